# SPDX-License-Identifier: Apache-2.0
"""A lake writer that is killed at any step and retries its batch stores each change once."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
from deltalake import DeltaTable

from penstock.sinks.iceberg.sink import IcebergSink
from penstock.sinks.iceberg.table import catalog_of
from penstock.sinks.sink import Sink, make_sink, settings_of
from tests.conftest import ROOT
from tests.support.programs.write_lake import batch, write
from tests.support.suite.patience import WAIT_SECONDS_MAX

STEPS_MAX = 40
TABLES = ("orders", "visits")
Row = dict[str, Any]


class Lake:
    """A folder written by one sink, and a process that writes to it and is killed."""

    def __init__(self, kind: str, mode: str | None, folder: Path) -> None:
        settings = {"path": str(folder)} | ({"mode": mode} if mode else {})
        self.mode = mode or "feed"
        self.folder = folder
        self.sink: Sink = make_sink(kind, settings_of(kind)(**settings))
        self._writer = subprocess.Popen(
            [sys.executable, "-m", "tests.support.programs.write_lake", kind, json.dumps(settings)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        self._writer.communicate(timeout=WAIT_SECONDS_MAX)

    def is_killed(self, number: int, step: int) -> bool:
        """Write a batch up to a step; return whether that step exists."""
        assert self._writer.stdin
        assert self._writer.stdout
        self._writer.stdin.write(f"{number} {step}\n")
        self._writer.stdin.flush()
        answer = self._writer.stdout.readline().strip()
        assert answer in ("killed", "done")
        return answer == "killed"

    def rows(self, table: str) -> list[Row]:
        """Return the rows of a table read by the format's own reader."""
        if self.sink.kind == "delta":
            lake_table = DeltaTable(str(self.folder / "shop" / table)).to_pyarrow_table()
        elif isinstance(self.sink, IcebergSink):
            lake_table = catalog_of(self.sink._catalog()).load_table(f"shop.{table}").scan().to_arrow()
        else:
            lake_table = pyarrow.dataset.dataset(self.folder / "shop" / table, format="parquet").to_table()
        return list(lake_table.to_pylist())


@pytest.fixture(
    params=[
        ("delta", "mirror"),
        ("delta", "feed"),
        ("delta", "history"),
        ("iceberg", "mirror"),
        ("iceberg", "feed"),
        ("files", None),
    ],
    ids=lambda variant: "-".join(filter(None, variant)),
)
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lake]:
    kind, mode = request.param
    opened = Lake(kind, mode, tmp_path / "lake")
    yield opened
    opened.close()


@pytest.mark.deep(keep=("delta-mirror", "files"))
def test_writer_killed_at_any_step_leaves_each_change_once(lake: Lake) -> None:
    write(lake.sink, 1)
    number = 2
    for step in range(STEPS_MAX):
        killed = lake.is_killed(number, step)
        write(lake.sink, number)
        for table in TABLES:
            assert sorted(stored_rows(lake, table)) == expected(lake.mode, number), (table, step)
        if not killed:
            break
        number += 1
    assert number > 4, "the batch has several steps"
    assert not killed


@pytest.mark.deep(keep=("delta-mirror",))
@pytest.mark.parametrize(
    "lake", [("delta", "mirror"), ("delta", "feed"), ("delta", "history")], ids="-".join, indirect=True
)
def test_first_batch_killed_at_any_step_creates_each_table_once_with_its_rows(lake: Lake) -> None:
    for step in range(STEPS_MAX):
        killed = lake.is_killed(1, step)
        # Other processes, which have prepared nothing, run the batch again and continue.
        for number in (1, 2):
            assert not lake.is_killed(number, STEPS_MAX)
        for table in TABLES:
            assert sorted(stored_rows(lake, table)) == expected(lake.mode, 2), (table, step)
            assert DeltaTable(str(lake.folder / "shop" / table)).version() == 1, (table, step)
        if not killed:
            break
        shutil.rmtree(lake.folder)
    assert step > 8, "the batch has several steps"
    assert not killed


def stored_rows(lake: Lake, table: str) -> list[tuple[Any, ...]]:
    """Return the compared columns of a table's rows."""
    names = {
        "mirror": ("id", "note"),
        "feed": ("_commit_version", "id", "note", "_change_type"),
        "history": ("id", "_valid_from_version", "note", "_valid_to_version"),
    }[lake.mode]
    return [tuple(row[name] for name in names) for row in lake.rows(table)]


def expected(mode: str, number: int) -> list[tuple[Any, ...]]:
    """Return the expected rows after the batches up to a number."""
    if mode == "mirror":
        return [(number - 1, "old"), (number, "new")]
    if mode == "feed":
        changes = [changes.rows.to_pylist() for at in range(1, number + 1) for changes in batch(at)[0]]
        names = ("_commit_version", "id", "note", "_change_type")
        return sorted(tuple(row[name] for name in names) for rows in changes for row in rows)
    periods: list[tuple[Any, ...]] = []
    for row in range(1, number + 1):
        changed, gone = 10 * (row + 1) + 1, 10 * (row + 2) + 2
        periods.append((row, 10 * row, "new", changed if row < number else None))
        if row < number:
            periods.append((row, changed, "old", gone if row + 1 < number else None))
    return sorted(periods)
