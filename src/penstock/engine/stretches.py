# SPDX-License-Identifier: Apache-2.0
"""Determines how far the next batch extends in the log of each source."""

from collections.abc import Mapping

import structlog

from penstock.engine.loading import Loading
from penstock.engine.progress import Progress
from penstock.engine.source_log import SourceLog, around_skips
from penstock.pipeline.record import RangeWork
from penstock.pipeline.shard_records import ShardRecords
from penstock.pipeline.state import Checkpoint
from penstock.source.offsets import Offset

_log = structlog.get_logger(__name__)


class Stretches:
    """The stretches of the logs that a run reads next, through all restarts of the run.

    With `until_caught_up`, the run reads each log up to the end that it had when the loads finished. With
    `to_barrier` as well, it reads up to the barrier of the pipeline's shards. All other runs ignore barriers,
    which may be left over from an interrupted change of the number of shards.
    """

    def __init__(self, progress: Progress, *, until_caught_up: bool, to_barrier: bool) -> None:
        self._progress = progress
        self._until_caught_up = until_caught_up
        self._to_barrier = to_barrier
        self._logs: Mapping[str, SourceLog] = {}
        self._loading: Loading | None = None
        self._targets: dict[str, Offset] | None = None

    def open(self, logs: Mapping[str, SourceLog], loading: Loading, shards: ShardRecords) -> None:
        """Set the logs, the loads and the barrier that this attempt of the run uses. Raises
        CoordinationLost.
        """
        self._logs, self._loading = logs, loading
        barrier = shards.barrier() if self._to_barrier else None
        if barrier is not None:
            # Shards receive a barrier only after all of their tables are loaded.
            self._targets = {name: Offset.from_json(offset) for name, offset in barrier.items()}

    def next(self, checkpoint: Checkpoint, name: str) -> tuple[Offset, Offset, list[RangeWork]] | None:
        """Return the start, the end and the ranges of a source's next stretch, or None if nothing is new.

        Raises PositionPurged, or any error from reading the log.
        """
        target = self._until(name, checkpoint)
        skips = checkpoint.skips.get(name, ())
        begin, until = around_skips(Offset.from_json(checkpoint.offsets[name]), target, skips)
        log = self._logs[name]
        if until is None and (arrived := log.arrived(begin)) is not None:
            if arrived.work is None:
                return None
            self._progress.seen(name, arrived.end, arrived.end)
            return begin, arrived.end, [arrived.work]
        with log.listed(begin):
            here = log.resume(begin)
            if target is not None and self._targets is not None and not log.has(target, here):
                # A different server answers. Its positions cannot be compared with the target, so choose a
                # new target.
                target = self._targets[name] = log.target()
                _log.warning("the run now ends at another server's log", source=name, target=str(target))
                _, until = around_skips(begin, target, skips)
            ends = log.next(here, until)
            if ends is None:
                return None
            end, head = ends
            self._progress.seen(name, end, head)
            works = log.works(here, end)
            log.note_planned(end, head, works)
            return here, end, works

    def is_caught_up(self, checkpoint: Checkpoint) -> bool:
        """Return whether a run that stops once caught up may end. The caller has checked that there are no
        new changes.
        """
        return self._targets is not None and not self._is_loading(checkpoint)

    def _until(self, name: str, checkpoint: Checkpoint) -> Offset | None:
        """Return the position where this run ends in a source; None if there is none yet."""
        if not self._until_caught_up:
            return None
        if self._targets is None:
            if self._is_loading(checkpoint):
                return None
            # The rows of a load are consistent only together with the changes made during the load.
            self._targets = {source: log.target() for source, log in self._logs.items()}
        if name not in self._targets:
            # The source was set aside until now, so it has no end position yet.
            self._targets[name] = self._logs[name].target()
        return self._targets[name]

    def _is_loading(self, checkpoint: Checkpoint) -> bool:
        assert self._loading is not None, "the run opens its stretches first"
        return self._loading.is_loading(checkpoint) or self._loading.is_asked(checkpoint)
