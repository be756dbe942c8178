# SPDX-License-Identifier: Apache-2.0
"""A member that is slower than the daemon gets the same rows, in the same order, in fewer batches."""

import random
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import pyarrow
import pytest

from penstock.client.fetch import EndFrame, Frame, PositionFrame, RowFrame, RowsFrame
from penstock.client.flow import Place
from penstock.client.intake import Intake, _Link
from penstock.client.merging import merged
from penstock.client.owned import OwnedShard, OwnedShards
from penstock.client.split import Cut
from penstock.errors import ConnectionLost, PenstockError, StatementLogged
from penstock.model import Position

START = Position(0, "binlog.000001", 4)
ROWS_MAX = 1000


def rows_of(table: str, numbers: list[int], version: int = 1, **columns: Any) -> RowsFrame:
    batch = pyarrow.record_batch(
        {"id": pyarrow.array(numbers, pyarrow.int64()), "_commit_version": numbers, **columns}
    )
    return RowsFrame(table, version, ("id",), batch)


def by_table(frames: list[RowFrame]) -> dict[str, list[tuple[int, int]]]:
    """Return the version and the id of each row, in order."""
    seen: dict[str, list[tuple[int, int]]] = {}
    for frame in frames:
        ids = frame.to_arrow().column("id").to_pylist()
        seen.setdefault(frame.table, []).extend((frame.schema_version, number) for number in ids)
    return seen


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_each_table_keep_their_order_and_definition(seed: int) -> None:
    seeded = random.Random(seed)
    frames: list[RowFrame] = []
    for number in range(seeded.randrange(12)):
        more = {"note": ["x"]} if seeded.random() < 0.2 else {}
        frames.append(
            rows_of(seeded.choice(["shop.a", "shop.b"]), [number], seeded.choice([1, 1, 2]), **more)
        )
    joined = merged(frames, ROWS_MAX)
    assert by_table(joined) == by_table(frames)
    assert len(joined) <= len(frames)


def test_a_table_has_one_batch_until_its_definition_changes() -> None:
    frames: list[RowFrame] = [rows_of("shop.a", [1]), rows_of("shop.b", [2]), rows_of("shop.a", [3, 4])]
    assert [(frame.table, frame.rows) for frame in merged(frames, ROWS_MAX)] == [("shop.a", 3), ("shop.b", 1)]
    changed: list[RowFrame] = [*frames, rows_of("shop.a", [5], 2), rows_of("shop.a", [6], 1)]
    assert [(frame.table, frame.rows) for frame in merged(changed, ROWS_MAX)] == [
        ("shop.a", 3),
        ("shop.b", 1),
        ("shop.a", 1),
        ("shop.a", 1),
    ]


@pytest.mark.parametrize("rows_max", [1, 2, 3, 5])
def test_joined_batches_stay_within_the_rows_of_a_batch(rows_max: int) -> None:
    frames: list[RowFrame] = [rows_of("shop.a", [number]) for number in range(7)]
    joined = merged(frames, rows_max)
    assert by_table(joined) == by_table(frames)
    assert max(frame.rows for frame in joined) == rows_max


class Answer:
    """An answer with the given frames, and then an error, unless it ends regularly. More of it has arrived
    after each frame in `more_after`.
    """

    def __init__(
        self, frames: list[Frame], more_after: set[int], error: type[PenstockError] = ConnectionLost
    ):
        self._frames = frames
        self._more_after = more_after
        self._error = error
        self._sent = -1

    def has_more(self) -> bool:
        return self._sent in self._more_after

    def frames(self) -> Generator[Frame, None, None]:
        for number, frame in enumerate(self._frames):
            self._sent = number
            yield frame
        if not isinstance(self._frames[-1], EndFrame):
            raise self._error("the answer breaks off")

    def cut(self) -> None:
        pass


class Publisher:
    """A publisher of one answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def __len__(self) -> int:
        return 1

    def changes(self, *_: Any) -> Answer:
        return self._answer


def position(offset: int) -> PositionFrame:
    return PositionFrame(Position(0, "binlog.000001", offset), "", "mysql:1", 0, 0)


def follow(answer: Answer) -> tuple[list[list[int]], str]:
    """Read an answer; return the ids in each batch, and where the next request starts."""
    shards = OwnedShards()
    shard = OwnedShard(0, 1, Place(START), lambda _: None)
    shards.gain(shard)
    failures: list[BaseException] = []
    intake = Intake(Publisher(answer), shards, {"batch_rows": ROWS_MAX}, 0, failures.append)  # type: ignore[arg-type]
    link = _Link(0, shards.version, 1, {0: shard}, {0: Cut(0)}, {"position": str(START)}, False, 0.0)
    with suppress(PenstockError):
        intake._read(link)
    batches = []
    while (batch := shard.take()) is not None:
        batches.append(batch.to_arrow().column("id").to_pylist())
        batch.ack()
    return batches, link.start["position"]


FRAMES: list[Frame] = [
    rows_of("shop.a", [1]),
    position(10),
    rows_of("shop.a", [2]),
    position(20),
    rows_of("shop.a", [3]),
    position(30),
]


def test_rows_that_have_arrived_already_are_delivered_together() -> None:
    apart = [[1], [2], [3]], "binlog.000001:30"
    assert follow(Answer([*FRAMES, EndFrame("wait")], set())) == apart
    assert follow(Answer([*FRAMES, EndFrame("wait")], {1})) == ([[1, 2], [3]], "binlog.000001:30")
    assert follow(Answer([*FRAMES, EndFrame("wait")], {1, 3, 5})) == ([[1, 2, 3]], "binlog.000001:30")


@pytest.mark.parametrize("error", [ConnectionLost, StatementLogged])
@pytest.mark.parametrize("more_after", [{3}, {1, 3}])
def test_whole_transactions_before_an_error_are_delivered(
    more_after: set[int], error: type[PenstockError]
) -> None:
    """The error may have arrived already when they would otherwise be delivered, and so each time."""
    batches, end = follow(Answer(FRAMES[:5], more_after, error))
    assert ([number for batch in batches for number in batch], end) == ([1, 2], "binlog.000001:20")


def test_many_rows_do_not_wait_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.client.intake._MERGED_BYTES_MAX", 1)
    assert follow(Answer([*FRAMES, EndFrame("wait")], {1, 3, 5}))[0] == [[1], [2], [3]]
