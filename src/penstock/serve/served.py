# SPDX-License-Identifier: Apache-2.0
"""What every protocol stands on: the instances that are served, and waiting for what arrives in them."""

import asyncio
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import pyarrow

from penstock.errors import SourceMissing
from penstock.logstore.log import Log
from penstock.model import Position
from penstock.serve.arrivals import Arrivals
from penstock.serve.consumers import Consumers
from penstock.serve.pieces import PieceMemory, Pieces
from penstock.serve.subscribers import Subscribers
from penstock.serve.threads import Threads

__all__ = ["Arrivals", "Served", "ServedInstance"]


class ServedInstance(Protocol):
    """An instance as a reader sees it."""

    @property
    def name(self) -> str:
        """Its name."""

    def status(self) -> Mapping[str, Any]:
        """Return how it stands, as plain JSON values; never waits."""

    def log(self) -> Log:
        """Return its log. Raises ServerBusy while it is being opened, and the reason where it cannot be."""


class Served:
    """The instances that are served, by name."""

    def __init__(
        self,
        instances: Mapping[str, ServedInstance],
        arrivals: Arrivals,
        shard_columns: Mapping[str, Mapping[str, tuple[str, ...]]] | None = None,
        canal_gtid: Collection[str] = (),
        hold_seconds: Mapping[str, float | None] | None = None,
    ) -> None:
        self.instances = dict(instances)
        self.arrivals = arrivals
        # For each instance, the shard columns of tables by pattern; other tables have their primary key.
        self.shard_columns = dict(shard_columns or {})
        # Instances whose messages of Canal carry the set of executed GTIDs.
        self.canal_gtid = frozenset(canal_gtid)

        self.subscribers = Subscribers()
        self.consumers = Consumers(lambda name: self.instance(name).log(), hold_seconds)
        self._memory = PieceMemory()
        self.threads = Threads()
        # At its first array pyarrow imports pandas, where it is installed: not while a subscriber waits.
        self.threads.decoding.submit(pyarrow.array, [0])
        self._pieces: dict[str, Pieces] = {}

    def pieces(self, name: str) -> Pieces:
        """Return an instance's changes in pieces, shared by all who follow it. Raises SourceMissing."""
        instance = self.instance(name)
        if name not in self._pieces:
            self._pieces[name] = Pieces(instance, self.arrivals, self._memory, self.threads)
        return self._pieces[name]

    def instance(self, name: str) -> ServedInstance:
        """Return an instance. Raises SourceMissing."""
        found = self.instances.get(name)
        if found is None:
            known = ", ".join(sorted(self.instances))
            raise SourceMissing(f"there is no instance {name!r}", hint=f"The instances here are: {known}")
        return found

    async def wait_behind(self, name: str, after: Position | None, seconds: float) -> Position | None:
        """Return how far whole transactions go, once that is behind `after` or the time is up.

        Without `after` it returns at once.
        """
        log = self.instance(name).log()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            with self.arrivals.waiting(name) as arrival:
                visible = log.visible
                left = deadline - loop.time()
                if after is None or left <= 0 or self.arrivals.closing:
                    return visible
                if visible is not None and visible > after:
                    return visible
                try:
                    await asyncio.wait_for(arrival.wait(), left)
                except TimeoutError:
                    return log.visible
