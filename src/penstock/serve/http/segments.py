# SPDX-License-Identifier: Apache-2.0
"""The segments of a log over HTTP: `GET /v1/instances/{instance}/segments`, newest first."""

import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.logstore.log import Log
from penstock.logstore.records import OPEN, STATES, SegmentRecord
from penstock.serve.http.query import Query, log_of
from penstock.serve.served import Served

_SEGMENTS_DEFAULT = 200


def routes(served: Served) -> list[Route]:
    """Return the route of segments."""
    path = "/v1/instances/{instance}/segments"
    return [Route(path, functools.partial(_segments, served), methods=["GET"], name="_segments")]


async def _segments(served: Served, request: Request) -> Response:
    log, limit = log_of(served, request), Query(request).number("limit", _SEGMENTS_DEFAULT)
    return JSONResponse(await served.threads.search(_listed, log, limit))


def _listed(log: Log, limit: int) -> dict[str, Any]:
    """Return the newest segments, and the totals of all segments by state."""
    records = list(log.segments)
    totals = {state: {"segments": 0, "bytes": 0} for state in STATES}
    for record in records:
        total = totals[STATES[record.state]]
        total["segments"] += 1
        total["bytes"] += _bytes_of(log, record)
    newest = reversed(records[-limit:] if limit else [])
    retention = log.settings.retention
    return {
        "count": len(records),
        "totals": totals,
        "retention": {
            "age_seconds": retention.age,
            "bytes": retention.bytes,
            "free_bytes": retention.free_bytes,
        },
        "segments": [_shown(log, record) for record in newest],
    }


def _end_of(log: Log, record: SegmentRecord) -> int:
    """Return the offset up to which a segment can be read. For the open segment, that is the end of the
    log.
    """
    visible = log.visible
    if record.state != OPEN:
        return record.source_end
    is_newest = visible is not None and (visible.epoch, visible.file_number) == (
        record.epoch,
        record.file_number,
    )
    return visible.offset if is_newest and visible is not None else record.base


def _bytes_of(log: Log, record: SegmentRecord) -> int:
    if record.state != OPEN:
        return record.stored_bytes
    return record.head_bytes + _end_of(log, record) - record.base


def _shown(log: Log, record: SegmentRecord) -> dict[str, Any]:
    """Return a segment. Fields that are known only at the end of the segment are null while it is open."""
    is_open = record.state == OPEN
    return {
        "segment": f"{record.version:019d}",
        "state": STATES[record.state],
        "epoch": record.epoch,
        "file": log.file_of(record),
        "start": record.base,
        "end": _end_of(log, record),
        "time_first_us": record.time_first_us or None,
        "time_last_us": None if is_open else record.time_max_us or None,
        "transactions": None if is_open else record.transactions,
        "changes": None if is_open else record.changes,
        "bytes": _bytes_of(log, record),
    }
