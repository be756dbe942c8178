# SPDX-License-Identifier: Apache-2.0
"""Feeds of tables without a key: crashes before and after the commit of a load, and before and after the load
is recorded in the state.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deltalake
import pytest

import penstock.engine.batches as batches_module
from penstock.local.driver import LocalDriver
from penstock.pipeline.state import PipelineState
from tests.support.pipeline.oracle import parquet_rows
from tests.support.pipeline.running import pipeline_of, run_to_end
from tests.support.sinks.kafka_reading import records
from tests.support.suite.fixture_types import FreshDatabase, MissingPart
from tests.support.suite.own_servers import started
from tools.kafka import Kafka
from tools.servers import Server


@pytest.fixture(scope="module")
def broker(missing_part: MissingPart) -> Iterator[Kafka]:
    with started(Kafka(), "Kafka", missing_part) as kafka:
        yield kafka


class Death(BaseException):
    """Simulates the end of the process."""


def dying_after(place: Any, name: str, calls: int, patch: pytest.MonkeyPatch) -> None:
    """Simulate the end of the process after this many calls of a function."""
    does: Callable[..., Any] = getattr(place, name)
    left = calls

    def die(*words: Any, **options: Any) -> Any:
        nonlocal left
        result = does(*words, **options)
        left -= 1
        if left == 0:
            raise Death
        return result

    patch.setattr(place, name, die)


@pytest.mark.deep(keep=("mysql-commit",))
@pytest.mark.parametrize("step", ["begin", "tasks", "commit"])
@pytest.mark.parametrize("kind", ["mysql", "files", "delta", "kafka"])
def test_load_of_a_keyless_table_is_in_a_feed_once_after_a_crash(
    mysql_server: Server,
    mariadb_server: Server,
    broker: Kafka,
    fresh_database: FreshDatabase,
    tmp_path: Path,
    kind: str,
    step: str,
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(
        "CREATE TABLE visits (page INT); INSERT INTO visits VALUES (1), (1), (2)", database=database
    )
    folder = str(tmp_path / "feed")
    sinks = {
        "mysql": {"mysql": {"url": mariadb_server.url("root"), "mode": "feed"}},
        "files": {"files": {"path": folder}},
        "delta": {"delta": {"path": folder, "mode": "feed"}},
        "kafka": {"kafka": {"servers": broker.servers, "format": "json"}},
    }
    settings = pipeline_of(mysql_server, database, sinks[kind], tmp_path)

    def pages() -> list[int]:
        if kind == "mysql":
            rows = mariadb_server.sql(f"SELECT page FROM {database}.visits ORDER BY page")
            return [page for (page,) in rows]
        if kind == "files":
            return sorted(row["page"] for row in parquet_rows(f"{folder}/{database}/visits/[!_]*.parquet"))
        if kind == "kafka":
            return sorted(record.message["after"]["page"] for record in records(broker, f"{database}.visits"))
        table = deltalake.DeltaTable(f"{folder}/{database}/visits").to_pyarrow_table()
        return sorted(table["page"].to_pylist())

    steps: dict[str, tuple[Any, str]] = {
        "begin": (PipelineState, "begin"),
        "tasks": (batches_module, "run_job"),
        "commit": (type(settings.make_sink()), "commit"),
    }
    with pytest.MonkeyPatch.context() as patch:
        dying_after(*steps[step], 1, patch)
        with pytest.raises(Death):
            run_to_end(LocalDriver(2), settings)
    # A change after the load's position is in the feed once, and not in the load.
    mysql_server.sql("INSERT INTO visits VALUES (3)", database=database)
    run_to_end(LocalDriver(2), settings)
    mysql_server.sql("INSERT INTO visits VALUES (4)", database=database)
    run_to_end(LocalDriver(2), settings)
    assert pages() == [1, 1, 2, 3, 4]
    if kind == "mysql":
        mariadb_server.sql(f"DROP DATABASE {database}")
