# SPDX-License-Identifier: Apache-2.0
"""The effects of statements on table definitions. The expected definitions were read from real servers."""

import json
from dataclasses import replace

import pytest

from penstock.model import Position, TableName, TableSchema
from penstock.schema.history import SchemaHistory
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.tokens import ServerSpelling

MYSQL = ServerSpelling(version=(9, 7, 4))
MARIADB = ServerSpelling(mariadb=True, version=(11, 8, 6))


def schema_after(statements: str, spelling: ServerSpelling) -> TableSchema | None:
    """Return the schema of shop.t after statements separated by `;`, or None if a server has to be
    queried.
    """
    history = SchemaHistory(ServerDefaults(spelling, "utf8mb4", {"shop": "gbk", "other": "latin1"}, False))
    for number, statement in enumerate(statements.split(";")):
        history.apply(statement, "shop", Position(0, "bin.000001", 100 * (number + 1)))
    return None if history.needs_reread(TableName("shop", "t")) else history.schema("shop", "t")


def columns_after(statements: str, spelling: ServerSpelling) -> list[str] | None:
    """Return the columns of the schema that `schema_after` returns, with their types and charsets."""
    schema = schema_after(statements, spelling)
    if schema is None:
        return None
    return [f"{column.name} {column.type_text} {column.charset or ''}".rstrip() for column in schema.columns]


@pytest.mark.parametrize(
    ("statements", "columns"),
    [
        ("CREATE TABLE t (a TEXT CHAR SET latin1) CHAR SET = ascii; ALTER TABLE t ADD b CHAR(2)",
         ["a text latin1", "b char(2) ascii"]),
        ("CREATE TABLE t (a CHAR(2)); ALTER TABLE t CHAR SET latin1; ALTER TABLE t ADD b LONG CHAR VARYING",
         ["a char(2) gbk", "b mediumtext latin1"]),
        ("CREATE TABLE t (a CHAR) CHARSET latin1 ENGINE=InnoDB", ["a char(1) latin1"]),
        ("CREATE TABLE t (a TEXT(40) CHARACTER SET binary, b TEXT(300) CHARACTER SET binary)",
         ["a tinyblob", "b blob"]),
        ("CREATE DATABASE IF NOT EXISTS shop CHARACTER SET utf8mb4; CREATE TABLE t (a CHAR(2))",
         ["a char(2) gbk"]),
        ("CREATE TABLE t (a INT) CHARSET latin1; ALTER TABLE t ADD b CHAR(2), CONVERT TO CHARACTER SET gbk",
         ["a int", "b char(2) gbk"]),
        ("CREATE TABLE t (a INT); ALTER TABLE t CONVERT TO CHARACTER SET ucs2, ADD b CHAR(4) ASCII",
         ["a int", "b char(4) ucs2"]),
        ("CREATE TABLE t (a INT); ALTER TABLE t ADD b CHAR, CHARSET latin1", ["a int", "b char(1) latin1"]),
        ("CREATE TABLE t (a ENUM('é','x') CHARSET latin1, b SET('中') CHARSET gbk)",
         ["a enum('é','x') latin1", "b set('中') gbk"]),
    ],
)  # fmt: skip
def test_column_charsets_equal_the_servers(statements: str, columns: list[str]) -> None:
    assert columns_after(statements, MYSQL) == columns


@pytest.mark.parametrize(
    "statements",
    [
        "CREATE TABLE t (a CHAR(2) CHARSET utf8)",
        "CREATE TABLE t (a CHAR(2) COLLATE utf8_bin)",
        "CREATE TABLE t (a CHAR(2)) DEFAULT CHARACTER SET = 'utf8'",
        "CREATE TABLE t (a CHAR(2)); ALTER TABLE t CONVERT TO CHARACTER SET utf8",
        "CREATE TABLE t (b INT); ALTER TABLE t CHARSET utf8; ALTER TABLE t ADD a CHAR(2), DROP b",
        "CREATE DATABASE d CHARACTER SET utf8; CREATE TABLE d.u (a CHAR(2)); RENAME TABLE d.u TO t",
        "ALTER DATABASE shop COLLATE utf8_general_ci; CREATE TABLE t (a CHAR(2))",
    ],
)
def test_utf8_is_the_charset_that_the_server_means(statements: str) -> None:
    assert columns_after(statements, MARIADB) == ["a char(2) utf8mb3"]
    assert columns_after(statements, replace(MARIADB, utf8="utf8mb4")) == ["a char(2) utf8mb4"]


