# SPDX-License-Identifier: Apache-2.0
"""The effects of statements on a pipeline's tables."""

from dataclasses import replace

import pytest

from penstock.changes import Target
from penstock.model import Column, Position, TableName, TablePatterns
from penstock.pipeline.column_types import keeps_values
from penstock.pipeline.ghosts import PipelinePatterns, table_of_ghost
from penstock.pipeline.table_changes import TableBefore, columns_after, consequences_of, keeps_rows
from penstock.schema.statements.row_changes import tables_of
from penstock.schema.statements.tokens import ServerSpelling
from penstock.source.reading import LoggedStatement

T = TableName("d", "t")
COLUMNS = (Column("id", "int", None, False), Column("name", "varchar(20)", "utf8mb4"))
NOW = Target(T, COLUMNS, ("id",))
BEFORE = {T: TableBefore(COLUMNS, frozenset({"old"}), lambda: NOW)}
SPELLING = ServerSpelling()


def statement(text: str) -> LoggedStatement:
    found = tables_of(text, "d", SPELLING)
    place = Position(0, "b.000001", 4)
    return LoggedStatement(
        text, "d", place, place, found.named, found.databases, found.emptied, None, found.unlogged
    )


@pytest.mark.parametrize(
    ("text", "reread"),
    [
        ("ALTER TABLE t ADD COLUMN a INT", False),
        ("ALTER TABLE t ADD COLUMN a INT NULL DEFAULT NULL AFTER id", False),
        ("ALTER TABLE t ADD COLUMN a INT DEFAULT 5", True),
        ("ALTER TABLE t ADD COLUMN a INT NOT NULL", True),
        ("ALTER TABLE t ADD COLUMN a INT AS (id + 1) STORED", True),
        ("ALTER TABLE t ADD COLUMN a INT AUTO_INCREMENT UNIQUE", True),
        ("ALTER TABLE t DROP COLUMN name", False),
        ("ALTER TABLE t ADD INDEX (name)", False),
        ("ALTER TABLE t MODIFY id BIGINT NOT NULL", False),
        ("ALTER TABLE t MODIFY id INT UNSIGNED NOT NULL", True),
        ("ALTER TABLE t MODIFY name VARCHAR(40)", False),
        ("ALTER TABLE t MODIFY name VARCHAR(10)", True),
        ("ALTER TABLE t MODIFY name TEXT", False),
        ("ALTER TABLE t CHANGE name title VARCHAR(20)", True),
        ("ALTER TABLE t RENAME COLUMN name TO title", True),
        # A column that is dropped and added again has no earlier values.
        ("ALTER TABLE t DROP COLUMN name, ADD COLUMN name VARCHAR(20)", True),
        ("ALTER TABLE t ADD COLUMN Name INT, DROP COLUMN name", True),
        ("ALTER TABLE t ADD COLUMN OLD INT", True),
        # Here, non-strict sessions or servers without explicit_defaults_for_timestamp put values into
        # existing rows.
        ("ALTER TABLE t ADD COLUMN a TIMESTAMP", True),
        ("ALTER TABLE t ADD COLUMN a TIMESTAMP NULL", False),
        ("ALTER TABLE t ADD COLUMN a INT NULL, ADD COLUMN b TIMESTAMP(3)", True),
        ("ALTER TABLE t MODIFY name VARCHAR(20) NOT NULL", True),
        ("ALTER TABLE t MODIFY name TIMESTAMP", True),
        ("ALTER TABLE t MODIFY name VARCHAR(20) AS (id) STORED", True),
        ("ALTER TABLE t MODIFY name VARCHAR(20) GENERATED ALWAYS AS (id + 1) STORED", True),
        ("ALTER TABLE t MODIFY name VARCHAR(20) CHARACTER SET ascii", True),
        ("ALTER TABLE t MODIFY name VARCHAR(20) CHARACTER SET utf8mb4", False),
        ("ALTER TABLE t CONVERT TO CHARACTER SET latin1", True),
        ("ALTER TABLE t CONVERT TO CHARACTER SET utf8mb4", False),
        ("ALTER TABLE t DEFAULT CHARACTER SET latin1", False),
    ],
)
def test_table_is_reloaded_if_its_rows_change_without_being_logged(text: str, reread: bool) -> None:
    assert (T in consequences_of(statement(text), SPELLING, BEFORE).reread) == reread


