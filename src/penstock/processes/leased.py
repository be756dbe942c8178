# SPDX-License-Identifier: Apache-2.0
"""An instance of a fleet that is captured under a lease, in a separate process."""

from collections.abc import Mapping
from typing import Any

from penstock.logstore.followed_log import FollowedLog
from penstock.processes.lease import HeldLease
from penstock.processes.supervisor import Supervisor


class LeasedCapture:
    """The capture of one instance, from its start to its end; see `penstock.fleet.tenure.TenuredCapture`.

    The lease is None only in a daemon that belongs to no fleet.
    """

    def __init__(self, supervisor: Supervisor, name: str, lease: HeldLease | None) -> None:
        self._supervisor = supervisor
        self._instance, self._process = supervisor.add(name, lease)

    @property
    def name(self) -> str:
        """The instance's name."""
        return self._instance.name

    def start(self) -> None:
        """Start the process. Raises RuntimeError if no thread can be started."""
        self._process.start()

    def stop(self) -> None:
        """Ask the process to end. Its capture first stores what it has received, if the lease permits it."""
        self._process.stop()

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the process; return whether it has ended."""
        if not self._process.join(seconds):
            return False
        self._supervisor.remove(self._process)
        return True

    def status(self) -> Mapping[str, Any]:
        """Return the status as plain JSON values. Never waits."""
        return self._instance.status()

    def log(self) -> FollowedLog:
        """Return the log. Raises ServerBusy while it is being opened, and the error if opening failed."""
        return self._instance.log()
