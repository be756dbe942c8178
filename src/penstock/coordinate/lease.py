# SPDX-License-Identifier: Apache-2.0
"""A lease: the exclusive right to a job, as an ephemeral record of a session, with a fencing token.

The token is the number of the change that created the lease's record. The store never reuses a number, so a
later holder's token is always larger, even after deletions and restarts. A process may not notice at once
that its lease has ended (clock skew, a paused process, a network partition). Every write that requires the
lease therefore carries the token, and is rejected if the record already has a later token: see `checkpoint`.
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
    """The holder of a lease: its name, its token, and when it acquired the lease (microseconds since 1970,
    UTC).
    """

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
    """A lease that this process has acquired. Thread-safe."""

    def __init__(self, session: Session, path: str, holder: str, token: int) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._released = False
        self.path = path
        self.holder = holder
        self.token = token

    @classmethod
    def acquire(cls, store: CoordinationStore, session: Session, path: str, holder: str) -> Self | None:
        """Acquire the lease at a path, or return None if another session has it. `holder` is the display name
        of the new holder.

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
        """Whether this process is known to hold the lease.

        False after its release, after the end of its session, and while the store does not confirm the
        session, because the store may have ended it. In that last case it may become true again.
        """
        return not self._released and self._session.certain

    @property
    def held_until(self) -> float:
        """The time until which no other process can have the lease, in monotonic seconds of this host; -inf
        if the lease is not held.
        """
        return float("-inf") if self._released else self._session.certain_until

    @property
    def expired(self) -> bool:
        """Whether the lease's session has ended."""
        return not self._session.alive

    @property
    def lost(self) -> bool:
        """Whether the lease is permanently lost: it was released, or its session ended."""
        return self._released or not self._session.alive

    def on_lost(self, lost: Callable[[], None]) -> None:
        """Register a callback for the loss of the session before the release. The callback must not block."""

        def notify() -> None:
            if not self._released:
                lost()

        self._session.on_lost(notify)

    def release(self) -> None:
        """Release the lease; it counts as not held from the start of the call.

        After CoordinationLost, release it again or let it expire.
        """
        with self._lock:
            self._released = True
        if self._session.alive:
            self._session.remove(self.path)

    def __repr__(self) -> str:
        return f"Lease({self.path!r}, holder={self.holder!r}, token={self.token}, held={self.held})"
