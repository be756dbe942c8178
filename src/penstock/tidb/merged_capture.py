# SPDX-License-Identifier: Apache-2.0
"""What the captures of a TiDB cluster and of TiCDC's output have in common: both generate the log's bytes."""

from collections.abc import Callable
from dataclasses import replace

from penstock.capture.generated_log import EPOCH, SERVER_ID
from penstock.capture.receive import Receiver
from penstock.capture.run import Capture
from penstock.capture.status import CaptureStatus, State
from penstock.errors import OptionInvalid, ServerChanged
from penstock.limits import CAPTURE_CHUNK_BYTES
from penstock.logstore.log import Log
from penstock.tidb.merged_log import FLAVOR, MergedLog, begin_merged_log
from penstock.tidb.messages import LOGICAL_BITS


class MergedCapture(Capture):
    """A capture whose log is merged by commit timestamp."""

    def snapshot(self) -> CaptureStatus:
        """Return the state of the capture. Never waits."""
        return replace(super().snapshot(), server=self._settings.source)

    # --- The thread -------------------------------------------------------------------------

    def _connecting_log(self) -> Log:
        """Return the opened log, and show that its source is read."""
        log = self._opened_log()
        self._set_state(State.CONNECTING, f"reading {self._settings.source}")
        return log

    def _begin_log(self, log: Log, key: str, record_start: Callable[[], None]) -> None:
        """Begin a new log, after `record_start` recorded where. Raises ServerChanged for another source."""
        if log.epoch is None:
            # First the position: after a crash in between, the log is still new.
            record_start()
            begin_merged_log(log, key)
        elif log.epoch.server_key != key:
            raise ServerChanged(
                f"{log.folder} is the log of {log.epoch.server_key}, and {self._settings.source} is {key}",
                hint="Correct source, or use another log folder for another source",
            )

    def _start_ts(self, newest: Callable[[], int]) -> int:
        """Return the commit timestamp after which a new log starts: by default the `newest` of the source."""
        start = self._start_at
        if start.earliest:
            return 0
        if start.commit_ts is not None:
            return start.commit_ts
        if start.time_us is not None:
            return start.time_us // 1000 << LOGICAL_BITS
        if start.position is not None or start.gtid_set is not None:
            raise OptionInvalid(
                f"{self._settings.source} has no such position",
                hint="start: earliest, latest, a time, or commit_ts:N",
            )
        return newest()

    def _merged_log(self, log: Log) -> MergedLog:
        """Return the log for appending."""
        receiver = Receiver(
            log,
            self._progress,
            self._stopping,
            epoch=EPOCH,
            server_id=SERVER_ID,
            flavor=FLAVOR,
            chunk_bytes=CAPTURE_CHUNK_BYTES,
            schemas=None,
            hold=self._hold,
            arrived=self._handle_arrival,
        )
        return MergedLog(log, receiver)
