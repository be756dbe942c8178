# SPDX-License-Identifier: Apache-2.0
"""Compare a pipeline's target with its source: exactly the differences are reported and repaired."""

from pathlib import Path

import pytest

from penstock.capture.status import State
from penstock.errors import SchemaChanged
from penstock.pipeline.verify.differences import Kind
from penstock.pipeline.verify.report import lines
from penstock.pipeline.verify.verify import Verification, verify
from tests.support.capture.captured_log import (
    capturing,
    head_of,
    settings_of,
    wait_for_position,
    wait_for_state,
)
from tests.support.pipeline.by_hand import HandDriven
from tests.support.pipeline.oracle import assert_same, mysql_rows, source_rows
from tests.support.pipeline.workload import Workload
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server


class Pair:
    """A source, a target of a different server family with a database of the same name, and a pipeline
    between them.
    """

    def __init__(self, source: Server, target: Server, database: str, folder: Path) -> None:
        self.source, self.target, self.database = source, target, database
        target.sql(f"CREATE DATABASE IF NOT EXISTS {database}")
        self.workload = Workload(source, database, seed=5, rows=120, big_rows=500, truncates=False)
        self.workload.create()
        sink = {"mysql": {"url": target.url("root"), "positions": f"{database}.penstock_positions"}}
        self.pipeline = HandDriven(source, f"{database}.*", sink, folder)

    def prove(self) -> None:
        for table in self.workload.tables:
            wanted = source_rows(self.source, self.database, table)
            assert_same(wanted, mysql_rows(self.target, self.database, table), key=self.workload.keys(table))

    def verify(self, *tables: str, **options: object) -> Verification:
        return verify(self.pipeline.settings, [f"{self.database}.{table}" for table in tables], **options)  # type: ignore[arg-type]

    def spoil(self, statement: str) -> None:
        self.target.sql(statement, database=self.database)


@pytest.fixture
def pair(mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path) -> Pair:
    return Pair(mysql_server, mariadb_server, fresh_database(mysql_server), tmp_path)


def kinds(verification: Verification) -> dict[str, list[str]]:
    return {
        comparison.table.target.name.table: sorted(str(difference.kind) for difference in comparison.found)
        for comparison in verification.results
        if comparison.found
    }


def test_target_that_equals_its_source_is_reported_equal(pair: Pair) -> None:
    pair.pipeline.load()
    pair.workload.run(60)
    pair.pipeline.follow()
    pair.prove()
    verification = pair.verify()
    assert verification.equal, kinds(verification)
    assert len(verification.results) == len(pair.workload.tables)
    for comparison in verification.results:
        assert comparison.source_rows == comparison.target_rows > 0


def test_advancing_source_is_compared_at_its_earlier_state(pair: Pair) -> None:
    pair.pipeline.load()
    pair.workload.run(120)
    verification = pair.verify()
    assert verification.equal, kinds(verification)


def test_differences_are_reported_despite_an_advancing_source(pair: Pair) -> None:
    pair.pipeline.load()
    pair.source.sql(
        "INSERT INTO accounts (id, owner, balance) VALUES"
        " (9001, 'kept', 1), (9002, 'kept', 2), (9003, 'kept', 3)",
        database=pair.database,
    )
    pair.pipeline.follow()
    # The source changes these rows after the pipeline's position; one of the changes hides a wrong value.
    pair.spoil("UPDATE accounts SET owner = 'spoilt' WHERE id = 9001")
    pair.source.sql("UPDATE accounts SET owner = 'spoilt' WHERE id = 9001", database=pair.database)
    pair.spoil("DELETE FROM accounts WHERE id = 9002")
    pair.source.sql("DELETE FROM accounts WHERE id = 9002", database=pair.database)
    pair.spoil("INSERT INTO accounts (id, owner, balance) VALUES (9009, 'besides', 0)")
    pair.source.sql(
        "INSERT INTO accounts (id, owner, balance) VALUES (9009, 'besides', 0)", database=pair.database
    )
    verification = pair.verify("accounts")
    (result,) = verification.results
    assert {(difference.row["id"], difference.kind) for difference in result.found} == {
        (9001, Kind.CHANGED),
        (9002, Kind.MISSING),
        (9009, Kind.EXTRA),
    }
    (changed,) = [difference for difference in result.found if difference.kind is Kind.CHANGED]
    assert changed.columns == ("owner",)