@pytest.mark.parametrize(
    ("text", "rekeyed"),
    [
        ("ALTER TABLE t ADD COLUMN a INT DEFAULT 5", False),
        ("ALTER TABLE t MODIFY name VARCHAR(5)", False),
        ("ALTER TABLE t MODIFY id INT UNSIGNED NOT NULL", True),
        ("ALTER TABLE t CHANGE code id INT NOT NULL", True),
        ("ALTER TABLE t RENAME COLUMN code TO id", True),
        ("ALTER TABLE t DROP PRIMARY KEY, ADD PRIMARY KEY (name)", True),
        ("ALTER TABLE t CONVERT TO CHARACTER SET latin1", True),
        ("ALTER TABLE t FLIP name", True),
    ],
)
def test_table_whose_keys_may_change_is_compared_as_well(text: str, rekeyed: bool) -> None:
    assert (T in consequences_of(statement(text), SPELLING, BEFORE).rekeyed) == rekeyed


def test_text_column_without_a_charset_uses_that_of_its_table() -> None:
    latin = Target(T, (COLUMNS[0], Column("name", "varchar(20)", "latin1")), ("id",))
    text = statement("ALTER TABLE t MODIFY name VARCHAR(20)")
    before = TableBefore(COLUMNS, frozenset(), lambda: latin)
    assert T in consequences_of(text, SPELLING, {T: before}).reread


@pytest.mark.parametrize("nullable", [False, True])
def test_added_unique_column_is_a_key_of_a_table_without_a_primary_key(nullable: bool) -> None:
    number = Column("number", "int", nullable=nullable)
    now = replace(NOW, columns=(*NOW.columns, number), primary_key=(), unique_keys=(("number",),))
    before = TableBefore(COLUMNS, frozenset(), lambda: now)
    text = statement("ALTER TABLE t ADD COLUMN number INT NOT NULL AUTO_INCREMENT UNIQUE")
    assert (T in consequences_of(text, SPELLING, {T: before}).rekeyed) == (not nullable)


def test_dropped_columns_are_reported() -> None:
    found = consequences_of(statement("ALTER TABLE t DROP name, CHANGE id no INT"), SPELLING, BEFORE)
    assert found.dropped[T] == {"name", "id"}
    traded = "ALTER TABLE t RENAME COLUMN id TO name, RENAME COLUMN name TO id"
    assert not consequences_of(statement(traded), SPELLING, BEFORE).dropped[T]


