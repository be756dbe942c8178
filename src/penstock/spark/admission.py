# SPDX-License-Identifier: Apache-2.0
"""The stream reader for Spark 4.2 and newer, which passes the start of each batch and a limit."""

from typing import Any

from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from penstock.spark.stream import StreamReader


class AdmissionStreamReader(StreamReader, SupportsTriggerAvailableNow):
    """Limits each batch as Spark requests. The trigger availableNow runs as many batches as these limits
    require.
    """

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit that the options set. If there are two limits, Spark gets one of them, but both
        apply.
        """
        if self._settings.bytes_max is not None:
            return ReadMaxBytes(self._settings.bytes_max)
        if self._settings.rows_max is not None:
            return ReadMaxRows(self._settings.rows_max)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """Use the current end of the log as the end of this run."""
        self._target = self._driver_log.target()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next batch; see `StreamReader.end_of_batch`."""
        return self.end_of_batch(start, takes_all=isinstance(limit, ReadAllAvailable))

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the last known end of the log, for Spark's progress reports."""
        return None if self._seen is None else self._seen.to_json()
