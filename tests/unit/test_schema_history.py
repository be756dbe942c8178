# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import pytest

from penstock.errors import SchemaInvalid, SchemaUnknown
from penstock.model import Column, Position, StatementSession, TableName, TableSchema
from penstock.schema.history import SchemaHistory
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.tokens import ServerSpelling
from penstock.schema.table_definition import TableDefinition

DEFAULTS = ServerDefaults(ServerSpelling(version=(9, 7, 4)), "utf8mb4", {"legacy": "latin1"}, False)


def at(offset: int) -> Position:
    return Position(0, "bin.000001", offset)


def columns(history: SchemaHistory, table: str, position: Position | None = None) -> list[str] | None:
    schema = history.schema("shop", table, position)
    return [f"{column.name} {column.type_text}" for column in schema.columns] if schema else None


def followed(*statements: str) -> SchemaHistory:
    history = SchemaHistory(DEFAULTS)
    for number, statement in enumerate(statements):
        history.apply(statement, "shop", at(100 * (number + 1)))
    return history


def test_each_position_has_the_schema_in_force_there() -> None:
    history = followed(
        "CREATE TABLE t (a INT PRIMARY KEY)",
        "ALTER TABLE t ADD COLUMN b TEXT FIRST",
        "ALTER TABLE t DROP COLUMN a",
    )
    assert columns(history, "t", at(99)) is None
    assert columns(history, "t", at(100)) == ["a int"]
    assert columns(history, "t", at(299)) == ["b text", "a int"]
    assert columns(history, "t") == ["b text"]
    newest = history.schema("shop", "t")
    assert newest is not None
    assert (newest.version, newest.primary_key) == (3, ())


def test_recreated_table_has_a_new_version() -> None:
    history = followed("CREATE TABLE t (a INT)", "DROP TABLE t", "CREATE TABLE t (a BIGINT)")
    assert columns(history, "t", at(150)) == ["a int"]
    assert columns(history, "t", at(250)) is None
    assert columns(history, "t", at(350)) == ["a bigint"]
    schema = history.schema("shop", "t")
    assert schema is not None
    assert schema.version == 2


def test_online_schema_change_swaps_tables_by_renaming() -> None:
    history = followed(
        "CREATE TABLE orders (id INT PRIMARY KEY)",
        "CREATE TABLE _orders_gho LIKE orders",
        "ALTER TABLE _orders_gho ADD COLUMN note VARCHAR(10)",
        "RENAME TABLE orders TO _orders_del, _orders_gho TO orders",
        "DROP TABLE _orders_del",
    )
    assert columns(history, "orders") == ["id int", "note varchar(10)"]
    assert columns(history, "orders", at(399)) == ["id int"]
    assert columns(history, "_orders_gho") is None
    assert columns(history, "_orders_del") is None


def test_charsets_come_from_column_then_table_then_database_then_server() -> None:
    history = followed(
        "CREATE TABLE t (a CHAR(1) CHARACTER SET gbk, b CHAR(1)) CHARSET big5",
        "CREATE TABLE legacy.t (a CHAR(1), b CHAR(1) COLLATE sjis_bin)",
        "CREATE TABLE u (a CHAR(1))",
        "CREATE DATABASE young COLLATE utf8mb4_bin",
        "CREATE TABLE young.t (a CHAR(1))",
    )

    def charsets(database: str, table: str) -> list[str | None]:
        schema = history.schema(database, table)
        assert schema is not None
        return [column.charset for column in schema.columns]

    assert charsets("shop", "t") == ["gbk", "big5"]
    assert charsets("legacy", "t") == ["latin1", "sjis"]
    assert charsets("shop", "u") == ["utf8mb4"]
    assert charsets("young", "t") == ["utf8mb4"]


def test_unknown_charset_is_not_guessed() -> None:
    history = SchemaHistory()
    history.apply("CREATE TABLE t (a CHAR(1))", "shop", at(4))
    assert history.needs_reread(TableName("shop", "t"))


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE t ADD COLUMN a INT",
        "ALTER TABLE t DROP COLUMN gone",
        "ALTER TABLE t ADD COLUMN b INT AFTER gone",
        "ALTER TABLE t RENAME COLUMN gone TO b",
        "ALTER TABLE t ADD COLUMN b NOVELTY",
        "ALTER TABLE t ADD PRIMARY KEY (gone)",
        "CREATE TABLE t SELECT 1",
        "FROBNICATE t",
    ],
)
def test_contradictory_statement_puts_the_table_in_doubt(statement: str) -> None:
    history = followed("CREATE TABLE t (a INT)")
    moved = history.apply(statement, "shop", at(500))
    assert TableName("shop", "t") in moved
    assert history.needs_reread(TableName("shop", "t"))
    with pytest.raises(SchemaUnknown):
        history.reread(TableName("shop", "t"), at(600))


