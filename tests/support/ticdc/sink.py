# SPDX-License-Identifier: Apache-2.0
"""Files in the format of TiCDC's storage sink, written according to the documentation of its folder layout
and its protocols.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.ticdc.schema_files import definition_checksum

TERMINATOR = "\r\n"

# The values of a row in the form of canal-json.
Row = Mapping[str, str | None]


def column(name: str, kind: str, precision: int | None = None, **others: str) -> dict[str, str]:
    """Return a column of a schema file."""
    known = {"ColumnName": name, "ColumnType": kind}
    return known | ({} if precision is None else {"ColumnPrecision": str(precision)}) | others


KEY = column("id", "INT", 11, ColumnNullable="false", ColumnIsPk="true")
NAME = column("name", "VARCHAR", 20)


class Sink:
    """The folder of a storage sink. Files may be written in any order; readers use them only after the
    checkpoint covers them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def source(self) -> str:
        """The source of an instance that reads the sink."""
        return f"ticdc+file://{self.folder}"

    def checkpoint(self, commit_ts: int) -> None:
        """Declare everything below a commit timestamp complete."""
        self.write("metadata", json.dumps({"checkpoint-ts": commit_ts}))

    def table(
        self, name: str, version: int, columns: Sequence[Mapping[str, str]], query: str = "", kind: int = 0
    ) -> None:
        """Write the definition of a table of `shop`, and the statement that led to it."""
        self._schema(f"shop/{name}/meta", name, version, columns, query, kind)

    def database(self, version: int, query: str, kind: int = 1) -> None:
        """Write a statement about the database `shop`."""
        self._schema("shop/meta", "", version, None, query, kind)

    def rows(self, path: str, *messages: str) -> None:
        """Write a data file of `shop`, with each message on a line."""
        self.write(f"shop/{path}", "".join(f"{message}{TERMINATOR}" for message in messages))

    def write(self, path: str, text: str) -> None:
        """Write a file."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, newline="")

    def _schema(
        self,
        folder: str,
        table: str,
        version: int,
        columns: Sequence[Mapping[str, str]] | None,
        query: str,
        kind: int,
    ) -> None:
        values = {
            "Table": table,
            "Schema": "shop",
            "Version": 1,
            "TableVersion": version,
            "Query": query,
            "Type": kind,
            "TableColumns": columns,
            "TableColumnsTotal": len(columns or ()),
        }
        name = f"schema_{version}_{definition_checksum(values):010d}.json"
        self.write(f"{folder}/{name}", json.dumps(values, indent=4))


def message(
    commit_ts: int, kind: str, data: Row, old: Row | None = None, table: str = "t", **others: Any
) -> str:
    """Return a canal-json message with the TiDB extension."""
    values = {
        "id": 0,
        "database": "shop",
        "table": table,
        "pkNames": ["id"],
        "isDdl": False,
        "type": kind,
        "es": commit_ts >> 18,
        "ts": 1_795_346_137_118,
        "sql": "",
        "sqlType": dict.fromkeys(data, 12),
        "mysqlType": dict.fromkeys(data, "varchar"),
        "old": None if old is None else [old],
        "data": [data],
        "_tidb": {"commitTs": commit_ts},
    }
    return json.dumps(values | others, ensure_ascii=False)


def inserted(commit_ts: int, key: int, name: str | None = "n", table: str = "t") -> str:
    """Return the message of an inserted row of a table with KEY and NAME."""
    return message(commit_ts, "INSERT", {"id": str(key), "name": name}, table=table)


def updated(commit_ts: int, key: int, old: str, new: str, table: str = "t") -> str:
    """Return the message of an updated row; the old row has only the changed columns."""
    return message(commit_ts, "UPDATE", {"id": str(key), "name": new}, {"name": old}, table=table)


def deleted(commit_ts: int, key: int, name: str | None = "n", table: str = "t") -> str:
    """Return the message of a deleted row."""
    return message(commit_ts, "DELETE", {"id": str(key), "name": name}, table=table)
