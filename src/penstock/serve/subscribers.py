# SPDX-License-Identifier: Apache-2.0
"""The current followers of the logs, over all protocols, and their progress."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from penstock.limits import SUBSCRIBER_SHOWN_SECONDS, SUBSCRIBERS_IDLE_SHOWN_MAX
from penstock.model import Position

SubscriberKey = tuple[str, str, str, int | None, frozenset[int]]

# `penstock tail` names itself so. It follows from one process and resumes nothing.
_TAIL = "tail/"

# A longer list of shards is replaced by their number.
_SHARDS_TEXT_MAX = 200


@dataclass
class Subscriber:
    """A follower of an instance, which uses one connection or consecutive requests.

    `rows` and `bytes` count what was sent since `since_us`. `position` and `time_us` are the end of the
    latest data. `moved` counts the updates that moved a row into the subscriber's shards from another shard.
    """

    protocol: str
    instance: str
    name: str
    shards: str
    account: str
    since_us: int
    position: Position | None = None
    time_us: int = 0
    rows: int = 0
    moved: int = 0
    bytes: int = 0
    requests: int = 0
    seen_us: int = 0

    def sent(self, size: int, rows: int, position: Position | None, time_us: int = 0) -> None:
        """Count sent data; `time_us` is the commit time of the last sent transaction, 0 if unknown."""
        self.bytes += size
        self.rows += rows
        self.time_us = time_us or self.time_us
        if position is not None:
            self.position = position

    def joined(self, other: "Subscriber") -> "Subscriber":
        """Merge the records of a subscriber whose requests two processes have served. The result has the
        later of the two positions.
        """
        latest = max(self, other, key=lambda subscriber: (subscriber.requests > 0, subscriber.seen_us))
        return replace(
            latest,
            since_us=min(self.since_us, other.since_us),
            rows=self.rows + other.rows,
            moved=self.moved + other.moved,
            bytes=self.bytes + other.bytes,
            requests=self.requests + other.requests,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "subscriber": self.name,
            "instance": self.instance,
            "protocol": self.protocol,
            "shards": self.shards or None,
            "account": self.account,
            "requests": self.requests,
            "since_us": self.since_us,
            "seen_us": self.seen_us,
            "position": None if self.position is None else str(self.position),
            "rows": self.rows,
            "moved": self.moved,
            "bytes": self.bytes,
        }


class Subscribers:
    """The current and recent followers. Belongs to the event loop."""

    def __init__(self) -> None:
        self._known: dict[SubscriberKey, Subscriber] = {}
        # The latest report of each process of the daemon that serves followers.
        self._elsewhere: dict[int, Mapping[SubscriberKey, Subscriber]] = {}

    @contextmanager
    def following(
        self,
        protocol: str,
        instance: str,
        name: str,
        *,
        account: str = "",
        shard_count: int | None = None,
        shards: Sequence[int] = (),
    ) -> Iterator[Subscriber]:
        """List a subscriber inside the block, and for a while after it, because another request may
        follow."""
        now_us = time.time_ns() // 1000
        key = protocol, instance, name, shard_count, frozenset(shards)
        subscriber = self._known.get(key)
        if subscriber is None:
            self._forget(now_us)
            shards_text = _shards_text(shard_count, shards)
            subscriber = self._known[key] = Subscriber(protocol, instance, name, shards_text, account, now_us)
        subscriber.requests += 1
        subscriber.seen_us = now_us
        try:
            yield subscriber
        except BaseException:
            # The client disconnected before the end of the response: a tail has ended.
            if name.startswith(_TAIL) and subscriber.requests == 1 and self._known.get(key) is subscriber:
                del self._known[key]
            raise
        finally:
            subscriber.requests -= 1
            subscriber.seen_us = time.time_ns() // 1000

    def all(self) -> list[Subscriber]:
        """Return all subscribers in no particular order."""
        known = self.here()
        for elsewhere in self._elsewhere.values():
            for key, subscriber in elsewhere.items():
                before = known.get(key)
                known[key] = subscriber if before is None else before.joined(subscriber)
        return list(known.values())

    def here(self) -> dict[SubscriberKey, Subscriber]:
        """Return the subscribers that this process serves."""
        self._forget(time.time_ns() // 1000)
        return dict(self._known)

    def report(self, process: int, subscribers: Mapping[SubscriberKey, Subscriber]) -> None:
        """Record the subscribers that another process serves; an empty list once the process has ended."""
        self._elsewhere[process] = subscribers
        if not subscribers:
            del self._elsewhere[process]

    def count(self, instance: str) -> int:
        """Return the number of followers of an instance."""
        return sum(subscriber.instance == instance for subscriber in self.all())

    def _forget(self, now_us: int) -> None:
        limit = now_us - SUBSCRIBER_SHOWN_SECONDS * 1_000_000
        expired = [
            key
            for key, subscriber in self._known.items()
            if not subscriber.requests and subscriber.seen_us < limit
        ]
        for key in expired:
            del self._known[key]
        # Clients choose the names, so the number of names must be bounded too.
        idle = [key for key, subscriber in self._known.items() if not subscriber.requests]
        for key in idle[:-SUBSCRIBERS_IDLE_SHOWN_MAX]:
            del self._known[key]


def _shards_text(shard_count: int | None, shards: Sequence[int]) -> str:
    if shard_count is None:
        return ""
    text = ",".join(map(str, sorted(shards)))
    return f"{text if len(text) <= _SHARDS_TEXT_MAX else f'{len(shards)} shards'}/{shard_count}"