def test_meaning_of_utf8_is_kept_with_a_history() -> None:
    for spelling in (MARIADB, replace(MARIADB, utf8="utf8mb4")):
        history = SchemaHistory(ServerDefaults(spelling, "utf8mb4", {}, False))
        assert SchemaHistory.from_json(json.loads(json.dumps(history.to_json()))).spelling == spelling


@pytest.mark.parametrize(
    "statements",
    [
        # DEFAULT is the charset of the session's current database.
        "CREATE TABLE other.u (a CHAR); ALTER TABLE other.u CONVERT TO CHARSET DEFAULT, RENAME TO shop.t",
        # In ENUM and SET members, characters that the charset cannot represent become question marks.
        "CREATE TABLE t (a ENUM('é') CHARACTER SET sjis)",
        "CREATE TABLE t (a SET('é')); ALTER TABLE t CONVERT TO CHARACTER SET ascii",
        "CREATE TABLE t (a ENUM('x') CHARACTER SET ucs2); ALTER TABLE t CONVERT TO CHARACTER SET utf8mb3",
        "CREATE TABLE t (a ENUM('é') CHARACTER SET latin1); ALTER TABLE t CONVERT TO CHARACTER SET utf8mb4",
        # MariaDB keeps the primary key.
        "CREATE TABLE t (a INT KEY, b INT); ALTER TABLE t DROP a, ADD a TEXT",
        "CREATE TABLE t (a VARCHAR(20, 0))",
        "CREATE TABLE t (a ENUM('x') CHARACTER SET binary); ALTER TABLE t CONVERT TO CHARACTER SET ucs2",
    ],
)
def test_charset_known_only_to_the_server_puts_a_table_in_doubt(statements: str) -> None:
    assert columns_after(statements, MYSQL) is None


@pytest.mark.parametrize("spelling", [MYSQL, MARIADB])
@pytest.mark.parametrize(
    "column",
    ["VARCHAR(70000)", "VARBINARY(70000)", "VARCHAR(70000) BYTE", "VARCHAR(40000) CHARACTER SET binary"],
)
def test_column_that_only_a_lenient_server_accepts_puts_a_table_in_doubt(
    spelling: ServerSpelling, column: str
) -> None:
    # Without strict mode, the column becomes a TEXT or BLOB.
    is_long = "40000" not in column
    assert (schema_after(f"CREATE TABLE t (a {column})", spelling) is None) == is_long
    assert (
        schema_after(f"CREATE TABLE t (b INT); ALTER TABLE t ADD a {column}", spelling) is None
    ) == is_long


