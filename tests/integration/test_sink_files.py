# SPDX-License-Identifier: Apache-2.0

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.dataset
import pytest

from penstock.changes import Changes, Origin
from penstock.errors import DiskFailed, OptionInvalid, SchemaChanged
from penstock.model import TableName
from penstock.sinks.files import sink as files
from penstock.sinks.files.sink import FilesSink
from penstock.sinks.lake.parquet_files import ROW_GROUP_ROWS
from penstock.sinks.sink import BatchMark, Delivery, Evolution, Receipt, Sink, Spread, make_sink, settings_of
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update

ORDERS = target_of({"id": "int", "note": "varchar(40)"})
WIDER = target_of({"id": "bigint", "note": "varchar(40)", "paid": "time(6)"})


@pytest.fixture
def sink(tmp_path: Path) -> Sink:
    return make_sink("files", settings_of("files")(path=str(tmp_path / "feed")))


def mark(number: int) -> BatchMark:
    return BatchMark("shop", "g", number)


def stage(sink: Sink, number: int, part: int, *changes: Changes) -> Receipt:
    for change in changes:
        sink.prepare(change.target, Evolution.EVOLVE)
    writer = sink.open(mark(number), part)
    for change in changes:
        writer.write(change)
    return writer.finish()


def rows(tmp_path: Path, table: str = "shop/orders") -> list[dict[str, Any]]:
    """Return a feed's rows as readers of the folder see them."""
    folder = tmp_path / "feed" / table
    if not list(folder.glob("[!_]*")):
        return []
    lake_table = pyarrow.dataset.dataset(folder, format="parquet").to_table()
    return sorted(lake_table.to_pylist(), key=lambda row: (row["_commit_version"], row["_metadata"]["row"]))


def ids(tmp_path: Path) -> list[int]:
    return [row["id"] for row in rows(tmp_path)]


def batch(sink: Sink, number: int, *parts: Sequence[Changes]) -> None:
    sink.commit(mark(number), [stage(sink, number, part, *changes) for part, changes in enumerate(parts)])


def test_every_change_is_a_row_with_all_its_columns(sink: Sink, tmp_path: Path) -> None:
    changes = changes_of(
        ORDERS,
        insert(1, id=1, note="a"),
        update(2, {"id": 1, "note": "a"}, {"id": 1, "note": "b"}),
        delete(3, id=1, note="b"),
    )
    batch(sink, 1, [changes])
    assert rows(tmp_path) == changes.rows.to_pylist()
    assert (sink.spread, sink.delivery, sink.keeps_state) == (Spread.RANGES, Delivery.EXACTLY_ONCE, False)


def test_batch_is_visible_once_and_only_after_its_commit(sink: Sink, tmp_path: Path) -> None:
    batch(sink, 1, [changes_of(ORDERS, insert(1, id=1))])
    changes = [changes_of(ORDERS, insert(2, id=2))], [changes_of(ORDERS, insert(3, id=3))]
    receipts = [stage(sink, 2, part, *change) for part, change in enumerate(changes)]
    assert ids(tmp_path) == [1]
    for _ in range(2):
        sink.commit(mark(2), receipts)
        assert ids(tmp_path) == [1, 2, 3]
    batch(sink, 2, *changes)
    assert ids(tmp_path) == [1, 2, 3]
    batch(sink, 3, [changes_of(ORDERS, insert(4, id=4))])
    assert ids(tmp_path) == [1, 2, 3, 4]
    assert not list((tmp_path / "feed/shop/orders/_staged").iterdir())


@pytest.mark.parametrize("whole", range(3))
def test_interrupted_commit_is_completed_by_the_retried_batch(
    sink: Sink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: int
) -> None:
    parts = [changes_of(ORDERS, insert(1, id=1))], [changes_of(ORDERS, insert(2, id=2))]
    moved = []
    publish = FilesSink._publish

    def cut(self: FilesSink, staged: str, final: str) -> None:
        if len(moved) == whole:
            raise OSError("no more")
        moved.append(final)
        publish(self, staged, final)

    def cut_manifest(folder: Any, name: str, write: Any) -> None:
        if name.endswith(".json"):
            raise OSError("no more")
        put(folder, name, write)

    put = files._write_atomically
    with monkeypatch.context() as patch:
        patch.setattr(FilesSink, "_publish", cut)
        patch.setattr(files, "_write_atomically", cut_manifest)
        with pytest.raises(DiskFailed):
            batch(sink, 1, *parts)
    assert len(ids(tmp_path)) == whole
    batch(sink, 1, *parts)
    assert ids(tmp_path) == [1, 2]


