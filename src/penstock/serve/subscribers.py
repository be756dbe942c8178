# SPDX-License-Identifier: Apache-2.0
"""Who follows the logs now, over whatever protocol, and how far each has got."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.limits import SUBSCRIBER_SHOWN_SECONDS, SUBSCRIBERS_IDLE_SHOWN_MAX
from penstock.model import Position

_Key = tuple[str, str, str, int | None, frozenset[int]]

# A longer list of shards is shown as their number.
_SHARDS_TEXT_MAX = 200


@dataclass
class Subscriber:
    """One that follows an instance, over one request after the other, or one connection.

    `rows` and `bytes` are what was sent since `since_us`, `position` what was sent last ends at. `moved`
    counts the updates that brought a row to its shards from another one.
    """

    protocol: str
    instance: str
    name: str
    shards: str
    account: str
    since_us: int
    position: Position | None = None
    rows: int = 0
    moved: int = 0
    bytes: int = 0
    requests: int = 0
    seen_us: int = 0

    def sent(self, size: int, rows: int, position: Position | None) -> None:
        """Note what was sent."""
        self.bytes += size
        self.rows += rows
        if position is not None:
            self.position = position

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
    """Everybody who follows now, or did a moment ago. Belongs to the event loop."""

    def __init__(self) -> None:
        self._known: dict[_Key, Subscriber] = {}

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
        """Show a subscriber inside the block, and for a while behind it: it may only be between requests."""
        now_us = time.time_ns() // 1000
        key = protocol, instance, name, shard_count, frozenset(shards)
        one = self._known.get(key)
        if one is None:
            self._forget(now_us)
            told = _shards_text(shard_count, shards)
            one = self._known[key] = Subscriber(protocol, instance, name, told, account, now_us)
        one.requests += 1
        one.seen_us = now_us
        try:
            yield one
        finally:
            one.requests -= 1
            one.seen_us = time.time_ns() // 1000

    def all(self) -> list[Subscriber]:
        """Return them all, in no order that means anything."""
        self._forget(time.time_ns() // 1000)
        return list(self._known.values())

    def count(self, instance: str) -> int:
        """Return how many follow an instance."""
        return sum(one.instance == instance for one in self.all())

    def _forget(self, now_us: int) -> None:
        limit = now_us - SUBSCRIBER_SHOWN_SECONDS * 1_000_000
        gone = [key for key, one in self._known.items() if not one.requests and one.seen_us < limit]
        for key in gone:
            del self._known[key]
        # Names are chosen by clients, so their number is bounded, too.
        idle = [key for key, one in self._known.items() if not one.requests]
        for key in idle[:-SUBSCRIBERS_IDLE_SHOWN_MAX]:
            del self._known[key]


def _shards_text(shard_count: int | None, shards: Sequence[int]) -> str:
    if shard_count is None:
        return ""
    text = ",".join(map(str, sorted(shards)))
    return f"{text if len(text) <= _SHARDS_TEXT_MAX else f'{len(shards)} shards'}/{shard_count}"
