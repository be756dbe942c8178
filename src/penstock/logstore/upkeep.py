# SPDX-License-Identifier: Apache-2.0
"""Periodic maintenance of a log: expire old segments, compress cold ones, move compressed ones to the tier.

One pass does a bounded amount of work, so that the logs of several instances take turns.
"""

import time
from calendar import timegm
from collections.abc import Callable
from contextlib import closing
from functools import partial

import structlog

from penstock.errors import DiskFailed, PenstockError, SourceMissing, StreamError
from penstock.logstore.catalog import FolderCatalog, SegmentCatalog
from penstock.logstore.cold import make_cold
from penstock.logstore.disk import Disk
from penstock.logstore.layout import Layout
from penstock.logstore.log import Log
from penstock.logstore.prepared import PreparedSurvey
from penstock.logstore.records import CLOSED, COLD, SegmentRecord
from penstock.logstore.retention import Retention, RetentionPolicy
from penstock.logstore.tier import Tier
from penstock.settings.daemon import LogSettings
from penstock.telemetry.counters import Counter

_HOUR_SECONDS = 3600
# Errors limited to one segment. Any other error would hit the next segment too.
_SEGMENT_ERRORS = (StreamError, SourceMissing, DiskFailed)

_log = structlog.get_logger(__name__)


class Upkeep:
    """Maintains one log according to its settings. Run by the process that writes the log, one pass at a
    time.

    Raises DependencyMissing if the settings name a tier whose package is not installed.
    """

    def __init__(self, disk: Disk, layout: Layout, settings: LogSettings) -> None:
        self._disk = disk
        self._layout = layout
        self._cold_after = settings.cold_after
        self._tier = Tier(settings.tier, disk, layout, writes=True) if settings.tier is not None else None
        # Counts of segments moved to the tier and of failures, by outcome.
        self.uploads = Counter("moved", "failed")
        # When work on a segment last failed, by the segment's state and version, in monotonic seconds.
        self._failed: dict[tuple[int, int], float] = {}
        self._prepared = PreparedSurvey(disk, layout)
        kept = settings.retention
        self.retention = Retention(
            disk,
            layout,
            RetentionPolicy(
                kept.age, kept.bytes, kept.free_bytes, kept.hold_bytes, _hold_free_bytes(settings)
            ),
            tier=self._tier,
        )

    def run(self, log: Log) -> None:
        """Run one pass. A failed step does not prevent the others, and its error is raised at the end.

        A segment that cannot be compressed or moved is skipped for an hour, and the others continue. Raises
        LogDamaged, ChecksumMismatch, SourceMissing, LogFull, DiskFailed, ConnectionLost for an unreachable
        tier.
        """
        first: PenstockError | None = None
        # Hold the prepared transactions before any segment is removed.
        for step in (
            self._prepared.run,
            self.retention.run,
            self._show_broken_holds,
            self._compress_one,
            self._move_one,
        ):
            try:
                step(log)
            except PenstockError as problem:
                if first is not None:
                    _log.warning(
                        "upkeep failed in this too", folder=str(self._layout.folder), why=str(problem)
                    )
                first = first or problem
        if first is not None:
            raise first

    def make_room(self) -> None:
        """If a log cannot be opened because the disk is full, remove its segments whose retention has
        expired.

        Takes the log's lock, so that no other process opens the log concurrently. Raises LogLocked,
        LogDamaged if the folder has no sound L1, LogFull, DiskFailed, ConnectionLost for an unreachable tier.
        """
        with closing(self._disk.lock(self._layout.lock)):
            self.retention.run(FolderCatalog.load(self._disk, self._layout))

    def _show_broken_holds(self, log: Log) -> None:
        log.broken_holds = self.retention.broken

    def _compress_one(self, catalog: SegmentCatalog) -> None:
        def compress(segment: SegmentRecord) -> None:
            make_cold(self._disk, self._layout, catalog, segment)

        self._work_on_one(
            [segment for segment in catalog.segments if segment.state == CLOSED and self._is_cold(segment)],
            compress,
        )

    def _move_one(self, catalog: SegmentCatalog) -> None:
        tier = self._tier
        if tier is not None:
            compressed = [segment for segment in catalog.segments if segment.state == COLD]
            self._work_on_one(compressed, partial(self._upload, tier, catalog))

    def _upload(self, tier: Tier, catalog: SegmentCatalog, segment: SegmentRecord) -> None:
        try:
            tier.move(catalog, segment)
        except PenstockError:
            self.uploads.add("failed")
            raise
        self.uploads.add("moved")

    def _work_on_one(self, due: list[SegmentRecord], work: Callable[[SegmentRecord], object]) -> None:
        """Work on the first segment that did not fail within the last hour."""
        now = time.monotonic()
        for segment in due:
            key = segment.state, segment.version
            if now - self._failed.get(key, -_HOUR_SECONDS) < _HOUR_SECONDS:
                continue
            try:
                work(segment)
            except _SEGMENT_ERRORS:
                self._failed[key] = now
                raise
            return

    def _is_cold(self, segment: SegmentRecord) -> bool:
        """Return whether a segment is due for compression; its age counts from the end of its hour."""
        if self._cold_after is None:
            # A segment has to be compressed before it moves to the tier, so it is due at once if there is a
            # tier.
            return self._tier is not None
        started = timegm(time.strptime(str(segment.hour), "%Y%m%d%H"))
        return time.time() - (started + _HOUR_SECONDS) >= self._cold_after


def _hold_free_bytes(settings: LogSettings) -> int | None:
    """Return the free space below which holds are broken: at least twice what capture keeps free."""
    bound = settings.retention.hold_free_bytes
    return None if bound is None else max(bound, 2 * settings.free_bytes_min)
