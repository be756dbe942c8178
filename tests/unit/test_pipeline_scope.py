# SPDX-License-Identifier: Apache-2.0
"""Select the target rows that a reload deletes: no rows of another pipeline, and no rows that must be
kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy
import pyarrow
import pytest

from penstock._native import shard_slots
from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid
from penstock.model import Column, Position, ServerAddress, TableName
from penstock.pipeline.load.chunks import Chunk
from penstock.pipeline.load.watermark import Watermark
from penstock.pipeline.settings import PipelineSettings, SinkSettings, StepSettings, pipeline_of_values
from penstock.pipeline.step import target_through
from penstock.pipeline.verify import removal
from penstock.pipeline.verify.scope import joint_slots, scopes_of
from penstock.pipeline.verify.selection import _Merge
from penstock.pipeline.verify.shares import ComparedTable, Share, target_rows
from penstock.pipeline.verify.source_rows import SourceChunk, SourceTable
from penstock.pipeline.verify.system_columns import as_changes

ORDERS = Target(
    TableName("shop", "orders"),
    (Column("id", "int", None, False), Column("note", "varchar(20)", "utf8mb4")),
    ("id",),
)
PLACE = Position(0, "bin.000001", 1600)
SHARD = {"shard": {"of": 2, "keep": [0]}}


def pipeline(*steps: dict[str, Any]) -> PipelineSettings:
    source = {"url": "mysql://root@127.0.0.1", "name": "here", "tables": ["shop.*"]}
    return pipeline_of_values({"name": "one", "source": source, "sink": "stdout", "steps": list(steps)})


def settings(*steps: dict[str, Any]) -> tuple[StepSettings, ...]:
    return pipeline(*steps).steps


def made_by(steps: tuple[StepSettings, ...], orders: Target = ORDERS) -> Target:
    target = target_through([step.make() for step in steps], orders)
    assert target is not None
    return target


def rows_of(target: Target, ids: range) -> pyarrow.RecordBatch:
    rows = [dict.fromkeys(target.column_names) | {"id": number} for number in ids]
    for row in rows:
        row |= {"_deleted": 0} if "_deleted" in row else {}
    return pyarrow.RecordBatch.from_pylist(rows, schema=target.arrow())


@dataclass(frozen=True)
class RowsThere:
    """A target with existing rows. It serves both as the settings and as the sink."""

    rows: pyarrow.RecordBatch
    reads_ranges: bool = False
    keeps_texts: bool = False
    keeps_types: bool = True

    def make(self) -> "RowsThere":
        return self

    def read(self, target: Target, low: Any, high: Any) -> Iterator[pyarrow.RecordBatch]:
        assert (low, high) == (None, None), "all rows are read at once"
        yield self.rows.select(target.column_names)

    def close(self) -> None:
        """Do nothing, because the sink has no resources."""


def removed(
    monkeypatch: pytest.MonkeyPatch,
    *steps: dict[str, Any],
    source: range = range(0),
    types: bool = True,
    orders: Target = ORDERS,
    commit_ts: int | None = None,
) -> list[Changes]:
    """Return the changes that a removal makes, for a target with rows 0 to 99 and a source with the rows
    `source`.

    Without `types`, only the keys of the target can be read. `orders` is the source's table. For a TiDB
    cluster, `commit_ts` is the timestamp at which the source was read.
    """

    def rows(_: SourceChunk, *, loaded: bool) -> Iterator[Changes]:
        assert not loaded, "all rows of the source keep theirs"
        yield as_changes(orders, rows_of(orders, source), "insert", PLACE, instance="here")

    def watermark(server: ServerAddress, epoch: int = 0) -> Watermark:
        return Watermark(PLACE, 1, 0, commit_ts=commit_ts)

    monkeypatch.setattr(SourceChunk, "rows", rows)
    monkeypatch.setattr(removal, "take_watermark", watermark)
    pipeline_settings = pipeline(*steps)
    target = made_by(pipeline_settings.steps, orders)
    there = rows_of(target, range(100))
    there = there if types else there.select(target.primary_key)
    sink = cast(SinkSettings, RowsThere(there, keeps_types=types))
    own = SourceTable(pipeline_settings.sources[0], orders)
    return list(
        removal.removals([own], Chunk(orders.name), target=target, steps=pipeline_settings.steps, sink=sink)
    )


def ids_of(changes: list[Changes]) -> list[int]:
    return [number for change in changes for number in change.rows.column("id").to_pylist()]


def ids_of_shard(number: int, ids: range) -> list[int]:
    slots = pyarrow.array(shard_slots(rows_of(ORDERS, ids), ["id"])).to_numpy()
    return [id_ for id_, slot in zip(ids, slots, strict=True) if slot % 2 == number]


def test_removal_deletes_rows_missing_from_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ids_of(removed(monkeypatch, source=range(90))) == list(range(90, 100))


def test_rows_removed_by_a_read_of_a_tidb_cluster_have_its_timestamp(monkeypatch: pytest.MonkeyPatch) -> None:
    (deletes,) = removed(monkeypatch, source=range(90), commit_ts=1 << 58)
    assert set(deletes.rows.column("_commit_version").to_pylist()) == {1 << 58}
    (deletes,) = removed(monkeypatch, source=range(90))
    assert set(deletes.rows.column("_commit_version").to_pylist()) == {PLACE.commit_version - 1}


def test_removal_finds_rows_by_a_unique_key_where_there_is_no_primary_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unique = replace(ORDERS, primary_key=(), unique_keys=(("id",),))
    assert ids_of(removed(monkeypatch, source=range(90), orders=unique)) == list(range(90, 100))
    keyless = replace(ORDERS, primary_key=())
    assert removed(monkeypatch, source=range(90), orders=keyless) == []


def test_removal_leaves_the_rows_of_other_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ids_of_shard(0, range(50, 100))
    assert 0 < len(wanted) < 50
    assert ids_of(removed(monkeypatch, SHARD, source=range(50))) == wanted


@pytest.mark.parametrize(
    "only",
    [{"kinds": ["insert", "update"]}, {"kinds": ["insert", "update", "delete"], "load": False}],
    ids=["no deletes", "no load"],
)
def test_removal_skips_a_target_that_keeps_deleted_rows(
    monkeypatch: pytest.MonkeyPatch, only: dict[str, Any]
) -> None:
    assert removed(monkeypatch, {"only": only}) == []
    assert ids_of(removed(monkeypatch, {"only": only | {"tables": "shop.customers"}})) == list(range(100))


def test_removal_marks_rows_where_deletes_are_soft(monkeypatch: pytest.MonkeyPatch) -> None:
    (changes,) = removed(monkeypatch, {"soft_delete": {"at": "gone_at"}}, source=range(98))
    rows = changes.rows
    assert rows.column("_change_type").to_pylist() == ["update_preimage", "update_postimage"] * 2
    assert rows.column("id").to_pylist() == [98, 98, 99, 99]
    assert rows.column("_deleted").to_pylist() == [0, 1, 0, 1]
    times = rows.column("_commit_timestamp").to_pylist()
    assert rows.column("gone_at").to_pylist() == [None, times[1], None, times[3]]
    assert set(rows.column("_commit_version").to_pylist()) == {PLACE.commit_version - 1}


def test_comparison_skips_the_rows_of_other_shards() -> None:
    steps = settings(SHARD)
    scopes = scopes_of([ORDERS], steps)
    sink = cast(SinkSettings, RowsThere(rows_of(ORDERS, range(100))))
    source = SourceTable(pipeline().sources[0], ORDERS)
    table = ComparedTable(ORDERS, (source,), steps, sink, ("id",), slots=joint_slots(scopes))
    there = list(target_rows(Share(table, ())))
    assert numpy.concatenate([batch.column("id").to_numpy() for batch in there]).tolist() == ids_of_shard(
        0, range(100)
    )


@pytest.mark.parametrize(
    "steps",
    [
        [{"shard": {"of": 2, "keep": 0, "columns": ["note"]}}, {"mask": {"columns": {"note": "hash"}}}],
        [{"shard": {"of": 2, "keep": 0, "columns": ["note"]}}, {"map": {"drop": ["note"]}}],
        [{"soft_delete": {}}, {"map": {"rename": {"_deleted": "gone"}}}],
    ],
    ids=["the column is masked", "the column is dropped", "the mark is renamed"],
)
def test_rows_without_a_distinguishing_column_are_not_removed(
    monkeypatch: pytest.MonkeyPatch, steps: list[dict[str, Any]]
) -> None:
    with pytest.raises(OptionInvalid, match=r"rows of shop\.orders cannot be identified") as caught:
        removed(monkeypatch, *steps)
    assert caught.value.hint is not None
    merge = _Merge(ORDERS)
    pipeline_settings = settings(*steps)
    merge.take_scope([step.make() for step in pipeline_settings], pipeline_settings, ORDERS)
    assert "cannot be identified" in merge.why_open()


def test_tables_of_different_shards_merged_into_one_are_refused() -> None:
    steps = settings({"shard": SHARD["shard"] | {"tables": "shop.orders"}}, {"route": {"to": "shop.all"}})
    other = Target(TableName("shop", "returns"), ORDERS.columns, ("id",))
    with pytest.raises(OptionInvalid, match="pass different shards"):
        joint_slots(scopes_of([ORDERS, other], steps))


def test_rows_are_deleted_by_key_if_stored_values_may_have_another_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes = removed(monkeypatch, source=range(10, 100), types=False)
    assert ids_of(changes) == list(range(10))
    [deletes] = changes
    other_columns = [name for name in deletes.target.column_names if name not in deletes.target.primary_key]
    assert other_columns
    assert all(deletes.rows.column(name).null_count == 10 for name in other_columns)
