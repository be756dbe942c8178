# SPDX-License-Identifier: Apache-2.0
"""The work of a member that copies one instance's log, from the start of the copying to its end. It needs no
lease.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import structlog

from penstock.coordinate.store import CoordinationStore
from penstock.errors import PenstockError
from penstock.fleet.copying import LogCopy
from penstock.fleet.records import CopyRecord, copy_path

_log = structlog.get_logger(__name__)


class CopyTenure:
    """A copy of a log, as work of a member; see `penstock.fleet.group.Tenure`.

    `registration` returns the member's `MemberRecord.created`, None before the member has registered.
    """

    def __init__(
        self,
        store: CoordinationStore,
        instance: str,
        member: str,
        copy: LogCopy,
        registration: Callable[[], int | None],
    ) -> None:
        """Record that the copy begins. Raises CoordinationLost."""
        self.name = instance
        self.copy = copy
        self._store = store
        self._path = copy_path(instance, member)
        self._registration = registration
        self._recorded: CopyRecord | None = None
        self._left = threading.Event()
        # Replace the record of a member that was killed: it may still claim that the copy is in step.
        begun = CopyRecord(updated_us=time.time_ns() // 1000, registration=registration())
        store.put(self._path, begun.encode())

    @property
    def is_lost(self) -> bool:
        """Always False: no other member can take over this member's copy."""
        return False

    @property
    def damage(self) -> None:
        """Always None: a damaged copy is replaced by a new one."""

    @property
    def left(self) -> bool:
        """Whether the copy has ended and its log has been released."""
        return self._left.is_set()

    def record(self) -> None:
        """Record the progress of the copy, if it has changed. Raises CoordinationLost."""
        current = replace(self.copy.record(), registration=self._registration())
        if current == self._recorded:
            return
        self._store.put(self._path, replace(current, updated_us=time.time_ns() // 1000).encode())
        self._recorded = current

    def leave(self, why: str, left: Callable[[], None]) -> None:
        """End the copy in a separate thread, and remove its record; then call `left`."""
        threading.Thread(target=self._end, args=(left,), name=f"leave-copy-{self.name}", daemon=True).start()

    def wait_left(self, seconds: float) -> bool:
        """Wait up to `seconds` for the release of the log; return whether it has been released."""
        return self._left.wait(seconds)

    def _end(self, left: Callable[[], None]) -> None:
        try:
            self.copy.stop()
            try:
                # Delete the record before `left` is set, because the next copy of this log may then write the
                # same record.
                self._store.delete(self._path)
            except PenstockError as problem:
                _log.info("the record of a copy stays", instance=self.name, why=str(problem))
        finally:
            self._left.set()
            left()