@pytest.mark.parametrize(
    ("databases", "doubtful"),
    [
        ({"shop"}, ["shop.t", "shop.u"]),
        ({"other", "elsewhere"}, ["other.t"]),
        ({"elsewhere"}, []),
        ({""}, ["other.t", "shop.t", "shop.u"]),
        (None, ["other.t", "shop.t", "shop.u"]),
    ],
)
def test_unread_statement_puts_the_tables_of_its_listed_databases_in_doubt(
    databases: set[str] | None, doubtful: list[str]
) -> None:
    history = followed(
        "CREATE TABLE t (a INT)",
        "CREATE TABLE u (a INT)",
        "CREATE TABLE other.t (a INT)",
        "CREATE TABLE gone (a INT)",
    )
    history.apply("DROP TABLE gone", "shop", at(450))
    moved = history.apply("FROBNICATE x", "shop", at(500), StatementSession.of_event(databases, None))
    assert sorted(map(str, moved)) == doubtful
    doubts = history.doubts()
    assert sorted(map(str, doubts)) == doubtful
    assert {(doubt.since, doubt.reason) for doubt in doubts.values()} <= {(at(500), "FROBNICATE x")}


def test_doubts_keep_their_reasons_and_those_of_version_0_1_have_none() -> None:
    history = followed("CREATE TABLE t (a INT)", "FROBNICATE x")
    saved = history.to_json()
    assert SchemaHistory.from_json(saved).doubts() == history.doubts() != {}
    del saved["tables"][0]["doubt"]
    (doubt,) = SchemaHistory.from_json(saved).doubts().values()
    assert (doubt.since, doubt.reason) == (None, "")


def test_charset_of_an_unknown_database_is_the_session_default() -> None:
    history = SchemaHistory(DEFAULTS)
    latin1 = StatementSession(charset="latin1")
    history.apply("CREATE TABLE strange.t (a CHAR(1))", "shop", at(100), latin1)
    history.apply("CREATE DATABASE made", "shop", at(200), latin1)
    history.apply("CREATE TABLE made.t (a CHAR(1))", "shop", at(300), StatementSession(charset="gbk"))
    charsets = {
        name: schema.columns[0].charset
        for name in ("strange", "made")
        if (schema := history.schema(name, "t")) is not None
    }
    assert charsets == {"strange": "latin1", "made": "latin1"}


def test_doubt_is_settled_by_reading_the_table_again() -> None:
    asked = []

    def reread(name: TableName) -> TableDefinition:
        asked.append(str(name))
        return TableDefinition(
            TableSchema("shop", "t", (Column("a", "int"), Column("b", "money"))), "utf8mb4"
        )

    history = SchemaHistory(DEFAULTS, reread)
    history.apply("CREATE TABLE t (a INT)", "shop", at(100))
    history.apply("ALTER TABLE t ADD COLUMN b MONEY", "shop", at(200))
    assert history.needs_reread(TableName("shop", "t"))
    assert len(history.reread(TableName("shop", "t"), at(300)).columns) == 2
    assert not history.needs_reread(TableName("shop", "t"))
    assert columns(history, "t", at(400)) == ["a int", "b money"]
    assert asked == ["shop.t"]
    assert columns(history, "t", at(150)) == ["a int"]


def test_doubt_moves_with_a_renamed_table_and_ends_with_a_dropped_one() -> None:
    history = followed("CREATE TABLE t (a INT)", "ALTER TABLE t ADD b NOVELTY", "RENAME TABLE t TO u")
    assert not history.needs_reread(TableName("shop", "t"))
    assert history.needs_reread(TableName("shop", "u"))
    history.apply("DROP TABLE u", "shop", at(900))
    assert not history.needs_reread(TableName("shop", "u"))


def test_missing_table_is_refused_by_name() -> None:
    with pytest.raises(SchemaUnknown, match=r"shop\.nowhere") as unknown:
        SchemaHistory(DEFAULTS).reread(TableName("shop", "nowhere"), at(7))
    assert unknown.value.position == "bin.000001:7"


