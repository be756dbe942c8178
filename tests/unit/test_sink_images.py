# SPDX-License-Identifier: Apache-2.0

import random
from datetime import timedelta
from decimal import Decimal
from typing import Any

import numpy
import pyarrow
import pytest

from penstock.changes import PUTS, Changes, Origin
from penstock.sinks.images import LastImages, last_images, last_of_each, puts, split_moved_updates
from tests.support.pipeline.changes_made import Made, changes_of, delete, insert, target_of, update

ORDERS = target_of({"id": "int", "note": "varchar(20)"})


def seen(rows: pyarrow.Table, *columns: str) -> list[tuple[Any, ...]]:
    return sorted(
        tuple(row[name] for name in ("_change_type", *(columns or ("id", "note"))))
        for row in rows.to_pylist()
    )


def test_last_event_of_each_key_remains() -> None:
    changes = changes_of(
        ORDERS,
        insert(1, id=1, note="a"),
        insert(1, row=1, id=2, note="b"),
        update(2, {"id": 1, "note": "a"}, {"id": 1, "note": "c"}),
        delete(3, id=2, note="b"),
    )
    assert seen(last_images(ORDERS, [changes])) == [("delete", 2, "b"), ("update_postimage", 1, "c")]


def test_update_across_targets_is_a_delete_and_an_insert() -> None:
    changes = changes_of(
        ORDERS,
        insert(1, id=1),
        update(2, {"id": 1}, {"id": 2}),
        update(3, {"id": 2}, {"id": 4}),
        delete(4, id=4),
    )
    ids = changes.rows.column("id").to_numpy()
    kinds = split_moved_updates(changes, ids % 2).rows.column("_change_type").to_pylist()
    assert kinds == ["insert", "delete", "insert", "update_preimage", "update_postimage", "delete"]
    assert split_moved_updates(changes, ids * 0) is changes


def test_key_change_ends_one_row_and_starts_another() -> None:
    changes = changes_of(ORDERS, update(2, {"id": 1, "note": "a"}, {"id": 9, "note": "a"}))
    assert seen(last_images(ORDERS, [changes])) == [("update_postimage", 9, "a"), ("update_preimage", 1, "a")]


def test_swapped_keys_keep_both_rows() -> None:
    changes = changes_of(
        ORDERS,
        update(2, {"id": 1, "note": "a"}, {"id": 3, "note": "a"}),
        update(2, {"id": 2, "note": "b"}, {"id": 1, "note": "b"}, row=1),
        update(2, {"id": 3, "note": "a"}, {"id": 2, "note": "a"}, row=2),
    )
    assert seen(last_images(ORDERS, [changes])) == [
        ("update_postimage", 1, "b"),
        ("update_postimage", 2, "a"),
        ("update_preimage", 3, "a"),
    ]


def test_commit_version_decides_instead_of_arrival_order() -> None:
    logged = changes_of(ORDERS, delete(5, id=1, note="a"), insert(6, id=2, note="new"))
    loaded = changes_of(ORDERS, insert(4, id=1, note="a"), insert(4, id=2, note="old"), origin=Origin.LOAD)
    expected = [("delete", 1, "a"), ("insert", 2, "new")]
    assert seen(last_images(ORDERS, [logged, loaded])) == expected
    assert seen(last_images(ORDERS, [loaded, logged])) == expected


def test_loaded_row_yields_to_a_logged_row_of_the_same_version() -> None:
    logged = changes_of(ORDERS, insert(4, id=1, note="log"))
    loaded = changes_of(ORDERS, insert(4, id=1, note="load"), origin=Origin.LOAD)
    assert seen(last_images(ORDERS, [logged, loaded])) == [("insert", 1, "log")]


def test_keys_of_several_columns_and_types_are_compacted() -> None:
    target = target_of(
        {"a": "varchar(9)", "b": "decimal(20,2)", "c": "time(6)", "n": "int"}, key=("a", "b", "c")
    )
    first = {"a": "x", "b": Decimal("1.50"), "c": timedelta(hours=-30)}
    other = {**first, "c": timedelta(hours=30)}
    changes = changes_of(target, insert(1, **first, n=1), insert(2, **other, n=2), insert(3, **first, n=3))
    assert seen(last_images(target, [changes]), "n") == [("insert", 2), ("insert", 3)]


