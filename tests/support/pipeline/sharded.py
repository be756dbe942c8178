# SPDX-License-Identifier: Apache-2.0
"""A pipeline with shards over a growing binlog file of many tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import yaml

from penstock.local.shard_runs import ShardRuns
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.shards import Shard
from tests.support.binlog.events import assemble, events
from tests.support.binlog.forged_log import NAME, forged_log, insert
from tests.support.pipeline.local_runs import run_here

TABLES = tuple(f"shop.t{number}" for number in range(8))

_HEAD = list(events(forged_log(1)))[:2]


class GrowingLog:
    """A binlog file with inserts into TABLES. Row `n` goes to the table `n % 8`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._events = list(_HEAD)
        self.rows = 0
        folder.mkdir(parents=True, exist_ok=True)

    def grow(self, rows: int) -> None:
        """Add rows."""
        for number in range(self.rows, self.rows + rows):
            self._events += insert(number + 1, TABLES[number % len(TABLES)], number, b"note")
        self.rows += rows
        self._path.write_bytes(assemble(self._events))


class ShardsInProcess(ShardRuns):
    """Runs the shards one after another in this process, each to the end of the log or to the barrier."""

    def __init__(self, settings: PipelineSettings) -> None:
        super().__init__(settings, lambda shard, to_barrier=False: [], until_caught_up=True)

    def _run_shards(
        self, shards: Sequence[Shard], *, until_caught_up: bool, to_barrier: bool = False
    ) -> None:
        for shard in shards:
            run_here(self._settings.of_shard(shard), to_barrier=to_barrier)


def sharded_values(folder: Path, shards: int, **more: Any) -> dict[str, Any]:
    """Return the values of a pipeline that writes the log in `folder/log` to a feed in `folder/feed`."""
    return {
        "name": "shop",
        "source": {"path": str(folder / "log" / NAME), "name": "shop"},
        "load": "none",
        "sink": {"files": {"path": str(folder / "feed")}},
        "batch": {"interval": 0},
        "shards": shards,
        **more,
    }


def write_sharded(folder: Path, shards: int, **more: Any) -> Path:
    """Write the pipeline file that `sharded_values` describes."""
    file = folder / "shop.yaml"
    file.write_text(yaml.safe_dump(sharded_values(folder, shards, **more)))
    return file


def rows_in_feed(folder: Path) -> Sequence[tuple[str, int]]:
    """Return the table and the id of every row of the feed, sorted: a duplicate row occurs twice."""
    return sorted(
        (f"shop.{file.parent.name}", number)
        for file in (folder / "feed" / "shop").glob("*/[!_]*.parquet")
        for number in parquet.read_table(file)["id"].to_pylist()
    )


def rows_of_log(rows: int) -> Sequence[tuple[str, int]]:
    """Return the table and id of every row in a log with this many rows, sorted."""
    return sorted((TABLES[number % len(TABLES)], number) for number in range(rows))
