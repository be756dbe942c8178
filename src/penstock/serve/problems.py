# SPDX-License-Identifier: Apache-2.0
"""Errors as RFC 9457 problem documents: `application/problem+json`, with the error class as `type`."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from penstock.errors import (
    AccessDenied,
    AuthenticationFailed,
    CapturedElsewhere,
    LeaseLost,
    LimitExceeded,
    OptionInvalid,
    PenstockError,
    PositionInvalid,
    PositionPurged,
    QuotaReached,
    ServerChanged,
    SourceMissing,
    TransientError,
    VersionConflict,
)

PROBLEM_TYPE = "application/problem+json"

# The first matching class wins, so base classes come last.
_STATUS: tuple[tuple[type[PenstockError], int], ...] = (
    (AuthenticationFailed, 401),
    (AccessDenied, 403),
    (SourceMissing, 404),
    (ServerChanged, 409),
    (VersionConflict, 409),
    (LeaseLost, 409),
    (PositionPurged, 410),
    (PositionInvalid, 416),
    (OptionInvalid, 400),
    (LimitExceeded, 413),
    (CapturedElsewhere, 421),
    (QuotaReached, 429),
    (TransientError, 503),
    (PenstockError, 500),
)


def status_of(problem: PenstockError) -> int:
    """Return the HTTP status of an error."""
    return next(code for kind, code in _STATUS if isinstance(problem, kind))


def problem_body(problem: PenstockError) -> dict[str, Any]:
    """Return an error as plain JSON values, from which a client raises the same error."""
    body = {
        "type": type(problem).__name__,
        "title": (type(problem).__doc__ or "").split("\n")[0],
        "status": status_of(problem),
        "detail": problem.message,
        "position": problem.position,
        "hint": problem.hint,
    }
    if isinstance(problem, CapturedElsewhere):
        body["address"] = problem.address
    return body


def problem_response(problem: PenstockError, retry_seconds: int = 1) -> Response:
    """Return an error as a response, with Retry-After for a client that exceeded its quota."""
    status = status_of(problem)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": str(retry_seconds)}}.get(status)
    return JSONResponse(problem_body(problem), status, headers, media_type=PROBLEM_TYPE)


async def as_problem(request: Request, problem: Exception) -> Response:
    """Respond with a Penstock error."""
    assert isinstance(problem, PenstockError), "Starlette chooses by class"
    return problem_response(problem)


async def as_http_problem(request: Request, problem: Exception) -> Response:
    """Respond with an HTTP error, such as an unknown path."""
    assert isinstance(problem, HTTPException), "Starlette chooses by class"
    body = {
        "type": "about:blank",
        "title": problem.detail,
        "status": problem.status_code,
        "detail": f"{request.method} {request.url.path}: {problem.detail}",
    }
    return JSONResponse(body, problem.status_code, problem.headers, media_type=PROBLEM_TYPE)
