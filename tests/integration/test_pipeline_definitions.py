# SPDX-License-Identifier: Apache-2.0
"""Tables whose definitions change under a running pipeline: the target remains equal to the source."""

from pathlib import Path

import deltalake
import pytest

from penstock.errors import SchemaChanged
from penstock.local.driver import LocalDriver
from penstock.pipeline.state import PipelineState
from tests.support.pipeline.oracle import differences, mysql_rows, source_rows
from tests.support.pipeline.running import pipeline_of, run_to_end
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

_SWAP = """
    CREATE TABLE _{t}_gho LIKE {t};
    ALTER TABLE _{t}_gho ADD COLUMN extra INT NOT NULL DEFAULT 7, MODIFY name VARCHAR(60);
    INSERT INTO _{t}_gho (id, name) SELECT id, name FROM {t};
    UPDATE {t} SET name = 'during' WHERE id = 2;
    REPLACE INTO _{t}_gho (id, name) SELECT id, name FROM {t} WHERE id = 2;
    RENAME TABLE {t} TO _{t}_del, _{t}_gho TO {t};
    INSERT INTO {t} (id, name) VALUES (90, 'after')"""

_SWAP_FOR_AN_INDEX = """
    CREATE TABLE _{t}_gho LIKE {t}; ALTER TABLE _{t}_gho ADD INDEX (name);
    INSERT INTO _{t}_gho SELECT * FROM {t};
    rename /* gh-ost */ table {t} TO _{t}_del, _{t}_gho TO {t}; DROP TABLE _{t}_del;
    INSERT INTO {t} VALUES (90, 'after')"""

_SWAP_FOR_OTHER_ROWS = """
    CREATE TABLE _{t}_new LIKE {t}; INSERT INTO _{t}_new VALUES (2, 'other'), (9, 'more');
    RENAME TABLE {t} TO _{t}_old, _{t}_new TO {t}; DROP TABLE _{t}_old;
    INSERT INTO {t} VALUES (90, 'after')"""

_SWAP_FOR_A_SHORTER_TYPE = """
    SET sql_mode = ''; UPDATE {t} SET name = 'long' WHERE id = 3;
    CREATE TABLE _{t}_gho LIKE {t}; ALTER TABLE _{t}_gho MODIFY name VARCHAR(2);
    INSERT INTO _{t}_gho SELECT * FROM {t};
    RENAME TABLE {t} TO _{t}_del, _{t}_gho TO {t}"""

_SWAP_FOR_A_UNIQUE_KEY = """
    INSERT INTO {t} VALUES (4, 'a'), (5, 'b');
    CREATE TABLE _{t}_new LIKE {t}; ALTER TABLE _{t}_new ADD UNIQUE (name);
    INSERT IGNORE INTO _{t}_new SELECT * FROM {t};
    RENAME TABLE {t} TO _{t}_old, _{t}_new TO {t}; DROP TABLE _{t}_old"""

