# SPDX-License-Identifier: Apache-2.0
"""The lease to capture an instance that several hosts share, and the position that the last host recorded."""

from dataclasses import dataclass
from typing import Protocol

from penstock.gtid_sets import LoggedSet
from penstock.logstore.log import Log
from penstock.model import Position


@dataclass(frozen=True)
class Handover:
    """Where the log of another host continues when the log of the last host is unavailable.

    `position` is a transaction boundary in the log of the server `server_key`, in the epoch number that all
    hosts agree on. Every known reader has consumed what precedes it. `gtid_set` has the transactions before
    it, `time_us` is the time of a commit at or before it (microseconds UTC since 1970, 0 if unknown), and
    `fingerprint` identifies its file ("" if unknown). `reached` is the end of the last host's log.
    """

    position: Position
    server_key: str
    gtid_set: LoggedSet
    time_us: int
    fingerprint: str
    reached: Position


class CaptureLease(Protocol):
    """A lease that lets this process alone capture an instance. Thread-safe."""

    def pause_reason(self) -> str | None:
        """Return why nothing may be stored at the moment, None if it may.

        Raises LeaseLost once the lease is permanently lost.
        """

    def handover(self) -> Handover | None:
        """Return the last recorded position of the capture, None if it has never begun."""

    def begin_epoch(self, beginning: Handover) -> None:
        """Agree on the number of a new epoch with all hosts, before any log has it.

        Raises LeaseLost, CoordinationLost.
        """

    def log_opened(self, log: Log) -> None:
        """Prepare a log that was opened, before readers can see it."""
