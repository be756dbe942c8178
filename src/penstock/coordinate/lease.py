# SPDX-License-Identifier: Apache-2.0
"""The right to do a job, held by one at a time: a record of a session, and the number that fences its
holder.

The token is the number of the change that made the lease's record. The store never uses a number twice, so
a later holder's token is always the larger one, whatever was deleted or restarted in between. Holding a
lease is a promise that the store can break without our noticing at once (a clock, a pause of the process, a
cut network); what must not be done by two is guarded by the token where it is written: see `checkpoint`.
"""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from penstock.coordinate.store import CoordinationStore, Record, Session, reading_record
from penstock.errors import VersionConflict


@dataclass(frozen=True)
class Holder:
    """Who holds a lease, since when (microseconds UTC since 1970), and under which token."""

    name: str
    token: int
    since_us: int

    @classmethod
    def of(cls, record: Record | None) -> Self | None:
        """Read a lease's record; None where nobody holds it. Raises SchemaInvalid."""
        if record is None:
            return None
        with reading_record("the record of a lease", "End what holds it; it goes with its session"):
            found = json.loads(record.value)
            return cls(str(found["holder"]), record.created, int(found["since_us"]))


class Lease:
    """A lease that was taken. Safe for threads."""

    def __init__(self, session: Session, path: str, holder: str, token: int) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._released = False
        self.path = path
        self.holder = holder
        self.token = token

    @classmethod
    def acquire(cls, store: CoordinationStore, session: Session, path: str, holder: str) -> Self | None:
        """Take the lease at a path, or return None where another has it. `holder` is how we are shown.

        Taking what the session holds already gives the same token again. Raises CoordinationLost.
        """
        value = json.dumps({"holder": holder, "since_us": time.time_ns() // 1000}).encode()
        standing = store.get(path)
        if standing is not None and not standing.of_session:
            # Nothing but a session's record is a lease; one that stays would keep everybody out for good.
            store.delete(path, standing.version)
        try:
            return cls(session, path, holder, session.put_ephemeral(path, value))
        except VersionConflict:
            return None

    @property
    def held(self) -> bool:
        """Whether it is ours as far as can be known now.

        False after its release, when its session has ended, and as long as the store does not confirm the
        session: the store may have ended it meanwhile. It may become True again, until the session has
        ended.
        """
        return not self._released and self._session.certain

    @property
    def expired(self) -> bool:
        """Whether its session has ended."""
        return not self._session.alive

    @property
    def lost(self) -> bool:
        """Whether it is gone for good: released, or its session ended."""
        return self._released or not self._session.alive

    def on_lost(self, lost: Callable[[], None]) -> None:
        """Call this once when the session is lost before the lease was released. Must not block."""

        def tell() -> None:
            if not self._released:
                lost()

        self._session.on_lost(tell)

    def release(self) -> None:
        """Give it back; it counts as not held from the call on.

        Again after CoordinationLost, or let it expire.
        """
        with self._lock:
            self._released = True
        if self._session.alive:
            self._session.remove(self.path)

    def __repr__(self) -> str:
        return f"Lease({self.path!r}, holder={self.holder!r}, token={self.token}, held={self.held})"
