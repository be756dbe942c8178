# SPDX-License-Identifier: Apache-2.0
"""Delta and Iceberg, beyond the common behaviour of mirrors: feeds, histories, loads, batches larger than the
memory limit.
"""

import random
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deltalake
import pytest

from penstock.changes import Changes, Origin, Target
from penstock.errors import OptionInvalid, SchemaChanged, ValueMalformed, VersionConflict
from penstock.sinks.iceberg.sink import IcebergSink
from penstock.sinks.iceberg.table import catalog_of
from penstock.sinks.lake import syncing
from penstock.sinks.lake.copy_on_write import _SMALL_FILES_MAX as SMALL_FILES_MAX
from penstock.sinks.lake.lake_sink import LakeSink
from penstock.sinks.lake.parquet_files import DataFile
from penstock.sinks.sink import BatchMark, Evolution, Receipt, make_sink, settings_of
from tests.support.pipeline.changes_made import Made, changes_of, delete, insert, target_of, update

ORDERS = target_of({"id": "int", "note": "varchar(40)"})
Row = dict[str, Any]
KINDS = ("delta", "iceberg")


class Lake:
    """A sink that writes to a folder, its batches, and its tables as the format's own reader shows them."""

    def __init__(self, kind: str, path: Path, **settings: Any) -> None:
        made = make_sink(kind, settings_of(kind)(path=str(path), **settings))
        assert isinstance(made, LakeSink)
        self.sink, self.path = made, path

    def limit_memory(self, memory_bytes: int) -> None:
        """Use less memory than the settings allow."""
        self.sink.settings = self.sink.settings.model_copy(update={"memory_bytes": memory_bytes})

    def part(self, number: int, part: int, *changes: Changes, loads: bool = False) -> Receipt:
        for one in changes:
            self.sink.prepare(one.target, Evolution.EVOLVE)
        writer = self.sink.open(BatchMark("shop", "g", number, loads), part)
        for one in changes:
            writer.write(one)
        return writer.finish()

    def batch(self, number: int, *parts: Sequence[Changes], loads: bool = False) -> list[Receipt]:
        receipts = [self.part(number, at, *changes, loads=loads) for at, changes in enumerate(parts)]
        self.sink.commit(BatchMark("shop", "g", number, loads), receipts)
        return receipts

    def rows(self, target: Target = ORDERS) -> list[Row]:
        if isinstance(self.sink, IcebergSink):
            name = (target.name.database, target.name.table)
            found = catalog_of(self.sink._catalog()).load_table(name).scan().to_arrow()
        else:
            found = deltalake.DeltaTable(self.sink.location(target)).to_pyarrow_table()
        return list(found.to_pylist())

    def state(self, target: Target = ORDERS) -> dict[int, str]:
        rows = self.rows(target)
        found = {row["id"]: row["note"] for row in rows}
        assert len(found) == len(rows)
        return found

    def files(self, target: Target = ORDERS) -> set[str]:
        table = self.sink.open_table(target)
        assert table is not None
        return {one.path for one in table.files()}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def in_another_process(path: Path, numbers: range) -> None:
    """Write batches of one row each from a process that shares nothing with this process."""
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.integration.test_sink_lakes import Lake, ORDERS, changes_of, insert\n"
        "lake = Lake('delta', Path(sys.argv[1]))\n"
        "for number in range(int(sys.argv[2]), int(sys.argv[3])):\n"
        "    lake.batch(number, [changes_of(ORDERS, insert(number, id=number, note='d'))])"
    )
    root = Path(__file__).parents[2]
    words = [sys.executable, "-c", program, str(path), str(numbers.start), str(numbers.stop)]
    subprocess.run(words, check=True, cwd=root)


def loaded(*made: list[Made]) -> Changes:
    return changes_of(ORDERS, *made, origin=Origin.LOAD)


def test_delta_feed_columns_are_nullable_for_spark(tmp_path: Path) -> None:
    lake = Lake("delta", tmp_path, mode="feed")
    lake.sink.prepare(ORDERS, Evolution.EVOLVE)
    lake.sink.close()
    table = deltalake.DeltaTable(lake.sink.location(ORDERS))
    assert '"nullable":false' not in table.schema().to_json().replace(" ", "")
    assert set(table.protocol().reader_features or ()) <= {"timestampNtz"}


