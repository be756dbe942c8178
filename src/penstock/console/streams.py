# SPDX-License-Identifier: Apache-2.0
"""Pages that are sent while their values arrive. Each such page occupies a thread, so the number of pages
being sent is limited.

stream = visit.open_stream(read)
return StreamResponse(pieces_of(stream), stream, media_type="text/html")
"""

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.errors import PenstockError, QuotaReached
from penstock.serve.problems import problem_body

# The maximum number of streams. The web server has 40 threads, and the other pages need some of them.
STREAMS_MAX = 12
# The maximum number of streams of one session, which must leave streams for other sessions.
SESSION_STREAMS_MAX = 4
# One account, with any number of sessions, must leave streams for other accounts.
ACCOUNT_STREAMS_MAX = 8


class Stream(Iterator[dict[str, Any]]):
    """Produces the parts of one page. One thread reads the parts; any thread may call `leave`."""

    def __init__(self, read: Callable[[threading.Event], Generator[dict[str, Any], None, None]]) -> None:
        self._has_left = threading.Event()
        self._parts = read(self._has_left)

    def __next__(self) -> dict[str, Any]:
        return next(self._parts)

    def leave(self) -> None:
        """End the stream at its next part, because the browser has disconnected."""
        self._has_left.set()

    def close(self) -> None:
        """End a stream that no thread reads any more."""
        self._parts.close()


class Streams:
    """The streams that a console is sending. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()
        self._open_of_accounts: Counter[str] = Counter()

    def limited(
        self, session: str, read: Callable[[], Iterator[dict[str, Any]]], account: str = ""
    ) -> Stream:
        """Return a stream of the parts that `read` returns, for a session of an account, "" without a login.

        An error becomes the last part, because part of the page has already been sent.
        """

        def parts(has_left: threading.Event) -> Generator[dict[str, Any], None, None]:
            try:
                with self._counted(session, account):
                    for part in read():
                        if has_left.is_set():
                            return
                        yield part
            except PenstockError as problem:
                yield {"kind": "problem", **problem_body(problem)}

        return Stream(parts)

    @contextmanager
    def _counted(self, session: str, account: str) -> Iterator[None]:
        """Count a stream as open inside the block. Raises QuotaReached."""
        with self._lock:
            if self._open[session] >= SESSION_STREAMS_MAX:
                raise QuotaReached(
                    f"a session follows changes or searches the log on {SESSION_STREAMS_MAX} pages at most",
                    hint="Close a page that follows or searches",
                )
            # Without logins there are no other accounts.
            if account and self._open_of_accounts[account] >= ACCOUNT_STREAMS_MAX:
                raise QuotaReached(
                    f"account {account} follows changes or searches the log on {ACCOUNT_STREAMS_MAX} pages,"
                    " which is all it may have",
                    hint="Close a page that follows or searches, in any session of the account",
                )
            if self._open.total() >= STREAMS_MAX:
                raise QuotaReached(
                    "too many people follow changes or search the log",
                    hint="Close a page, or try again later",
                )
            self._open[session] += 1
            self._open_of_accounts[account] += 1
        try:
            yield
        finally:
            with self._lock:
                # Forget idle sessions, because a console sees many of them.
                for counts, name in ((self._open, session), (self._open_of_accounts, account)):
                    counts[name] -= 1
                    if not counts[name]:
                        del counts[name]


class StreamResponse(StreamingResponse):
    """A response that closes its stream when it ends or the browser disconnects.

    Templates contain reference cycles, so the garbage collector would close the stream much later.
    """

    def __init__(
        self,
        pieces: Iterable[str],
        stream: Stream | None,
        media_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(pieces, media_type=media_type, headers=headers)
        self._stream = stream

    async def listen_for_disconnect(self, receive: Receive) -> None:
        await super().listen_for_disconnect(receive)
        if self._stream is not None:
            # End the stream, because a thread may be waiting for its next part.
            self._stream.leave()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._stream is not None:
                self._stream.close()