@pytest.mark.parametrize(
    "statements",
    [
        "CREATE TABLE t (a INT, b VARCHAR(20), UNIQUE (b)); ALTER TABLE t MODIFY b TEXT",
        # A unique key counts too if it was added by a statement that adds nothing else.
        "CREATE TABLE t (a INT, b VARCHAR(20)); ALTER TABLE t ADD UNIQUE (b); ALTER TABLE t MODIFY b TEXT",
        "CREATE TABLE t (a INT, b CHAR(9)); CREATE UNIQUE INDEX i ON t (b); ALTER TABLE t MODIFY b TEXT",
        # It is unknown whether an index of this name exists.
        "CREATE TABLE t (a TEXT); ALTER TABLE t ADD UNIQUE IF NOT EXISTS u (a)",
        "CREATE TABLE t (a TEXT); CREATE UNIQUE INDEX IF NOT EXISTS u ON t (a)",
        "CREATE TABLE t (a TEXT UNIQUE, b INT); CREATE OR REPLACE INDEX a ON t (b)",
        "CREATE TABLE t (a INT, b VARCHAR(20), UNIQUE (b)); ALTER TABLE t CHANGE b c VARCHAR(900)",
        "CREATE TABLE t (a INT, b VARCHAR(300) UNIQUE) ENGINE=MyISAM",
        "CREATE TABLE t (a VARCHAR(200), b VARCHAR(200), UNIQUE (a, b)) ENGINE MyISAM",
        "CREATE TABLE t (a VARCHAR(700), b VARCHAR(200)); CREATE UNIQUE INDEX i USING BTREE ON t (a, b)",
        "CREATE TABLE t (a TEXT UNIQUE, b INT); ALTER TABLE t DROP INDEX b",
        "CREATE TABLE t (a TEXT UNIQUE, b INT); ALTER TABLE t MODIFY a INT",
        "CREATE TABLE t (a TEXT UNIQUE, b VARCHAR(300) UNIQUE); ALTER TABLE t CONVERT TO CHARSET utf8mb4",
    ],
)
def test_mariadb_tables_that_may_have_a_hidden_column_are_in_doubt(statements: str) -> None:
    assert columns_after(statements, MARIADB) is None
    assert columns_after(statements, MYSQL) is not None


def test_compressed_columns_of_mariadb_are_decompressed() -> None:
    columns = columns_after("CREATE TABLE t (a VARBINARY(50) COMPRESSED)", MARIADB)
    assert columns == ["a varbinary(50) /*M!100301 COMPRESSED*/"]


