# SPDX-License-Identifier: Apache-2.0
"""The charts of the last 24 hours over HTTP: `GET /v1/charts` for all instances, and
`/v1/instances/{instance}/charts` for one.
"""

import functools
import time
from concurrent.futures import Executor
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.serve.access import account_of
from penstock.serve.http.query import Query
from penstock.serve.samples import Samples
from penstock.serve.served import Served
from penstock.serve.threads import run_in
from penstock.telemetry.ring import KEPT_SECONDS

_SECONDS_DEFAULT = 3600
_POINTS_DEFAULT, _POINTS_MAX = 240, 1440


def routes(served: Served, samples: Samples, threads: Executor) -> list[Route]:
    """Return the routes of charts."""

    async def all_charts(request: Request) -> Response:
        account, query = account_of(request), Query(request)
        names = [name for name in served.instances if account.may_read(name)]
        return JSONResponse(await run_in(threads, functools.partial(_all, samples, names), *_span(query)))

    async def charts(request: Request) -> Response:
        name = request.path_params["instance"]
        account_of(request).prove_reads(name)
        served.instance(name)
        return JSONResponse(await run_in(threads, _single, samples, name, *_span(Query(request))))

    return [
        Route("/v1/charts", all_charts, methods=["GET"], name="_all_charts"),
        Route("/v1/instances/{instance}/charts", charts, methods=["GET"], name="_charts"),
    ]


def _span(query: Query) -> tuple[int, int]:
    """Return the requested span in seconds and the number of points."""
    seconds = min(max(query.number("span", _SECONDS_DEFAULT), 1), KEPT_SECONDS)
    points = min(max(query.number("points", _POINTS_DEFAULT), 1), _POINTS_MAX)
    return seconds, points


def _single(samples: Samples, name: str, seconds: int, points: int) -> dict[str, Any]:
    series = samples.read(name, seconds, points)
    return {"seconds": seconds, "until_us": time.time_ns() // 1000, "series": series}


def _all(samples: Samples, names: list[str], seconds: int, points: int) -> dict[str, Any]:
    """Return the series of each instance, as shown in an overview."""
    charts = {name: samples.read(name, seconds, points) for name in names}
    return {
        "seconds": seconds,
        "until_us": time.time_ns() // 1000,
        "instances": {
            name: {kind: series[kind] for kind in ("lag_seconds", "rows_per_second")}
            for name, series in charts.items()
        },
    }