@pytest.mark.parametrize(
    ("copied", "same"),
    [
        (Column("v", "varchar(50)", "latin1"), True),
        (Column("v", "varchar(60)", "utf8mb4"), True),
        (Column("v", "varchar(5)", "latin1"), False),
        (Column("v", "varchar(50)", "ascii"), False),
        (Column("v", "varchar(50)", "latin1", False), False),
        (Column("w", "varchar(50)", "latin1"), False),
    ],
)
def test_copy_has_the_rows_of_its_table_if_every_value_is_kept(copied: Column, same: bool) -> None:
    assert keeps_rows([Column("v", "varchar(50)", "latin1")], [copied]) == same


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("datetime(6)", "datetime"),
        ("time(6)", "time"),
        ("enum('a')", "varchar(5)"),
        ("enum('A')", "enum('a')"),
        ("decimal(50,10)", "decimal(50,2)"),
    ],
)
def test_copy_with_a_narrower_type_has_other_values(old: str, new: str) -> None:
    assert not keeps_rows([Column("v", old)], [Column("v", new)])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("TRUNCATE TABLE t", {"emptied"}),
        ("TRUNCATE t", {"emptied"}),
        ("DROP TABLE t", {"removed"}),
        ("CREATE TABLE t (id INT)", {"added", "surely_added"}),
        ("CREATE TABLE IF NOT EXISTS t (id INT)", {"added"}),
        ("CREATE TABLE t LIKE u", {"added", "surely_added"}),
        ("RENAME TABLE t TO u", {"removed"}),
        ("RENAME TABLE u TO t", {"replaced"}),
        ("RENAME TABLE t TO _t_del, _t_gho TO t", {"swapped"}),
        ("RENAME TABLE `d`.`t` TO `d`.`_t_old`, `d`.`_t_new` TO `d`.`t`", {"swapped"}),
        ("RENAME TABLE t TO `rename /* gh-ost */`, _t_new TO t", {"swapped"}),
        ("rename /* gh-ost */ table `d`.`t` to `d`.`_t_del`, `d`.`_t_gho` to `d`.`t`", {"swapped", "copied"}),
        ("alter /* gh-ost */ table `d`.`_t_gho` rename `t`", {"swapped", "copied"}),
        ("/* nightly */ TRUNCATE t WAIT 5", {"emptied"}),
        ("SET STATEMENT max_statement_time=1 FOR TRUNCATE t", {"emptied"}),
        ("CREATE OR REPLACE TABLE t (id INT)", {"emptied", "added", "surely_added"}),
        ("ALTER TABLE t DROP PARTITION p0", {"unlogged"}),
        ("ALTER TABLE t TRUNCATE PARTITION ALL", {"unlogged"}),
        ("ALTER TABLE t EXCHANGE PARTITION p0 WITH TABLE u", {"unlogged"}),
        ("ALTER TABLE u EXCHANGE PARTITION p0 WITH TABLE t WITHOUT VALIDATION", {"unlogged"}),
        ("SET STATEMENT a=1 FOR ALTER TABLE IF EXISTS t NOWAIT DROP PARTITION p0, p1", {"unlogged"}),
        ("ALTER TABLE t ADD COLUMN a INT, IMPORT TABLESPACE", {"unlogged"}),
        ("ALTER TABLE t DISCARD PARTITION p0 TABLESPACE", {"unlogged"}),
        ("ALTER TABLE u CONVERT PARTITION p0 TO TABLE t", {"unlogged"}),
        ("ALTER TABLE t CONVERT TABLE u TO PARTITION p1 VALUES LESS THAN (5)", {"unlogged"}),
        ("ALTER IGNORE TABLE t ADD UNIQUE (name)", {"unlogged"}),
        ("ALTER TABLE t ADD PARTITION (PARTITION p1 VALUES LESS THAN (5))", set()),
    ],
)
def test_created_and_dropped_tables_are_followed(text: str, what: set[str]) -> None:
    found = consequences_of(statement(text), SPELLING, BEFORE)
    fields = ("emptied", "removed", "added", "surely_added", "unlogged", "replaced", "swapped", "copied")
    assert {name for name in fields if T in getattr(found, name)} == what


def test_columns_are_followed_through_statements() -> None:
    columns = columns_after(T, COLUMNS, "ALTER TABLE t ADD COLUMN a INT, DROP COLUMN name", "d", SPELLING)
    assert columns is not None
    assert [column.name for column in columns] == ["id", "a"]
    assert columns_after(T, COLUMNS, "ALTER TABLE t DROP COLUMN nothing", "d", SPELLING) is None


@pytest.mark.parametrize(
    ("old", "new", "kept"),
    [
        ("int", "bigint", True),
        ("int(11)", "int", True),
        ("int unsigned", "bigint", True),
        ("int", "bigint unsigned", False),
        ("varchar(20)", "varchar(30)", True),
        ("varchar(20)", "char(30)", False),
        ("decimal(10,2)", "decimal(12,2)", True),
        ("decimal(10,2)", "decimal(12,3)", False),
        ("enum('a','b')", "enum('a','b','c')", True),
        ("enum('a','b')", "enum('b','a')", False),
        ("float", "double", False),
        ("text", "longtext", True),
        ("longtext", "text", False),
    ],
)
def test_widening_a_type_keeps_values(old: str, new: str, kept: bool) -> None:
    assert keeps_values(old, new) == kept


def test_ghost_tables_belong_to_their_originals() -> None:
    for ghost in ("_t_gho", "_t_ghc", "_t_del", "_t_20261121101500_del", "_t_new", "_t_old", "__t_old"):
        assert table_of_ghost(TableName("d", ghost)) == T
    patterns = PipelinePatterns(TablePatterns("d.*"), frozenset({TableName("d", "x")}))
    assert patterns.matches("d", "t")
    assert patterns.matches("d", "t_new")
    assert not patterns.matches("d", "_t_gho")
    assert not patterns.matches("d", "x")
    # A pattern that names the table selects it.
    assert PipelinePatterns(TablePatterns("d._t_new")).matches("d", "_t_new")
