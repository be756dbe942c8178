# SPDX-License-Identifier: Apache-2.0
"""The log of one source of a pipeline, as the driver plans by it."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import structlog

from penstock.engine.shared_ends import SharedEnds, Stretch
from penstock.errors import PenstockError
from penstock.limits import HOLD_AGE_SECONDS_DEFAULT, PIPELINE_HOLD_PAUSE_SECONDS
from penstock.model import TablePatterns
from penstock.pipeline.ghosts import PipelinePatterns
from penstock.pipeline.record import RangeWork
from penstock.pipeline.settings import PipelineSettings, PipelineSource
from penstock.source.asking import TRIES_WHILE_WAITING
from penstock.source.daemon import DaemonSource, Listing
from penstock.source.kept_stream_log import KeptStreamLog
from penstock.source.offsets import Offset
from penstock.source.read_settings import ENVELOPE, ReadSettings
from penstock.source.source import place_of
from penstock.source.stream_log import StreamLog, epoch_after
from penstock.source.tracking import TrackedSchemas

# One, so that a connection that is cut goes on from where it was.
_RECONNECT_TRIES_MAX = 1

_log = structlog.get_logger(__name__)


class SourceLog:
    """Plans batches of one source: offsets from listings, ranges by size. Holds a session; `close` ends
    it."""

    def __init__(
        self,
        source: PipelineSource,
        settings: PipelineSettings,
        cores: int,
        shared_ends: SharedEnds | None = None,
    ) -> None:
        self.source = source
        self._shared_ends = shared_ends
        count = len(settings.sources)
        self._settings = ReadSettings(
            # The driver retries, and reports what it waits for.
            source=replace(source.options, reconnect_tries=_RECONNECT_TRIES_MAX),
            tables=PipelinePatterns(source.tables),
            mode=ENVELOPE,
            start=source.start,
            rows_max=None if settings.batch.rows is None else max(1, settings.batch.rows // count),
            bytes_max=max(4096, settings.batch.bytes // count),
            ranges_min=max(1, cores // count),
            range_bytes=settings.batch.range_bytes,
            fail_on_data_loss=source.fail_on_data_loss,
            schemas=source.schemas,
        )
        kind = KeptStreamLog if source.options.is_kept else StreamLog
        # The driver retries, and reports what it waits for.
        self._log = kind(self._settings, TRIES_WHILE_WAITING)
        self._tracked: TrackedSchemas | None = None
        self._is_tracking = True
        # Each sink and shard holds the log by itself, so the daemon keeps it from their smallest position.
        part = (str(name) for name in (settings.sink.name, settings.shard) if name)
        self._reader = ("pipeline", settings.name, source.name, *part)
        self._hold_at = 0.0
        # The end of the log at the last planning, and the wait for a later end; any thread may use them.
        self._head: Offset | None = None
        self._arrivals: DaemonSource | None = None
        self._listing: Listing | None = None
        # The end that a later one was reported after. Planning at another daemon may not see the later one.
        self._outgrown: Offset | None = None

    def close(self) -> None:
        """End the sessions. The log can be asked again."""
        self._log.close()
        if self._arrivals is not None:
            self._arrivals.close()

    @property
    def reports_arrivals(self) -> bool:
        """Whether `wait` returns as soon as there is a new transaction."""
        return self.source.options.daemon is not None and self._head is not None

    def wait(self, seconds: float) -> bool:
        """Wait until the log has grown since `next`, for at most `seconds`. For one thread at a time.

        Return False at once if growth was reported before, and `next` did not see it: another daemon that
        lags behind answers there. Raises what asking the daemon raises.
        """
        head = self._head
        assert head is not None, "the caller asks `reports_arrivals`"
        if self._outgrown == head:
            return False
        if self._arrivals is None or self._arrivals.options.epochs != _epochs_of(head):
            options = replace(self._settings.source, epochs=_epochs_of(head))
            self._arrivals = DaemonSource(options)
        self._listing = listing = self._arrivals.wait_behind(head.position, seconds)
        self._outgrown = head if listing.has_grown else None
        return True

    def listed(self, begin: Offset) -> AbstractContextManager[None]:
        """Return a context manager in which the log may answer as of one time."""
        listing, self._listing = self._listing, None
        # Another sink may have agreed on an end that was written since.
        return self._log.listed(begin, listing) if self._shared_ends is None else nullcontext()

    def hold(self, offset: Offset) -> None:
        """Have a daemon's log keep what comes after an offset, once in a while; a failure is logged alone."""
        now = time.monotonic()
        if not isinstance(self._log, KeptStreamLog) or now < self._hold_at:
            return
        self._hold_at = now + PIPELINE_HOLD_PAUSE_SECONDS
        try:
            self._log.hold(self._reader, offset, HOLD_AGE_SECONDS_DEFAULT)
        except PenstockError as problem:
            _log.warning("a source's log is not held", source=self.source.name, why=str(problem))

    def first(self, earlier: Mapping[str, Any] | None = None) -> Offset:
        """Return where the pipeline begins in this log. `earlier` is where it stood before it was reset: what
        comes now has higher commit versions, whatever the files' numbers are."""
        first = self._log.first()
        if earlier is None or self.source.options.address is None:
            return first
        epoch = epoch_after(Offset.from_json(earlier).position)
        return replace(first, position=replace(first.position, epoch=epoch))

    def target(self) -> Offset:
        """Return the end of the log now, where a run that ends by itself is to end."""
        return self._log.target()

    def resume(self, begin: Offset) -> Offset:
        """Return where to go on from an offset; in a new epoch on another server. Raises what
        `StreamLog.resume` raises."""
        return self._log.resume(begin)

    def has(self, target: Offset, here: Offset) -> bool:
        """Return whether a target is a place in the log that an offset of `resume` belongs to."""
        return self._log.has(target, here)

    def next(self, here: Offset, until: Offset | None) -> tuple[Offset, Offset] | None:
        """Return the end of the batch that begins at an offset of `resume`, and the end of the log. Return
        None if there is nothing new. If several sinks read the log, they agree on the end."""
        log = self._log
        if self._shared_ends is not None:
            shared = self._shared_ends.stretch_from(here)
            if shared is not None and (until is None or log.up_to(shared.end, until, here) == shared.end):
                self._head = shared.head
                return shared.end, shared.head
        head = seen = self._head = log.head_behind(here)
        if until is not None:
            head = log.up_to(head, until, here)
        if place_of(head.position) <= place_of(here.position):
            return None
        stretch = Stretch(here, log.limited(here, head), seen)
        if self._shared_ends is not None:
            stretch = self._shared_ends.agree(stretch)
        return stretch.end, stretch.head

    def after_loss(self, begin: Offset) -> Offset:
        """Return where to go on without what lies between an offset that was purged and the log's end now."""
        return self._log.after_loss(begin)

    def works(self, begin: Offset, end: Offset) -> list[RangeWork]:
        """Cut a stretch into byte ranges, from a listing alone."""
        source, ranges, bounds = self._log.plan(begin, end)
        options = source.options
        start = self.source.start
        if start is not None and not isinstance(start, str) and start.time_us is not None:
            bounds = replace(bounds, time_from_us=start.time_us)
        return [
            RangeWork(self.source.name, byte_range, bounds, options.epoch, options.server_key, options.epochs)
            for byte_range in ranges
        ]

    def histories(self, works: list[RangeWork]) -> list[dict[str, Any] | None]:
        """Return the schema history in force at each range's start, None where the log names its columns."""
        if not works:
            return []
        if self._tracked is None and self._is_tracking:
            self._tracked = TrackedSchemas.open(self._tracked_settings(), works[0].byte_range.position)
            self._is_tracking = self._tracked is not None
        if self._tracked is None:
            return [None] * len(works)
        source = self._log.source(works[0].epoch, works[0].server_key or "")
        self._tracked.advance(source, [work.byte_range for work in works])
        return [self._tracked.at(work.byte_range.position) for work in works]

    def _tracked_settings(self) -> ReadSettings:
        """Return what the schema history covers: ranges that sinks share are decoded for all their tables."""
        if self._shared_ends is None:
            return self._settings
        patterns = self.source.tables
        return replace(
            self._settings,
            tables=PipelinePatterns(TablePatterns(list(patterns.include), list(patterns.exclude))),
        )


def _epochs_of(offset: Offset) -> tuple[tuple[int, str], ...]:
    return ((offset.position.epoch, offset.server_key),) if offset.server_key else ()


def around_skips(
    begin: Offset, until: Offset | None, skips: Sequence[Sequence[Mapping[str, Any]]]
) -> tuple[Offset, Offset | None]:
    """Return where to begin and to end so that nothing is read of stretches that are passed over."""
    for skip in skips:
        first, behind = (Offset.from_json(offset) for offset in skip)
        if place_of(begin.position) >= place_of(behind.position):
            continue
        if place_of(begin.position) < place_of(first.position):
            ends_before = until is not None and place_of(until.position) <= place_of(first.position)
            return begin, until if ends_before else first
        begin = behind
    return begin, until
