# SPDX-License-Identifier: Apache-2.0
"""A disk that is full at any step of a lake's batch is reported, and the failed attempt leaves no files."""

import errno
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import pyarrow
import pyarrow.parquet as parquet
import pytest

from penstock.engine.task_plan import ROWS
from penstock.engine.task_rows import Row
from penstock.errors import DiskFailed
from penstock.local.shuffle import Shuffle
from penstock.sinks.delta.sink import DeltaSink, Settings
from penstock.sinks.lake.spill_file import SpillFile
from penstock.sinks.lake.table_sink import Mode
from penstock.sinks.sink import BatchMark, Evolution
from tests.support.pipeline.changes_made import changes_of, insert, target_of, update

ORDERS = target_of({"id": "int", "note": "varchar(40)"})
VISITS = target_of({"id": "int", "note": "varchar(40)"}, name="shop.visits")
STEPS_MAX = 60


class Disk:
    """Takes a number of writes to Parquet files, then has no room."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.writes_left = -1
        for name in ("write_table", "close"):
            patch.setattr(parquet.ParquetWriter, name, self._limited(getattr(parquet.ParquetWriter, name)))

    def _limited(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def write_if_room(*arguments: Any, **named: Any) -> Any:
            if self.writes_left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.writes_left -= 1
            return write(*arguments, **named)

        return write_if_room


def write_batch(sink: DeltaSink, number: int) -> None:
    """Write a batch that updates the rows of the batch before it and inserts as many."""
    mark = BatchMark("shop", "g", number)
    writer = sink.open(mark, 0)
    try:
        for target in (ORDERS, VISITS):
            for key in range(0, 60, 20):
                rows = [insert(number, id=number * 60 + key + row, note="a" * 30) for row in range(20)]
                if number > 1:
                    before = (number - 1) * 60 + key
                    rows += [
                        update(number, {"id": before + row, "note": "a"}, {"id": before + row, "note": "b"})
                        for row in range(20)
                    ]
                writer.write(changes_of(target, *rows))
        receipt = writer.finish()
    except BaseException:
        writer.abort()
        raise
    sink.commit(mark, [receipt])


@pytest.mark.parametrize("memory_bytes", [3_000, 1 << 20])
@pytest.mark.parametrize("mode", ["mirror", "history", "feed"])
def test_failed_batch_leaves_no_files(
    mode: str, memory_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = DeltaSink(Settings(path=str(tmp_path), mode=Mode(mode)))
    monkeypatch.setattr(sink, "memory_for", lambda mark: memory_bytes)
    for target in (ORDERS, VISITS):
        sink.prepare(target, Evolution.EVOLVE)
    write_batch(sink, 1)
    disk = Disk(monkeypatch)
    for step in range(STEPS_MAX):
        disk.writes_left = step
        try:
            write_batch(sink, 2)
        except DiskFailed:
            disk.writes_left = -1
            for target in (ORDERS, VISITS):
                folder = Path(sink.location(target))
                committed = {Path(uri).name for uri in deltalake.DeltaTable(str(folder)).file_uris()}
                assert {path.name for path in folder.glob("*.parquet")} == committed, step
        else:
            break
    assert 3 < step < STEPS_MAX - 1


def no_room(**_: Any) -> Any:
    return open("/dev/full", "r+b")


def test_rows_that_cannot_be_spilled_are_a_failure_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", no_room)
    for rows in (1, 100_000):
        spill_file = SpillFile()
        with pytest.raises(DiskFailed, match="folder of temporary files"):
            spill_file.read(spill_file.write(pyarrow.table({"id": range(rows)})))
        spill_file.close()
    shuffle = Shuffle(0)
    with pytest.raises(DiskFailed):
        shuffle.output_of(0).append(Row(0, 0, 0, ROWS, bytes(1 << 20)))
    shuffle.close()


def test_missing_folder_of_temporary_files_is_a_failure_of_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(DiskFailed, match="folder of temporary files"):
        SpillFile().write(pyarrow.table({"id": [1]}))
