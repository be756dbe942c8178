# SPDX-License-Identifier: Apache-2.0
"""Row histories in Delta: each row version with its first and last commit."""

import random
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import deltalake
import pytest

from penstock.changes import Changes, Origin, Target
from penstock.errors import ConnectionLost, DiskFailed, ServerUnsupported, ValueMalformed
from penstock.sinks.delta import table as delta_table
from penstock.sinks.iceberg.table import catalog_of
from penstock.sinks.sink import BatchMark, Evolution, Receipt, make_sink, settings_of
from tests.support.pipeline.changes_made import Made, changes_of, delete, insert, target_of, update

ORDERS = target_of({"id": "int", "note": "varchar(40)"})
# A row's note, and the versions from which and until which it was valid.
Period = tuple[str | None, int, int | None]
Step = Changes | tuple[Target, int]


class Lake:
    """Writes batches into a folder, and reads the resulting table."""

    def __init__(self, path: Path, mode: str = "history", kind: str = "delta") -> None:
        options = {"path": str(path), "mode": mode}
        self.sink: Any = make_sink(kind, settings_of(kind).model_validate(options))
        self.path = path
        self.kind = kind

    def batch(self, number: int, *steps: Step, generation: str = "g", loads: bool = False) -> Receipt:
        """Write changes in one part; a target and a version mark a truncation of the table."""
        mark = BatchMark("shop", generation, number, loads)
        for step in steps:
            self.sink.prepare(step[0] if isinstance(step, tuple) else step.target, Evolution.EVOLVE)
        writer = self.sink.open(mark, 0)
        try:
            for step in steps:
                if isinstance(step, tuple):
                    writer.empty(*step)
                else:
                    writer.write(step)
            receipt = writer.finish()
        except BaseException:
            writer.abort()
            raise
        self.sink.commit(mark, [receipt])
        return receipt

    def rows(self) -> list[dict[str, Any]]:
        if self.kind == "iceberg":
            catalog = catalog_of(self.sink._catalog())
            return list(catalog.load_table(self.sink.location(ORDERS)).scan().to_arrow().to_pylist())
        return list(deltalake.DeltaTable(str(self.path / "shop/orders")).to_pyarrow_table().to_pylist())

    def periods(self) -> list[Period]:
        actual_rows = [
            (row["note"], row["_valid_from_version"], row["_valid_to_version"]) for row in self.rows()
        ]
        return sorted(actual_rows, key=lambda period: (period[1], str(period[0])))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path)


def log(*groups: list[Made]) -> Changes:
    return changes_of(ORDERS, *groups)


def load(*groups: list[Made]) -> Changes:
    return changes_of(ORDERS, *groups, origin=Origin.LOAD)


def change(version: int, before: str, after: str, key: int = 1) -> list[Made]:
    return update(version, {"id": key, "note": before}, {"id": key, "note": after})


def test_each_batch_closes_rows_of_earlier_batches(lake: Lake) -> None:
    batches = [
        log(insert(1, id=1, note="a"), insert(1, 1, id=2, note="x")),
        log(change(2, "a", "b"), change(3, "b", "c")),
        log(delete(4, id=2, note="x")),
        log(insert(5, id=2, note="y"), delete(6, id=1, note="c")),
    ]
    for number, changes in enumerate(batches, 1):
        for _ in range(2):
            lake.batch(number, changes)
    assert lake.periods() == [("a", 1, 2), ("x", 1, 4), ("b", 2, 3), ("c", 3, 6), ("y", 5, None)]
    ends = {row["note"]: (row["_valid_from"], row["_valid_to"]) for row in lake.rows()}
    assert ends["c"][1] == changes_of(ORDERS, insert(6)).rows.column("_commit_timestamp")[0].as_py()
    assert ends["y"][1] is None


def test_negative_zero_is_the_key_zero(lake: Lake) -> None:
    target = target_of({"at": "double", "note": "varchar(9)"}, key=("at",))
    lake.batch(1, changes_of(target, insert(1, at=0.0, note="a")))
    first = update(2, {"at": 0.0, "note": "a"}, {"at": 0.0, "note": "b"})
    second = update(3, {"at": 0.0, "note": "b"}, {"at": -0.0, "note": "c"})
    lake.batch(2, changes_of(target, first, second))
    assert lake.periods() == [("a", 1, 2), ("b", 2, 3), ("c", 3, None)]


