# SPDX-License-Identifier: Apache-2.0
"""Steps in whole pipelines, in one process and on Spark, between real servers."""

import hashlib
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.errors import StepFailed
from penstock.local.driver import LocalDriver
from penstock.pipeline.dead_letter import dead_letters, replay, rows_of_letter
from penstock.pipeline.verify.differences import Kind
from penstock.pipeline.verify.verify import verify
from tests.support.pipeline.engines import engine  # noqa: F401
from tests.support.pipeline.running import run_to_end
from tests.support.spark.session import spark  # noqa: F401
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server


def stripped(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """A user function that fails on one value."""
    if "poison" in batch.column("note").to_pylist():
        raise ValueError("this note cannot be read")
    return batch


def rows(server: Server, statement: str) -> list[tuple[Any, ...]]:
    """Return the rows of a statement according to the server's own client."""
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall())


class Fleet:
    """Four shards of a table in one database, and the pipeline that merges them into a table of another
    server.
    """

    def __init__(self, source: Server, target: Server, database: str, folder: Path) -> None:
        self.source, self.target, self.database, self.folder = source, target, database, folder
        for shard in range(4):
            source.sql(
                f"CREATE TABLE {database}.orders_{shard} (id INT PRIMARY KEY, email VARCHAR(50) UNIQUE,"
                " status VARCHAR(10), price DECIMAL(8,2), quantity INT, note VARCHAR(20))"
            )
            values = ", ".join(
                f"({number}, 'u{number}@{shard}', IF({number} % 5, 'paid', 'draft'), 1.50, {number}, '')"
                for number in range(1, 41)
            )
            source.sql(f"INSERT INTO {database}.orders_{shard} VALUES {values}")

    def pipeline(self, **more: Any) -> penstock.Pipeline:
        steps = [
            {"filter": "status <> 'draft'"},
            {"python": {"function": stripped, "on_error": "dead_letter"}},
            {"mask": {"columns": {"email": "hash"}}},
            {
                "map": {
                    "add": {"total": "price * quantity"},
                    "cast": {"total": "decimal(12,2)"},
                    "drop": ["note", "price", "quantity"],
                    "rename": {"id": "order_id"},
                }
            },
            {
                "route": {
                    "tables": f"{self.database}.orders_*",
                    "to": f"{self.database}.orders",
                    "shard_column": "shard",
                    "shard_value": "{1}",
                    "shard_type": "int",
                }
            },
        ]
        return penstock.Pipeline(
            source={"url": self.source.url("root"), "name": "fleet"},
            tables=f"{self.database}.orders_*",
            steps=steps,
            sink={"mysql": {"url": self.target.url("root")}},
            name="fleet",
            folder=self.folder,
            batch={"interval": 0},
            **more,
        )

    def expected(self, left_out: set[tuple[int, int]] = frozenset()) -> set[tuple[Any, ...]]:  # type: ignore[assignment]
        masked_rows = set()
        for shard in range(4):
            statement = (
                f"SELECT id, email, status, price * quantity FROM {self.database}.orders_{shard}"
                " WHERE status <> 'draft'"
            )
            for key, email, status, total in rows(self.source, statement):
                if (shard, key) not in left_out:
                    masked_rows.add((key, hashlib.sha256(email.encode()).hexdigest(), status, total, shard))
        return masked_rows

    def merged(self) -> set[tuple[Any, ...]]:
        statement = f"SELECT order_id, email, status, total, shard FROM {self.database}.orders"
        actual_rows = rows(self.target, statement)
        assert len(actual_rows) == len(set(actual_rows))
        return set(actual_rows)