# The statements run on each table, and whether they make the pipeline read the table again.
CASES = {
    "emptied": ("TRUNCATE TABLE {t}; INSERT INTO {t} VALUES (8, 'new')", False),
    "emptied_last": ("INSERT INTO {t} VALUES (8, 'old'); TRUNCATE TABLE {t}", False),
    "made_anew": (
        "DROP TABLE {t}; CREATE TABLE {t} (id INT PRIMARY KEY, name VARCHAR(20));"
        "INSERT INTO {t} VALUES (5, 'e')",
        False,
    ),
    "made_of_a_query": (
        "CREATE TABLE {t}_origin (id INT, name VARCHAR(20));"
        "INSERT INTO {t}_origin VALUES (5, 'e'), (6, 'f'), (7, 'g'); DROP TABLE {t};"
        "CREATE TABLE {t} (PRIMARY KEY (id)) AS SELECT id, name FROM {t}_origin",
        False,
    ),
    "null_added": ("ALTER TABLE {t} ADD COLUMN a INT; INSERT INTO {t} VALUES (4, 'd', 1)", False),
    "value_added": ("ALTER TABLE {t} ADD COLUMN a INT NOT NULL DEFAULT 3", True),
    "front_added": (
        "ALTER TABLE {t} ADD COLUMN a DATETIME FIRST; INSERT INTO {t} VALUES ('2026-01-01', 4, 'd')",
        False,
    ),
    "dropped": (
        "UPDATE {t} SET name = 'x'; ALTER TABLE {t} DROP COLUMN name; INSERT INTO {t} VALUES (4)",
        False,
    ),
    "renamed": (
        "ALTER TABLE {t} RENAME COLUMN name TO title; UPDATE {t} SET title = 'x' WHERE id = 1",
        True,
    ),
    "widened": ("ALTER TABLE {t} MODIFY name VARCHAR(200); INSERT INTO {t} VALUES (4, 'd')", False),
    "converted": ("ALTER TABLE {t} MODIFY name VARBINARY(20); INSERT INTO {t} VALUES (4, 'd')", True),
    "replaced": (
        "CREATE TABLE {t}_u (id INT PRIMARY KEY, name VARCHAR(20)); INSERT INTO {t}_u VALUES (7, 'u');"
        "RENAME TABLE {t} TO {t}_v, {t}_u TO {t}; DELETE FROM {t}_v WHERE id = 1",
        True,
    ),
    "swapped": (_SWAP, True),
    "swapped_same": (_SWAP_FOR_AN_INDEX, False),
    "swapped_by_hand": (_SWAP_FOR_OTHER_ROWS, True),
    "swapped_shorter": (_SWAP_FOR_A_SHORTER_TYPE, True),
    "swapped_unique": (_SWAP_FOR_A_UNIQUE_KEY, True),
    "dropped_and_added": ("ALTER TABLE {t} DROP COLUMN name, ADD COLUMN name VARCHAR(20)", True),
    "dropped_then_added": (
        "ALTER TABLE {t} DROP COLUMN name; ALTER TABLE {t} ADD COLUMN name VARCHAR(20);"
        "INSERT INTO {t} VALUES (4, 'd')",
        True,
    ),
    "added_with_another_type": (
        "INSERT INTO {t} VALUES (4, 'd'); ALTER TABLE {t} DROP COLUMN name;"
        "ALTER TABLE {t} ADD COLUMN name INT; INSERT INTO {t} VALUES (5, 5)",
        True,
    ),
    "null_refused": (
        "INSERT INTO {t} VALUES (4, NULL); SET sql_mode = '';"
        "ALTER TABLE {t} MODIFY name VARCHAR(20) NOT NULL",
        True,
    ),
    "letters_lost": (
        "INSERT INTO {t} VALUES (4, 'ü'); SET sql_mode = '';"
        "ALTER TABLE {t} MODIFY name VARCHAR(20) CHARACTER SET ascii",
        True,
    ),
    "computed": (
        "ALTER TABLE {t} ADD COLUMN g INT AS (id + 1) STORED;ALTER TABLE {t} MODIFY g INT AS (id + 2) STORED",
        True,
    ),
    "stamped": (
        "SET explicit_defaults_for_timestamp = OFF; ALTER TABLE {t} ADD COLUMN ts TIMESTAMP(6);"
        "INSERT INTO {t} (id, name) VALUES (4, 'd')",
        True,
    ),
    "partitioned": (
        "ALTER TABLE {t} PARTITION BY RANGE (id) (PARTITION a VALUES LESS THAN (2),"
        " PARTITION b VALUES LESS THAN (1000)); ALTER TABLE {t} DROP PARTITION a",
        True,
    ),
    "exchanged": (
        "ALTER TABLE {t} PARTITION BY RANGE (id) (PARTITION a VALUES LESS THAN (3),"
        " PARTITION b VALUES LESS THAN (1000)); CREATE TABLE {t}_u LIKE {t}; ALTER TABLE {t}_u REMOVE"
        " PARTITIONING; INSERT INTO {t}_u VALUES (1, 'u'); INSERT INTO {t} VALUES (4, 'd');"
        " ALTER TABLE {t} EXCHANGE PARTITION a WITH TABLE {t}_u; INSERT INTO {t} VALUES (5, 'e')",
        True,
    ),
    "keyed": (
        "INSERT INTO {t} VALUES (4, 'd'); ALTER TABLE {t} MODIFY name VARCHAR(20) NOT NULL, DROP PRIMARY KEY,"
        " ADD PRIMARY KEY (id, name); INSERT INTO {t} VALUES (1, 'second'); DELETE FROM {t} WHERE id = 2",
        True,
    ),
    "several": (
        "ALTER TABLE {t} ADD COLUMN a INT; INSERT INTO {t} VALUES (4, 'd', 1);"
        "ALTER TABLE {t} ADD COLUMN b INT, DROP COLUMN name; UPDATE {t} SET b = 2, a = 3 WHERE id < 3;"
        "TRUNCATE TABLE {t}; INSERT INTO {t} VALUES (11, 1, 1)",
        False,
    ),
}


