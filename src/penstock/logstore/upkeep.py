# SPDX-License-Identifier: Apache-2.0
"""What time asks of a log: what is old leaves, what is cold is compressed, what is compressed moves away.

One pass does a bounded amount of work, so that the logs of several instances take turns.
"""

import time
from calendar import timegm
from collections.abc import Callable

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
from penstock.settings import LogSettings

_HOUR_SECONDS = 3600
# What one segment alone may be wrong with; whatever else fails would fail with the next one too.
_OF_ONE_SEGMENT = (StreamError, SourceMissing, DiskFailed)

_log = structlog.get_logger(__name__)


class Upkeep:
    """Keeps one log as its settings say; run by the process that writes it, one pass at a time.

    Raises DependencyMissing where the settings name a tier whose package is not installed.
    """

    def __init__(self, disk: Disk, layout: Layout, settings: LogSettings) -> None:
        self._disk = disk
        self._layout = layout
        self._cold_after = settings.cold_after
        self._tier = Tier(settings.tier, disk, layout, writes=True) if settings.tier is not None else None
        # When a segment could not be worked on, by its state and version; monotonic seconds.
        self._refused: dict[tuple[int, int], float] = {}
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
        """Do one pass. What fails keeps nothing else from being done, and is raised at the end.

        A segment that cannot be compressed or moved is passed over for an hour, and the others go on.
        Raises LogDamaged, ChecksumMismatch, SourceMissing, LogFull, DiskFailed, ConnectionLost for a tier
        that is away.
        """
        first: PenstockError | None = None
        # What is prepared is held before anything leaves.
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
        """Let go what is due of a log that cannot be opened for want of room, so that it can be.

        For who would open it, so that nobody else does meanwhile. Raises LogLocked, LogDamaged where the
        folder has no sound L1, LogFull, DiskFailed, ConnectionLost for a tier that is away.
        """
        held = self._disk.lock(self._layout.lock)
        try:
            self.retention.run(FolderCatalog.load(self._disk, self._layout))
        finally:
            held.close()

    def _show_broken_holds(self, log: Log) -> None:
        log.broken_holds = self.retention.broken

    def _compress_one(self, catalog: SegmentCatalog) -> None:
        def compress(segment: SegmentRecord) -> None:
            make_cold(self._disk, self._layout, catalog, segment)

        self._work_on_one(
            [one for one in catalog.segments if one.state == CLOSED and self._is_cold(one)], compress
        )

    def _move_one(self, catalog: SegmentCatalog) -> None:
        tier = self._tier
        if tier is not None:
            compressed = [one for one in catalog.segments if one.state == COLD]
            self._work_on_one(compressed, lambda segment: tier.move(catalog, segment))

    def _work_on_one(self, due: list[SegmentRecord], work: Callable[[SegmentRecord], object]) -> None:
        """Do it to the first that was not refused within the hour."""
        now = time.monotonic()
        for segment in due:
            key = segment.state, segment.version
            if now - self._refused.get(key, -_HOUR_SECONDS) < _HOUR_SECONDS:
                continue
            try:
                work(segment)
            except _OF_ONE_SEGMENT:
                self._refused[key] = now
                raise
            return

    def _is_cold(self, segment: SegmentRecord) -> bool:
        """Tell whether a segment is to be compressed; its age counts from the end of its hour."""
        if self._cold_after is None:
            # What is to move away is compressed first.
            return self._tier is not None
        begun = timegm(time.strptime(str(segment.hour), "%Y%m%d%H"))
        return time.time() - (begun + _HOUR_SECONDS) >= self._cold_after


def _hold_free_bytes(settings: LogSettings) -> int | None:
    """Return below how many free bytes holds give way: before the capture holds, whatever is set."""
    bound = settings.retention.hold_free_bytes
    return None if bound is None else max(bound, 2 * settings.free_bytes_min)
