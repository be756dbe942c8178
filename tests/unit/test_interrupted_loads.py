# SPDX-License-Identifier: Apache-2.0
"""Uses commit versions to detect whether a feed already contains a given load of a table without a key."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from penstock.engine import tables as tables_module
from penstock.engine.interrupted_loads import committed_floors
from penstock.engine.tables import PipelineTables
from penstock.model import Position, TableName
from penstock.pipeline.record import BatchRecord, ChunkWork
from penstock.pipeline.settings import pipeline_of_values
from penstock.pipeline.state import PipelineState
from penstock.sinks.sink import BatchMark, Evolution
from penstock.source.offsets import Offset
from tests.support.pipeline.changes_made import changes_of, insert, target_of

VISITS = target_of({"page": "int"}, key=(), name="shop.visits")
PLANNED_TS = 470_639_217_768_660_992
CLUSTER_BEGIN = Position(0, "tidb-binlog.000003", 4096)
SERVER_BEGIN = Position(0, "mysql-bin.000003", 4096)

Settled = Callable[[Position, dict[str, Any], int], dict[str, int] | None]


@pytest.fixture
def settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settled:
    """Return the floors of a load whose batch is already in the feed, for a target with one row of a given
    commit version.
    """
    monkeypatch.setattr(tables_module, "targets_of", lambda *_: [VISITS])
    monkeypatch.setattr(tables_module, "tables_on_servers", lambda _: {})
    settings = pipeline_of_values(
        {
            "name": "visits",
            "source": {"url": "mysql://root@127.0.0.1", "name": "here", "tables": ["shop.visits"]},
            "sink": {"delta": {"path": str(tmp_path / "lake"), "mode": "feed"}},
            "state": f"sqlite:{tmp_path / 'state.db'}",
        }
    )

    def settle(begin: Position, chunk: dict[str, Any], version: int) -> dict[str, int] | None:
        sink, steps = settings.make_sink(), settings.make_steps()
        mark = BatchMark("visits", "1", 1)
        sink.prepare(VISITS, Evolution.EVOLVE)
        writer = sink.open(mark, 0)
        changes = changes_of(VISITS, insert(1, page=1))
        index = changes.rows.schema.get_field_index("_commit_version")
        versions = pyarrow.array([version], pyarrow.int64())
        rows = changes.rows.set_column(index, changes.rows.schema.field(index), versions)
        writer.write(replace(changes, rows=rows))
        sink.commit(mark, [writer.finish()])
        work = ChunkWork("here", TableName("shop", "visits"), chunk, exact=True)
        record = BatchRecord(1, {}, {}, (), (work,), 1)
        with closing(PipelineState.open(settings.state, settings.name)) as state:
            state.take()
            tables = PipelineTables(settings, state, sink, steps, lambda *_, **__: None)
            tables.open()
            tables.targets[VISITS.name] = VISITS
            return committed_floors(sink, tables, steps, mark, record, Offset(begin))

    return settle


def test_rows_read_from_a_server_set_the_floor(settled: Settled) -> None:
    version = SERVER_BEGIN.commit_version - 1
    assert settled(SERVER_BEGIN, {}, version) == {"here/shop.visits": version + 1}


def test_older_change_does_not_set_the_floor_of_an_empty_load(settled: Settled) -> None:
    assert settled(SERVER_BEGIN, {}, SERVER_BEGIN.commit_version - 2) is None


def test_rows_read_from_a_tidb_cluster_set_the_floor_by_its_timestamps(settled: Settled) -> None:
    floors = settled(CLUSTER_BEGIN, {"commit_ts": PLANNED_TS}, PLANNED_TS)
    assert floors == {"here/shop.visits": PLANNED_TS + 1}


def test_older_change_of_a_tidb_cluster_does_not_set_the_floor_of_an_empty_load(settled: Settled) -> None:
    assert settled(CLUSTER_BEGIN, {"commit_ts": PLANNED_TS}, PLANNED_TS - 1) is None
