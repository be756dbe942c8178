# SPDX-License-Identifier: Apache-2.0
"""Schemas supplied by a caller are parsed in the SQL dialect of the log's server."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.binlog import read_binlog
from tests.support.binlog.events import with_table_metadata
from tests.support.logstore.source import LOGS

# A log of MariaDB with a table of COMPRESSED columns.
COMPRESSED = LOGS / "mariadb-10.11-4.binlog"
DDL = "CREATE TABLE c (id INT PRIMARY KEY, text TEXT {0}, bytes VARBINARY(500) {0})"


def in_file(attribute: str) -> Callable[[Path], Any]:
    def write(folder: Path) -> str:
        path = folder / "schema.sql"
        path.write_text(f"USE fuzzed; {DDL.format(attribute)} DEFAULT CHARSET=utf8mb4")
        return str(path)

    return write


def mapped(folder: Path) -> dict[str, dict[str, str]]:
    columns = {"id": "int", "text": "text compressed", "bytes": "varbinary(500) /*M!100301 COMPRESSED*/"}
    return {"fuzzed.c": columns}


@pytest.mark.parametrize(
    "schemas",
    [lambda folder: {}, in_file("COMPRESSED"), in_file("/*M!100301 COMPRESSED*/"), mapped],
    ids=["none", "sql", "sql of SHOW CREATE TABLE", "mapping"],
)
def test_compressed_mariadb_columns_are_read_with_supplied_schemas(
    schemas: Callable[[Path], Any], tmp_path: Path
) -> None:
    named, unnamed = tmp_path / "named.000001", tmp_path / "unnamed.000001"
    named.write_bytes(COMPRESSED.read_bytes())
    unnamed.write_bytes(with_table_metadata(COMPRESSED.read_bytes(), ()))
    expected = rows_of(named, None)
    assert len(expected) > 1
    assert rows_of(unnamed, schemas(tmp_path)) == expected


def rows_of(path: Path, schemas: Any) -> list[tuple[Any, ...]]:
    batches = read_binlog(
        str(path), tables="fuzzed.c", schemas=schemas, columns=["id", "text", "bytes", "_change_type"]
    )
    return [tuple(row.values()) for batch in batches for row in batch.to_arrow().to_pylist()]
