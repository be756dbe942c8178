# SPDX-License-Identifier: Apache-2.0
"""Plans what a pipeline reads from the log of one source."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import structlog

from penstock.engine.shared_ends import SharedEnds, Stretch
from penstock.errors import PenstockError
from penstock.limits import HOLD_AGE_SECONDS_DEFAULT, PIPELINE_HOLD_PAUSE_SECONDS
from penstock.model import TablePatterns
from penstock.pipeline.ghosts import PipelinePatterns
from penstock.pipeline.record import RangeWork
from penstock.pipeline.settings import PipelineSettings, PipelineSource
from penstock.source.asking import TRIES_WHILE_WAITING
from penstock.source.offsets import Offset
from penstock.source.read_settings import ENVELOPE, ReadSettings
from penstock.source.source import place_of
from penstock.source.stream_log import StreamLog, epoch_after
from penstock.source.tracking import TrackedSchemas

if TYPE_CHECKING:
    from penstock.engine.head_follower import ArrivedStretch, HeadFollower
    from penstock.source.daemon import DaemonSource, Listing

# Only one attempt, because reading must continue where a lost connection ended.
_RECONNECT_TRIES_MAX = 1

_log = structlog.get_logger(__name__)


class SourceLog:
    """Plans the batches of one source: takes offsets from listings and splits ranges by size. Holds a session
    until `close`.
    """

    def __init__(
        self,
        source: PipelineSource,
        settings: PipelineSettings,
        cores: int,
        shared_ends: SharedEnds | None = None,
        *,
        follows_head: bool = False,
    ) -> None:
        self.source = source
        self._shared_ends = shared_ends
        count = len(settings.sources)
        self._settings = ReadSettings(
            # The driver does the retries and reports the errors.
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
        self._log = _opened_log(self._settings)
        self._tracked: TrackedSchemas | None = None
        self._is_tracking = True
        # Each sink and shard registers a separate hold on the log, so the daemon keeps the log from the
        # lowest position.
        part = (str(name) for name in (settings.sink.name, settings.shard) if name)
        self._reader = ("pipeline", settings.name, source.name, *part)
        self._hold_at = 0.0
        # The end of the log when a batch was last planned, and the source that waits for growth beyond that
        # end. Any thread may use them.
        self._head: Offset | None = None
        self._arrivals: DaemonSource | None = None
        self._listing: Listing | None = None
        self._follower: HeadFollower | None = None
        self._followed: tuple[tuple[int, str], ...] = ()
        self._may_follow = (
            follows_head
            and source.options.daemon is not None
            # With several sources, each source waits in its own thread. With several sinks, the sinks agree
            # on the ends of the stretches that they read.
            and count == 1
            and shared_ends is None
            and settings.batch.rows is None
        )
        # The end of the log in the daemon's last report of growth. Another daemon may not have reached it
        # yet.
        self._outgrown: Offset | None = None

    def close(self) -> None:
        """End the sessions. The next query opens new sessions."""
        self._log.close()
        if self._arrivals is not None:
            self._arrivals.close()
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    @property
    def reports_arrivals(self) -> bool:
        """Whether `wait` returns as soon as there is a new transaction."""
        return self.source.options.daemon is not None and self._head is not None

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds` until the log has grown since the last call of `next`. Only one thread
        may call this at a time.

        Return False at once if growth was reported earlier but `next` did not see it because a lagging daemon
        answered. Raises the daemon's errors.
        """
        head = self._head
        assert head is not None, "the caller asks `reports_arrivals`"
        if self._follower is not None and self._follower.wait(head, seconds):
            return True
        if self._outgrown == head:
            return False
        # Imported here, because only a pipeline that follows a daemon needs the client of a daemon.
        from penstock.source.daemon import DaemonSource

        if self._arrivals is None or self._arrivals.options.epochs != _epochs_of(head):
            options = replace(self._settings.source, epochs=_epochs_of(head))
            self._arrivals = DaemonSource(options)
        self._listing = listing = self._arrivals.wait_behind(head.position, seconds)
        self._outgrown = head if listing.has_grown else None
        return True

    def listed(self, begin: Offset) -> AbstractContextManager[None]:
        """Return a context manager in which queries may be answered from one listing of the log."""
        listing, self._listing = self._listing, None
        # The end that another sink agreed on may be later than the listing.
        return self._log.listed(begin, listing) if self._shared_ends is None else nullcontext()

    def hold(self, offset: Offset) -> None:
        """Make a daemon keep the log after an offset. Renewed at intervals; a failure is only logged."""
        now = time.monotonic()
        if not self.source.options.is_kept or now < self._hold_at:
            return
        from penstock.source.kept_stream_log import KeptStreamLog

        assert isinstance(self._log, KeptStreamLog), "it was opened so"
        self._hold_at = now + PIPELINE_HOLD_PAUSE_SECONDS
        try:
            self._log.hold(self._reader, offset, HOLD_AGE_SECONDS_DEFAULT)
        except PenstockError as problem:
            _log.warning("a source's log is not held", source=self.source.name, why=str(problem))

    def first(self, earlier: Mapping[str, Any] | None = None) -> Offset:
        """Return where the pipeline begins in this log.

        `earlier` is the pipeline's position before a reset. Changes read from now on must have higher commit
        versions than that position, even if the server's file numbers have restarted.
        """
        first = self._log.first()
        if earlier is None or self.source.options.address is None:
            return first
        epoch = epoch_after(Offset.from_json(earlier).position)
        return replace(first, position=replace(first.position, epoch=epoch))

    def target(self) -> Offset:
        """Return the current end of the log, where a run that catches up will end."""
        return self._log.target()

    def resume(self, begin: Offset) -> Offset:
        """Return where to continue from an offset; see `StreamLog.resume`."""
        return self._log.resume(begin)

    def has(self, target: Offset, here: Offset) -> bool:
        """Return whether a target belongs to the same log as an offset that `resume` returned."""
        return self._log.has(target, here)

    def next(self, here: Offset, until: Offset | None) -> tuple[Offset, Offset] | None:
        """Return the end of the batch that begins at an offset from `resume`, and the end of the log; or None
        if there is nothing new. Sinks that share the log use the same end.
        """
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

    def arrived(self, begin: Offset) -> "ArrivedStretch | None":
        """Return the log after the end of the last batch, None if it must be planned from a listing."""
        stretch = None if self._follower is None else self._follower.next(begin)
        if stretch is not None:
            self._head = stretch.end
        return stretch

    def note_planned(self, end: Offset, head: Offset, works: list[RangeWork]) -> None:
        """Record a stretch that was planned from a listing, because `arrived` may continue at its end."""
        if not self._may_follow or not end.server_key:
            return
        if self._follower is None or self._followed != _epochs_of(end):
            # Imported here, because only a pipeline that follows a daemon needs the client of a daemon.
            from penstock.engine.head_follower import HeadFollower

            assert self._settings.bytes_max is not None, "a pipeline bounds its batches"
            if self._follower is not None:
                self._follower.close()
            self._followed = _epochs_of(end)
            options = replace(self._settings.source, epochs=self._followed)
            self._follower = HeadFollower(options, self._settings.bytes_max)
        self._follower.note(end, head, works)

    def after_loss(self, begin: Offset) -> Offset:
        """Return where to continue when everything from a purged offset to the log's current end is lost."""
        return self._log.after_loss(begin)

    def works(self, begin: Offset, end: Offset) -> list[RangeWork]:
        """Cut a stretch into byte ranges, based only on a listing of the log."""
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
        """Return the schema history at the start of each range, None for a log that names its columns."""
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
        """Return settings for the schema history. Ranges that sinks share are decoded for all tables."""
        if self._shared_ends is None:
            return self._settings
        patterns = self.source.tables
        return replace(
            self._settings,
            tables=PipelinePatterns(TablePatterns(list(patterns.include), list(patterns.exclude))),
        )


def _opened_log(settings: ReadSettings) -> StreamLog:
    if not settings.source.is_kept:
        return StreamLog(settings, TRIES_WHILE_WAITING)
    from penstock.source.kept_stream_log import KeptStreamLog

    return KeptStreamLog(settings, TRIES_WHILE_WAITING)


def _epochs_of(offset: Offset) -> tuple[tuple[int, str], ...]:
    return ((offset.position.epoch, offset.server_key),) if offset.server_key else ()


def around_skips(
    begin: Offset, until: Offset | None, skips: Sequence[Sequence[Mapping[str, Any]]]
) -> tuple[Offset, Offset | None]:
    """Return begin and end positions that exclude skipped stretches."""
    for skip in skips:
        first, behind = (Offset.from_json(offset) for offset in skip)
        if place_of(begin.position) >= place_of(behind.position):
            continue
        if place_of(begin.position) < place_of(first.position):
            ends_before = until is not None and place_of(until.position) <= place_of(first.position)
            return begin, until if ends_before else first
        begin = behind
    return begin, until
