# SPDX-License-Identifier: Apache-2.0
"""Delta tables that are prepared, and created by their first commit."""

import errno
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltalake
import pyarrow
import pytest

from penstock.errors import DiskFailed, OptionInvalid, VersionConflict
from penstock.sinks.delta import first_entry, unwritten_table
from penstock.sinks.delta.sink import DeltaSink, Settings
from penstock.sinks.delta.table import create_delta
from penstock.sinks.delta.unwritten_table import (
    UnwrittenDelta,
    new_unwritten,
    open_unwritten,
    save_tables,
)
from penstock.sinks.lake import syncing
from penstock.sinks.sink import BatchMark, Evolution
from tests.support.pipeline.changes_made import changes_of, insert, target_of

ORDERS = target_of({"id": "int", "note": "varchar(20)"})
VISITS = target_of({"id": "int", "note": "varchar(20)"}, name="shop.visits")


def sink_at(path: Path, **settings: object) -> DeltaSink:
    sink = DeltaSink(Settings(path=str(path), **settings))
    for target in (ORDERS, VISITS):
        sink.prepare(target, Evolution.EVOLVE)
    return sink


def write(sink: DeltaSink, number: int) -> None:
    mark = BatchMark("shop", "g", number)
    writer = sink.open(mark, 0)
    writer.write(changes_of(ORDERS, insert(number, id=number, note="new")))
    sink.commit(mark, [writer.finish()])


def version(path: Path, table: str) -> int | None:
    folder = str(path / "shop" / table)
    return deltalake.DeltaTable(folder).version() if deltalake.DeltaTable.is_deltatable(folder) else None


