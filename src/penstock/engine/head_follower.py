# SPDX-License-Identifier: Apache-2.0
"""Gets the next batch at the head of a daemon's log, and its bytes, in one request.

The usual plan lists the log and then reads the range. These two requests take longer than processing the few
transactions of such a batch. At the head of a file, the listing would add no information, so requesting the
bytes after the position is enough. Under load, the daemon sends them without a request for each batch: see
`FollowedBytes`. In all other cases, such as the next file, another server or a backlog,
the batch is planned from a listing.
"""

import time
from dataclasses import dataclass, replace

import structlog

from penstock.errors import PenstockError
from penstock.limits import MIB
from penstock.pipeline.record import RangeWork
from penstock.source.daemon import DaemonSource
from penstock.source.followed_bytes import ArrivedBytes
from penstock.source.offsets import Offset
from penstock.source.source import SourceOptions

# If there are more bytes than this, the task reads them while it decodes them.
_BYTES_MAX = MIB
# The pause after an unusable answer: the daemon does not support the request, or there are too many bytes.
_PAUSE_SECONDS = 1.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ArrivedStretch:
    """A stretch of the log after an offset: its end, and the work that reads it. `work` is None if nothing is
    new.
    """

    end: Offset
    work: RangeWork | None


class HeadFollower:
    """Follows one log, starting at the end of each batch. Used by one thread."""

    def __init__(self, options: SourceOptions, bytes_max: int) -> None:
        self._source = DaemonSource(options)
        self._bytes_max = min(bytes_max, _BYTES_MAX)
        # The end of the last batch that was planned from a listing, and the batch's work.
        self._planned: tuple[Offset, RangeWork] | None = None
        self._arrived: tuple[Offset, ArrivedBytes] | None = None
        self._paused_until = 0.0
        # The daemon whose file is known to be that of the offsets. A listing of another daemon proved nothing
        # about the first of several.
        self._proved_url = self._source.answering_url if self._source.has_one_daemon else ""

    def close(self) -> None:
        """Close the connection."""
        self._source.close()

    def note(self, end: Offset, head: Offset, works: list[RangeWork]) -> None:
        """Note the range of the log that a listing planned."""
        last = works[-1] if len(works) == 1 else None
        is_plain = last is not None and last.bounds.gtid_after is None and not end.by_set
        is_at_head = end.position == head.position and bool(end.server_key)
        self._planned = None
        if last is not None and is_plain and is_at_head and last.byte_range.stop == end.position.offset:
            self._planned = end, last

    def wait(self, begin: Offset, seconds: float) -> bool:
        """Wait up to `seconds` for transactions after an offset. Return False if the next batch must be
        planned from a listing.
        """
        if self._planned is None or self._planned[0] != begin:
            return False
        arrived = self._ask(begin, seconds)
        self._arrived = None if arrived is None else (begin, arrived)
        return arrived is not None

    def next(self, begin: Offset) -> ArrivedStretch | None:
        """Return the transactions after an offset, None if they must be planned from a listing."""
        planned, self._planned = self._planned, None
        waited, self._arrived = self._arrived, None
        if planned is None or planned[0] != begin:
            return None
        is_waited = waited is not None and waited[0] == begin
        arrived = waited[1] if waited is not None and is_waited else self._ask(begin, 0.0)
        if arrived is None:
            return None
        if not arrived.content:
            # The response has no bytes, but the log may continue in another file.
            if arrived.head != begin.position:
                return None
            self._planned = planned
            return ArrivedStretch(begin, None)
        end = replace(begin, position=replace(begin.position, offset=arrived.end), gtid_set=arrived.gtid_set)
        byte_range = replace(planned[1].byte_range, start=begin.position.offset, stop=arrived.end)
        work = replace(planned[1], byte_range=byte_range)
        self._planned = end, work
        return ArrivedStretch(end, replace(work, content=arrived.content))

    def _ask(self, begin: Offset, seconds: float) -> ArrivedBytes | None:
        if time.monotonic() < self._paused_until:
            return None
        try:
            arrived = self._source.bytes_behind(begin.position, seconds, self._bytes_max)
            if arrived is not None and not self._is_same_file(begin):
                arrived = None
        except PenstockError as problem:
            # Planning from a listing will meet the same error and handle it.
            _log.debug("a daemon does not give the bytes at its head", why=str(problem))
            arrived = None
        if arrived is None:
            self._paused_until = time.monotonic() + _PAUSE_SECONDS
        return arrived

    def _is_same_file(self, begin: Offset) -> bool:
        """Return whether the daemon that answered last has the file of an offset."""
        url = self._source.answering_url
        if url != self._proved_url and begin.fingerprint:
            position = begin.position
            if self._source.fingerprint(position.file, position.epoch) != begin.fingerprint:
                return False
            self._proved_url = url
        return True