@pytest.mark.parametrize(
    ("statements", "columns"),
    [
        # IF EXISTS and IF NOT EXISTS refer to the columns that exist before the statement.
        ("CREATE TABLE t (a INT); ALTER TABLE t ADD IF NOT EXISTS a TEXT, ADD IF NOT EXISTS b INT FIRST",
         ["b int(11)", "a int(11)"]),
        ("CREATE TABLE t (a INT, b INT); ALTER TABLE t DROP a, ADD IF NOT EXISTS a TEXT", ["b int(11)"]),
        ("CREATE TABLE t (a INT); ALTER TABLE t ADD b INT, DROP IF EXISTS b", ["a int(11)", "b int(11)"]),
        ("CREATE TABLE t (a INT); ALTER TABLE t MODIFY IF EXISTS b INT, RENAME COLUMN IF EXISTS c TO d",
         ["a int(11)"]),
        ("CREATE TABLE t (a INT); ALTER TABLE t CHANGE IF EXISTS a b DATE, CHANGE IF EXISTS x y INT",
         ["b date"]),
        ("CREATE TABLE t (a INT, b TEXT); CREATE INDEX i ON t (b(9)); DROP INDEX i ON t",
         ["a int(11)", "b text gbk"]),
        ("CREATE TABLE t (a INT, b CHAR(9)); ALTER TABLE t ADD UNIQUE (a), MODIFY b TEXT",
         ["a int(11)", "b text gbk"]),
        # A unique key over a type without a length has a hidden hash, which stays the last column.
        ("CREATE TABLE t (a INT, b GEOMETRY UNIQUE)",
         ["a int(11)", "b geometry", "DB_ROW_HASH_1 bigint(20) unsigned"]),
        ("CREATE TABLE t (a TEXT); ALTER TABLE t ADD UNIQUE (a); ALTER TABLE t ADD b INT",
         ["a text gbk", "b int(11)", "DB_ROW_HASH_1 bigint(20) unsigned"]),
        ("CREATE TABLE t (a INT); ALTER TABLE t ADD b TEXT UNIQUE; ALTER TABLE t CONVERT TO CHARSET latin1",
         ["a int(11)", "b text latin1", "DB_ROW_HASH_1 bigint(20) unsigned"]),
        ("CREATE TABLE t (a INT) WITH SYSTEM VERSIONING; ALTER TABLE t ADD b INT",
         ["a int(11)", "b int(11)", "row_start timestamp(6)", "row_end timestamp(6)"]),
        ("CREATE TABLE t (a INT); ALTER TABLE t ADD IF NOT EXISTS a TEXT UNIQUE", ["a int(11)"]),
        ("CREATE TABLE t (a TEXT); ALTER TABLE t ADD IF NOT EXISTS a INT UNIQUE",
         ["a text gbk", "DB_ROW_HASH_1 bigint(20) unsigned"]),
        ("CREATE TABLE t (a INT UNIQUE); ALTER TABLE t DROP INDEX a, DROP CONSTRAINT x", ["a int(11)"]),
        ("CREATE TABLE t (a INT); ALTER TABLE t REORGANIZE PARTITION p, q INTO (PARTITION r VALUES IN (1))",
         ["a int(11)"]),
        ("CREATE TABLE t (a INT) WITH SYSTEM VERSIONING",
         ["a int(11)", "row_start timestamp(6)", "row_end timestamp(6)"]),
        ("CREATE TABLE t (a INT WITH SYSTEM VERSIONING, b INT)",
         ["a int(11)", "b int(11)", "row_start timestamp(6)", "row_end timestamp(6)"]),
        ("CREATE TABLE t (a JSON COLLATE latin1_bin, b CHAR(5) COLLATE DEFAULT, c JSON) CHARSET cp1251",
         ["a longtext latin1", "b char(5) cp1251", "c longtext utf8mb4"]),
        ("CREATE TABLE t (a INT); ALTER TABLE t ADD CONSTRAINT IF NOT EXISTS c CHECK (a > 0), ADD b INT",
         ["a int(11)", "b int(11)"]),
        ("CREATE TABLE t (a INT, b TEXT); CREATE OR REPLACE UNIQUE INDEX u ON t (b)",
         ["a int(11)", "b text gbk", "DB_ROW_HASH_1 bigint(20) unsigned"]),
        ("CREATE TABLE t (a INT); CREATE OR REPLACE INDEX u ON t (a); CREATE UNIQUE INDEX IF NOT EXISTS v"
         " ON t (a); ALTER TABLE t ADD b INT", ["a int(11)", "b int(11)"]),
        ("CREATE TABLE t (a INT) WITH SYSTEM VERSIONING; ALTER TABLE t DROP SYSTEM VERSIONING",
         ["a int(11)"]),
        ("CREATE TABLE t (a INT); ALTER TABLE t ADD SYSTEM VERSIONING",
         ["a int(11)", "row_start timestamp(6)", "row_end timestamp(6)"]),
    ],
)  # fmt: skip
def test_clauses_of_mariadb_are_followed(statements: str, columns: list[str]) -> None:
    assert columns_after(statements, MARIADB) == columns


@pytest.mark.parametrize(
    ("statements", "key"),
    [
        ("CREATE TABLE t (a INT, b INT); ALTER TABLE t ADD IF NOT EXISTS c INT KEY", ("c",)),
        ("CREATE TABLE t (a INT, b INT); ALTER TABLE t ADD IF NOT EXISTS b INT KEY", ("b",)),
        ("CREATE TABLE t (a INT KEY, b INT); ALTER TABLE t ADD IF NOT EXISTS b INT KEY", ("a",)),
        # The server adds the column and leaves the key out.
        ("CREATE TABLE t (a INT KEY, b INT); ALTER TABLE t ADD IF NOT EXISTS c INT KEY", ("a",)),
        ("CREATE TABLE t (a INT, b INT); ALTER TABLE t MODIFY IF EXISTS b INT KEY", ("b",)),
        ("CREATE TABLE t (a INT KEY, b INT); ALTER TABLE t MODIFY IF EXISTS b INT KEY", ("a",)),
        ("CREATE TABLE t (a INT KEY, b INT); ALTER TABLE t ADD PRIMARY KEY IF NOT EXISTS (b)", ("a",)),
        ("CREATE TABLE t (a INT, b INT); ALTER TABLE t ADD PRIMARY KEY IF NOT EXISTS (b)", ("b",)),
        ("CREATE TABLE t (a INT KEY); ALTER TABLE t DROP PRIMARY KEY, ADD IF NOT EXISTS c INT KEY", None),
    ],
)
def test_primary_key_of_a_column_with_a_condition_is_followed(
    statements: str, key: tuple[str, ...] | None
) -> None:
    schema = schema_after(statements, MARIADB)
    assert (schema.primary_key if schema is not None else None) == key