def test_positive_and_negative_zero_are_one_key() -> None:
    target = target_of({"id": "double", "note": "varchar(9)"})
    changes = changes_of(target, insert(1, id=0.0, note="a"), delete(2, id=-0.0, note="a"))
    assert seen(last_images(target, [changes]), "note") == [("delete", "a")]


def test_unrepresentable_keys_are_distinguished_by_their_text() -> None:
    target = target_of({"day": "date", "note": "varchar(9)"}, key=("day",))

    def day(text: str, version: int, note: str) -> list[Made]:
        return [Made("insert", version, {"note": note}, unrepresentable={"day": text})]

    changes = changes_of(
        target, day("0000-00-00", 1, "a"), day("2026-00-15", 2, "b"), day("0000-00-00", 3, "c")
    )
    assert seen(last_images(target, [changes]), "note") == [("insert", "b"), ("insert", "c")]


def test_without_a_key_every_row_remains_in_commit_order() -> None:
    target = target_of({"id": "int"}, key=())
    late, early = changes_of(target, insert(2, id=1)), changes_of(target, insert(1, id=1), insert(1, id=1))
    assert last_images(target, [late, early]).column("_commit_version").to_pylist() == [1, 1, 2]


def test_upserts_are_distinguished_from_deletes() -> None:
    changes = changes_of(ORDERS, insert(1, id=1), delete(2, id=1), update(3, {"id": 1}, {"id": 1}))
    assert puts(changes.rows).to_pylist() == [True, False, False, True]


@pytest.mark.parametrize("seed", range(4))
def test_compaction_equals_applying_each_change(seed: int) -> None:
    chance = random.Random(seed)
    state: dict[int, str] = {}
    images = LastImages(ORDERS, bytes_between=8_000)
    for version in range(1, 400):
        key, note = chance.randrange(40), str(version)
        if chance.random() < 0.005:
            state.clear()
            images.empty(version)
            continue
        if key not in state:
            change = insert(version, id=key, note=note)
            state[key] = note
        elif chance.random() < 0.3:
            change = delete(version, id=key, note=state.pop(key))
        else:
            moved = chance.choice([key, *(set(range(40)) - set(state))])
            change = update(version, {"id": key, "note": state.pop(key)}, {"id": moved, "note": note})
            state[moved] = note
        images.add(changes_of(ORDERS, change))
    rows = images.rows()
    left = {row["id"]: row["note"] for row in rows.to_pylist() if row["_change_type"] in PUTS}
    assert left == state
    assert rows.num_rows == len({row["id"] for row in rows.to_pylist()})


def test_rows_loaded_before_a_truncation_are_dropped() -> None:
    images = LastImages(ORDERS)
    images.add(changes_of(ORDERS, insert(1, id=1)))
    images.empty(5)
    images.add(changes_of(ORDERS, insert(4, id=2), origin=Origin.LOAD))
    images.add(changes_of(ORDERS, insert(6, id=3)))
    rows = images.rows()
    assert [row["id"] for row in rows.to_pylist()] == [3]
    assert images.emptied == 5


def test_buffered_rows_stay_in_key_order() -> None:
    images = LastImages(ORDERS)
    batch = changes_of(ORDERS, *(insert(1, id=key, note="x" * 20) for key in range(1000)))
    for _ in range(1000):
        images.add(Changes(ORDERS, batch.rows, ORDERS.name))
    assert images.bytes < 500 * batch.rows.nbytes


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.int64(), pyarrow.float64(), pyarrow.bool_()])
def test_few_rows_have_the_last_of_each_key_that_grouping_finds(
    seed: int, kind: pyarrow.DataType, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(seed)
    rows = generator.randrange(12)
    values = [generator.choice([None, *range(generator.choice([3, 100]))]) for _ in range(rows)]
    keys = pyarrow.chunked_array([pyarrow.array(values, pyarrow.int64()).cast(kind)])
    rank = numpy.array(generator.sample(range(rows), rows), numpy.int64)
    kept = last_of_each([keys], rank)
    monkeypatch.setattr("penstock.sinks.images._FEW_ROWS_MAX", -1)
    assert kept.tolist() == last_of_each([keys], rank).tolist()


def test_few_keys_are_not_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyarrow, "table", None)
    keys = pyarrow.chunked_array([pyarrow.array(["a", None, "b", "a"])])
    assert last_of_each([keys], numpy.array([2, 0, 1, 3])).tolist() == [0, 1, 3]
