# SPDX-License-Identifier: Apache-2.0
"""The code shared by the captures of a TiDB cluster and of TiCDC's output, whose logs are in commit order."""

from collections.abc import Callable

from penstock.capture.generated_capture import GeneratedCapture
from penstock.errors import OptionInvalid, ServerChanged
from penstock.logstore.log import Log
from penstock.tidb.merged_log import FLAVOR, MergedLog, begin_merged_log
from penstock.tidb.messages import LOGICAL_BITS


class MergedCapture(GeneratedCapture):
    """A capture that merges its input into a log by commit timestamp."""

    def _begin_log(self, log: Log, key: str, record_start: Callable[[], None]) -> None:
        """Begin a new log, after `record_start` has recorded the start. Raises ServerChanged for another
        source.
        """
        if log.epoch is None:
            # Record the position first. After a crash in between, the log still counts as new.
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
        return MergedLog(log, self._receiver(log, FLAVOR))