def test_row_with_a_changed_key_ends_under_its_old_key(lake: Lake) -> None:
    lake.batch(1, log(insert(1, id=1, note="a"), insert(1, 1, id=2, note="b")))
    swap = log(
        update(2, {"id": 1, "note": "a"}, {"id": 9, "note": "a"}),
        update(2, {"id": 2, "note": "b"}, {"id": 1, "note": "b"}, 1),
        update(2, {"id": 9, "note": "a"}, {"id": 2, "note": "a"}, 2),
    )
    lake.batch(2, swap)
    open_rows = {row["id"]: row["note"] for row in lake.rows() if row["_valid_to_version"] is None}
    assert open_rows == {1: "b", 2: "a"}
    ended = [
        (row["id"], row["note"])
        for row in lake.rows()
        if row["_valid_from_version"] == 1 and row["_valid_to_version"] == 2
    ]
    assert sorted(ended) == [(1, "a"), (2, "b")]


def test_each_truncation_closes_the_rows_open_at_that_time(lake: Lake) -> None:
    lake.batch(1, log(insert(1, id=1, note="a")))
    steps: list[Step] = [
        log(insert(3, id=5, note="e")),
        (ORDERS, 4),
        log(insert(5, id=2, note="b")),
        (ORDERS, 6),
        log(insert(7, id=1, note="c")),
    ]
    for _ in range(2):
        lake.batch(2, *steps)
    assert lake.periods() == [("a", 1, 4), ("e", 3, 4), ("b", 5, 6), ("c", 7, None)]


