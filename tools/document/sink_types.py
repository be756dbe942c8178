# SPDX-License-Identifier: Apache-2.0
"""The page of column types in sinks: for each SQL type of the source, the column type in each target."""

import json

from penstock.changes import Target
from penstock.model import Column, TableName
from penstock.sinks.clickhouse.types import stored_columns
from penstock.sinks.lake import types as lake_types
from penstock.sinks.mongodb import documents as mongodb_documents
from penstock.sinks.mysql import tables as mysql_tables
from penstock.sinks.mysql.connection import Dialect
from penstock.sinks.postgres import tables as postgres_tables
from penstock.sinks.search import documents as search_documents
from tools.document.markdown import document, table
from tools.document.types import BYTES, MOMENTS, NUMBERS, TEXTS, SqlType

# Integers in Iceberg have at least this many bits.
_ICEBERG_BITS = 32

_MYSQL = Dialect(mariadb=False, version=(9, 0))

_HEAD = (
    "The column type that a pipeline creates in each kind of target. `files` is Parquet, listed with Arrow\n"
    "names; `duckdb` has the same types under its own names; `sqlite` lists its types in\n"
    "[its guide](../guides/sinks/sqlite.md); `mysql` is MySQL 9. The conformance suite\n"
    "writes every type and reads it back. `redis`, `kafka`, `rabbitmq`, `rocketmq`, `http` and `stdout`\n"
    "write text, as [messages](../formats/messages.md) show it. A value that the target's column cannot\n"
    "hold is written as null and counted."
)


def page() -> str:
    """Return the page."""
    columns = (
        "SQL",
        "`mysql`",
        "`postgres`",
        "`clickhouse`",
        "`mongodb`",
        "`elasticsearch`, `opensearch`",
        "`files`, `delta`",
        "`iceberg`",
    )
    parts = [_HEAD]
    for title, kinds in (
        ("Numbers", NUMBERS),
        ("Days and times", MOMENTS),
        ("Text", TEXTS),
        ("Bytes", BYTES),
    ):
        parts += [f"## {title}", table(columns, [_row(kind) for kind in kinds])]
    return document("Types in targets", "the sinks of src/penstock/sinks", *parts)


def _row(kind: SqlType) -> list[str]:
    columns = (Column("id", "int", None, False), Column("value", kind.text, kind.charset))
    target = Target(TableName("shop", "orders"), columns, ("id",), mariadb=kind.mariadb)
    declared = target.arrow().field("value").type
    where = " (MariaDB)" if kind.mariadb else ""
    names = [
        mysql_tables.type_text(kind.text, kind.mariadb, _MYSQL),
        postgres_tables.types_of(target)["value"],
        stored_columns(target)[1].sql,
        mongodb_documents.bson_type(target, "value"),
        _mapped(search_documents.mapping(target)["value"]),
        str(lake_types.stored_type(declared)),
        str(lake_types.stored_type(declared, _ICEBERG_BITS)),
    ]
    return [f"`{kind.text}`{where}", *(f"`{name}`" for name in names)]


def _mapped(mapping: dict[str, object]) -> str:
    """Return the mapping of a field, in one word if possible."""
    shown = {name: value for name, value in mapping.items() if name not in ("type", "fields")}
    return f"{mapping['type']} {json.dumps(shown)}" if shown else str(mapping["type"])
