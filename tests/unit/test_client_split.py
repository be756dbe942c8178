# SPDX-License-Identifier: Apache-2.0
import numpy
import pyarrow
import pytest

from penstock._native import shard_slots
from penstock.client.split import Cut, split
from penstock.commit_versions import commit_version, epoch_base
from penstock.coordinate.checkpoint import Checkpoint, ShardState
from penstock.coordinate.floors import Floors
from penstock.coordinate.resize import reshaped
from penstock.model import Position
from penstock.source.sharding import preimages_of, sharded, slots_of


def rows(slots: list[int], versions: list[int] | None = None) -> pyarrow.RecordBatch:
    return pyarrow.record_batch(
        {
            "id": list(range(len(slots))),
            "_commit_version": pyarrow.array(versions or range(len(slots)), pyarrow.int64()),
            "_shard_slot": pyarrow.array(slots, pyarrow.int16()),
        }
    )


def ids(batch: pyarrow.RecordBatch) -> list[int]:
    return batch.column("id").to_pylist()  # type: ignore[no-any-return]


def test_rows_side_by_side_are_not_copied() -> None:
    batch = rows([1, 1, 0, 3])
    routed = dict(split(batch, 4, {shard: Cut(0) for shard in range(4)}))
    values = batch.column("id").buffers()[1].address
    assert {shard: ids(part) for shard, part in routed.items()} == {0: [2], 1: [0, 1], 3: [3]}
    assert {part.column("id").buffers()[1].address for part in routed.values()} == {values}


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_random_slots_are_those_that_a_filter_selects(seed: int) -> None:
    random = numpy.random.default_rng(seed)
    shards = int(random.integers(1, 9))
    slots = random.integers(-1, 1024, int(random.integers(0, 40))).clip(0).tolist()
    ours = random.permutation(shards)[: int(random.integers(1, shards + 1))].tolist()
    routed = {
        shard: ids(part) for shard, part in split(rows(slots), shards, {shard: Cut(0) for shard in ours})
    }
    expected = {shard: [row for row, slot in enumerate(slots) if slot % shards == shard] for shard in ours}
    assert routed == {shard: selected for shard, selected in expected.items() if selected}


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_a_shard_are_its_rows_in_order(seed: int) -> None:
    random = numpy.random.default_rng(seed)
    shards = int(random.integers(1, 9))
    batch = rows(random.integers(0, 1024, int(random.integers(0, 20))).tolist())
    cuts = {shard: Cut(0) for shard in random.permutation(shards)[: int(random.integers(1, shards + 1))]}
    routed: dict[int, list[int]] = {}
    for shard, part in split(batch, shards, cuts, in_runs=True):
        assert "_shard_slot" not in part.schema.names
        routed.setdefault(shard, []).extend(ids(part))
    assert routed == {shard: ids(part) for shard, part in split(batch, shards, cuts)}


def test_many_runs_are_gathered_by_shard() -> None:
    alternating = [0, 1] * 100
    routed = split(rows(alternating), 2, {0: Cut(0), 1: Cut(0)}, in_runs=True)
    assert [(shard, part.num_rows) for shard, part in routed] == [(0, 100), (1, 100)]
    few = split(rows(alternating[:4]), 2, {0: Cut(0), 1: Cut(0)}, in_runs=True)
    assert [(shard, ids(part)) for shard, part in few] == [(0, [0]), (1, [1]), (0, [2]), (1, [3])]


def test_rows_are_routed_in_order_by_slot_and_lose_the_slot() -> None:
    actual_rows = split(rows([0, 1, 5, 4, 32766, 1]), 4, {0: Cut(0), 1: Cut(0), 2: Cut(0)})
    assert {shard: ids(batch) for shard, batch in actual_rows} == {0: [0, 3], 1: [1, 2, 5], 2: [4]}
    assert all(batch.schema.names == ["id", "_commit_version"] for _, batch in actual_rows)


@pytest.mark.parametrize("slots", [[3, 7, 3], [3, 4]])
def test_rows_of_unowned_shards_are_dropped(slots: list[int]) -> None:
    assert split(rows(slots), 4, {1: Cut(0)}) == []


def test_shard_that_is_ahead_drops_rows_it_already_has() -> None:
    batch = rows([0, 1, 0, 1, 0, 1], [10, 10, 20, 20, 30, 30])
    options = dict(split(batch, 2, {0: Cut(20), 1: Cut(31)}))
    assert {shard: ids(part) for shard, part in options.items()} == {0: [2, 4]}


def test_rows_below_their_slot_floor_are_dropped() -> None:
    floors = Floors((20, 10), "x", 0)
    batch = rows([0, 1, 2, 3, 0], [10, 10, 20, 5, 30])
    options = dict(split(batch, 4, {shard: Cut(0, 0, floors.table("x", 0)) for shard in range(4)}))
    assert {shard: ids(part) for shard, part in options.items()} == {0: [4], 1: [1], 2: [2]}


