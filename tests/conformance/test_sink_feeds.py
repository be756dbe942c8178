# SPDX-License-Identifier: Apache-2.0
"""A feed stores every change exactly once as a row, in any target."""

import pytest

from penstock.errors import StateOutdated
from penstock.sinks.sink import BatchMark, Evolution, Sink, Spread
from tests.conformance.batches import MakeTarget, Pipe, runs_on
from tests.support.pipeline.changes_made import changes_of, delete, insert, update
from tests.support.sinks.backends import FeedRow, SinkBackend

CHANGES = (
    insert(1, id=1, name="a"),
    update(2, {"id": 1, "name": "a"}, {"id": 1, "name": "b"}, 3),
    delete(3, id=1, name="b"),
)
ROWS = [
    FeedRow(1, "a", "insert", 1, 0),
    FeedRow(1, "a", "update_preimage", 2, 3),
    FeedRow(1, "b", "update_postimage", 2, 3),
    FeedRow(1, "b", "delete", 3, 0),
]


def keeps_feeds(backend: type[SinkBackend]) -> bool:
    return backend.FEED is not None


@pytest.fixture
def feed(backend: SinkBackend) -> Sink:
    """A sink that keeps every change."""
    assert backend.FEED is not None
    return backend.sink(**backend.FEED)


@runs_on(keeps_feeds)
def test_every_change_is_a_row(backend: SinkBackend, feed: Sink, table: MakeTarget) -> None:
    # If only one process can write to a target, it has one writer.
    spread = Spread.WHOLE if feed.in_driver else Spread.RANGES
    assert (feed.spread, feed.keeps_state) == (spread, False)
    Pipe(feed).changes(table(), *CHANGES)
    assert backend.feed_rows(feed, table()) == ROWS


@runs_on(keeps_feeds)
def test_repeated_batch_of_several_parts_is_stored_once(
    backend: SinkBackend, feed: Sink, table: MakeTarget
) -> None:
    target, pipe = table(), Pipe(feed)
    parts = [changes_of(target, *CHANGES[:2])], [changes_of(target, *CHANGES[2:])]
    receipts = pipe.batch(*parts)
    feed.commit(BatchMark("conformance", "1", 1), receipts)
    assert backend.feed_rows(feed, target) == ROWS
    pipe.batch(*parts, again=True)
    assert backend.feed_rows(feed, target) == ROWS
    pipe.changes(target, insert(4, id=2, name="c"))
    assert backend.feed_rows(feed, target) == [*ROWS, FeedRow(2, "c", "insert", 4, 0)]


@runs_on(lambda backend: keeps_feeds(backend) and backend.STORES_NUMBERS)
def test_batch_before_the_last_one_is_refused(backend: SinkBackend, feed: Sink, table: MakeTarget) -> None:
    target, pipe = table(), Pipe(feed)
    for change in CHANGES:
        pipe.changes(target, change)
    outdated = Pipe(feed)
    with pytest.raises(StateOutdated, match="the target has batch 3"):
        outdated.changes(target, insert(4, id=2, name="c"))
    with pytest.raises(StateOutdated, match="the target has batch 3"):
        feed.settle_load(BatchMark("conformance", "1", 2), [target])
    assert backend.feed_rows(feed, target) == ROWS


@runs_on(keeps_feeds)
def test_repeated_batch_may_be_split_differently(backend: SinkBackend, feed: Sink, table: MakeTarget) -> None:
    target, pipe = table(), Pipe(feed)
    pipe.changes(target, *CHANGES)
    pipe.batch([changes_of(target, change) for change in CHANGES], again=True)
    assert backend.feed_rows(feed, target) == ROWS


@runs_on(lambda backend: keeps_feeds(backend) and backend.FEED_HAS_METADATA)
def test_rows_of_a_feed_carry_their_position_in_the_log(
    backend: SinkBackend, feed: Sink, table: MakeTarget
) -> None:
    target = table()
    feed.prepare(target, Evolution.EVOLVE)
    changes = changes_of(target, *CHANGES)
    Pipe(feed).batch([changes])
    wanted = sorted(row["_metadata"]["offset"] for row in changes.rows.to_pylist())
    assert wanted == [16, 32, 32, 48]
    assert sorted(row["_metadata"]["offset"] for row in backend.stored_feed(feed, target)) == wanted


@runs_on(lambda backend: keeps_feeds(backend) and backend.STORES_NUMBERS)
def test_interrupted_load_is_settled_by_the_batch_number(
    backend: SinkBackend, feed: Sink, table: MakeTarget
) -> None:
    target = table()
    first, second = (BatchMark("settled", "1", number) for number in (1, 2))
    assert feed.settle_load(first, [target]) is None, "the target does not exist"
    feed.prepare(target, Evolution.EVOLVE)
    writer = feed.open(first, 0)
    writer.write(changes_of(target, *CHANGES))
    receipt = writer.finish()
    feed.commit(first, [receipt])
    assert feed.settle_load(first, [target]) == 3
    writer = feed.open(second, 0)
    writer.write(changes_of(target, insert(4, id=2, name="c")))
    writer.abort()
    assert feed.settle_load(second, [target]) is None
    assert backend.feed_rows(feed, target) == ROWS