def test_repair_corrects_the_target_and_the_stream_continues_from_it(pair: Pair) -> None:
    pair.pipeline.load()
    pair.workload.run(30)
    pair.pipeline.follow()
    pair.spoil("DELETE FROM seats ORDER BY id LIMIT 4")
    pair.spoil("UPDATE order_lines SET latin = 'spoilt', spent = '00:00:01' ORDER BY code LIMIT 5")
    pair.spoil("INSERT INTO tokens VALUES (x'0102', 1, NULL), (x'0103', 1, NULL)")
    pair.spoil("UPDATE accounts SET id = id + 100000 ORDER BY id LIMIT 3")
    pair.workload.run(30)
    verification = pair.verify(mend=True)
    assert not verification.equal
    assert verification.repaired == sum(len(comparison.found) for comparison in verification.results)
    assert pair.verify().equal
    pair.pipeline.follow()
    pair.prove()


def test_large_tables_are_compared_range_by_range(pair: Pair) -> None:
    pair.source.sql(
        "INSERT INTO accounts (id, owner, balance) SELECT 100000 + n, 'many', n FROM"
        " (WITH RECURSIVE up AS (SELECT 1 n UNION ALL SELECT n + 1 FROM up WHERE n < 900)"
        " SELECT n FROM up) up",
        database=pair.database,
    )
    pair.source.sql("ANALYZE TABLE accounts", database=pair.database)
    pair.pipeline.load()
    pair.spoil("DELETE FROM accounts WHERE id IN (100001, 100450, 100900)")
    pair.spoil("INSERT INTO accounts (id, owner, balance) VALUES (-5, 'first', 0), (500000, 'last', 0)")
    pair.source.sql("UPDATE accounts SET id = id + 1000 WHERE id = 100460", database=pair.database)
    verification = pair.verify("accounts", share_rows=100)
    (result,) = verification.results
    assert {(difference.row["id"], difference.kind) for difference in result.found} == {
        *((number, Kind.MISSING) for number in (100001, 100450, 100900)),
        *((number, Kind.EXTRA) for number in (-5, 500000)),
    }


def shop(server: Server, target: Server, database: str, *tables: str) -> dict[str, object]:
    """Create tables of orders, and a sink for them."""
    target.sql(f"CREATE DATABASE IF NOT EXISTS {database}")
    for table in tables:
        server.sql(
            f"CREATE TABLE {table} (id INT PRIMARY KEY, code VARCHAR(20), total DECIMAL(8,2), plan JSON)",
            database=database,
        )
        rows = ", ".join(
            f"({number}, 'c{number}', {number}.5, '{{\"n\": {number}, \"m\": 1}}')" for number in range(40)
        )
        server.sql(f"INSERT INTO {table} VALUES {rows}", database=database)
    return {"mysql": {"url": target.url("root"), "positions": f"{database}.penstock_positions"}}