def test_commit_versions_are_renumbered_for_their_epoch() -> None:
    there, here = commit_version(1, 3, 160), commit_version(4, 3, 160)
    floors = numpy.zeros(32768, numpy.int64)
    floors[:] = here
    shift = epoch_base(4) - epoch_base(1)
    for cut in (Cut(there, shift), Cut(there, shift, floors)):
        ((_, batch),) = split(rows([0], [there]), 1, {0: cut})
        assert batch.column("_commit_version").to_pylist() == [here]
    assert split(rows([0], [there - 1]), 1, {0: Cut(0, shift, floors)}) == []


def test_slice_of_a_batch_is_read_at_its_own_offset() -> None:
    actual_rows = dict(split(rows([0, 1, 0, 1], [1, 2, 3, 4]).slice(1), 2, {0: Cut(3), 1: Cut(4)}))
    assert {shard: ids(part) for shard, part in actual_rows.items()} == {0: [2], 1: [3]}


def test_without_slots_every_row_belongs_to_one_shard() -> None:
    batch = rows([5, 6]).select(["id", "_commit_version"])
    ((shard, rows_of_shard),) = split(batch, 1, {0: Cut(0)})
    assert (shard, ids(rows_of_shard)) == (0, [0, 1])


@pytest.mark.parametrize(
    ("first", "second", "expected"), [(400, 600, ("delete", 1)), (600, 400, ("insert", 2))]
)
def test_resize_between_the_halves_of_a_move_reports_the_remaining_half(
    first: int, second: int, expected: tuple[str, int]
) -> None:
    changes = pyarrow.record_batch(
        {
            "id": [1, 2],
            "_change_type": ["update_preimage", "update_postimage"],
            "_commit_version": [Position(0, "binlog.000001", 500).commit_version] * 2,
        }
    )
    preimages = preimages_of(changes)
    slots = slots_of(changes, ["id"], "shop.orders", preimages)
    # Two shards receive the update as a delete and an insert; a shard's checkpoint is its consumed position.
    owners = [int(slot) % 2 for slot in slots]
    assert sharded(changes, slots, preimages, 2).rows["_change_type"].to_pylist() == ["delete", "insert"]
    places = dict(zip(owners, (first, second), strict=True))
    states = [ShardState(Checkpoint(f"binlog.000001:{places[shard]}", "", "mysql:x")) for shard in (0, 1)]
    (state,) = reshaped(states, 1)
    assert state.checkpoint is not None
    cut = Cut(Position.parse(state.checkpoint.position).commit_version, 0, state.floors.table("mysql:x", 0))

    dealt = sharded(changes, slots, preimages, 1)
    arrow = dealt.rows.append_column("_shard_slot", pyarrow.array(dealt.slots))
    ((_, rows),) = split(arrow, 1, {0: cut})
    assert [(row["_change_type"], row["id"]) for row in rows.to_pylist()] == [expected]


@pytest.mark.parametrize("slots", [[0, 1, 0], [0, 0], [1, 0, 1, 0]])
@pytest.mark.parametrize("cut", [Cut(0), Cut(1)])
def test_shard_beyond_the_number_of_shards_has_no_rows(slots: list[int], cut: Cut) -> None:
    routed = dict(split(rows(slots), 2, {0: Cut(0), 2: cut, 5: cut}))
    assert {shard: ids(part) for shard, part in routed.items()} == {
        0: [row for row, slot in enumerate(slots) if slot == 0]
    }


@pytest.mark.parametrize("columns", [("id",), ("id", "name"), ("name", "id"), ()])
def test_slots_of_rows_are_those_of_all_their_columns(columns: tuple[str, ...]) -> None:
    changes = pyarrow.record_batch(
        {
            "id": pyarrow.array([12, 7, None], pyarrow.int64()),
            "other": ["x", "y", "z"],
            "name": ["ab", None, "c"],
            "_change_type": ["insert"] * 3,
        }
    )
    slots = slots_of(changes, columns, "shop.orders", preimages_of(changes))
    expected = pyarrow.array(shard_slots(changes, list(columns), "shop.orders"))
    assert slots.tolist() == expected.to_pylist()


def test_rows_grouped_by_shard_are_dropped_by_their_own_versions() -> None:
    batch = rows([0, 4, 1, 5], [30, 40, 10, 20])
    for in_runs in (False, True):
        routed = split(batch, 4, {0: Cut(20), 1: Cut(20)}, in_runs=in_runs)
        assert [(shard, ids(part)) for shard, part in routed] == [(0, [0, 1]), (1, [3])]
