# SPDX-License-Identifier: Apache-2.0
"""Metrics over HTTP: `GET /metrics`, as Prometheus text or OpenMetrics."""

from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from penstock.serve.access import account_of
from penstock.serve.threads import run_in
from penstock.telemetry.readings import Readings


def routes(
    read: Callable[[], Awaitable[Readings]], threads: Executor, alias: Literal["canal"] | None
) -> list[Route]:
    """Return the route of metrics. `alias` repeats the metrics under the names of another system."""

    async def metrics(request: Request) -> Response:
        account_of(request).prove_reads_metrics()
        readings = await read()
        body, media_type = await run_in(threads, _encode, readings, request.headers.get("accept", ""), alias)
        return Response(body, headers={"Content-Type": media_type})

    return [Route("/metrics", metrics, name="_metrics")]


def _encode(readings: Readings, accept: str, alias: Literal["canal"] | None) -> tuple[bytes, str]:
    # Imported at the first scrape, because most daemons on laptops and in tests are never scraped.
    from penstock.telemetry.prometheus import exposition

    return exposition(readings, accept, alias)
