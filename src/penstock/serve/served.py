# SPDX-License-Identifier: Apache-2.0
"""The code shared by all protocols: the served instances, and waiting until an instance has new data."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import pyarrow

from penstock.errors import SourceMissing
from penstock.logstore.followed_log import ServedLog
from penstock.model import Position, TablePatterns
from penstock.serve.arrivals import Arrivals
from penstock.serve.consumers import Consumers
from penstock.serve.limited import Limits
from penstock.serve.pieces import PieceMemory, Pieces
from penstock.serve.subscribers import Subscribers
from penstock.serve.threads import Threads

__all__ = ["Arrivals", "Served", "ServedInstance"]


class ServedInstance(Protocol):
    """An instance as seen by a reader."""

    @property
    def name(self) -> str:
        """Its name."""

    def status(self) -> Mapping[str, Any]:
        """Return the instance's status as plain JSON values, without waiting."""

    def log(self) -> ServedLog:
        """Return the instance's log. Raises ServerBusy while it is being opened, or the error that prevents
        it.
        """


class Served:
    """The served instances by name."""

    def __init__(
        self,
        instances: Mapping[str, ServedInstance],
        arrivals: Arrivals,
        shard_columns: Mapping[str, Mapping[str, tuple[str, ...]]] | None = None,
        canal_gtid: Collection[str] = (),
        hold_seconds: Mapping[str, float | None] | None = None,
        canal_filters: Mapping[str, TablePatterns] | None = None,
        canal_limits: Mapping[str, Limits] | None = None,
        is_here: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """`is_here` returns whether this process has an instance's log, rather than another member of its
        fleet.
        """
        self.arrivals = arrivals
        self.is_here = is_here
        self.subscribers = Subscribers()
        self.consumers = Consumers(lambda name: self.instance(name).log())
        self.configure(instances, shard_columns, canal_gtid, hold_seconds, canal_filters, canal_limits)
        self._memory = PieceMemory()
        self.threads = Threads()
        # pyarrow imports pandas, if it is installed, for the first array. Let it do that now, not while a
        # subscriber waits.
        self.threads.decoding.submit(pyarrow.array, [0])
        self._pieces: dict[str, Pieces] = {}

    def configure(
        self,
        instances: Mapping[str, ServedInstance],
        shard_columns: Mapping[str, Mapping[str, tuple[str, ...]]] | None = None,
        canal_gtid: Collection[str] = (),
        hold_seconds: Mapping[str, float | None] | None = None,
        canal_filters: Mapping[str, TablePatterns] | None = None,
        canal_limits: Mapping[str, Limits] | None = None,
    ) -> None:
        """Serve these instances. Any thread may call it again; running requests are not affected."""
        self.instances = dict(instances)
        # Shard columns per instance and table pattern. Other tables use their primary key.
        self.shard_columns = dict(shard_columns or {})
        # Instances whose Canal messages include the set of executed GTIDs.
        self.canal_gtid = frozenset(canal_gtid)
        # The tables by instance, for the instances whose own filters limit Canal clients.
        self.canal_filters = dict(canal_filters or {})
        # The visible rows and columns of Canal's entries.
        self.canal_limits = dict(canal_limits or {})
        self.consumers.hold_seconds = dict(hold_seconds or {})

    def pieces(self, name: str) -> Pieces:
        """Return an instance's pieces, shared by all its followers. Raises SourceMissing."""
        instance = self.instance(name)
        pieces = self._pieces.get(name)
        if pieces is None or pieces.instance is not instance:
            self._memory.forget(name)
            pieces = self._pieces[name] = Pieces(instance, self.arrivals, self._memory, self.threads)
        return pieces

    def instance(self, name: str) -> ServedInstance:
        """Return an instance. Raises SourceMissing."""
        instance = self.instances.get(name)
        if instance is None:
            known = ", ".join(sorted(self.instances))
            raise SourceMissing(f"there is no instance {name!r}", hint=f"The instances here are: {known}")
        return instance

    async def wait_behind(
        self, name: str, after: Position | None, seconds: float, log: ServedLog | None = None
    ) -> Position | None:
        """Wait until the end of the last whole transaction is past `after`, or until the timeout expires;
        return that end.

        Without `after`, return at once. If `log` is given, it is used instead of the log that readers see.
        """
        log = log or self.instance(name).log()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            with self.arrivals.waiting(name) as arrival:
                visible = log.visible
                remaining = deadline - loop.time()
                if after is None or remaining <= 0 or self.arrivals.closing:
                    return visible
                if visible is not None and visible > after:
                    return visible
                try:
                    async with asyncio.timeout(remaining):
                        await arrival.wait()
                except TimeoutError:
                    return log.visible
