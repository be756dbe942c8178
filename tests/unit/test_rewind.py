# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.model import Column, Position, StatementSession, TableName, TableSchema
from penstock.schema.history import SchemaHistory
from penstock.schema.rewind import (
    CannotRewind,
    LoggedStatement,
    definition_before,
    names_after,
    statements_by_table,
    touches,
)
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.tokens import ServerSpelling
from penstock.schema.table_definition import TableDefinition

SPELLING = ServerSpelling(version=(9, 7, 4))
CREATE = "CREATE TABLE t (a INT PRIMARY KEY, b VARCHAR(20), c ENUM('x', 'y'))"
NAME = TableName("shop", "t")


def at(number: int) -> Position:
    return Position(0, "bin.000001", 100 * number)


def followed(statements: list[str]) -> SchemaHistory:
    history = SchemaHistory(ServerDefaults(SPELLING, "utf8mb4", {}, False))
    for number, text in enumerate([CREATE, *statements]):
        history.apply(text, "shop", at(number))
    return history


def newest(history: SchemaHistory, name: TableName) -> TableDefinition | None:
    schema = history.schema(name.database, name.table)
    return TableDefinition(schema, "utf8mb4") if schema is not None else None


def before(statements: list[str], name: TableName = NAME) -> list[str]:
    """Return the earlier columns that rewinding computes from the later definition and the statements."""
    history = followed(statements)
    logged = [LoggedStatement(at(number), "shop", text) for number, text in enumerate(statements, start=1)]
    definition = definition_before(name, logged, lambda now: newest(history, now), SPELLING)
    assert definition is not None
    assert definition.schema.name == name
    return [f"{column.name} {column.type_text}" for column in definition.schema.columns]


ORIGINAL = ["a int", "b varchar(20)", "c enum('x','y')"]

numbers = st.integers(0, 9)
steps = st.one_of(
    st.builds(lambda n: f"ADD COLUMN n{n} INT", numbers),
    st.builds(lambda n: f"ADD COLUMN n{n} TEXT FIRST", numbers),
    st.builds(lambda n: f"ADD COLUMN n{n} INT AFTER b", numbers),
    st.builds(lambda n, m: f"RENAME COLUMN n{n} TO n{m}", numbers, numbers),
    st.just("ENGINE = InnoDB"),
    st.just("ADD INDEX (b)"),
    st.just("DROP PRIMARY KEY"),
)


@given(st.lists(st.lists(steps, min_size=1, max_size=3), max_size=6))
def test_rewinding_reverts_followed_statements(alterations: list[list[str]]) -> None:
    # A server runs only statements that fit the table, so only those are in its log.
    accepted: list[str] = []
    for alteration in alterations:
        text = "ALTER TABLE t " + ", ".join(alteration)
        if not followed([*accepted, text]).needs_reread(NAME):
            accepted.append(text)
    assert before(accepted) == ORIGINAL


def test_columns_that_swapped_names_get_their_names_back() -> None:
    assert before(["ALTER TABLE t RENAME COLUMN a TO b, RENAME COLUMN b TO a"]) == ORIGINAL


def test_table_name_is_followed_to_its_current_name() -> None:
    assert (
        before(["RENAME TABLE t TO u", "ALTER TABLE u ADD d INT, RENAME v", "CREATE TABLE t (z INT)"])
        == ORIGINAL
    )


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE t DROP COLUMN c",
        "ALTER TABLE t MODIFY b VARCHAR(40)",
        "ALTER TABLE t CHANGE b bb VARCHAR(20)",
        "ALTER TABLE t CONVERT TO CHARACTER SET latin1",
        "ALTER TABLE t ADD d NOVELTY",
        "DROP TABLE t",
        "DROP DATABASE shop",
        "CREATE OR REPLACE TABLE t (z INT)",
        "RENAME TABLE other TO t",
        "FROBNICATE EVERYTHING",
    ],
)
def test_irreversible_statement_is_named(statement: str) -> None:
    harmless = LoggedStatement(at(1), "shop", "ALTER TABLE t ADD e INT")
    hiding = LoggedStatement(at(2), "shop", statement)
    history = followed([harmless.text])
    with pytest.raises(CannotRewind) as stopped:
        definition_before(NAME, [harmless, hiding], lambda now: newest(history, now), SPELLING)
    assert stopped.value.statement == hiding


def test_unread_statement_of_other_databases_hides_nothing() -> None:
    elsewhere = StatementSession.of_event(["elsewhere"], None)
    unread = LoggedStatement(at(1), "shop", "FROBNICATE EVERYTHING", elsewhere)
    history = followed([])
    known = definition_before(NAME, [unread], lambda now: newest(history, now), SPELLING)
    assert known == newest(history, NAME) is not None


def test_statements_of_other_tables_hide_nothing() -> None:
    assert (
        before(["CREATE TABLE o (a INT)", "ALTER TABLE o DROP COLUMN a, ADD b INT", "DROP TABLE o"])
        == ORIGINAL
    )


def rewound(name: TableName, logged: Sequence[LoggedStatement]) -> object:
    """Return the table's earlier names, the statements on it, and its earlier definition or a statement that
    hides it.
    """
    names = names_after(name, logged, SPELLING)
    touched = [statement for statement in logged if touches(statement, names, SPELLING)]
    schema = TableSchema("shop", "now", tuple(Column(column, "int") for column in "abcd"))
    try:
        definition = definition_before(name, logged, lambda _: TableDefinition(schema, None), SPELLING)
    except CannotRewind as hidden:
        return names, touched, hidden.statement
    return names, touched, definition


STATEMENTS = [
    "ALTER TABLE t ADD b INT",
    "ALTER TABLE u DROP COLUMN x",
    "ALTER TABLE v RENAME COLUMN a TO c",
    "RENAME TABLE t TO w",
    "RENAME TABLE u TO v, w TO t",
    "CREATE TABLE v LIKE t",
    "CREATE TABLE IF NOT EXISTS u (a INT)",
    "DROP TABLE t, v",
    "DROP DATABASE shop",
    "DROP DATABASE other",
    "ALTER TABLE v FROBNICATE",
    "FROBNICATE",
    "INSERT INTO t VALUES (1)",
]


@given(st.lists(st.sampled_from(STATEMENTS), max_size=5))
def test_filtered_statements_rewind_a_table_as_all_statements_do(texts: list[str]) -> None:
    logged = [LoggedStatement(at(number), "shop", text) for number, text in enumerate(texts)]
    of_table = statements_by_table(logged, SPELLING)
    for table in ("t", "u", "v", "w", "x"):
        name = TableName("shop", table)
        assert rewound(name, of_table(name)) == rewound(name, logged)


def test_statements_about_other_tables_do_not_concern_the_table() -> None:
    logged = [LoggedStatement(at(number), "shop", f"ALTER TABLE t{number} ADD b INT") for number in range(9)]
    of_table = statements_by_table(logged, SPELLING)
    assert of_table(TableName("shop", "t3")) == [logged[3]]
    assert of_table(TableName("shop", "u")) == []