@pytest.mark.parametrize(
    ("statement", "spellings"),
    [
        ("ALTER TABLE t DROP KEY `primary`", (MYSQL, MARIADB)),
        ("ALTER TABLE t DROP CONSTRAINT `primary`", (MYSQL, MARIADB)),
        ("DROP INDEX `primary` ON t", (MYSQL, MARIADB)),
        ("ALTER TABLE t DROP KEY IF EXISTS `primary`", (MARIADB,)),
        ("ALTER TABLE t DROP CONSTRAINT IF EXISTS `PRIMARY`", (MARIADB,)),
        ("DROP INDEX IF EXISTS `primary` ON t", (MARIADB,)),
    ],
)
def test_primary_key_is_dropped_by_its_name(statement: str, spellings: tuple[ServerSpelling, ...]) -> None:
    for spelling in spellings:
        schema = schema_after(f"CREATE TABLE t (a INT NOT NULL, PRIMARY KEY (a)); {statement}", spelling)
        assert schema is not None
        assert schema.primary_key == ()


@pytest.mark.parametrize("spelling", [MYSQL, MARIADB])
@pytest.mark.parametrize(
    ("action", "columns", "key"),
    [
        ("ADD x TEXT FIRST PARTITION BY HASH (b)", "xabc", ("a", "b")),
        ("ADD x TEXT FIRST REMOVE PARTITIONING", "xabc", ("a", "b")),
        ("ADD x TEXT AFTER a PARTITION BY KEY (a, b) PARTITIONS 3", "axbc", ("a", "b")),
        ("ADD x TEXT PARTITION BY KEY (a)", "abcx", ("a", "b")),
        ("MODIFY c TEXT FIRST, ENGINE=InnoDB PARTITION BY RANGE (a) (PARTITION p VALUES LESS THAN (3),"
         " PARTITION q VALUES LESS THAN (5))", "cab", ("a", "b")),
        ("DROP PRIMARY KEY, ADD PRIMARY KEY (b) PARTITION BY KEY (b)", "abc", ("b",)),
        ("RENAME COLUMN c TO x PARTITION BY LINEAR KEY ALGORITHM=2 (a)", "abx", ("a", "b")),
        ("RENAME u PARTITION BY HASH (a); RENAME TABLE u TO t", "abc", ("a", "b")),
        ("PARTITION BY KEY (a, b)", "abc", ("a", "b")),
        ("REMOVE PARTITIONING", "abc", ("a", "b")),
    ],
)  # fmt: skip
def test_partitions_after_the_last_action_belong_to_no_column(
    spelling: ServerSpelling, action: str, columns: str, key: tuple[str, ...]
) -> None:
    created = "CREATE TABLE t (a INT, b INT, c INT, PRIMARY KEY (a, b))"
    schema = schema_after(f"{created}; ALTER TABLE t {action}", spelling)
    assert schema is not None
    names = "".join(column.name for column in schema.columns)
    assert (names, schema.primary_key) == (columns, key)