def test_statements_without_effect_create_no_version() -> None:
    history = followed("CREATE TABLE t (a INT)")
    for statement in ["TRUNCATE t", "ALTER TABLE t ENGINE=InnoDB", "ALTER TABLE t MODIFY a INT", "BEGIN"]:
        assert history.apply(statement, "shop", at(300)) == set()
    schema = history.schema("shop", "t")
    assert schema is not None
    assert schema.version == 1


def test_if_not_exists_leaves_a_known_table_unchanged() -> None:
    history = followed("CREATE TABLE t (a INT)", "CREATE TABLE IF NOT EXISTS t (b INT)")
    assert columns(history, "t") == ["a int"]


def test_names_that_differ_only_in_case_are_one_table_if_folded() -> None:
    folding = ServerDefaults(ServerSpelling(), "utf8mb4", {}, True)
    history = SchemaHistory(folding)
    history.apply("CREATE TABLE Orders (a INT)", "Shop", at(4))
    assert history.schema("shop", "ORDERS") is not None
    assert followed("CREATE TABLE Orders (a INT)").schema("shop", "orders") is None


def test_dropped_database_drops_its_tables() -> None:
    history = followed("CREATE TABLE t (a INT)", "CREATE TABLE other.t (a INT)", "DROP DATABASE shop")
    assert history.schema("shop", "t") is None
    assert history.schema("other", "t") is not None


def test_saved_history_loads_unchanged(tmp_path: Path) -> None:
    history = followed(
        "CREATE TABLE t (a INT PRIMARY KEY, `o``dd` ENUM('x','y''z'))",
        "ALTER TABLE t ADD b NOVELTY",
        "CREATE TABLE `a.b` (a INT)",
        "DROP TABLE `a.b`",
    )
    history.save(tmp_path / "history.json")
    again = SchemaHistory.load(tmp_path / "history.json")
    assert again.to_json() == history.to_json()
    assert again.needs_reread(TableName("shop", "t"))
    assert columns(again, "a.b", at(350)) == ["a int"]
    assert columns(again, "a.b") is None
    assert [path.name for path in tmp_path.iterdir()] == ["history.json"]


def test_sql_dump_file_provides_its_schemas(tmp_path: Path) -> None:
    file = tmp_path / "schema.sql"
    file.write_text(
        "/*!40101 SET NAMES utf8mb4 */;\nCREATE DATABASE /*!32312 IF NOT EXISTS*/ `shop`"
        " /*!40100 DEFAULT CHARACTER SET latin1 */ /*!80016 DEFAULT ENCRYPTION='N' */;\nUSE `shop`;\n"
        "DROP TABLE IF EXISTS `t`;\nCREATE TABLE `t` (\n  `id` int unsigned NOT NULL,\n  `n` varchar(20),\n"
        "  PRIMARY KEY (`id`)\n) ENGINE=InnoDB;\nINSERT INTO `t` VALUES (1,'a;b');\nDELIMITER ;;\n"
        "CREATE TRIGGER x BEFORE INSERT ON t FOR EACH ROW BEGIN SET @a = 1; END ;;\nDELIMITER ;\n"
        "ALTER TABLE t ADD COLUMN late INT;\n"
    )
    history = SchemaHistory.from_file(file)
    schema = history.schema("shop", "t", at(4))
    assert schema is not None
    assert [column.name for column in schema.columns] == ["id", "n", "late"]
    assert schema.columns[1].charset == "latin1"
    assert schema.primary_key == ("id",)


def test_json_file_provides_its_schemas(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    schema = TableSchema("shop", "t", (Column("a", "int"),))
    file.write_text(json.dumps([schema.to_json()]))
    assert SchemaHistory.from_file(file).schema("shop", "t", at(4)) == schema


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "{"),
        ("a.json", "{}"),
        ("a.json", '[{"database": "a"}]'),
        ("a.json", '{"format": 99}'),
        ("a.sql", "CREATE TABLE t (a INT)"),
        ("a.sql", "USE d; CREATE TABLE t (a NOVELTY)"),
        ("a.sql", "USE d; CREATE TABLE t (a INT); ALTER TABLE t DROP COLUMN b"),
        ("a.sql", "USE d; CREATE TABLE t (a CHAR(1))"),
        ("a.sql", "USE d; CREATE TABLE t (a INT) COMMENT 'open"),
    ],
)
def test_invalid_schema_file_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SchemaInvalid):
        SchemaHistory.from_file(tmp_path / name)


def test_missing_schema_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaInvalid):
        SchemaHistory.from_file(tmp_path / "nowhere.json")
