# SPDX-License-Identifier: Apache-2.0
"""The lease for capturing an instance that several hosts share, and the position recorded by the host that
captured it last.
"""

from dataclasses import dataclass
from typing import Protocol

from penstock.gtid_sets import LoggedSet
from penstock.logstore.log import Log
from penstock.model import Position


@dataclass(frozen=True)
class Handover:
    """The position where another host's log continues when the last host's log is unavailable.

    `position` is a transaction boundary in the log of the server `server_key`, with the epoch number that all
    hosts agree on. Every known reader has consumed the log up to `position`. `gtid_set` contains the
    transactions before it. `time_us` is the time of a commit at or before it (microseconds since 1970, UTC; 0
    if unknown). `fingerprint` identifies its file ("" if unknown). `reached` is the end of the last host's
    log.
    """

    position: Position
    server_key: str
    gtid_set: LoggedSet
    time_us: int
    fingerprint: str
    reached: Position


class CaptureLease(Protocol):
    """A lease under which only this process captures an instance. Thread-safe."""

    def pause_reason(self) -> str | None:
        """Return why the log must not be written at the moment, None if it may be.

        Raises LeaseLost once the lease is permanently lost.
        """

    def handover(self) -> Handover | None:
        """Return the capture's last recorded position, None if capture has never begun."""

    def begin_epoch(self, beginning: Handover) -> None:
        """Agree with all hosts on the number of a new epoch, before any log records it.

        Raises LeaseLost, CoordinationLost.
        """

    def log_opened(self, log: Log) -> None:
        """Prepare a newly opened log before readers can see it."""