@pytest.mark.parametrize(
    ("spelled", "types"),
    [
        ("DECIMAL(0)", ("decimal(10,0)", "decimal(10,0)")),
        ("NUMERIC(0,0) UNSIGNED", ("decimal(10,0) unsigned", "decimal(10,0) unsigned")),
        ("BIGINT(0) ZEROFILL", ("bigint(20) unsigned zerofill", "bigint(20) unsigned zerofill")),
        ("TINYINT(0)", ("tinyint", "tinyint(4)")),
        ("DATETIME(0)", ("datetime", "datetime")),
        ("TEXT(0)", ("tinytext gbk", "text gbk")),
        ("BLOB(0)", ("tinyblob", "blob")),
        # MySQL refuses these types.
        ("BIT(0)", (None, "bit(1)")),
        ("FLOAT(0,0)", (None, "float")),
        ("DOUBLE(0,0) UNSIGNED", (None, "double unsigned")),
        ("YEAR(2)", (None, "year(2)")),
    ],
)
def test_length_of_zero_is_the_default(spelled: str, types: tuple[str | None, str]) -> None:
    for spelling, type_text in zip((MYSQL, MARIADB), types, strict=True):
        if type_text is not None:
            assert columns_after(f"CREATE TABLE t (a {spelled})", spelling) == [f"a {type_text}"]


@pytest.mark.parametrize(
    ("column", "nullable", "key"),
    [
        ("INT NOT NULL REFERENCES p (id) ON DELETE SET NULL", False, ()),
        ("INT NOT NULL REFERENCES shop.p (id) MATCH FULL ON UPDATE SET NULL ON DELETE NO ACTION", False, ()),
        ("INT REFERENCES p (id) ON DELETE SET DEFAULT NOT NULL", False, ()),
        ("INT REFERENCES p (id) ON DELETE CASCADE PRIMARY KEY", False, ("a",)),
        ("INT COLUMN_FORMAT DEFAULT NOT NULL", False, ()),
        ("INT NULL AUTO_INCREMENT UNIQUE", False, ()),
        ("INT AUTO_INCREMENT NULL UNIQUE", True, ()),
        ("INT SERIAL DEFAULT VALUE", False, ()),
        ("INT DEFAULT CASE 1 WHEN 1 THEN CASE WHEN b IS NOT NULL THEN 3 END END", True, ()),
        ("INT DEFAULT CASE WHEN b IS NULL THEN 1 END NOT NULL", False, ()),
        ("INT STORAGE DEFAULT UNIQUE KEY", True, ()),
    ],
)
def test_attributes_of_a_column_are_told_apart(column: str, nullable: bool, key: tuple[str, ...]) -> None:
    schema = schema_after(f"CREATE TABLE t (a {column})", MYSQL)
    assert schema is not None
    assert (schema.columns[0].nullable, schema.primary_key) == (nullable, key)


def test_column_whose_key_is_not_added_stays_nullable() -> None:
    schema = schema_after(
        "CREATE TABLE t (a INT KEY, b INT); ALTER TABLE t MODIFY IF EXISTS b INT KEY NULL", MARIADB
    )
    assert schema is not None
    assert [column.nullable for column in schema.columns] == [False, True]


@pytest.mark.parametrize(
    ("text", "charset", "to", "expected"),
    [
        ("TEXT", "utf8mb3", "utf8mb4", "mediumtext"),
        ("TINYTEXT", "latin1", "utf8mb4", "text"),
        ("TEXT", "utf8mb4", "latin1", "text"),
        ("MEDIUMTEXT", "utf16", "ucs2", "mediumtext"),
        ("LONGTEXT", "latin1", "utf8mb4", "longtext"),
        ("VARCHAR(200)", "latin1", "utf8mb4", "varchar(200)"),
    ],
)
def test_converted_text_columns_keep_their_number_of_characters(
    text: str, charset: str, to: str, expected: str
) -> None:
    statements = (
        f"CREATE TABLE t (a {text} CHARACTER SET {charset}); ALTER TABLE t CONVERT TO CHARACTER SET {to}"
    )
    assert columns_after(statements, MYSQL) == [f"a {expected} {to}"]


@pytest.mark.parametrize("declared", ["ADD b BLOB", "MODIFY a TINYTEXT", "CHANGE a b LONG VARBINARY"])
def test_server_computed_size_puts_a_table_in_doubt(declared: str) -> None:
    assert (
        columns_after(f"CREATE TABLE t (a CHAR); ALTER TABLE t {declared}, CONVERT TO CHARSET ucs2", MYSQL)
        is None
    )


