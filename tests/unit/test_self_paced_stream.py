# SPDX-License-Identifier: Apache-2.0
"""Streams on Spark 4.0 and 4.1, called in the order in which those versions call a reader."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import penstock
from penstock.errors import OptionInvalid
from penstock.model import TablePatterns
from penstock.source.read_settings import ENVELOPE, ReadSettings
from penstock.source.source import SourceOptions
from penstock.spark.partition import EmptyPartition, RangePartition
from penstock.spark.self_paced import SelfPacedStreamReader

SAMPLE = Path(penstock.__file__).with_name("sample") / "mysql-bin.000001"


def reader_of(folder: Path, bytes_max: int | None = None) -> SelfPacedStreamReader:
    """Return a reader as a new query or a restarted one creates it."""
    settings = ReadSettings(SourceOptions.parse(folder), TablePatterns(), ENVELOPE, bytes_max=bytes_max)
    return SelfPacedStreamReader(settings, None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the first file of a log."""
    shutil.copyfile(SAMPLE, tmp_path / "mysql-bin.000001")
    return tmp_path


def place(offset: dict[str, Any]) -> tuple[str, int]:
    return offset["file"], offset["offset"]


def test_new_query_takes_all_there_is_and_then_waits_for_more(folder: Path) -> None:
    reader = reader_of(folder)
    # Spark 4.0 and 4.1 request the end before the start.
    end = reader.latestOffset()
    assert place(end) == ("mysql-bin.000001", SAMPLE.stat().st_size)
    (planned,) = reader.partitions(reader.initialOffset(), end)
    assert isinstance(planned, RangePartition)
    assert reader.latestOffset() == end
    assert sum(batch.num_rows for batch in reader.read(planned)) > 0


def test_limited_batches_continue_each_other_and_warn_once(folder: Path) -> None:
    reader, ends = reader_of(folder, bytes_max=65_536), []
    start = reader.initialOffset()
    with capture_logs() as logs:
        while (end := reader.latestOffset()) != start:
            reader.partitions(start, end)
            ends.append(place(end)[1])
            start = end
    assert len(ends) > 3
    assert ends == sorted(ends)
    assert ends[-1] == SAMPLE.stat().st_size
    assert [entry["batch_end"] for entry in logs] == [f"mysql-bin.000001:{ends[0]}"]


def test_restarted_query_continues_at_the_end_of_its_checkpoint(folder: Path) -> None:
    first = reader_of(folder, bytes_max=65_536)
    committed = first.latestOffset()
    first.partitions(first.initialOffset(), committed)
    restarted = pickle.loads(pickle.dumps(reader_of(folder, bytes_max=65_536)))
    # Spark passes the checkpoint's last offset as an empty batch.
    (empty,) = restarted.partitions(committed, committed)
    assert isinstance(empty, EmptyPartition)
    assert place(restarted.latestOffset()) > place(committed)
    assert restarted.latestOffset() == first.latestOffset()


def test_end_that_was_asked_for_before_the_checkpoint_was_read_is_refused(folder: Path) -> None:
    before = reader_of(folder, bytes_max=131_072)
    committed = before.latestOffset()
    # This end is counted from the start of the log instead of the checkpoint, so the stream would go back.
    restarted = reader_of(folder, bytes_max=65_536)
    end = restarted.latestOffset()
    restarted.partitions(committed, committed)
    with pytest.raises(OptionInvalid, match="before it read where the checkpoint ends"):
        restarted.partitions(committed, end)
