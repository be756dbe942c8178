# SPDX-License-Identifier: Apache-2.0
"""The lease of an instance that a capture process captures: the daemon holds it, the process counts on it.

The daemon reports until when the store cannot end the lease. The process stores nothing after that time, also
if the daemon is frozen or gone, because both read the same monotonic clock. Nothing is given away when the
process ends: the daemon keeps the lease and starts the process again.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

from penstock.capture.lease import Handover
from penstock.logstore.disk import Disk
from penstock.logstore.layout import Layout
from penstock.logstore.log import Log


class HeldLease(Protocol):
    """A lease as the daemon holds it. Thread-safe; see `penstock.capture.lease.CaptureLease`."""

    @property
    def permitted_until(self) -> float:
        """Until when received bytes may be stored, in monotonic seconds of this host; -inf if not now."""

    def handover(self) -> Handover | None:
        """Return where the capture was when it was last recorded."""

    def begin_epoch(self, beginning: Handover) -> None:
        """Agree on the number of a new epoch."""

    def adopt_holds(self, disk: Disk, layout: Layout, *, has_epoch: bool) -> None:
        """Give a log that was opened the holds of the last host."""


class PermittedLease:
    """A lease as its capture process counts on it; see `penstock.capture.lease.CaptureLease`.

    `call` calls a function of the daemon's `HeldLease`, and raises CoordinationLost without an answer.
    """

    def __init__(self, instance: str, permitted_until: float, call: Callable[..., Any]) -> None:
        self._instance = instance
        self._permitted_until = permitted_until
        self._call = call

    def permit(self, until: float) -> None:
        """Note until when bytes may be stored."""
        self._permitted_until = until

    def pause_reason(self) -> str | None:
        """Return why nothing may be stored at the moment."""
        if time.monotonic() < self._permitted_until:
            return None
        unconfirmed = f"the lease to capture {self._instance}"
        if self._permitted_until == float("-inf"):
            return f"the coordination store does not confirm {unconfirmed}"
        return f"the daemon has not confirmed {unconfirmed} in time"

    def handover(self) -> Handover | None:
        """Return where the capture was when it was last recorded."""
        handover: Handover | None = self._call("handover")
        return handover

    def begin_epoch(self, beginning: Handover) -> None:
        """Agree on the number of a new epoch."""
        self._call("begin_epoch", beginning)

    def log_opened(self, log: Log) -> None:
        """Have the daemon give the log the holds of the last host, before readers have it."""
        self._call("adopt_holds", log.epoch is not None)
