# SPDX-License-Identifier: Apache-2.0
"""Mirrors in Delta whose files or columns other writers have changed."""

import json
import shutil
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import pyarrow
import pytest

from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid, ServerUnsupported, VersionConflict
from penstock.sinks.delta.sink import DeltaSink, Settings
from penstock.sinks.delta.table import open_delta
from penstock.sinks.lake import lake_sink
from penstock.sinks.sink import BatchMark, Evolution
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update

DAY = datetime(2026, 1, 2, 3, 4, 5)
# In ascending order.
KEYS: dict[str, list[Any]] = {
    "datetime(6)": [DAY + timedelta(microseconds=step) for step in (1, 999, 123_456, 999_999)],
    "timestamp(6)": [DAY.replace(tzinfo=UTC) + timedelta(microseconds=step) for step in (1, 2, 999_999)],
    "bigint unsigned": [2**53 + 1, 2**63 + 1, 2**64 - 1],
    "decimal(30,10)": [Decimal(f"{sign}12345678901234567890.0123456789") for sign in ("-", "")],
    "double": [-1.1, 0.1, 2.0**0.5],
    "float": [-0.5, 0.25, 3.5],
    "varbinary(16)": [b"\x00", b"a\xff", b"\xff\xfe"],
    "varchar(200)": ["a" * 100 + "x", "é" * 100 + "y", "\U0001f600" * 40],
    "date": [date(1, 1, 1), date(2026, 1, 1), date(9999, 12, 31)],
    "time(6)": [timedelta(hours=-800, microseconds=1), timedelta(0), timedelta(hours=800, microseconds=7)],
    "bit(64)": [0, 2**63 + 12345, 2**64 - 1],
}
ORDERS = target_of({"id": "int", "note": "varchar(20)"})


class Mirror:
    """A mirror of one table in a folder."""

    def __init__(self, path: Path, target: Target = ORDERS, mode: str = "mirror") -> None:
        self.sink = DeltaSink(Settings.model_validate({"path": str(path), "mode": mode}))
        self.target = target
        self.location = self.sink.location(target)
        self._number = 0

    def write(self, *changes: Changes) -> None:
        """Write a batch."""
        self._number += 1
        mark = BatchMark("shop", "g", self._number)
        self.sink.prepare(self.target, Evolution.EVOLVE)
        writer = self.sink.open(mark, 0)
        for part in changes:
            writer.write(part)
        self.sink.commit(mark, [writer.finish()])

    def write_rows(self, *groups: Any) -> None:
        """Write a batch of changes."""
        self.write(changes_of(self.target, *groups))

    def table(self) -> deltalake.DeltaTable:
        """Return the table as other writers see it."""
        return deltalake.DeltaTable(self.location)

    def rows(self) -> list[tuple[Any, ...]]:
        """Return the rows, in order."""
        rows = self.table().to_pyarrow_table().to_pylist()
        return sorted(tuple(row[name] for name in self.target.column_names) for row in rows)


@pytest.mark.parametrize("declared", KEYS)
def test_rows_of_a_compacted_file_are_changed_by_their_keys(declared: str, tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, target_of({"k": declared, "note": "varchar(20)"}, key=("k",)))
    first, *others = KEYS[declared]
    mirror.write_rows(insert(1, k=first, note="old"))
    mirror.write_rows(*(insert(2, k=key, note="old") for key in others))
    assert mirror.table().optimize.compact()["numFilesRemoved"] == 2
    last = others[-1]
    mirror.write_rows(update(3, {"k": last, "note": "old"}, {"k": last, "note": "new"}))
    mirror.write_rows(delete(4, k=first, note="old"))
    notes = [note for _, note in mirror.rows()]
    assert notes == ["old"] * (len(others) - 1) + ["new"]


