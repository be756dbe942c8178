# SPDX-License-Identifier: Apache-2.0
"""Binlogs with rows, and the definitions of their tables, in the form that TiDB writes them."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.protobuf import encode, varint

INT, TIMESTAMP, VARCHAR = 3, 7, 15
NOT_NULL, PRIMARY_KEY = 1, 2
PUBLIC = 5

# The values of a row by the numbers of their columns.
Row = Mapping[int, int | str | None]


def matched_rows(
    commit_ts: int,
    schema_version: int,
    table_id: int,
    *,
    inserted: Sequence[Row] = (),
    updated: Sequence[tuple[Row, Row]] = (),
    deleted: Sequence[Row] = (),
) -> bytes:
    """Return the commit of a transaction with its rows. Column 1 of an inserted row is the integer key."""
    rows = [(2, _datums([row[1]]) + (_pairs({n: v for n, v in row.items() if n != 1}))) for row in inserted]
    rows += [(3, _pairs(before) + _pairs(after)) for before, after in updated]
    rows += [(6, _pairs(row)) for row in deleted]
    sequence = [(7, {2: 0, 3: 1, 6: 4}[number]) for number, _ in rows]
    mutation = encode((1, table_id), *rows, *sequence)
    value = encode((1, schema_version), (2, mutation))
    start_ts = commit_ts - 1
    return encode((1, 1), (2, start_ts), (3, commit_ts), (4, b"key"), (5, value), (7, 0), (8, 0))


def matched_statement(commit_ts: int, job_id: int, text: str, state: int = PUBLIC) -> bytes:
    """Return the commit of a DDL job."""
    return encode((1, 1), (2, commit_ts - 1), (3, commit_ts), (6, text), (7, job_id), (8, state))


def column(number: int, name: str, kind: int = INT, flags: int = 0, **others: Any) -> dict[str, Any]:
    """Return a column of a definition."""
    field = {"Tp": kind, "Flag": flags, "Flen": 20, "Charset": "utf8mb4", "Collate": "utf8mb4_bin"}
    names = {"O": name, "L": name.lower()}
    return {
        "id": number,
        "name": names,
        "offset": number,
        "state": PUBLIC,
        "version": 2,
        "type": field,
    } | others


def table_info(table_id: int, name: str, columns: Sequence[dict[str, Any]], last: int) -> dict[str, Any]:
    """Return the definition of a table with an integer key; `last` is the highest column id."""
    names = {"O": name, "L": name.lower()}
    return {"id": table_id, "name": names, "pk_is_handle": True, "cols": list(columns), "max_col_id": last}


def ddl_job(
    job_id: int, kind: int, version: int, query: str, table: dict[str, Any], **others: Any
) -> dict[str, Any]:
    """Return a finished job of a table in the database `shop`."""
    binlog = {"SchemaVersion": version, "TableInfo": table, "FinishedTS": 0}
    known = {"state": 6, "schema_id": 1, "table_id": table["id"], "schema_name": "shop", "query": query}
    return {"id": job_id, "type": kind, "binlog": binlog} | known | others


def _pairs(row: Row) -> bytes:
    return _datums([datum for pair in row.items() for datum in pair])


def _datums(values: Sequence[int | str | None]) -> bytes:
    written = b""
    for value in values:
        if value is None:
            written += b"\x00"
        elif isinstance(value, int):
            written += b"\x08" + varint(value << 1 ^ value >> 63)
        else:
            written += b"\x02" + varint(len(value.encode()) << 1) + value.encode()
    return written