def test_load_into_an_empty_table_reads_nothing_back(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(kind, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("penstock.sinks.lake.copy_on_write.CopyOnWrite.rewrite", None)
        for number in (1, 2):
            chunks = [
                [loaded(*(insert(1, id=row, note="load") for row in range(at, at + 10)))]
                for at in range(number * 100, number * 100 + 40, 10)
            ]
            lake.batch(number, *chunks, loads=True)
    before = lake.files()
    assert len(lake.state()) == 80
    lake.batch(3, [changes_of(ORDERS, update(2, {"id": 100}, {"id": 100, "note": "log"}))])
    assert lake.state()[100] == "log"
    assert len(before & lake.files()) == len(before) - 1, "one file held the key"


def test_load_into_a_table_with_rows_replaces_them(kind: str, tmp_path: Path) -> None:
    lake = Lake(kind, tmp_path)
    lake.batch(1, [changes_of(ORDERS, insert(1, id=1, note="a"), insert(1, 1, id=2, note="b"))])
    chunks = [[loaded(insert(5, id=2, note="load"))], [loaded(insert(5, id=3, note="load"))]]
    lake.batch(2, *chunks, loads=True)
    lake.batch(2, *chunks, loads=True)
    assert lake.state() == {1: "a", 2: "load", 3: "load"}


def test_batch_larger_than_memory_is_one_commit_with_the_same_rows(kind: str, tmp_path: Path) -> None:
    chance = random.Random(kind)
    lake = Lake(kind, tmp_path, memory_bytes=1 << 20, file_bytes=1 << 16)
    lake.limit_memory(60_000)
    state: dict[int, str] = {}
    for number in range(1, 4):
        parts = []
        for step in range(12):
            made = []
            for at in range(100):
                version, key = number * 10_000 + step * 100 + at, chance.randrange(2000)
                if key in state and chance.random() < 0.3:
                    made.append(delete(version, id=key, note=state.pop(key)))
                elif key in state:
                    before, state[key] = state[key], str(version)
                    made.append(update(version, {"id": key, "note": before}, {"id": key, "note": state[key]}))
                else:
                    state[key] = str(version)
                    made.append(insert(version, id=key, note=state[key]))
            parts.append(changes_of(ORDERS, *made))
        lake.batch(number, parts)
        assert lake.state() == state
        lake.batch(number, parts)
        assert lake.state() == state


def test_history_has_each_row_with_its_time(kind: str, tmp_path: Path) -> None:
    chance = random.Random(7)
    lake = Lake(kind, tmp_path, mode="history", file_bytes=1 << 16)
    open_rows: dict[int, tuple[int, str]] = {}
    ended: list[tuple[int, str, int, int | None]] = []
    version = 0
    for number in range(1, 6):
        made = []
        for _ in range(60):
            version += 1
            key, note = chance.randrange(25), f"note {version}"
            if key not in open_rows:
                made.append(insert(version, id=key, note=note))
            else:
                begun, before = open_rows.pop(key)
                ended.append((key, before, begun, version))
                if chance.random() < 0.4:
                    made.append(delete(version, id=key, note=before))
                    continue
                made.append(update(version, {"id": key, "note": before}, {"id": key, "note": note}))
            open_rows[key] = (version, note)
        changes = changes_of(ORDERS, *made)
        for _ in range(2):
            lake.batch(number, [changes])
        wanted = ended + [(key, note, begun, None) for key, (begun, note) in open_rows.items()]
        found = [
            (row["id"], row["note"], row["_valid_from_version"], row["_valid_to_version"])
            for row in lake.rows()
        ]
        assert sorted(found, key=str) == sorted(wanted, key=str)


def test_truncated_table_closes_all_open_rows_of_its_history(kind: str, tmp_path: Path) -> None:
    lake = Lake(kind, tmp_path, mode="history")
    lake.batch(1, [changes_of(ORDERS, insert(1, id=1, note="a"), insert(2, id=2, note="b"))])
    mark = BatchMark("shop", "g", 2)
    writer = lake.sink.open(mark, 0)
    writer.write(changes_of(ORDERS, update(3, {"id": 1, "note": "a"}, {"id": 1, "note": "c"})))
    writer.empty(ORDERS, 4)
    writer.write(changes_of(ORDERS, insert(5, id=1, note="d")))
    lake.sink.commit(mark, [writer.finish()])
    found = [
        (row["note"], row["_valid_from_version"], row["_valid_to_version"])
        for row in sorted(lake.rows(), key=lambda row: row["_valid_from_version"])
    ]
    assert found == [("a", 1, 3), ("b", 2, 4), ("c", 3, 4), ("d", 5, None)]


def test_same_batch_from_two_writers_is_stored_once(kind: str, tmp_path: Path) -> None:
    lake = Lake(kind, tmp_path, mode="feed")
    lake.batch(1, [changes_of(ORDERS, insert(1, id=1))])
    receipt = lake.part(2, 0, changes_of(ORDERS, insert(2, id=2)))
    late = lake.sink.open_table(ORDERS)
    assert late is not None
    other = lake.part(2, 0, changes_of(ORDERS, insert(2, id=2)))
    lake.sink.commit(BatchMark("shop", "g", 2), [receipt])
    with pytest.raises(VersionConflict):
        late.commit([late.describe(one) for one in staged(other)], [], {"penstock/shop/g": 2})
    lake.sink.commit(BatchMark("shop", "g", 2), [other])
    assert sorted(row["id"] for row in lake.rows()) == [1, 2]


def staged(receipt: Receipt) -> list[Any]:
    return [DataFile.from_json(file) for one in receipt.staged for file in one["files"]]


def test_zero_date_key_is_located_again_and_other_invalid_keys_stop(kind: str, tmp_path: Path) -> None:
    target = target_of({"id": "int", "day": "date", "note": "varchar(9)"}, key=("id", "day"))
    lake = Lake(kind, tmp_path)

    def day(text: str, version: int, note: str, change: str = "insert") -> Changes:
        made = Made(change, version, {"id": 1, "note": note}, unrepresentable={"day": text})
        return changes_of(target, [made])

    lake.batch(1, [day("0000-00-00", 1, "a")])
    lake.batch(2, [day("0000-00-00", 2, "b", "update_postimage")])
    assert lake.rows(target) == [{"id": 1, "day": None, "note": "b"}]
    lake.batch(3, [day("0000-00-00", 3, "b", "delete")])
    assert lake.rows(target) == []
    with pytest.raises(ValueMalformed, match="2026-00-15"):
        lake.batch(4, [day("2026-00-15", 4, "c")])


def test_unsupported_mirror_is_refused(kind: str, tmp_path: Path) -> None:
    lake = Lake(kind, tmp_path)
    lake.sink.prepare(ORDERS, Evolution.EVOLVE)
    wider = target_of({"id": "bigint", "note": "varchar(40)"})
    for evolution in (Evolution.STOP, Evolution.ADD_ONLY):
        with pytest.raises(SchemaChanged, match="id"):
            lake.sink.prepare(wider, evolution)
    with pytest.raises(SchemaChanged):
        lake.sink.prepare(target_of({"id": "int", "note": "date"}), Evolution.EVOLVE)


def test_small_files_are_compacted(kind: str, tmp_path: Path) -> None:
    lake = Lake(kind, tmp_path)
    count = SMALL_FILES_MAX + 4
    for number in range(count):
        lake.batch(number + 1, [changes_of(ORDERS, insert(number, id=number, note="a"))])
    assert len(lake.files()) < SMALL_FILES_MAX
    assert lake.state() == dict.fromkeys(range(count), "a")


def test_row_loaded_before_a_change_yields_even_beyond_memory(kind: str, tmp_path: Path) -> None:
    lake = Lake(kind, tmp_path, memory_bytes=1 << 20, file_bytes=1 << 16)
    lake.limit_memory(20_000)
    changed = [insert(10, key, id=key, note="new") for key in range(300)]
    gone = [delete(11, key, id=key, note="new") for key in range(300, 320)]
    old = [loaded(*(insert(5, id=key, note="old") for key in part)) for part in (range(250), range(250, 400))]
    lake.batch(1, [changes_of(ORDERS, *changed), changes_of(ORDERS, *gone), *old])
    assert lake.state() == dict.fromkeys(range(300), "new") | dict.fromkeys(range(320, 400), "old")


def test_table_name_escapes_no_folder(tmp_path: Path) -> None:
    names = ("..", "a/../../b", "%2E", "a\\b", "a\nb")
    for name in names:
        target = target_of({"id": "int"}, name=f"`{name}`.`{name}`")
        with pytest.raises(OptionInvalid, match="would be the folder"):
            Lake("delta", tmp_path).sink.location(target)
        remote = Lake("delta", "s3://lake/bronze").sink.location(target)  # type: ignore[arg-type]
        assert re.fullmatch(r"s3://lake/bronze/[^/\s\\]+/[^/\s\\]+", remote)
    assert Lake("delta", tmp_path).sink.location(target_of({"id": "int"}, name="a.b")) == f"{tmp_path}/a/b"


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_delta_table_has_the_name_of_its_source(scheme: str, tmp_path: Path) -> None:
    target = target_of({"id": "int"}, name="`my $hop`.`bestellungen #1 für 50%`")
    lake = Lake("delta", f"{scheme}{tmp_path}")  # type: ignore[arg-type]
    for number in (1, 2):
        lake.batch(number, [changes_of(target, insert(number, id=number))])
    folder = tmp_path / "my $hop/bestellungen #1 für 50%"
    assert sorted(row["id"] for row in deltalake.DeltaTable(folder).to_pyarrow_table().to_pylist()) == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["my $hop"]


def test_iceberg_metadata_is_durable_before_its_batch_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()
    monkeypatch.setattr(syncing, "_sync", synced.add)
    lake = Lake("iceberg", tmp_path)
    wider = target_of({"id": "bigint", "note": "varchar(40)", "more": "int"})
    for number, target in enumerate((ORDERS, ORDERS, wider), 1):
        lake.batch(number, [changes_of(target, insert(number, id=number, note="a"))])
        metadata = {str(path) for path in (tmp_path / "shop/orders/metadata").iterdir()}
        assert metadata <= synced


def test_folder_that_an_earlier_version_quoted_stays(tmp_path: Path) -> None:
    target = target_of({"id": "int"}, name="`my shop`.orders")
    (tmp_path / "my%20shop/orders").mkdir(parents=True)
    assert Lake("delta", tmp_path).sink.location(target) == f"{tmp_path}/my%20shop/orders"


def test_delta_table_changed_or_recreated_between_batches_is_read_as_it_is(
    tmp_path: Path,
) -> None:
    lake = Lake("delta", tmp_path)
    lake.batch(1, [changes_of(ORDERS, insert(1, id=1, note="a"))])
    place = lake.sink.location(ORDERS)
    # Other clients may compact a table, or delete from it.
    deltalake.DeltaTable(place).delete("id = 1")
    lake.batch(2, [changes_of(ORDERS, insert(2, id=2, note="b"))])
    assert lake.state() == {2: "b"}
    shutil.rmtree(place)
    lake.batch(3, [changes_of(ORDERS, insert(3, id=3, note="c"))])
    assert lake.state() == {3: "c"}
    assert deltalake.DeltaTable(place).version() == 0
    # The table was recreated, and has more versions than the known table.
    shutil.rmtree(place)
    in_another_process(tmp_path, range(1, 6))
    lake.batch(6, [changes_of(ORDERS, insert(6, id=6, note="e"))])
    assert lake.state() == dict.fromkeys(range(1, 6), "d") | {6: "e"}


def test_delta_log_is_read_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake("delta", tmp_path)
    for number in (1, 2):
        lake.part(number, 0, changes_of(ORDERS, insert(number, id=number, note="a")))
    with monkeypatch.context() as patch:
        patch.setattr("penstock.sinks.delta.table.DeltaTable", None)
        for number in range(3, 14):
            writer = lake.sink.open(BatchMark("shop", "g", number), 0)
            writer.write(changes_of(ORDERS, insert(number, id=number, note="b")))
            writer.finish()
    assert len(lake.state()) == 13
    # A reader reads few entries at a time.
    assert (Path(lake.sink.location(ORDERS)) / "_delta_log" / "_last_checkpoint").exists()