def test_first_batch_creates_its_table_in_one_commit(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    assert version(tmp_path, "orders") is None
    write(sink, 1)
    assert version(tmp_path, "orders") == 0
    assert deltalake.DeltaTable(tmp_path / "shop/orders").transaction_version("penstock/shop/g") == 1
    assert not list(tmp_path.glob("shop/orders/.penstock*"))


def test_one_commit_creates_the_same_table_as_two(tmp_path: Path) -> None:
    sink = sink_at(tmp_path / "one")
    sink.close()
    one = deltalake.DeltaTable(tmp_path / "one/shop/orders")
    create_delta(str(tmp_path / "two"), {}, "shop.orders", sink.schema_of(ORDERS), {})
    two = deltalake.DeltaTable(tmp_path / "two")
    assert one.schema() == two.schema()
    assert one.metadata().configuration == two.metadata().configuration
    assert one.metadata().name == two.metadata().name
    assert one.protocol() == two.protocol()


def test_table_without_rows_is_created_once_no_batch_creates_tables(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    write(sink, 1)
    sink.keep_alive()
    assert version(tmp_path, "visits") is None
    sink.keep_alive()
    assert version(tmp_path, "visits") == 0


def test_table_without_rows_is_created_by_the_next_run_after_a_kill(tmp_path: Path) -> None:
    sink_at(tmp_path)
    next_run = DeltaSink(Settings(path=str(tmp_path)))
    assert next_run.columns_missing([ORDERS, VISITS]) == {}
    next_run.close()
    assert [version(tmp_path, table) for table in ("orders", "visits")] == [0, 0]


def test_sink_that_prepares_nothing_creates_nothing(tmp_path: Path) -> None:
    sink_at(tmp_path)
    reader = DeltaSink(Settings(path=str(tmp_path)))
    assert reader.plan(ORDERS, Evolution.EVOLVE) == []
    assert list(reader.read(ORDERS)) == []
    reader.close()
    assert version(tmp_path, "orders") is None


@pytest.mark.parametrize("written", [False, True])
def test_table_dropped_by_hand_is_not_created_again(tmp_path: Path, written: bool) -> None:
    sink = sink_at(tmp_path)
    if written:
        write(sink, 1)
    shutil.rmtree(tmp_path / "shop/orders")
    with pytest.raises(OptionInvalid, match="is gone"):
        write(sink, 2)


def test_dropped_log_of_a_written_table_is_noticed_after_a_kill_before_the_file_was_removed(
    tmp_path: Path,
) -> None:
    schema = pyarrow.schema([pyarrow.field("id", pyarrow.int64())])
    table = new_unwritten(str(tmp_path), "t", schema)
    save_tables([table])
    table.commit([], [], {})
    save_tables([table])
    assert open_unwritten(str(tmp_path)) is None
    shutil.rmtree(tmp_path / "_delta_log")
    assert open_unwritten(str(tmp_path)) is None


def test_commit_that_did_not_end_leaves_the_table_unwritten(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    log = tmp_path / "shop/orders/_delta_log"
    log.mkdir()
    # `deltalake` writes a commit under another name first.
    (log / "00000000000000000000.json#1").write_text("{")
    write(sink, 1)
    assert version(tmp_path, "orders") == 0


def test_table_that_somebody_else_created_is_a_conflict(tmp_path: Path) -> None:
    schema = pyarrow.schema([pyarrow.field("id", pyarrow.int64())])
    table = new_unwritten(str(tmp_path), "t", schema)
    save_tables([table])
    create_delta(str(tmp_path), {}, "t", schema, {})
    with pytest.raises(VersionConflict):
        table.commit([], [], {"penstock/shop/g": 1})
    assert deltalake.DeltaTable(tmp_path).transaction_version("penstock/shop/g") is None


def test_only_one_of_several_writers_creates_a_table(tmp_path: Path) -> None:
    schema = pyarrow.schema([pyarrow.field("id", pyarrow.int64())])
    numbers = {"penstock/shop/g": 1}
    for attempt in range(10):
        folder = str(tmp_path / str(attempt))
        save_tables([new_unwritten(folder, "t", schema)])
        tables = [open_unwritten(folder) for _ in range(3)]
        together, outcomes = threading.Barrier(len(tables)), []

        def create(table: UnwrittenDelta | None, together: threading.Barrier, outcomes: list[str]) -> None:
            assert table is not None
            together.wait()
            try:
                table.commit([], [], numbers)
                outcomes.append("created")
            except VersionConflict:
                outcomes.append("conflict")

        threads = [threading.Thread(target=create, args=(table, together, outcomes)) for table in tables]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["conflict", "conflict", "created"]
        assert deltalake.DeltaTable(folder).version() == 0


def test_columns_may_change_before_the_first_commit(tmp_path: Path) -> None:
    sink = sink_at(tmp_path)
    wider = target_of({"id": "bigint", "note": "varchar(20)", "at": "datetime(6)"})
    sink.prepare(wider, Evolution.EVOLVE)
    sink.close()
    expected = DeltaSink(Settings(path=str(tmp_path))).schema_of(wider)
    stored = pyarrow.schema(deltalake.DeltaTable(tmp_path / "shop/orders").schema().to_arrow())
    assert [(field.name, field.type) for field in stored] == [(field.name, field.type) for field in expected]


@pytest.mark.parametrize("kept", [0, 20])
def test_file_torn_by_a_power_loss_is_no_table_until_it_is_prepared_again(tmp_path: Path, kept: int) -> None:
    sink = sink_at(tmp_path)
    file = tmp_path / "shop/orders/.penstock-unwritten"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(OptionInvalid, match="is gone"):
        write(sink, 1)
    sink.prepare(ORDERS, Evolution.EVOLVE)
    write(sink, 1)
    assert version(tmp_path, "orders") == 0


@pytest.mark.parametrize("keep", [lambda content: b"", lambda content: bytes(len(content)), lambda c: c[:-9]])
def test_first_entry_torn_by_a_power_loss_is_written_again(
    tmp_path: Path, keep: Callable[[bytes], bytes]
) -> None:
    sink = sink_at(tmp_path)
    marker = tmp_path / "shop/orders/.penstock-unwritten"
    prepared = marker.read_bytes()
    write(sink, 1)
    # The file that marks the table is removed after the entry has become durable.
    marker.write_bytes(prepared)
    entry = tmp_path / f"shop/orders/_delta_log/{0:020}.json"
    entry.write_bytes(keep(entry.read_bytes()))
    restarted = sink_at(tmp_path)
    write(restarted, 1)
    table = deltalake.DeltaTable(tmp_path / "shop/orders")
    assert pyarrow.table(table.to_pyarrow_table()).column("id").to_pylist() == [1]
    assert not marker.exists()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were made durable, in order."""
    paths: list[str] = []
    monkeypatch.setattr(syncing, "_sync", paths.append)
    return paths


def test_tables_that_are_prepared_together_become_durable_together(tmp_path: Path, synced: list[str]) -> None:
    sink = DeltaSink(Settings(path=str(tmp_path / "lake")))
    with sink.preparing():
        for target in (ORDERS, VISITS):
            sink.prepare(target, Evolution.EVOLVE)
        assert synced == []
    shop = tmp_path / "lake/shop"
    assert sorted(synced[:2]) == [f"{shop}/{table}/.penstock-unwritten-new" for table in ("orders", "visits")]
    folders = {tmp_path, tmp_path / "lake", shop, shop / "orders", shop / "visits"}
    assert set(synced[2:]) == set(map(str, folders))
    write(sink, 1)


def test_commits_are_durable_before_their_batch_is_recorded(tmp_path: Path, synced: list[str]) -> None:
    sink = sink_at(tmp_path)
    for number in range(1, 13):
        write(sink, number)
        log = tmp_path / f"shop/orders/_delta_log/{number - 1:020}"
        assert f"{log}.json" in synced
        checkpoint = Path(f"{log}.checkpoint.parquet")
        assert checkpoint.exists() == (str(checkpoint) in synced)
    assert list(tmp_path.rglob("*.checkpoint.parquet"))


def test_first_entry_that_the_disk_refuses_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_at(tmp_path)

    def refuse(_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(first_entry.json, "dumps", refuse)
        with pytest.raises(DiskFailed):
            new_unwritten(sink.location(ORDERS), "t", sink.schema_of(ORDERS)).commit([], [], {})
    assert list((tmp_path / "shop/orders/_delta_log").iterdir()) == []
    write(sink, 1)


def test_disk_that_refuses_the_columns_of_a_table_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_at(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(unwritten_table.os, "replace", refuse)
        with pytest.raises(DiskFailed):
            sink.prepare(target_of({"id": "int", "note": "varchar(20)", "n": "int"}), Evolution.EVOLVE)
    write(sink, 1)
    assert version(tmp_path, "orders") == 0


def test_table_that_cannot_be_created_without_rows_does_not_keep_others_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_at(tmp_path)
    create, tried = unwritten_table.write_first_entry, []

    def refuse_orders(log: str, *arguments: Any) -> None:
        tried.append(log)
        if log.endswith("orders/_delta_log"):
            raise OSError(errno.EACCES, "Permission denied")
        create(log, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(unwritten_table, "write_first_entry", refuse_orders)
        for _ in range(5):
            sink.keep_alive()
    assert len(tried) == 2, "it is not tried, and reported, again and again"
    assert [version(tmp_path, table) for table in ("orders", "visits")] == [None, 0]
    write(sink, 1)
    assert version(tmp_path, "orders") == 0


def test_properties_create_the_table_at_once(tmp_path: Path) -> None:
    sink_at(tmp_path, properties={"delta.checkpointInterval": "20"})
    assert version(tmp_path, "orders") == 0


def test_expired_entries_of_the_log_are_deleted(tmp_path: Path) -> None:
    sink = sink_at(tmp_path, properties={"delta.logRetentionDuration": "interval 0 days"})
    for number in range(1, 25):
        write(sink, number)
    entries = sorted(path.name for path in (tmp_path / "shop/orders/_delta_log").glob("*.json"))
    assert entries[-1] == "00000000000000000024.json"
    assert "00000000000000000000.json" not in entries
    assert deltalake.DeltaTable(tmp_path / "shop/orders").count() == 24
