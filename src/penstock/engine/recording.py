# SPDX-License-Identifier: Apache-2.0
"""Determines when a run records the batches that it begins and completes.

A batch is recorded before it runs, so that a replay covers the same changes under the same number, and again
when it is done. A sink that `can_rewind` needs neither record, because a replay may begin at any earlier
position. For such a sink, processing a small batch at the head of a log takes less time than two durable
writes, so the ends of several batches are recorded together. A batch is always recorded immediately if it
belongs to a load, if any of its rows were rejected, or if it had to be repeated because of a surprise.
"""

import time

from penstock.pipeline.record import BatchRecord
from penstock.pipeline.state import Checkpoint, PipelineState
from penstock.sinks.sink import Sink

# How many seconds of log, at most, a replay after a crash may write to the target again.
_UNRECORDED_SECONDS_MAX = 0.1


class Recording:
    """Records the batches of one attempt of a run. The methods raise LeaseLost and CoordinationLost."""

    def __init__(self, state: PipelineState, sink: Sink) -> None:
        self._state = state
        self._can_rewind = sink.can_rewind
        self._recorded_at = 0.0
        self._confirmed_at = 0.0
        # Whether there are completed batches that the state does not have yet.
        self.is_behind = False

    def begin(self, record: BatchRecord, checkpoint: Checkpoint) -> None:
        """Record a batch before it runs, if a replay must be the same batch."""
        if self._can_rewind and not record.chunks:
            return
        # A begun batch must have the number after the recorded checkpoint's number, so record the latest
        # checkpoint first.
        self.settle(checkpoint)
        self._state.begin(record)

    def end(self, record: BatchRecord, checkpoint: Checkpoint, *, is_plain: bool) -> bool:
        """Record that a batch is done, now or together with later batches. Return whether it has been
        recorded.

        A plain batch contains only rows of known tables, none of which was rejected.
        """
        is_due = time.monotonic() >= self._recorded_at + _UNRECORDED_SECONDS_MAX
        self.is_behind = True
        if self._can_rewind and is_plain and not record.chunks and not is_due:
            return False
        self.settle(checkpoint)
        return True

    def settle(self, checkpoint: Checkpoint) -> None:
        """Record the run's latest checkpoint, unless the state already has it."""
        if self.is_behind:
            self._state.write(checkpoint)
            self.is_behind = False
            self._recorded_at = time.monotonic()

    def confirm(self) -> None:
        """Check before tasks write that this process still owns the pipeline. While it was suspended, another
        may have taken over.

        For a sink that `can_rewind`, a check or a record of a moment ago is sufficient.
        """
        checked_at = max(self._recorded_at, self._confirmed_at)
        if not self._can_rewind or time.monotonic() >= checked_at + _UNRECORDED_SECONDS_MAX:
            self._state.confirm()
            self._confirmed_at = time.monotonic()
