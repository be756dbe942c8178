# SPDX-License-Identifier: Apache-2.0
"""The newest bytes of a log, which are still in memory: in one response, or as a stream of what arrives."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from starlette.responses import Response
from starlette.types import Send

from penstock.errors import PenstockError
from penstock.gtid_sets import NO_GTIDS, LoggedSet
from penstock.limits import PIECE_BYTES_AT_ONCE
from penstock.logstore.followed_log import ServedLog
from penstock.logstore.log import Log
from penstock.model import Position
from penstock.serve.access import Account
from penstock.serve.http.answers import StreamedAnswer
from penstock.serve.http.change_frames import frame_head
from penstock.serve.served import Served
from penstock.source.followed_bytes import FOLLOWED_TYPE

# Clients limit the length of a header, so a longer GTID set is left out.
GTID_SET_CHARACTERS_MAX = 8192
# How long a stream lasts at most. An account does not change while a daemon runs, so it is checked once.
FOLLOW_SECONDS_MAX = 30.0
# While nothing arrives, a frame without bytes is sent at this interval, because a client gives up a stream
# that is silent for a second. The log is looked up again too, because it may have been reopened.
_IDLE_SECONDS_MAX = 0.4
# The minimum interval between frames, so that a frame for each transaction does not use a whole core.
_FRAME_GAP_SECONDS = 0.0005
_NO_CONTENT = 204


def newest_bytes(log: ServedLog, start: Position) -> tuple[bytes, Position, LoggedSet] | None:
    """Return the log after a position, its end, and the GTID set there, if it is short and all in memory.

    Else return None: the range needs a thread, which costs more than reading a few transactions.
    """
    if not isinstance(log, Log) or log.memory is None:
        return None
    head, gtid_set = log.visible_end()
    if head is None or (head.epoch, head.file) != (start.epoch, start.file):
        return None
    length = head.offset - start.offset
    if not 0 < length <= PIECE_BYTES_AT_ONCE:
        return None
    views = log.memory.read(start.epoch, start.file, start.offset, head.offset)
    content = b"".join(views or ())
    return (content, head, gtid_set) if len(content) == length else None


def followed_bytes(
    served: Served,
    instance: str,
    log: ServedLog,
    start: Position,
    seconds: float,
    headers: Mapping[str, str],
    account: Account,
) -> Response:
    """Return a stream of the transactions after a position, or an empty response if the position is not near
    the end of a log whose newest bytes are in memory.

    A stream would use up one of the concurrent requests that `account` may have, so an account with such a
    limit gets none.
    """
    may_follow = account.quota.requests_max is None and isinstance(log, Log) and log.memory is not None
    visible = log.visible if may_follow else None
    is_here = visible is not None and (visible.epoch, visible.file) == (start.epoch, start.file)
    if visible is None or not is_here or not 0 <= visible.offset - start.offset <= PIECE_BYTES_AT_ONCE:
        return Response(status_code=_NO_CONTENT)
    return _FollowedBytes(served, instance, log, start, min(seconds, FOLLOW_SECONDS_MAX), headers)


class _FollowedBytes(StreamedAnswer):
    """Sends frames of whole transactions. It ends with the file, and if its client or the memory falls
    behind."""

    def __init__(
        self,
        served: Served,
        instance: str,
        log: ServedLog,
        start: Position,
        seconds: float,
        headers: Mapping[str, str],
    ) -> None:
        # A proxy that gathers a response would delay the frames.
        super().__init__(headers={**headers, "X-Accel-Buffering": "no"}, media_type=FOLLOWED_TYPE)
        del self.headers["content-length"]
        self._served = served
        self._instance = instance
        self._log = log
        self._position = start
        self._seconds = seconds

    async def stream(self, send: Send) -> None:
        """Send frames while the log grows."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + self._seconds
        while (remaining := ends_at - loop.time()) > 0 and not self._served.arrivals.closing:
            wait = min(remaining, _IDLE_SECONDS_MAX)
            head = await self._served.wait_behind(self._instance, self._position, wait, self._log)
            is_idle = head == self._position and self._is_current()
            newest = (b"", self._position, NO_GTIDS) if is_idle else newest_bytes(self._log, self._position)
            if newest is None or len(newest[2]) > GTID_SET_CHARACTERS_MAX:
                break
            content, head, gtid_set = newest
            frame = {"end": head.offset, "gtid_set": gtid_set, "bytes": len(content)}
            await send({"type": "http.response.body", "body": frame_head(frame) + content, "more_body": True})
            self._position = replace(self._position, offset=head.offset)
            await asyncio.sleep(_FRAME_GAP_SECONDS)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _is_current(self) -> bool:
        """Return whether the instance still has the same log: a log that was reopened is another object."""
        try:
            return self._served.instance(self._instance).log() is self._log
        except PenstockError:
            return False
