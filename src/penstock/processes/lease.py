# SPDX-License-Identifier: Apache-2.0
"""Holds the lease of an instance in the daemon, on behalf of the process that captures the instance.

The daemon reports the time until which the store cannot end the lease. The process stores nothing after that
time, even if the daemon is frozen or gone, because both read the same monotonic clock. When the process ends,
the daemon keeps the lease and starts the process again.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

from penstock.capture.lease import Handover
from penstock.logstore.disk import Disk
from penstock.logstore.layout import Layout
from penstock.logstore.log import Log


class HeldLease(Protocol):
    """The daemon's side of a lease. Thread-safe; see `penstock.capture.lease.CaptureLease`."""

    @property
    def permitted_until(self) -> float:
        """The time until which received bytes may be stored, in monotonic seconds of this host; -inf if they
        may not be stored now.
        """

    def handover(self) -> Handover | None:
        """Return the last recorded position of the capture."""

    def begin_epoch(self, beginning: Handover) -> None:
        """Agree on the number of a new epoch."""

    def adopt_holds(self, disk: Disk, layout: Layout, *, has_epoch: bool) -> None:
        """Write the holds of the last host into a log that was opened."""


class PermittedLease:
    """The capture process's side of a lease; see `penstock.capture.lease.CaptureLease`.

    `call` calls a method of the daemon's `HeldLease`, and raises CoordinationLost if there is no answer.
    """

    def __init__(self, instance: str, permitted_until: float, call: Callable[..., Any]) -> None:
        self._instance = instance
        self._permitted_until = permitted_until
        self._call = call

    def permit(self, until: float) -> None:
        """Record the time until which bytes may be stored."""
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
        """Return the last recorded position of the capture."""
        handover: Handover | None = self._call("handover")
        return handover

    def begin_epoch(self, beginning: Handover) -> None:
        """Agree on the number of a new epoch."""
        self._call("begin_epoch", beginning)

    def log_opened(self, log: Log) -> None:
        """Have the daemon write the holds of the last host into the log, before readers see it."""
        self._call("adopt_holds", log.epoch is not None)