def test_changed_definitions_are_followed(
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    for table in CASES:
        mysql_server.sql(
            f"CREATE TABLE {table} (id INT PRIMARY KEY, name VARCHAR(20));"
            f"INSERT INTO {table} VALUES (1, 'a'), (2, 'b'), (3, 'c')",
            database=database,
        )
    settings = pipeline_of(mysql_server, database, {"mysql": {"url": mariadb_server.url("root")}}, tmp_path)
    run_to_end(LocalDriver(2), settings)
    for table, (statements, _) in CASES.items():
        mysql_server.sql(statements.format(t=table), database=database)
    mysql_server.sql(
        "CREATE TABLE later (id INT PRIMARY KEY); INSERT INTO later VALUES (1)", database=database
    )
    run_to_end(LocalDriver(2), settings)
    tables = [str(row[0]) for row in mysql_server.sql("SHOW TABLES", database=database)]
    actual_rows = {
        table: differences(
            source_rows(mysql_server, database, table),
            mysql_rows(mariadb_server, database, table),
            key=("id",),
        )
        for table in tables
        if not table.startswith("_")
    }
    assert not any(actual_rows.values()), {
        table: differing for table, differing in actual_rows.items() if differing
    }
    state = PipelineState.open(settings.state, settings.name)
    reread = {request.table.table for request in state.requests()}
    assert {request.state for request in state.requests()} == {"done"}
    state.close()
    # In the case `replaced`, the two tables with new names are read as well.
    assert {name for name in reread if name in CASES} == {name for name, (_, again) in CASES.items() if again}
    assert not mariadb_server.sql(f"SHOW TABLES IN {database} LIKE '\\_%'"), "a ghost is no table of ours"
    mariadb_server.sql(f"DROP DATABASE {database}")


def test_policy_restricts_schema_changes(
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE t (id INT PRIMARY KEY, name VARCHAR(20))", database=database)
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    stopping = pipeline_of(mysql_server, database, sink, tmp_path, schema_changes="stop")
    run_to_end(LocalDriver(2), stopping)
    mysql_server.sql("ALTER TABLE t ADD COLUMN a INT; INSERT INTO t VALUES (1, 'a', 2)", database=database)
    with pytest.raises(SchemaChanged):
        run_to_end(LocalDriver(2), stopping)
    # With another policy, the same batch continues and leaves the target unchanged.
    run_to_end(LocalDriver(2), pipeline_of(mysql_server, database, sink, tmp_path, schema_changes="ignore"))
    assert mariadb_server.sql(f"SELECT * FROM {database}.t") == [(1, "a")]
    mariadb_server.sql(f"DROP DATABASE {database}")


def test_columns_are_only_added_if_configured(
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(
        "CREATE TABLE t (id INT PRIMARY KEY, code INT NOT NULL, name VARCHAR(5) NOT NULL, UNIQUE (code));"
        "INSERT INTO t VALUES (1, 1, 'a')",
        database=database,
    )
    sink = {"mysql": {"url": mariadb_server.url("root")}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, schema_changes="add_only")
    run_to_end(LocalDriver(2), settings)
    mysql_server.sql(
        "ALTER TABLE t ADD COLUMN more INT, DROP INDEX code, MODIFY code INT NULL;"
        "INSERT INTO t VALUES (2, 1, 'b', 5); INSERT INTO t VALUES (3, NULL, 'c', 6);"
        "ALTER TABLE t DROP COLUMN name; INSERT INTO t VALUES (4, 1, 7);"
        "ALTER TABLE t MODIFY code BIGINT; UPDATE t SET code = 2 WHERE id = 1",
        database=database,
    )
    run_to_end(LocalDriver(2), settings)
    followed = [(1, 2, None), (2, 1, 5), (3, None, 6), (4, 1, 7)]
    assert mariadb_server.sql(f"SELECT id, code, more FROM {database}.t ORDER BY id") == followed
    # The target keeps the column `name`, which the source has dropped. Rows written after the drop have no
    # name.
    left = mariadb_server.sql(f"SELECT id, name FROM {database}.t WHERE name IS NOT NULL ORDER BY id")
    assert left == [(2, "b"), (3, "c")]
    # Values that the old type cannot hold, and rows with equal old keys, stop the pipeline with an error that
    # says why.
    for statement, why in (
        (f"INSERT INTO t VALUES (5, {2**40}, 8)", "code"),
        (
            "ALTER TABLE t ADD COLUMN part INT NOT NULL, DROP PRIMARY KEY, ADD PRIMARY KEY (id, part)",
            "key of",
        ),
    ):
        mysql_server.sql(statement, database=database)
        with pytest.raises(SchemaChanged, match=why):
            run_to_end(LocalDriver(2), settings)
    assert mariadb_server.sql(f"SELECT id, code, more FROM {database}.t ORDER BY id") == followed
    mariadb_server.sql(f"DROP DATABASE {database}")


@pytest.mark.deep(
    guard="tests/unit/test_pipeline_table_changes.py::"
    "test_table_is_reloaded_if_its_rows_change_without_being_logged"
)
@pytest.mark.parametrize("sink", ["delta", "add_only"])
def test_recreated_column_has_none_of_its_old_values(
    sink: str,
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(
        "CREATE TABLE t (id INT PRIMARY KEY, name VARCHAR(20)); INSERT INTO t VALUES (1, 'a'), (2, 'b')",
        database=database,
    )
    if sink == "delta":
        settings = pipeline_of(mysql_server, database, {"delta": {"path": str(tmp_path / "lake")}}, tmp_path)
    else:
        target = {"mysql": {"url": mariadb_server.url("root")}}
        settings = pipeline_of(mysql_server, database, target, tmp_path, schema_changes="add_only")
    for statement in (
        "SELECT 1",
        "ALTER TABLE t DROP COLUMN name; INSERT INTO t VALUES (3)",
        "ALTER TABLE t ADD COLUMN name VARCHAR(20); INSERT INTO t VALUES (4, 'd')",
    ):
        mysql_server.sql(statement, database=database)
        run_to_end(LocalDriver(2), settings)
    if sink == "delta":
        rows = deltalake.DeltaTable(str(tmp_path / "lake" / database / "t")).to_pyarrow_table().to_pylist()
        actual = sorted((row["id"], row["name"]) for row in rows)
    else:
        actual = mariadb_server.sql(f"SELECT id, name FROM {database}.t ORDER BY id")
        mariadb_server.sql(f"DROP DATABASE {database}")
    assert actual == [(1, None), (2, None), (3, None), (4, "d")]
