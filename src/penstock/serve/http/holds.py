# SPDX-License-Identifier: Apache-2.0
"""Holds over HTTP: a reader reports its position, and until the report expires, the log keeps everything
after that position.

An account sees, moves and removes its own holds; an admin sees, moves and removes the holds of all accounts.
"""

import functools
import time
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.errors import OptionInvalid
from penstock.limits import HOLD_SECONDS_MAX
from penstock.logstore.followed_log import ServedLog
from penstock.logstore.holds import Hold, Holds, prove_not_own
from penstock.logstore.memory_log import MemoryLog
from penstock.serve.access import Account, account_of
from penstock.serve.http.query import Query, log_of
from penstock.serve.served import Served

# A reader that is silent for this long is considered gone, and its hold expires.
HOLD_SECONDS_DEFAULT = 24 * 3600

_INSTANCE = "/v1/instances/{instance}"


def routes(served: Served) -> list[Route]:
    """Return the routes of holds."""
    return [
        Route(f"{_INSTANCE}/position", functools.partial(_put, served), methods=["POST"], name="_hold"),
        Route(f"{_INSTANCE}/holds", functools.partial(_list, served), methods=["GET"], name="_holds"),
        Route(
            f"{_INSTANCE}/holds/{{reader}}",
            functools.partial(_remove, served),
            methods=["DELETE"],
            name="_remove_hold",
        ),
    ]


async def _put(served: Served, request: Request) -> Response:
    """Record a reader's position. With a log in memory, a slow reader causes backpressure on capture."""
    log, query = log_of(served, request), Query(request)
    reader, position = query.text("reader"), query.needed_position("position")
    account = account_of(request)
    account.prove_reads(request.path_params["instance"], reader)
    prove_not_own(reader)
    seconds = query.number("seconds", HOLD_SECONDS_DEFAULT)
    if seconds > HOLD_SECONDS_MAX:
        raise OptionInvalid(
            f"seconds={seconds} is longer than a hold may last", hint=f"Ask for {HOLD_SECONDS_MAX} at most"
        )
    hold = Hold(reader, position, time.time_ns() // 1000 + seconds * 1_000_000, account.name)
    await run_in_threadpool(_set, log, hold, admin=account.admin)
    return JSONResponse({"reader": reader, "position": str(position), "expires_us": hold.expires_us})


async def _list(served: Served, request: Request) -> Response:
    """List the holds in force, beginning with the hold that is furthest back."""
    account, log = account_of(request), log_of(served, request)
    shown = await served.threads.search(_shown_to, account, log)
    return JSONResponse({"holds": shown})


async def _remove(served: Served, request: Request) -> Response:
    """Remove a hold. The next retention pass removes the data that only this hold kept."""
    account, log = account_of(request), log_of(served, request)
    reader = request.path_params["reader"]
    instance = request.path_params["instance"]
    account.prove_reads(instance, reader)
    await run_in_threadpool(give_up_hold, log, reader, account)
    # Forget the consumer's earlier report: otherwise, the report would set the hold again.
    served.consumers.release(instance, reader)
    return JSONResponse({"reader": reader})


def _set(log: ServedLog, hold: Hold, *, admin: bool) -> None:
    if isinstance(log, MemoryLog):
        log.hold(hold, admin=admin)
    else:
        Holds(log.disk, log.layout).put(hold, log=log, admin=admin)


def give_up_hold(log: ServedLog, reader: str, account: Account) -> None:
    """Remove a hold of a log. Raises SourceMissing, AccessDenied."""
    holds = log if isinstance(log, MemoryLog) else Holds(log.disk, log.layout)
    holds.give_up(reader, account.name, admin=account.admin)


def _all(log: ServedLog) -> list[Hold]:
    if isinstance(log, MemoryLog):
        return log.holds()
    return Holds(log.disk, log.layout).readable(time.time_ns() // 1000)


def visible_holds(account: Account, log: ServedLog) -> list[Hold]:
    """Return the holds that an account may see, beginning with the hold that is furthest back."""
    visible = [hold for hold in _all(log) if account.admin or hold.account == account.name]
    return sorted(visible, key=lambda hold: hold.position)


def _shown_to(account: Account, log: ServedLog) -> list[dict[str, Any]]:
    visible = visible_holds(account, log)
    broken = {broken_hold.hold.name: broken_hold.why for broken_hold in log.broken_holds}
    all_bytes_behind = log.bytes_behind_all([hold.position for hold in visible])
    return [
        {
            "reader": hold.name,
            "position": str(hold.position),
            "account": hold.account,
            "expires_us": hold.expires_us,
            "behind_bytes": bytes_behind,
            "broken": broken.get(hold.name),
        }
        for hold, bytes_behind in zip(visible, all_bytes_behind, strict=True)
    ]