def test_retry_replaces_files_that_an_earlier_version_published_before_its_manifest(
    sink: Sink, tmp_path: Path
) -> None:
    batch(sink, 1, [changes_of(ORDERS, insert(1, id=1))])
    [first] = (tmp_path / "feed/shop/orders").glob("*-*.parquet")
    # The first letters are those of the SHA-256 of `penstock/shop/g`.
    unfinished = first.with_name("a0d9818e-000000000002-00001.parquet")
    shutil.copy(first, unfinished)
    assert ids(tmp_path) == [1, 1]
    batch(sink, 2, [changes_of(ORDERS, insert(2, id=2))])
    assert ids(tmp_path) == [1, 2]


def test_manifest_lists_the_files_of_a_batch(sink: Sink, tmp_path: Path) -> None:
    batch(sink, 7, [changes_of(ORDERS, insert(1, id=1), insert(1, 1, id=2))])
    [manifest] = (tmp_path / "feed/_penstock").rglob("*.json")
    content = json.loads(manifest.read_text())
    assert content["batch"] == 7
    [file] = content["files"]
    assert (tmp_path / "feed" / file["path"]).stat().st_size == file["bytes"]
    assert file["rows"] == 2


def test_aborted_writer_leaves_nothing(sink: Sink, tmp_path: Path) -> None:
    sink.prepare(ORDERS, Evolution.EVOLVE)
    writer = sink.open(mark(1), 0)
    writer.write(changes_of(ORDERS, insert(1, id=1)))
    writer.finish()
    writer.abort()
    assert not list((tmp_path / "feed").rglob("*-*.parquet"))


def test_columns_follow_the_source_as_far_as_permitted(sink: Sink, tmp_path: Path) -> None:
    batch(sink, 1, [changes_of(ORDERS, insert(1, id=1, note="a"))])
    for evolution in (Evolution.STOP, Evolution.ADD_ONLY):
        with pytest.raises(SchemaChanged, match="id"):
            sink.prepare(WIDER, evolution)
    assert sink.plan(WIDER, Evolution.EVOLVE)
    batch(sink, 2, [changes_of(WIDER, insert(2, id=2**40, note="b", paid=-1))])
    assert not sink.plan(WIDER, Evolution.EVOLVE)
    pattern = str(tmp_path / "feed/shop/orders/*-*.parquet")
    actual_rows = duckdb.sql(
        f"select id, paid from read_parquet('{pattern}', union_by_name=true) order by id"
    )
    assert actual_rows.fetchall() == [(1, None), (2**40, -1)]
    with pytest.raises(SchemaChanged):
        sink.prepare(target_of({"id": "varchar(9)"}), Evolution.ADD_ONLY)


def digest(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()[:40]


def test_many_rows_become_files_of_the_configured_size(tmp_path: Path) -> None:
    sink = make_sink("files", settings_of("files")(path=str(tmp_path / "feed"), file_bytes=1 << 16))
    change = changes_of(
        ORDERS, *(insert(1, number, id=number, note=digest(number)) for number in range(1000))
    )
    # A file has at least one row group.
    parts = [change] * (ROW_GROUP_ROWS // 1000 + 5)
    receipt = stage(sink, 1, 0, *parts)
    sink.commit(mark(1), [receipt])
    assert len(receipt.staged) > 1
    feed = pyarrow.dataset.dataset(tmp_path / "feed/shop/orders", format="parquet")
    assert receipt.rows == feed.count_rows() == sum(map(len, parts))


def test_unwritable_target_is_reported_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sink = make_sink("files", settings_of("files")(path=str(tmp_path / "new/feed")))
    assert not sink.check()
    assert not (tmp_path / "new").exists()
    missing = make_sink("files", settings_of("files")(path="s4://nowhere/feed"))
    assert [finding.fatal for finding in missing.check()] == [True]


def test_missing_folder_is_reported_with_its_table(sink: Sink, tmp_path: Path) -> None:
    other = replace(ORDERS, name=TableName("shop", "gone"))
    batch(sink, 1, [changes_of(ORDERS, insert(1, id=1)), changes_of(other, insert(1, id=1))])
    shutil.rmtree(tmp_path / "feed" / "shop" / "gone")
    writer = sink.open(mark(2), 0)
    writer.write(changes_of(ORDERS, insert(2, id=2)))
    with pytest.raises(OptionInvalid):
        writer.write(changes_of(other, insert(2, id=2)))
    assert writer.at == other.name
    writer.abort()


def test_load_and_changes_may_be_in_one_batch(sink: Sink, tmp_path: Path) -> None:
    loaded = changes_of(ORDERS, insert(1, id=1), origin=Origin.LOAD)
    batch(sink, 1, [loaded, changes_of(ORDERS, delete(1, 1, id=1))])
    assert [row["_change_type"] for row in rows(tmp_path)] == ["insert", "delete"]
