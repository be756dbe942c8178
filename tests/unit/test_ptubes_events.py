# SPDX-License-Identifier: Apache-2.0
"""The events of a session: rows by shard, commits and definitions for all shards, no consumed events."""

from dataclasses import replace
from typing import Any

import pyarrow
import pytest

from penstock.serve.ptubes.events import EventRules, Events, Skip, answer
from tests.support.ptubes.packet import RdsEnvelope, RdsEvent, shards_of

ROW, UPDATE, DDL, END, BEAT = 0, 1, 3, 5, 6

# The end of a transaction of heartbeats, which is not sent.
SILENT = (END, -2)

RULES = EventRules(shard_count=4, shards=(0, 1, 2, 3), need_end=True, need_ddl=True)

# (kind, slot, version) of each event; the event is named after its index.
_Told = list[tuple[int, int, int]]


def batch_of(event_rows: _Told) -> pyarrow.RecordBatch:
    indexes: dict[int, int] = {}
    values = []
    for number, (kind, slot, version) in enumerate(event_rows):
        indexes[version] = indexes.get(version, -1) + 1
        event = RdsEvent(sql=str(number), ddlSchemaName="shop.orders" if kind == DDL else "")
        event.header.checkpoint.binlogOffset = version * 16
        event.header.checkpoint.eventIndex = indexes[version]
        content = event.SerializeToString()
        values.append(b"" if (kind, slot) == SILENT else b"\x1a" + bytes([len(content)]) + content)
    kinds, slots, versions = zip(*event_rows, strict=True)
    return pyarrow.record_batch(
        {
            "value": pyarrow.array(values, pyarrow.large_binary()),
            "kind": pyarrow.array(kinds, pyarrow.int8()),
            "slot": pyarrow.array(slots, pyarrow.int16()),
            "commit_version": pyarrow.array(versions, pyarrow.int64()),
        }
    )


def names(events: Events, rules: EventRules = RULES, count: int = 1000, size: int = 1 << 20) -> Any:
    """Read the available events, and return the numbers of the events of each shard."""
    content = answer([events.take(count, size)], rules, None)
    envelope = shards_of(RdsEnvelope.FromString(content))
    return {shard: [int(event.sql) for event in of_shard] for shard, of_shard in envelope.items()}


def test_rows_go_to_their_shard_and_commits_to_all() -> None:
    event_rows = [(ROW, 4, 1), (UPDATE, 9, 1), (ROW, 8, 1), (END, -1, 1)]
    assert names(Events(batch_of(event_rows), RULES, None)) == {0: [0, 2, 3], 1: [1, 3], 2: [3], 3: [3]}


def test_session_receives_only_its_shards() -> None:
    event_rows = [(ROW, 4, 1), (ROW, 9, 1), (ROW, 32_766, 1), (END, -1, 1)]
    rules = replace(RULES, shards=(2,))
    assert names(Events(batch_of(event_rows), rules, None), rules) == {2: [2, 3]}
    none = replace(RULES, shards=())
    assert Events(batch_of(event_rows), none, None).left == 0


def test_unwanted_commits_and_definitions_are_omitted() -> None:
    event_rows = [(ROW, 0, 1), (END, -1, 1), (DDL, -1, 2), (ROW, 0, 3), (END, -1, 3)]
    no_ends = replace(RULES, need_end=False)
    assert names(Events(batch_of(event_rows), no_ends, None), no_ends)[0] == [0, 2, 3]
    no_ddl = replace(RULES, need_ddl=False)
    assert names(Events(batch_of(event_rows), no_ddl, None), no_ddl)[0] == [0, 1, 3, 4]
    assert names(Events(batch_of(event_rows), RULES, None))[3] == [1, 2, 4]


def test_last_of_consecutive_commits_is_sent() -> None:
    event_rows = [(ROW, 1, 1), (END, -1, 1), (ROW, 2, 2), (END, -1, 2), (ROW, 1, 3), (END, -1, 3)]
    rules = replace(RULES, shards=(1,))
    # The second transaction has no row of shard 1, so its commit covers both transactions.
    assert names(Events(batch_of(event_rows), rules, None), rules) == {1: [0, 3, 4, 5]}


def test_heartbeats_go_to_all_shards_and_their_commits_to_none() -> None:
    event_rows = [
        (ROW, 0, 1),
        (END, -1, 1),
        (BEAT, -1, 2),
        (*SILENT, 2),
        (ROW, 0, 3),
        (BEAT, -1, 3),
        (END, -1, 3),
    ]
    assert names(Events(batch_of(event_rows), RULES, None)) == {
        0: [0, 1, 2, 4, 5, 6],
        **{shard: [1, 2, 5, 6] for shard in (1, 2, 3)},
    }


def test_heartbeats_that_were_consumed_are_not_sent_again() -> None:
    event_rows = [(BEAT, -1, 2), (BEAT, -1, 2), (*SILENT, 2), (ROW, 0, 3)]
    assert names(Events(batch_of(event_rows), RULES, Skip(2, 0)))[0] == [1, 3]
    assert names(Events(batch_of(event_rows), RULES, Skip(2, 1)))[0] == [3]


@pytest.mark.parametrize(
    ("index", "left"), [(-1, [0, 1, 2, 3, 4]), (0, [1, 2, 3, 4]), (2, [3, 4]), (9, [3, 4])]
)
def test_events_up_to_the_checkpoint_are_not_sent_again(index: int, left: list[int]) -> None:
    event_rows = [(ROW, 0, 5), (ROW, 0, 5), (END, -1, 5), (ROW, 0, 6), (END, -1, 6)]
    assert names(Events(batch_of(event_rows), RULES, Skip(5, index)))[0] == left


def test_batch_is_read_in_parts_at_either_bound() -> None:
    event_rows = [(ROW, 0, 1) for _ in range(10)]
    events = Events(batch_of(event_rows), RULES, None)
    assert names(events, count=3) == {0: [0, 1, 2]}
    assert names(events, size=1) == {0: [3]}, "one event fits, however large"
    assert events.left == 6
    assert names(events, count=3, size=1 << 20) == {0: [4, 5, 6]}
    assert names(events) == {0: [7, 8, 9]}
    assert events.left == 0


def test_event_for_all_shards_counts_once_for_each() -> None:
    event_rows = [(END, -1, 1), (ROW, 0, 2), (END, -1, 2), (ROW, 0, 3)]
    events = Events(batch_of(event_rows), RULES, None)
    assert names(events, count=4) == {shard: [0] for shard in range(4)}
    assert names(events, count=5) == {0: [1, 2], 1: [2], 2: [2], 3: [2]}


def test_last_checkpoint_is_that_of_the_last_consumed_event() -> None:
    events = Events(batch_of([(ROW, 0, 7), (ROW, 1, 7), (END, -1, 7)]), RULES, None)
    taken = events.take(2, 1 << 20)
    checkpoint = RdsEvent().header.checkpoint.FromString(taken.last_checkpoint())
    assert (checkpoint.binlogOffset, checkpoint.eventIndex) == (7 * 16, 1)


def test_commit_at_the_end_is_replaced_by_an_immediately_following_commit() -> None:
    first = Events(batch_of([(ROW, 0, 1), (END, -1, 1)]), RULES, None).take(100, 1 << 20)
    shorter = first.without_last_end(len(RULES.shards))
    assert (shorter.count, first.count) == (1, 5)
    assert shorter.size == len(RdsEvent.FromString(shorter.values[0].as_py()[2:]).SerializeToString())
    content = answer([shorter], RULES, None)
    assert list(shards_of(RdsEnvelope.FromString(content))) == [0]