@pytest.fixture
def fleet(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> Fleet:
    return Fleet(mysql_server, mariadb_server, fresh_database(mysql_server), tmp_path)


@pytest.mark.deep(keep=("local",))
def test_merged_filtered_masked_table_equals_its_shards(
    engine: "SparkSession | LocalDriver",  # noqa: F811
    fleet: Fleet,
) -> None:
    settings = fleet.pipeline().settings
    run_to_end(engine, settings)
    assert fleet.merged() == fleet.expected()
    assert len(fleet.merged()) == 4 * 32
    for statement in (
        "UPDATE {t}0 SET status = IF(status = 'draft', 'paid', 'draft') WHERE id <= 10",
        "UPDATE {t}1 SET id = id + 100 WHERE id % 3 = 0",
        "UPDATE {t}2 SET email = CONCAT(email, 'x'), quantity = quantity + 1",
        "DELETE FROM {t}3 WHERE id < 8",
        "INSERT INTO {t}3 VALUES (1, 'new', 'paid', 2.00, 3, 'fine')",
        "ALTER TABLE {t}0 ADD COLUMN extra INT",
        "INSERT INTO {t}0 VALUES (500, 'e', 'paid', 1.00, 1, '', 7)",
    ):
        fleet.source.sql(statement.format(t=f"{fleet.database}.orders_"))
    run_to_end(engine, settings)
    assert fleet.merged() == fleet.expected()


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_daemon.py::test_rows_that_a_step_rejects_are_stored_or_end_the_run"
)
def test_poison_row_is_rejected_and_delivered_once_it_is_fixed(
    spark: SparkSession,  # noqa: F811
    fleet: Fleet,
) -> None:
    fleet.source.sql(f"UPDATE {fleet.database}.orders_1 SET note = 'poison' WHERE id = 7")
    pipeline = fleet.pipeline()
    pipeline.run(spark, until="caught-up")
    assert fleet.merged() == fleet.expected({(1, 7)})
    fleet.source.sql(
        f"INSERT INTO {fleet.database}.orders_2 VALUES (90, 'a', 'paid', 1.00, 1, ''),"
        " (91, 'b', 'paid', 1.00, 1, 'poison'), (92, 'c', 'paid', 1.00, 1, '')"
    )
    pipeline.run(spark, until="caught-up")
    assert fleet.merged() == fleet.expected({(1, 7), (2, 91)})
    loaded, followed = sorted(dead_letters(pipeline.settings), key=lambda batch: batch.noted_us)
    assert [(str(status.table), status.rows, status.error) for status in (loaded, followed)] == [
        (f"{fleet.database}.orders_1", 1, "StepFailed"),
        (f"{fleet.database}.orders_2", 1, "StepFailed"),
    ]
    # After the rows are fixed, the rejected rows are replayed: their keys are read again.
    for shard in (1, 2):
        fleet.source.sql(f"UPDATE {fleet.database}.orders_{shard} SET note = 'fine' WHERE note = 'poison'")
    assert sum(done.read_again for done in replay(pipeline.settings)) == 2
    pipeline.run(spark, until="caught-up")
    assert fleet.merged() == fleet.expected()
    # The updates that fixed the rows have the poison value in the before image.
    again = [
        rows_of_letter(pipeline.settings, dead_letter.name).rows
        for dead_letter in dead_letters(pipeline.settings)
    ]
    assert [batch.column("note").to_pylist() for batch in again] == [["poison", "fine"]] * 2


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_steps.py::test_merged_filtered_masked_table_equals_its_shards"
)
def test_rows_that_name_their_table_arrive_in_tables_created_for_them(
    spark: SparkSession,  # noqa: F811
    fleet: Fleet,
) -> None:
    database, source, target = fleet.database, fleet.source, fleet.target
    pipeline = penstock.Pipeline(
        source={"url": source.url("root"), "name": "fleet"},
        tables=f"{database}.orders_0",
        steps=[{"route": {"to": "{database}.of_{status}"}}],
        sink={"mysql": {"url": target.url("root")}},
        name="parted",
        folder=fleet.folder,
        batch={"interval": 0},
    )
    pipeline.run(spark, until="caught-up")
    source.sql(f"UPDATE {database}.orders_0 SET status = 'draft' WHERE id = 1")
    source.sql(f"ALTER TABLE {database}.orders_0 ADD COLUMN extra INT DEFAULT 4")
    source.sql(
        f"INSERT INTO {database}.orders_0 VALUES (70, 'n', 'paid', 1, 1, '', 5),"
        " (71, 'm', 'sent', 1, 1, '', 6)"
    )
    pipeline.run(spark, until="caught-up")
    names = [name for (name,) in rows(target, f"SHOW TABLES IN {database}")]
    assert sorted(names) == ["of_draft", "of_paid", "of_sent"]
    for status in ("draft", "paid", "sent"):
        wanted = f"SELECT * FROM {database}.orders_0 WHERE status = '{status}' ORDER BY id"
        assert rows(target, f"SELECT * FROM {database}.of_{status} ORDER BY id") == rows(source, wanted)
    # A target table to which rows are no longer routed is compared as well.
    source.sql(f"DELETE FROM {database}.orders_0 WHERE status = 'draft'")
    pipeline.run(spark, until="caught-up")
    target.sql(f"INSERT INTO {database}.of_draft SELECT * FROM {database}.of_paid LIMIT 1")
    results = {
        comparison.table.target.name.table: comparison for comparison in verify(pipeline.settings).results
    }
    assert sorted(results) == ["of_draft", "of_paid", "of_sent"]
    assert [difference.kind for difference in results["of_draft"].found] == [Kind.EXTRA]
    assert results["of_paid"].equal
    assert results["of_sent"].equal


def test_poison_row_stops_the_pipeline_by_default(
    spark: SparkSession,  # noqa: F811
    fleet: Fleet,
) -> None:
    pipeline = penstock.Pipeline(
        source={"url": fleet.source.url("root"), "name": "fleet"},
        tables=f"{fleet.database}.orders_0",
        steps=[stripped],
        sink={"mysql": {"url": fleet.target.url("root")}},
        name="strict",
        folder=fleet.folder,
        load="none",
        batch={"interval": 0},
    )
    pipeline.run(spark, until="caught-up")
    fleet.source.sql(f"INSERT INTO {fleet.database}.orders_0 VALUES (91, 'b', 'paid', 1.00, 1, 'poison')")
    with pytest.raises(StepFailed) as stopped:
        pipeline.run(spark, until="caught-up")
    assert "this note cannot be read" in stopped.value.message
    assert stopped.value.position is not None
