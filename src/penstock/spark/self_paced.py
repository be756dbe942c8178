# SPDX-License-Identifier: Apache-2.0
"""The stream reader for Spark 4.0 and 4.1, which request the end of a batch without passing its start.

When Spark resumes from a checkpoint, it first plans an empty batch at the last offset. Once Spark has
requested the end of a batch, it also plans that batch. The start of a batch is therefore the end of the last
planned batch.
"""

from collections.abc import Sequence
from typing import Any

import structlog
from pyspark.sql.datasource import InputPartition

from penstock.errors import OptionInvalid
from penstock.source.offsets import Offset
from penstock.spark.partition import EmptyPartition
from penstock.spark.stream import StreamReader

_log = structlog.get_logger(__name__)


class SelfPacedStreamReader(StreamReader):
    """Applies the limits of the options itself, without Spark's read limits. The trigger availableNow runs a
    single batch.
    """

    # The offset where the last planned batch ended, and the start and end of the batch that Spark last asked
    # for.
    _planned: dict[str, Any] | None = None
    _asked: tuple[dict[str, Any], dict[str, Any]] | None = None
    _has_warned = False

    def latestOffset(self) -> dict[str, Any]:  # type: ignore[override]  # Spark 4.0 passes nothing
        """Return the end of the next batch; see `StreamReader.end_of_batch`.

        Logs a warning the first time that a limit leaves a part of the log to a later batch.
        """
        begin = self.initialOffset() if self._planned is None else self._planned
        end = self.end_of_batch(begin, takes_all=False)
        self._asked = begin, end
        self._warn_of_remainder(end)
        return end

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan a batch. The next batch will begin where this batch ends.

        Raises OptionInvalid if Spark asked for the end of the batch before it read the checkpoint.
        """
        if self._asked is not None and end == self._asked[1] and start not in self._asked:
            raise OptionInvalid(
                "Spark asked where the stream ends before it read where the checkpoint ends",
                hint="Turn spark.sql.streaming.triggerAvailableNowWrapper.enabled off, or use Spark 4.2",
            )
        self._planned = end
        return [EmptyPartition()] if start == end else super().partitions(start, end)

    def _warn_of_remainder(self, end: dict[str, Any]) -> None:
        head = self._seen
        if self._has_warned or head is None or Offset.from_json(end).position == head.position:
            return
        self._has_warned = True
        _log.warning(
            "a limit ends this batch before the log does; with trigger availableNow, Spark below 4.2 ends the"
            " query after one batch: start it again to read on",
            batch_end=str(Offset.from_json(end).position),
            log_end=str(head.position),
        )