def test_rows_are_compared_as_the_steps_leave_them(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    sink = shop(mysql_server, mariadb_server, database, "orders_1", "orders_2")
    steps = [
        {"filter": "total > 5"},
        {"mask": {"columns": {"code": "hash"}}},
        {"route": {"tables": f"{database}.orders_*", "to": f"{database}.orders", "shard_column": "shard"}},
    ]
    pipeline = HandDriven(mysql_server, f"{database}.*", sink, tmp_path, steps=steps)
    pipeline.load()
    mysql_server.sql("UPDATE orders_1 SET total = 1 WHERE id IN (10, 11)", database=database)
    mysql_server.sql(
        "UPDATE orders_2 SET total = 50 WHERE id < 3; DELETE FROM orders_2 WHERE id = 20", database=database
    )
    verification = verify(pipeline.settings)
    (result,) = verification.results
    assert verification.equal
    assert result.source_rows == result.target_rows == 2 * 35
    mariadb_server.sql(
        "UPDATE orders SET code = 'c30' WHERE id = 30; DELETE FROM orders WHERE id = 31", database=database
    )
    (result,) = verify(pipeline.settings, mend=True).results
    assert sorted((difference.row["id"], str(difference.kind)) for difference in result.found) == [
        (30, "changed"),
        (30, "changed"),
        (31, "missing"),
        (31, "missing"),
    ]
    pipeline.follow()
    verification = verify(pipeline.settings)
    assert verification.equal
    assert verification.results[0].source_rows == 2 * 35 - 2 + 3 - 1


@pytest.mark.deep(
    guard="tests/unit/test_pipeline_comparison.py::test_rows_sharing_a_key_with_a_rejected_row_are_undecided"
)
def test_repair_leaves_rows_with_a_change_rejected_by_a_step(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    sink = shop(mysql_server, mariadb_server, database, "orders")
    steps = [{"map": {"add": {"total": "cast(substr(code, 2) AS int)"}, "on_error": "skip"}}]
    pipeline = HandDriven(mysql_server, f"{database}.*", sink, tmp_path, steps=steps)
    pipeline.load()
    before = mariadb_server.sql(f"SELECT * FROM {database}.orders WHERE id IN (5, 6) ORDER BY id")
    assert len(before) == 2
    # The step rejects the new values, so the target keeps the earlier rows.
    mysql_server.sql("UPDATE orders SET code = 'none' WHERE id IN (5, 6)", database=database)
    pipeline.follow()
    mariadb_server.sql(f"INSERT INTO {database}.orders VALUES (900, 'C', 1, NULL)")
    verification = verify(pipeline.settings, mend=True)
    (result,) = verification.results
    assert {(difference.row["id"], difference.kind) for difference in result.found} == {
        (5, Kind.UNSETTLED),
        (6, Kind.UNSETTLED),
        (900, Kind.EXTRA),
    }
    assert result.rejected == 2
    assert verification.repaired == 1
    assert mariadb_server.sql(f"SELECT * FROM {database}.orders WHERE id IN (5, 6) ORDER BY id") == before
    assert mariadb_server.sql(f"SELECT * FROM {database}.orders WHERE id = 900") == []


def test_rows_that_no_load_read_may_be_present_or_absent(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    sink = shop(mysql_server, mariadb_server, database, "orders")
    load = {"where": {f"{database}.orders": "id >= 20"}}
    pipeline = HandDriven(mysql_server, f"{database}.*", sink, tmp_path, load=load)
    pipeline.load()
    mysql_server.sql("UPDATE orders SET total = 1 WHERE id IN (3, 30)", database=database)
    pipeline.follow()
    assert mariadb_server.sql(f"SELECT COUNT(*) FROM {database}.orders") == [(21,)]
    assert verify(pipeline.settings).equal
    mariadb_server.sql(
        "DELETE FROM orders WHERE id = 25; UPDATE orders SET total = 2 WHERE id = 3", database=database
    )
    (result,) = verify(pipeline.settings).results
    assert sorted((difference.row["id"], str(difference.kind)) for difference in result.found) == [
        (3, "changed"),
        (25, "missing"),
    ]


def test_table_without_a_reconstructable_state_is_reported_and_the_others_are_compared(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    sink = shop(mysql_server, mariadb_server, database, "emptied", "altered", "kept")
    mysql_server.sql(
        "CREATE TABLE keyless (n INT); INSERT INTO keyless VALUES (1), (1), (2)", database=database
    )
    pipeline = HandDriven(mysql_server, f"{database}.*", sink, tmp_path)
    pipeline.load()
    assert verify(pipeline.settings).equal
    mariadb_server.sql("DELETE FROM keyless WHERE n = 1 LIMIT 1", database=database)
    (result,) = verify(pipeline.settings, [f"{database}.keyless"]).results
    assert [(difference.row, str(difference.kind)) for difference in result.found] == [({"n": 1}, "missing")]
    mysql_server.sql(
        "TRUNCATE TABLE emptied; ALTER TABLE altered ADD COLUMN more INT;"
        " INSERT INTO altered VALUES (99, 'x', 1, NULL, 5); INSERT INTO keyless VALUES (3)",
        database=database,
    )
    results = {
        comparison.table.target.name.table: comparison for comparison in verify(pipeline.settings).results
    }
    assert results["kept"].equal
    assert "emptied or defined anew" in results["emptied"].open
    assert "emptied or defined anew" in results["altered"].open
    assert "no primary key" in results["keyless"].open
    # A table missing from the target does not stop the comparison of others, unless it is the only one.
    mariadb_server.sql(f"DROP TABLE {database}.kept")
    mysql_server.sql("CREATE TABLE later (id INT PRIMARY KEY)", database=database)
    results = {
        comparison.table.target.name.table: comparison for comparison in verify(pipeline.settings).results
    }
    assert "has no table" in results["kept"].open
    assert "emptied or defined anew" in results["later"].open
    with pytest.raises(SchemaChanged, match="has no table"):
        verify(pipeline.settings, [f"{database}.kept"])


@pytest.mark.deep(
    guard="tests/unit/test_pipeline_comparison.py::test_text_of_unrepresentable_values_is_compared_if_a_sink_writes_it"
)
def test_invalid_dates_are_compared_and_repaired_by_their_text(pair: Pair, tmp_path: Path) -> None:
    lenient = "SET SESSION sql_mode = 'ALLOW_INVALID_DATES'; "
    pair.source.sql(
        lenient + "CREATE TABLE odd (id INT PRIMARY KEY, day DATE, note VARCHAR(9));"
        " INSERT INTO odd VALUES (1, '0000-00-00', 'a'), (2, '2026-02-30', 'b'), (3, '2026-02-00', 'c'),"
        " (4, NULL, 'd')",
        database=pair.database,
    )
    for more in (", PRIMARY KEY (day)", ""):
        name = "keyed" if more else "keyless"
        pair.source.sql(
            f"{lenient} CREATE TABLE {name} (day DATE NOT NULL, n INT{more});"
            f" INSERT INTO {name} VALUES ('2026-02-30', 1), ('2026-01-01', 2)",
            database=pair.database,
        )
    pair.pipeline.load()
    assert pair.verify("odd", "keyed", "keyless").equal
    # Exactly the extra rows are deleted, identified by the text of their key or of the whole row.
    for name in ("keyed", "keyless"):
        pair.spoil(f"{lenient} INSERT INTO {name} VALUES ('2026-02-31', 1)")
    # One of two duplicate rows is deleted.
    pair.spoil("INSERT INTO keyless VALUES ('2026-01-01', 2)")
    verification = pair.verify("keyed", "keyless", mend=True)
    assert [len(result.found) for result in verification.results] == [1, 2]
    assert {difference.kind for result in verification.results for difference in result.found} == {Kind.EXTRA}
    assert pair.verify("odd", "keyed", "keyless").equal
    pair.spoil("UPDATE odd SET day = NULL WHERE id = 1")
    pair.spoil(lenient + "UPDATE odd SET day = '2026-02-31' WHERE id = 2")
    pair.spoil(lenient + "UPDATE odd SET day = '0000-00-00' WHERE id = 4")
    verification = pair.verify("odd", mend=True)
    (result,) = verification.results
    assert {(difference.row["id"], difference.columns) for difference in result.found} == {
        (1, ("day",)),
        (2, ("day",)),
        (4, ("day",)),
    }
    assert "day is None, not '0000-00-00'" in "\n".join(lines(result, 10))
    assert verification.repaired == 3
    assert pair.verify("odd").equal
    # The text of an excluded column is not compared either.
    pair.spoil("UPDATE odd SET day = NULL WHERE id = 1")
    assert pair.verify("odd", columns_left_out=["day"]).equal


def test_started_batch_leaves_its_keys_undecided(pair: Pair) -> None:
    pair.pipeline.load()
    pair.source.sql(
        "INSERT INTO accounts (id, owner) VALUES (9001, 'new'), (9002, 'new')", database=pair.database
    )
    pair.pipeline.begin()
    # Simulate a partly written batch in the target: one key of the batch, and one unrelated wrong row.
    pair.spoil("INSERT INTO accounts (id, owner, balance) VALUES (9001, 'new', 0), (9003, 'besides', 0)")
    (result,) = pair.verify("accounts").results
    assert {(difference.row["id"], str(difference.kind)) for difference in result.found} == {
        (9001, "unsettled"),
        (9003, "extra"),
    }


def test_kept_log_reconstructs_a_position(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    with capturing(settings_of(tmp_path / "logs", mysql_server.url())) as capture:
        wait_for_state(capture, State.RUNNING)
        sink = shop(mysql_server, mariadb_server, database, "orders")
        pipeline = HandDriven(mysql_server, f"{database}.*", sink, tmp_path, tmp_path / "logs" / "shop")
        wait_for_position(capture, head_of(mysql_server))
        pipeline.load()
        for number in range(30):
            mysql_server.sql(f"UPDATE orders SET total = -1 WHERE id = {number}", database=database)
        # The captured log may lag behind the server when rows are read; the comparison waits for it.
        assert verify(pipeline.settings).equal
        mariadb_server.sql("UPDATE orders SET total = -1 WHERE id = 7", database=database)
        (result,) = verify(pipeline.settings).results
        assert [(difference.row["id"], str(difference.kind)) for difference in result.found] == [
            (7, "changed")
        ]
        pipeline.follow()
        assert verify(pipeline.settings).equal
