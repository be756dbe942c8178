# SPDX-License-Identifier: Apache-2.0
"""A lease: the exclusive right to a job, as an ephemeral record of a session, with a fencing token.

The token is the number of the change that created the lease's record. The store never reuses a number, so a
later holder's token is always larger, even after deletions and restarts. A lease can end without our noticing
at once (clock skew, a paused process, a network partition). So exclusive writes are guarded by the token
where they are written: see `checkpoint`.
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
    """The holder of a lease, since when (microseconds UTC since 1970), and its token."""

    name: str
    token: int
    since_us: int

    @classmethod
    def of(cls, record: Record | None) -> Self | None:
        """Read a lease's record; None if nobody holds it. Raises SchemaInvalid."""
        if record is None:
            return None
        with reading_record("the record of a lease", "End what holds it; it goes with its session"):
            values = json.loads(record.value)
            return cls(str(values["holder"]), record.created, int(values["since_us"]))


class Lease:
    """A lease that was acquired. Thread-safe."""

    def __init__(self, session: Session, path: str, holder: str, token: int) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._released = False
        self.path = path
        self.holder = holder
        self.token = token

    @classmethod
    def acquire(cls, store: CoordinationStore, session: Session, path: str, holder: str) -> Self | None:
        """Acquire the lease at a path, or return None if another session has it. `holder` is our display
        name.

        Acquiring a lease that the session already holds returns the same token. Raises CoordinationLost.
        """
        value = json.dumps({"holder": holder, "since_us": time.time_ns() // 1000}).encode()
        existing = store.get(path)
        if existing is not None and not existing.of_session:
            # Only an ephemeral record is a lease. A permanent record would lock everybody out forever.
            store.delete(path, existing.version)
        try:
            return cls(session, path, holder, session.put_ephemeral(path, value))
        except VersionConflict:
            return None

    @property
    def held(self) -> bool:
        """Whether the lease is ours, as far as is known now.

        False after its release, after the end of its session, and while the store does not confirm the
        session, because the store may have ended it. It may become true again until the session has ended.
        """
        return not self._released and self._session.certain

    @property
    def held_until(self) -> float:
        """Until when nobody else can have it, in monotonic seconds of this host; -inf if it is not held."""
        return float("-inf") if self._released else self._session.certain_until

    @property
    def expired(self) -> bool:
        """Whether its session has ended."""
        return not self._session.alive

    @property
    def lost(self) -> bool:
        """Whether the lease is lost for good: it was released, or its session ended."""
        return self._released or not self._session.alive

    def on_lost(self, lost: Callable[[], None]) -> None:
        """Register a callback for the loss of the session before the release. It must not block."""

        def notify() -> None:
            if not self._released:
                lost()

        self._session.on_lost(notify)

    def release(self) -> None:
        """Release the lease; it counts as not held from the call on.

        After CoordinationLost, release it again or let it expire.
        """
        with self._lock:
            self._released = True
        if self._session.alive:
            self._session.remove(self.path)

    def __repr__(self) -> str:
        return f"Lease({self.path!r}, holder={self.holder!r}, token={self.token}, held={self.held})"