def test_key_is_dropped_before_columns_change_and_added_after() -> None:
    history = SchemaHistory(ServerDefaults(MYSQL, "utf8mb4", {}, False))
    statements = (
        "CREATE TABLE t (a INT PRIMARY KEY, b INT)",
        "ALTER TABLE t MODIFY a BIGINT, CHANGE b c INT PRIMARY KEY, DROP INDEX `PRIMARY`",
    )
    for number, statement in enumerate(statements):
        history.apply(statement, "shop", Position(0, "bin.000001", 100 * (number + 1)))
    schema = history.schema("shop", "t")
    assert schema is not None
    assert [(column.name, column.nullable) for column in schema.columns] == [("a", True), ("c", False)]
    assert schema.primary_key == ("c",)


def test_key_of_a_system_versioned_table_ends_with_its_period() -> None:
    history = SchemaHistory(ServerDefaults(MARIADB, "utf8mb4", {}, False))
    history.apply(
        "CREATE TABLE t (a INT KEY, s TIMESTAMP(6) AS ROW START, e TIMESTAMP(6) GENERATED ALWAYS AS ROW END,"
        " PERIOD FOR SYSTEM_TIME (s, e)) WITH SYSTEM VERSIONING",
        "shop",
        Position(0, "bin.000001", 100),
    )
    history.apply("CREATE TABLE u (a INT KEY) WITH SYSTEM VERSIONING", "shop", Position(0, "bin.000001", 200))
    keys = [schema.primary_key for name in "tu" if (schema := history.schema("shop", name))]
    assert keys == [("a", "e"), ("a", "row_end")]


def test_key_without_overlaps_has_the_columns_of_its_period() -> None:
    history = SchemaHistory(ServerDefaults(MARIADB, "utf8mb4", {}, False))
    statements = [
        "CREATE TABLE t (PRIMARY KEY (a, p WITHOUT OVERLAPS), a INT, S DATE, e DATE, PERIOD FOR p (s, e))",
        "CREATE TABLE u (a INT KEY, s DATE, e DATE, PERIOD FOR app (s, e))",
    ]
    for number, statement in enumerate(statements):
        history.apply(statement, "shop", Position(0, "bin.000001", 100 * (number + 1)))
    schemas = [schema for name in "tu" if (schema := history.schema("shop", name))]
    assert [schema.primary_key for schema in schemas] == [("a", "e", "S"), ("a",)]
    assert not any(column.nullable for schema in schemas for column in schema.columns)


@pytest.mark.parametrize(
    "alter", ["ADD PERIOD FOR app (s, e)", "DROP PRIMARY KEY, ADD PRIMARY KEY (a, app WITHOUT OVERLAPS)"]
)
def test_period_that_a_definition_does_not_have_puts_its_table_in_doubt(alter: str) -> None:
    history = SchemaHistory(ServerDefaults(MARIADB, "utf8mb4", {}, False))
    created = "CREATE TABLE t (a INT KEY, s DATE NOT NULL, e DATE NOT NULL)"
    for number, statement in enumerate([created, f"ALTER TABLE t {alter}"]):
        history.apply(statement, "shop", Position(0, "bin.000001", 100 * (number + 1)))
    assert history.needs_reread(TableName("shop", "t"))


@pytest.mark.parametrize(
    "alter",
    [
        "ADD a INT FIRST, RENAME COLUMN a TO b",
        "CHANGE a b INT, ADD A INT FIRST",
        "RENAME COLUMN a TO b, ADD a INT",
    ],
)
@pytest.mark.parametrize("spelling", [MYSQL, MARIADB])
def test_new_column_with_the_name_of_a_renamed_key_column_puts_the_table_in_doubt(
    spelling: ServerSpelling, alter: str
) -> None:
    assert schema_after(f"CREATE TABLE t (c INT, a INT KEY); ALTER TABLE t {alter}", spelling) is None
    assert schema_after(f"CREATE TABLE t (c INT KEY, a INT); ALTER TABLE t {alter}", spelling) is not None
