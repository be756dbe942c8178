# SPDX-License-Identifier: Apache-2.0
"""If the log contradicts a table definition, the definition is read again, or the table stops with an error
that names it.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.binlog import read_binlog
from penstock.errors import SchemaMismatch
from penstock.model import Column, Position, TableName, TableSchema
from penstock.schema.history import SchemaHistory
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.tokens import ServerSpelling
from penstock.schema.table_definition import TableDefinition
from tests.support.binlog.decoding import decode
from tests.support.binlog.events import with_table_metadata
from tests.support.logstore.source import LOGS

WIDE = TableName("fuzzed", "wide")
MYSQL, MARIADB = "mysql-9.7-1", "mariadb-10.11-1"

Change = Callable[[dict[str, Column]], list[Column]]


@pytest.fixture
def log(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The log of one server with its default metadata; its name ends in a number."""
    path = tmp_path / "binlog.000001"
    content = (LOGS / f"{request.param}.binlog").read_bytes()
    path.write_bytes(with_table_metadata(content, (1, 2, 3) if request.param == MYSQL else ()))
    return path


def rows_of(path: Path, history: SchemaHistory | None = None, start: str | None = None) -> list[object]:
    schemas = {} if history is None else history
    batches = read_binlog(str(path), tables=str(WIDE), schemas=schemas, start=start, columns=None)
    return [row for batch in batches for row in batch.to_arrow().to_pylist()]


def definition_of(path: Path) -> TableSchema:
    batch = next(read_binlog(str(path), tables=str(WIDE), schemas={}))
    return TableSchema(WIDE.database, WIDE.table, batch.columns, ("id",))


def end_of_create(path: Path) -> str:
    decoded = decode(path.read_bytes(), path.name, emit="transactions", statements=True, drop_open=True)
    return str(decoded.statements[0].end_position)


def history_with(columns: list[Column], known: TableSchema | None, mariadb: bool) -> SchemaHistory:
    """Return a history with these columns; `known` is the server's answer, or None without a server."""
    spelling = ServerSpelling(mariadb)

    def reread(name: TableName) -> TableDefinition | None:
        assert name == WIDE
        return None if known is None else TableDefinition(known, None)

    history = SchemaHistory(ServerDefaults(spelling, None, {}, False), reread if known else None)
    believed = TableSchema(WIDE.database, WIDE.table, tuple(columns), ("id",))
    history.seed([TableDefinition(believed, None)], None)
    return history


def _is_mariadb(path: Path) -> bool:
    return b"MariaDB" in path.read_bytes()[:100]


def changed(name: str, **values: object) -> Change:
    return lambda columns: [
        replace(column, **values) if column.name == name else column for column in columns.values()
    ]


def swapped(first: str, second: str) -> Change:
    def swap(columns: dict[str, Column]) -> list[Column]:
        trade = {first: second, second: first}
        return [columns[trade.get(name, name)] for name in columns]

    return swap


EVERYWHERE: dict[str, Change] = {
    "a column too many": lambda columns: [*columns.values(), Column("more", "int")],
    "another type": changed("o", type_text="datetime(3)"),
    "another length": changed("r", type_text="varchar(299)"),
    "another character set": changed("r", charset="latin1"),
    "another length of bytes": changed("u", type_text="varbinary(21)"),
    "NOT NULL": changed("d", nullable=False),
    "swapped texts": swapped("q", "r"),
}
# MySQL logs signs and character sets in every table map.
ON_MYSQL: dict[str, Change] = {
    "another sign": changed("d", type_text="int"),
    "another character set of the same width": changed("s", charset="big5"),
    "a charset that lags behind": changed("r", charset="ucs2", type_text="varchar(600)"),
}
CASES = [
    *((server, what, change) for server in (MYSQL, MARIADB) for what, change in EVERYWHERE.items()),
    *((MYSQL, what, change) for what, change in ON_MYSQL.items()),
]


