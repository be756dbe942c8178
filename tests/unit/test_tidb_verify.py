# SPDX-License-Identifier: Apache-2.0
"""Compare a target with a TiDB cluster: which part of the merged log must be read to match the rows."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.changes import Target
from penstock.errors import OptionInvalid, ServerBehind
from penstock.logstore.disk import LocalDisk
from penstock.logstore.merge_position import MergePosition
from penstock.model import Column, Position, ServerAddress, TableName, TablePatterns
from penstock.pipeline.load.chunks import Chunk
from penstock.pipeline.load.watermark import Watermark
from penstock.pipeline.settings import PipelineSource
from penstock.pipeline.state import Checkpoint, PipelineState, TableLoad, table_key
from penstock.pipeline.verify import comparison, log_reader, source_rows
from penstock.pipeline.verify.log_reader import LogReader
from penstock.pipeline.verify.repair import repair
from penstock.pipeline.verify.shares import ComparedTable
from penstock.pipeline.verify.source_rows import SourceChunk, SourceTable
from penstock.source.source import SourceOptions
from tests.support.tidb.drainer_capture import (
    RunningDrainer,
    last_commit_ts,
    running_drainer,
    sample_jobs,
    sample_payloads,
)
from tests.support.tidb.drainer_pumps import StandInPump
from tools.tidb.cluster import FakeCluster

PAYLOADS = sample_payloads()
END = last_commit_ts(PAYLOADS)
# The table of `tests/samples/tidb/source.sql` in which one row is inserted and updated.
TABLE = Target(
    TableName("shop", "cpk"),
    (
        Column("a", "varchar(10)", "utf8mb4", False),
        Column("b", "int", None, False),
        Column("c", "int", None),
    ),
    ("a", "b"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a drainer that merged everything, and advanced beyond the last transaction."""
    folder = tmp_path_factory.mktemp("merged") / "log"
    with FakeCluster() as cluster, StandInPump(cluster, "only") as pump:
        cluster.store_jobs(sample_jobs())
        pump.release(*PAYLOADS)
        pump.release_fake(END + 1000)
        pump.register()
        with running_drainer(cluster, folder) as drainer:
            drainer.wait_for_ts(cluster, END)
            drainer.wait_until(lambda: _has_reached(drainer, END + 1000))
    return folder


def _has_reached(drainer: RunningDrainer, commit_ts: int) -> bool:
    return (drainer.capture.status()["commit_ts"] or 0) >= commit_ts


@pytest.fixture
def source(folder: Path) -> PipelineSource:
    options = SourceOptions(paths=(str(folder),), instance="shop")
    return PipelineSource("shop", options, TablePatterns(["shop.*"]), server=ServerAddress())


@pytest.fixture(autouse=True)
def _present(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the cluster's time to a timestamp that the log has reached."""
    _set_present(monkeypatch, END + 500)


def _set_present(monkeypatch: pytest.MonkeyPatch, commit_ts: int) -> None:
    position = Position(0, "tidb-binlog.000000", 0)
    watermark = Watermark(position, 0, 0, exact=True, commit_ts=commit_ts)
    monkeypatch.setattr(log_reader, "take_watermark", lambda address, *, epoch: watermark)


def _offset(position: Position) -> dict[str, Any]:
    return {"epoch": position.epoch, "file": position.file, "offset": position.offset, "server_key": ""}


@pytest.fixture
def first(folder: Path) -> dict[str, Any]:
    """The offset of the log's first transaction."""
    return _offset(Position(0, "tidb-binlog.000001", 4))


@pytest.fixture
def reader(source: PipelineSource, first: dict[str, Any]) -> Iterator[LogReader]:
    reader = LogReader(source, first, {TABLE.name: TABLE})
    yield reader
    reader.close()


def test_changes_are_read_up_to_the_timestamp_of_the_rows(reader: LogReader) -> None:
    kinds = [row["_change_type"] for changes in reader.read() for row in changes.rows.to_pylist()]
    assert kinds == ["insert", "update_preimage", "update_postimage"]


def test_log_that_ends_before_the_timestamp_of_the_rows_is_waited_for(
    reader: LogReader, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_present(monkeypatch, END + 2000)
    merged = MergePosition.load(LocalDisk(), folder)
    assert merged is not None

    def advance(seconds: float) -> None:
        replace(merged, commit_ts=END + 2000).write(LocalDisk(), folder)

    monkeypatch.setattr(log_reader.time, "sleep", advance)
    try:
        assert reader.head() == merged.log_end
    finally:
        merged.write(LocalDisk(), folder)


def test_log_that_does_not_reach_the_timestamp_of_the_rows_is_an_error(
    reader: LogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_present(monkeypatch, END + 2000)
    monkeypatch.setattr(log_reader, "_KEPT_LOG_SECONDS_MAX", 0.0)
    with pytest.raises(ServerBehind, match="the log of shop ends before"):
        reader.head()


def test_skipped_part_of_the_log_is_not_read(reader: LogReader) -> None:
    reader.skip()
    assert list(reader.read()) == []


def test_table_is_compared_once_the_stream_has_come_to_its_load(
    source: PipelineSource, first: dict[str, Any], reader: LogReader
) -> None:
    table = cast(
        ComparedTable,
        ComparedTable(TABLE, (SourceTable(source, TABLE),), (), cast(Any, None), ("a", "b", "c")),
    )
    loads = {table_key("shop", TABLE.name): TableLoad(1, 1, floor=END)}
    at_head = _offset(reader.head())
    for offset, why in ((at_head, ""), (first, "shop.cpk was loaded")):
        checkpoint = Checkpoint("generation", offsets={"shop": offset}, loads=loads)
        logs = comparison._Logs([table], checkpoint.stands)
        logs.read()
        assert logs.why_ahead(table, checkpoint).startswith(why)
        assert bool(logs.why_ahead(table, checkpoint)) == bool(why)
        logs.close()


def test_rows_are_read_as_they_are_now(source: PipelineSource, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[Chunk, Watermark | None]] = []

    def note(address: ServerAddress, table: Target, chunk: Chunk, **options: Any) -> Iterator[Any]:
        read.append((chunk, options["watermark"]))
        return iter(())

    monkeypatch.setattr(source_rows, "read_chunk", note)
    watermark = log_reader.take_watermark(ServerAddress(), epoch=0)
    planned = Chunk(TABLE.name, commit_ts=END)
    on_cluster = SourceChunk(SourceTable(source, TABLE), planned, watermark)
    on_server = replace(on_cluster, watermark=replace(watermark, commit_ts=None))
    for source_chunk in (on_cluster, on_server):
        assert list(source_chunk.rows(loaded=True)) == []
    assert read == [(Chunk(TABLE.name), None), (planned, on_server.watermark)]


def test_stopped_pipeline_of_a_cluster_is_not_repaired(first: dict[str, Any]) -> None:
    class _State:
        name = "orders"

        def checkpoint(self) -> Checkpoint:
            return Checkpoint("generation", offsets={"shop": first})

    with pytest.raises(OptionInvalid, match="only a running pipeline can repair"):
        repair([], cast(PipelineState, _State()))
