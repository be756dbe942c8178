# SPDX-License-Identifier: Apache-2.0
"""Verification of a log over HTTP: `POST /v1/instances/{instance}/verify`, as lines of JSON.

The verification reads every byte of the log and changes nothing; capture and serving continue meanwhile.
Kinds of lines: progress, finding, end, problem. For administrators, because findings name files. A
verification ends when its client disconnects.
"""

import asyncio
import functools
import json
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Send

from penstock.errors import OptionInvalid, PenstockError, QuotaReached
from penstock.logstore.followed_log import ServedLog
from penstock.logstore.memory_log import MemoryLog
from penstock.logstore.verify import verify
from penstock.serve.access import account_of
from penstock.serve.http.answers import StreamedAnswer, ending_on_disconnect
from penstock.serve.http.query import log_of
from penstock.serve.problems import problem_body
from penstock.serve.served import Served
from penstock.serve.threads import Threads, prove_wanted

MEDIA_TYPE = "application/x-ndjson"

# With more findings than this, a verification is not worth finishing.
_FINDINGS_MAX = 1000
_PROGRESS_SECONDS = 0.5


def routes(served: Served) -> list[Route]:
    """Return the route of verifications."""
    # A verification reads the disk as fast as it can, so run only one at a time.
    free = asyncio.Semaphore(1)
    handler = ending_on_disconnect(functools.partial(_verify, served, free))
    return [Route("/v1/instances/{instance}/verify", handler, methods=["POST"], name="_verify")]


async def _verify(served: Served, free: asyncio.Semaphore, request: Request) -> Response:
    account_of(request).prove_administers(request.path_params["instance"])
    log = log_of(served, request)
    if isinstance(log, MemoryLog):
        raise OptionInvalid("this log is in memory, and has no files that could be damaged")
    return _VerificationAnswer(log, served.threads, free)


class _VerificationAnswer(StreamedAnswer):
    """The progress and the findings of a verification as lines of JSON. The last line is `end` or
    `problem`.
    """

    def __init__(self, log: ServedLog, threads: Threads, free: asyncio.Semaphore) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        # The length is not known before the verification ends.
        del self.headers["content-length"]
        self._log = log
        self._threads = threads
        self._free = free
        self._lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def stream(self, send: Send) -> None:
        """Send the lines as the log is read. Raises QuotaReached before the start."""
        if self._free.locked():
            raise QuotaReached(
                "a log is being verified, which this daemon does one at a time",
                hint="Try again later; or verify the folder: penstock log verify",
            )
        async with self._free:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            loop = asyncio.get_running_loop()
            verifying = asyncio.ensure_future(self._threads.search(self._verify, loop))
            # The thread's lines arrive before the thread ends.
            verifying.add_done_callback(lambda _: self._lines.put_nowait(None))
            try:
                while (line := await self._lines.get()) is not None:
                    await _send_line(send, line, more=True)
                await _send_line(send, await _last_line(verifying), more=False)
            finally:
                verifying.cancel()

    def _verify(self, loop: asyncio.AbstractEventLoop) -> int:
        """Read the log in a thread; return the number of findings."""
        shown_at = 0.0

        def give(line: dict[str, Any]) -> None:
            loop.call_soon_threadsafe(self._lines.put_nowait, line)

        def reach(done: int, of: int) -> None:
            nonlocal shown_at
            prove_wanted()
            if time.monotonic() - shown_at >= _PROGRESS_SECONDS:
                shown_at = time.monotonic()
                give({"kind": "progress", "done": done, "of": of})

        log, findings = self._log, 0
        for finding in verify(log.disk, log.layout, tier=log.tier, progress=reach):
            prove_wanted()
            findings += 1
            give({"kind": "finding", "finding": finding.to_json()})
            if findings == _FINDINGS_MAX:
                break
        return findings


async def _last_line(verifying: "asyncio.Future[int]") -> dict[str, Any]:
    try:
        findings = await verifying
    except PenstockError as problem:
        return {"kind": "problem", **problem_body(problem)}
    return {"kind": "end", "why": "limit" if findings == _FINDINGS_MAX else "whole"}


async def _send_line(send: Send, line: dict[str, Any], *, more: bool) -> None:
    body = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    await send({"type": "http.response.body", "body": body, "more_body": more})