@pytest.mark.parametrize("mode", ["mirror", "history"])
def test_compaction_during_a_batch_is_a_conflict(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror(tmp_path, mode=mode)
    for key in (1, 2, 3):
        mirror.write_rows(insert(key, id=key, note="old"))
    sync_paths, has_compacted = lake_sink.sync_paths, []

    def compact_before_the_commit(paths: Iterable[str]) -> None:
        if not has_compacted:
            has_compacted.append(mirror.table().optimize.compact())
        sync_paths(paths)

    monkeypatch.setattr(lake_sink, "sync_paths", compact_before_the_commit)
    change = update(4, {"id": 1, "note": "old"}, {"id": 1, "note": "new"})
    with pytest.raises(VersionConflict):
        mirror.write_rows(change)
    mirror.write_rows(change)
    kept = [(1, "old")] if mode == "history" else []
    assert mirror.rows() == [(1, "new"), *kept, (2, "old"), (3, "old")]


def test_key_after_a_bound_that_was_rounded_down_is_found(tmp_path: Path) -> None:
    """Spark rounds both bounds down to milliseconds."""
    mirror = Mirror(tmp_path, target_of({"k": "datetime(6)", "note": "varchar(20)"}, key=("k",)))
    key = DAY + timedelta(microseconds=123_456)
    mirror.write_rows(insert(1, k=key, note="old"))
    entry = Path(mirror.location) / "_delta_log/00000000000000000000.json"
    rounded = entry.read_text()
    for bound in ("123", "124"):
        rounded = rounded.replace(f"03:04:05.{bound}", "03:04:05.123")
    entry.write_text(rounded)
    mirror.write_rows(delete(2, k=key, note="old"))
    assert mirror.rows() == []


def test_day_of_the_year_0_in_a_compacted_file_is_read(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, target_of({"id": "int", "day": "date"}))
    day = pyarrow.array([-719_528], pyarrow.int32()).cast(pyarrow.date32())
    for key in (1, 2):
        changes = changes_of(mirror.target, insert(key, id=key))
        mirror.write(changes.with_rows(changes.rows.set_column(1, changes.rows.schema.field(1), day)))
    mirror.table().optimize.compact()
    mirror.write_rows(delete(3, id=1))
    assert mirror.table().to_pyarrow_table()["id"].to_pylist() == [2]


@pytest.mark.parametrize(
    "options",
    [{"partition_by": ["note"]}, {"configuration": {"delta.columnMapping.mode": "name"}}],
    ids=["partitions", "mapped columns"],
)
def test_table_whose_files_do_not_have_its_columns_is_refused(
    options: dict[str, Any], tmp_path: Path
) -> None:
    mirror = Mirror(tmp_path)
    rows = pyarrow.table({"id": [1], "note": ["a"]}, mirror.sink.schema_of(ORDERS))
    deltalake.DeltaTable.create(mirror.location, rows.schema, **options)
    deltalake.write_deltalake(mirror.location, rows, mode="append")
    with pytest.raises(ServerUnsupported, match="do not have all columns"):
        mirror.write_rows(update(1, {"id": 1, "note": "a"}, {"id": 1, "note": "b"}))
    assert mirror.table().version() == 1


def test_table_that_was_partitioned_between_batches_is_refused(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path)
    mirror.write_rows(insert(1, id=1, note="a"))
    rows = mirror.table().to_pyarrow_table()
    deltalake.write_deltalake(
        mirror.location, rows, mode="overwrite", partition_by=["note"], schema_mode="overwrite"
    )
    with pytest.raises(ServerUnsupported, match="do not have all columns"):
        mirror.write_rows(insert(2, id=2, note="b"))
    assert mirror.rows() == [(1, "a")]


def test_log_that_is_deleted_while_a_table_is_open_is_reported(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path)
    for key in (1, 2):
        mirror.write_rows(insert(key, id=key, note="a"))
    table = open_delta(mirror.location, {})
    assert table is not None
    shutil.rmtree(Path(mirror.location) / "_delta_log")
    with pytest.raises(OptionInvalid, match="cannot be used"):
        table.number("penstock/shop/g")


def test_statistics_may_be_missing(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path)
    mirror.write_rows(insert(1, id=1, note="a"), insert(1, 1, id=2, note="b"))
    entry = Path(mirror.location) / "_delta_log/00000000000000000000.json"
    lines = [json.loads(line) for line in entry.read_text().splitlines()]
    for line in lines:
        line.get("add", {}).pop("stats", None)
    entry.write_text("".join(json.dumps(line) + "\n" for line in lines))
    mirror.write_rows(delete(2, id=1, note="a"))
    assert mirror.rows() == [(2, "b")]
