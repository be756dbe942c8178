# SPDX-License-Identifier: Apache-2.0
"""An instance with `log.serve: durable`: readers get a byte once `log.copies` members have synced it.

    append ─▶ sync here ─────────────────────────┐
         └──▶ a copy receives, syncs, confirms ──┴─▶ the end that `log.copies` members have ─▶ readers

A member that takes over the log continues at the end of its own copy, which contains everything that readers
have received. A failover therefore cannot remove a change that a reader has already received. There is one
exception: a copy that replaces another copy may lag behind the position that the replaced copy confirmed,
until it has caught up.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import PenstockError, ServerBusy
from penstock.logstore.confirmed_log import ConfirmedLog
from penstock.logstore.followed_log import ServedLog
from penstock.logstore.log import Log
from penstock.model import Position
from penstock.serve.served import ServedInstance


class DurableInstance:
    """Serves an instance of this process, but only the part of its log that `copies` members have synced; see
    `ServedInstance`.

    `arrived` is called with the instance's name when readers may see more of the log. Thread-safe.
    """

    def __init__(self, instance: ServedInstance, copies: int, arrived: Callable[[str], None]) -> None:
        self._instance = instance
        self._copies = copies
        self._arrived = arrived
        self._lock = threading.RLock()
        self._view: ConfirmedLog | None = None
        # The positions up to which other members have synced the log that is open now.
        self._synced: dict[str, Position] = {}
        # The end up to which readers have been able to read, here or at the member that captured before.
        self._confirmed: Position | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return self._instance.name

    def log(self) -> ServedLog:
        """Return the instance's log up to the confirmed end.

        Raises ServerBusy while nothing is confirmed, and propagates errors from the instance's own log.
        """
        view = self._view_of(self.stored_log())
        view.follow()
        if view.visible is None and view.stored.visible is not None:
            raise ServerBusy(
                f"nothing of {self.name} is confirmed yet: {self._why(view.stored)}",
                hint="See the copies: penstock fleet status",
            )
        return view

    def stored_log(self) -> Log:
        """Return the log with everything that is stored, for members that copy it. Propagates errors from
        `log`.
        """
        log = self._instance.log()
        assert isinstance(log, Log), "this process writes the log"
        return log

    def status(self) -> Mapping[str, Any]:
        """Return the instance's status with the end that readers see, and what holds that end back. Never
        waits.
        """
        status = dict(self._instance.status())
        try:
            stored = self.stored_log()
        except PenstockError:
            # There is no log, and the status already says why.
            return status
        view = self._view_of(stored)
        view.follow()
        end = view.visible
        unconfirmed = (stored.visible and end and stored.bytes_behind(end)) or 0
        is_waiting = end is None or unconfirmed > 0
        return {
            **status,
            "readable": None if end is None else str(end),
            "unconfirmed_bytes": unconfirmed,
            "why": status.get("why") or (self._why(stored) if is_waiting else None),
        }

    def confirm(self, member: str, synced: Position) -> None:
        """Record that a member has durably stored everything up to a position.

        Propagates errors from the instance's own log.
        """
        log = self.stored_log()
        with self._lock:
            self._view_of(log)
            self._synced[member] = synced
        self._advance()

    def readable_end(self) -> Position | None:
        """Return the end up to which readers can read now, None if there is none."""
        with self._lock:
            return None if self._view is None else self._view.visible

    def note_readable(self, position: Position) -> None:
        """Record what readers have seen at the capturing member, in case this member continues its log."""
        with self._lock:
            self._confirmed = max(filter(None, (self._confirmed, position)))

    # --- Inside -----------------------------------------------------------------------------

    def _view_of(self, log: Log) -> ConfirmedLog:
        with self._lock:
            if self._view is None or self._view.stored is not log:
                # Positions confirmed for another log do not apply: its data may have been lost since.
                self._synced.clear()
                self._view = ConfirmedLog(log, lambda: self._end_of(log))
                log.on_durable = self._advance
            return self._view

    def _advance(self) -> None:
        with self._lock:
            view = self._view
        if view is None:
            return
        before = view.visible
        view.follow()
        if view.visible != before:
            self._arrived(self.name)

    def _end_of(self, log: Log) -> Position | None:
        """Return the end up to which readers may read. It never moves backward within the same log."""
        own = log.durable
        if own is None:
            return None
        with self._lock:
            ends = sorted([own, *self._synced.values()], reverse=True)
            confirmed = ends[self._copies - 1] if len(ends) >= self._copies else None
            self._confirmed = max(filter(None, (self._confirmed, confirmed)), default=None)
            return None if self._confirmed is None else min(self._confirmed, own)

    def _why(self, log: Log) -> str | None:
        """Return why readers do not see everything that is stored."""
        if self._copies == 1:
            return None
        with self._lock:
            synced = sorted(self._synced.items())
        copies = [f"{member} is {log.bytes_behind(position)} bytes behind" for member, position in synced]
        needed = f"readers wait until {self._copies} members have synced the log"
        return "; ".join([needed, *(copies or ["no copy has confirmed anything"])])


def stored_log_of(instance: ServedInstance) -> ServedLog:
    """Return an instance's log with everything that is stored. Propagates errors from the instance's
    `log`.
    """
    return instance.stored_log() if isinstance(instance, DurableInstance) else instance.log()