@pytest.mark.parametrize("memory_bytes", [4_000, 200_000])
def test_batch_larger_than_memory_has_the_same_periods(
    memory_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(memory_bytes)
    lakes = [Lake(tmp_path / name) for name in ("limited", "unlimited")]
    monkeypatch.setattr(lakes[0].sink, "memory_for", lambda mark: memory_bytes)
    state: dict[int, str] = {}
    version = 0
    for number in range(1, 5):
        steps: list[Step] = []
        for _ in range(8):
            groups = []
            for _ in range(40):
                version, key = version + 1, chance.randrange(150)
                before = state.pop(key, None)
                if before is not None and chance.random() < 0.3:
                    groups.append(delete(version, id=key, note=before))
                    continue
                state[key] = str(version)
                is_new = before is None
                groups.append(
                    insert(version, id=key, note=state[key])
                    if is_new
                    else change(version, str(before), state[key], key)
                )
            steps.append(log(*groups))
        if number == 3:
            version, state = version + 1, {}
            steps.insert(6, (ORDERS, version - 100))
        # A load reads some rows again, at the version of the log's end.
        steps.append(load(*(insert(version, id=key, note="again") for key in range(20))))
        state |= dict.fromkeys(range(20), "again")
        for lake in lakes:
            lake.batch(number, *steps)
        limited, unlimited = (sorted(lake.rows(), key=str) for lake in lakes)
        assert limited == unlimited
        names = {path.name for path in (lakes[0].path / "shop/orders").glob("*.parquet")}
        assert {
            Path(uri).name for uri in deltalake.DeltaTable(str(lakes[0].path / "shop/orders")).file_uris()
        } <= names


def test_partial_image_is_refused(lake: Lake) -> None:
    images = [
        Made("update_preimage", 2, {"id": 1}, absent=("note",)),
        Made("update_postimage", 2, {"note": "b"}, absent=("id",)),
    ]
    lake.batch(1, changes_of(ORDERS, insert(1, id=1, note="a")))
    with pytest.raises(ServerUnsupported, match="lack columns"):
        lake.batch(2, changes_of(ORDERS, images))
    assert lake.periods() == [("a", 1, None)]


def test_truncation_alone_closes_all_rows(lake: Lake) -> None:
    lake.batch(1, log(insert(1, id=1, note="a"), insert(1, 1, id=2, note="b")))
    lake.batch(2, (ORDERS, 3))
    assert lake.periods() == [("a", 1, 3), ("b", 1, 3)]


def test_load_after_the_log_starts_new_row_versions(lake: Lake) -> None:
    lake.batch(1, log(insert(1, id=1, note="a"), insert(2, id=2, note="b")))
    lake.batch(2, load(insert(5, id=2, note="B"), insert(5, id=3, note="c")), loads=True)
    assert lake.periods() == [("a", 1, None), ("b", 2, 5), ("B", 5, None), ("c", 5, None)]


def test_no_row_ends_before_it_starts_when_the_log_repeats_changes_before_a_load(lake: Lake) -> None:
    """A load reads the latest state, including changes that the log delivers after the load."""
    lake.batch(1, load(insert(10, id=1, note="c"), insert(10, id=2, note="x")), loads=True)
    lake.batch(2, log(change(5, "a", "b")))
    lake.batch(3, log(change(6, "b", "c"), change(12, "c", "d")))
    assert lake.periods() == [("b", 5, 6), ("c", 6, 12), ("x", 10, None), ("d", 12, None)]


def test_log_after_a_reread_row_ends_the_earlier_row(lake: Lake) -> None:
    """Reread rows are ahead of the log, which then delivers changes between the two states."""
    lake.batch(1, log(insert(1, id=1, note="a"), insert(1, 1, id=2, note="x"), insert(1, 2, id=3, note="p")))
    lake.batch(2, load(insert(10, id=1, note="c"), insert(10, id=2, note="x")))
    lake.batch(3, log(change(5, "a", "b"), delete(6, id=3, note="p")))
    assert lake.periods() == [("a", 1, 5), ("p", 1, 6), ("x", 1, 10), ("b", 5, None), ("x", 10, None)]


def test_another_generation_writes_batches_of_the_same_number(lake: Lake) -> None:
    lake.batch(1, log(insert(1, id=1, note="a")))
    lake.batch(1, log(change(2, "a", "b")), generation="h")
    assert lake.periods() == [("a", 1, 2), ("b", 2, None)]


def test_added_columns_are_null_in_earlier_rows(lake: Lake) -> None:
    wider = target_of({"id": "bigint", "note": "varchar(40)", "more": "int"})
    lake.batch(1, log(insert(1, id=1, note="a"), insert(1, 1, id=2, note="b")))
    lake.batch(2, changes_of(wider, update(2, {"id": 1, "note": "a"}, {"id": 1, "note": "a", "more": 7})))
    actual_rows = [(row["id"], row["more"], row["_valid_to_version"]) for row in lake.rows()]
    assert sorted(actual_rows, key=str) == [(1, 7, None), (1, None, 2), (2, None, None)]


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda lake: lake.batch(2, log(change(2, "a", "b"))), id="changes"),
        pytest.param(
            lambda lake: lake.batch(2, load(insert(2, id=1, note="b")), loads=True), id="a load into rows"
        ),
        pytest.param(
            lambda lake: lake.batch(2, log(*(change(2, "a", "b", key) for key in range(2000)))),
            id="over memory",
        ),
    ],
)
@pytest.mark.parametrize("mode", ["mirror", "history"])
def test_files_named_by_a_commit_survive_its_lost_response(
    mode: str, write: Callable[[Lake], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(tmp_path, mode)
    monkeypatch.setattr(lake.sink, "settings", lake.sink.settings.model_copy(update={"memory_bytes": 1000}))
    lake.batch(1, log(insert(1, id=1, note="a")))
    commit = delta_table.Delta.commit

    def commit_unheard(self: delta_table.Delta, *args: Any) -> None:
        commit(self, *args)
        raise DiskFailed("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(delta_table.Delta, "commit", commit_unheard)
        with pytest.raises(DiskFailed):
            write(lake)
    wanted = {row["note"] for row in lake.rows()}
    assert "b" in wanted
    write(lake)
    assert {row["note"] for row in lake.rows()} == wanted


def test_feed_keeps_each_change_of_each_batch_once(tmp_path: Path) -> None:
    lake = Lake(tmp_path, "feed")
    batches: list[list[Step]] = [
        [load(insert(1, id=1, note="a"))],
        [log(change(2, "a", "b")), (ORDERS, 3), log(insert(4, id=1, note="c"))],
        [log(delete(5, id=1, note="c"))],
    ]
    for number, steps in enumerate(batches, 1):
        receipts = [lake.batch(number, *steps) for _ in range(2)]
        lake.sink.commit(BatchMark("shop", "g", number), receipts[:1])
    actual_rows = [(row["_commit_version"], row["_change_type"], row["note"]) for row in lake.rows()]
    assert sorted(actual_rows) == [
        (1, "insert", "a"),
        (2, "update_postimage", "b"),
        (2, "update_preimage", "a"),
        (4, "insert", "c"),
        (5, "delete", "c"),
    ]
    lake.batch(1, log(insert(9, id=2, note="z")), generation="h")
    assert len(lake.rows()) == 6, "another generation begins its numbers again"


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_disk_failure_is_reported_by_name(kind: str, tmp_path: Path) -> None:
    sink = make_sink(kind, settings_of(kind).model_validate({"path": str(tmp_path)}))
    lake = Lake(tmp_path)
    lake.sink = sink
    lake.batch(1, log(insert(1, id=1, note="a")))
    for file in tmp_path.rglob("part-*.parquet"):
        file.unlink()
    with pytest.raises(DiskFailed, match="orders"):
        lake.batch(2, log(change(2, "a", "b")))


@pytest.mark.parametrize(
    "catalog",
    [
        {"type": "sql", "uri": "sqlite:////nowhere/at/all", "warehouse": "file:///nowhere"},
        {"type": "rest", "uri": "http://me:sEcReT@127.0.0.1:9/lake"},
    ],
    ids=["sql", "rest"],
)
def test_unresponsive_catalog_is_retried_and_its_password_is_hidden(
    catalog: dict[str, str], tmp_path: Path
) -> None:
    sink = make_sink("iceberg", settings_of("iceberg").model_validate({"catalog": catalog}))
    with pytest.raises(ConnectionLost) as caught:
        sink.check()
    assert "sEcReT" not in f"{caught.value} {caught.value.hint}"
    with pytest.raises(ConnectionLost):
        sink.prepare(ORDERS, Evolution.EVOLVE)


@pytest.mark.parametrize("mode", ["mirror", "history"])
def test_added_column_may_belong_to_the_key(mode: str, tmp_path: Path) -> None:
    wider = target_of({"id": "int", "shard": "int", "note": "varchar(40)"}, key=("id", "shard"))
    lake = Lake(tmp_path, mode)
    lake.batch(1, log(insert(1, id=1, note="a")))
    lake.batch(2, changes_of(wider, insert(2, id=1, shard=1, note="b")))
    actual_rows = [(row["id"], row["shard"], row["note"]) for row in lake.rows()]
    assert sorted(actual_rows, key=str) == [(1, 1, "b"), (1, None, "a")]


def test_time_of_day_without_a_date_is_not_a_key(tmp_path: Path) -> None:
    target = target_of({"id": "int", "at": "datetime"}, key=("id", "at"))
    lake = Lake(tmp_path, "mirror")
    lake.batch(1, changes_of(target, [Made("insert", 1, {"id": 1}, 0, {"at": "0000-00-00 00:00:00"})]))
    with pytest.raises(ValueMalformed, match="10:00:00"):
        lake.batch(2, changes_of(target, [Made("insert", 2, {"id": 1}, 0, {"at": "0000-00-00 10:00:00"})]))
    assert len(lake.rows()) == 1


@pytest.mark.parametrize("kind", ["delta", "iceberg"])
@pytest.mark.parametrize(
    ("declared", "values"),
    [
        ("bigint unsigned", (1, 2**63 + 1)),
        ("decimal(10,2)", (Decimal("1.50"), Decimal("2.50"))),
        ("date", (date(2026, 1, 1), date(2026, 1, 2))),
        ("datetime(6)", (datetime(2026, 1, 1), datetime(2026, 1, 2, 3, 4, 5, 6))),
        ("timestamp", (datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC))),
        ("time(3)", (timedelta(hours=1), timedelta(hours=-2, milliseconds=5))),
        ("varchar(40)", ("a", "b")),
        ("double", (1.5, -0.0)),
    ],
)
def test_row_ends_in_the_batch_in_which_its_table_is_emptied(
    kind: str, declared: str, values: tuple[Any, Any], tmp_path: Path
) -> None:
    # A file that was rewritten for the first row has bounds of another origin than that of the second row.
    target = target_of({"at": declared}, key=("at",))
    lake = Lake(tmp_path, kind=kind)
    first, second = values
    lake.batch(1, changes_of(target, insert(1, at=first)))
    lake.batch(2, changes_of(target, insert(2, at=second)))
    lake.batch(3, changes_of(target, delete(3, at=first)), (target, 4))
    periods = [(row["_valid_from_version"], row["_valid_to_version"]) for row in lake.rows()]
    assert sorted(periods) == [(1, 3), (2, 4)]