@pytest.mark.parametrize(
    ("log", "change"),
    [(server, change) for server, _, change in CASES],
    ids=[f"{server}-{what}" for server, what, _ in CASES],
    indirect=["log"],
)
def test_contradicted_definition_is_read_again_or_stops_the_table(log: Path, change: Change) -> None:
    schema = definition_of(log)
    believed = change({column.name: column for column in schema.columns})
    assert believed != list(schema.columns)
    start, mariadb = end_of_create(log), _is_mariadb(log)
    expected = rows_of(log)
    assert expected

    assert rows_of(log, history_with(believed, schema, mariadb), start) == expected

    with pytest.raises(SchemaMismatch, match="fuzzed"):
        rows_of(log, history_with(believed, None, mariadb), start)


@pytest.mark.parametrize("log", [MYSQL, MARIADB], indirect=True)
def test_columns_without_nullability_are_accepted(log: Path) -> None:
    columns = [replace(column, nullable=True) for column in definition_of(log).columns]
    history = history_with(columns, None, _is_mariadb(log))
    assert rows_of(log, history, end_of_create(log)) == rows_of(log)


@pytest.mark.parametrize("log", [MYSQL], indirect=True)
def test_server_that_repeats_a_contradicted_definition_stops_the_table(log: Path) -> None:
    schema = definition_of(log)
    wrong = replace(schema, columns=(*schema.columns, Column("more", "int")))
    with pytest.raises(SchemaMismatch, match="28 columns, the table map 27"):
        rows_of(log, history_with(list(wrong.columns), wrong, False), end_of_create(log))


@pytest.mark.parametrize(("visible", "fits"), [(True, True), (None, True), (False, False)])
def test_visibility_that_the_log_contradicts_is_a_mismatch(
    visible: bool | None, fits: bool, tmp_path: Path
) -> None:
    path = tmp_path / "binlog.000001"
    signs, charset, charset_of_each, visibility = 1, 2, 3, 12
    content = (LOGS / f"{MYSQL}.binlog").read_bytes()
    path.write_bytes(with_table_metadata(content, (signs, charset, charset_of_each, visibility)))
    schema = definition_of(path)
    columns = [replace(column, visible=visible) for column in schema.columns]
    history, start = history_with(columns, None, mariadb=False), end_of_create(path)
    if fits:
        assert rows_of(path, history, start) == rows_of(path)
        return
    with pytest.raises(SchemaMismatch, match="declared as INVISIBLE, but the log tells VISIBLE"):
        rows_of(path, history, start)
    assert rows_of(path, history_with(columns, schema, mariadb=False), start) == rows_of(path)


def test_statements_move_the_visibility_of_columns_on() -> None:
    history = SchemaHistory(ServerDefaults(ServerSpelling(False), "utf8mb4", {"d": "utf8mb4"}, False))
    visible: list[dict[str, bool | None]] = []
    statements = (
        "CREATE TABLE t (id INT PRIMARY KEY, a INT INVISIBLE, b INT /*!80023 INVISIBLE */ DEFAULT 1)",
        "ALTER TABLE t ALTER COLUMN a SET VISIBLE, ALTER id SET INVISIBLE, ALTER INDEX i INVISIBLE",
        "ALTER TABLE t MODIFY b BIGINT, ADD c INT INVISIBLE AFTER id",
        "ALTER TABLE t MODIFY a INT INVISIBLE NOT NULL VISIBLE, MODIFY b INT VISIBLE DEFAULT 1 INVISIBLE",
    )
    for number, statement in enumerate(statements, 1):
        history.apply(statement, "d", Position(0, "binlog.000001", number))
        schema = history.schema("d", "t")
        assert schema is not None
        assert TableSchema.from_json(schema.to_json()).columns == schema.columns
        again = TableSchema.from_json(schema.to_json()).columns
        assert [column.visible for column in again] == [column.visible for column in schema.columns]
        visible.append({column.name: column.visible for column in schema.columns})
    assert visible == [
        {"id": True, "a": False, "b": False},
        {"id": False, "a": True, "b": False},
        {"id": False, "c": False, "a": True, "b": True},
        {"id": False, "c": False, "a": True, "b": False},
    ]
