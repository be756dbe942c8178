# SPDX-License-Identifier: Apache-2.0
"""The members and jobs of a fleet over HTTP. For full administrators only, because a job may use any table.

    GET  /v1/jobs                                   every job, and the workers
    GET  /v1/jobs/{job}                             a job with the newest lines of its output
    POST /v1/jobs/{job}/pause                       also resume, restart, delete
    POST /v1/jobs/{job}/move                        {"worker": "worker-2"}
    POST /v1/fleet/members/{member}/drain           {"at_once": false}
    POST /v1/fleet/members/{member}/undrain

With `dry_run`, the default, a call reports the current state and changes nothing.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.errors import SourceMissing
from penstock.serve.access import Account, account_of
from penstock.serve.http.audit import record_action
from penstock.serve.http.json_request import ChangeRequest
from penstock.serve.served import Served
from penstock.serve.threads import run_in

_WHAT = "the jobs of the fleet"


class Control(Protocol):
    """Controls the members and jobs of a fleet. Every method may wait for the coordination store."""

    def jobs(self) -> Mapping[str, list[dict[str, Any]]]:
        """Return the status of every job, and the workers."""

    def job(self, name: str) -> dict[str, Any]:
        """Return the status of a job with its command and output."""

    def change_job(self, name: str, word: str, *, dry_run: bool) -> dict[str, Any]:
        """Change a job; return its status before the change."""

    def move_job(self, name: str, worker: str | None, *, dry_run: bool) -> dict[str, Any]:
        """Move a job; return its status before the move."""

    def drain(self, member: str, *, at_once: bool, dry_run: bool) -> list[str]:
        """Drain a member; return its instances and jobs."""

    def undrain(self, member: str, *, dry_run: bool) -> list[str]:
        """Let a member receive work again; return its instances and jobs."""


class JobRequest(ChangeRequest):
    """The body of a request that changes a job and needs no parameter besides the job's name."""


class JobMoveRequest(ChangeRequest):
    """A request to move a job to a worker, which runs it for as long as possible."""

    worker: str | None = Field(default=None, description="A running worker, null: any worker")


class DrainRequest(ChangeRequest):
    """A request that a member hand over its instances and jobs."""

    at_once: bool = Field(default=False, description="Hand over also to copies of logs that are behind")


class UndrainRequest(ChangeRequest):
    """A request that allows a member to receive work again."""


_JOB, _MEMBER = "/v1/jobs/{job}", "/v1/fleet/members/{member}"

# Each change: its path, body, function, and the action of its audit record.
CHANGES: tuple[tuple[str, type[ChangeRequest], str, str], ...] = (
    (f"{_JOB}/pause", JobRequest, "Stop a job until it is resumed", "pause job"),
    (f"{_JOB}/resume", JobRequest, "Let a paused job run again", "resume job"),
    (f"{_JOB}/restart", JobRequest, "Start the process of a job again", "restart job"),
    (f"{_JOB}/delete", JobRequest, "Stop a job and forget it; its target stays", "delete job"),
    (f"{_JOB}/move", JobMoveRequest, "Have a worker run a job", "move job"),
    (f"{_MEMBER}/drain", DrainRequest, "Move the work of a member to others", "drain member"),
    (f"{_MEMBER}/undrain", UndrainRequest, "Let a drained member work again", "undrain member"),
)


def routes(served: Served, control: Control | None) -> list[Route]:
    """Return the routes; `control` is None if this daemon has no coordination store."""
    return [
        Route("/v1/jobs", functools.partial(_jobs, served, control), methods=["GET"], name="_jobs"),
        Route(_JOB, functools.partial(_job, served, control), methods=["GET"], name="_job"),
        *(
            Route(
                # The name of a member may have a slash.
                path.replace("{member}", "{member:path}"),
                functools.partial(_change, served, control, path.rpartition("/")[2], request_type, action),
                methods=["POST"],
                name=f"_{action.replace(' ', '_')}",
            )
            for path, request_type, _, action in CHANGES
        ),
    ]


async def _jobs(served: Served, control: Control | None, request: Request) -> Response:
    _prove(served, request)
    if control is None:
        return JSONResponse({"coordination": False, "jobs": [], "workers": []})
    return JSONResponse({"coordination": True, **await run_in(served.threads.reading, control.jobs)})


async def _job(served: Served, control: Control | None, request: Request) -> Response:
    _prove(served, request)
    work = _needed(control).job
    return JSONResponse(await run_in(served.threads.reading, work, request.path_params["job"]))


async def _change(
    served: Served,
    control: Control | None,
    word: str,
    request_type: type[ChangeRequest],
    action: str,
    request: Request,
) -> Response:
    account = _prove(served, request)
    needed = _needed(control)
    wanted = await request_type.read(request, '{"dry_run": true}')
    (subject, name) = next(iter(request.path_params.items()))
    work = _work(needed, name, word, wanted)
    before = await run_in(served.threads.reading, work)
    more = wanted.model_dump(exclude={"dry_run"})
    if not wanted.dry_run:
        record_action(account, action, **{subject: name}, **more)
    return JSONResponse({subject: name, **more, "before": before, "dry_run": wanted.dry_run})


def _work(control: Control, name: str, word: str, wanted: ChangeRequest) -> Callable[[], Any]:
    dry_run = wanted.dry_run
    if isinstance(wanted, DrainRequest):
        return functools.partial(control.drain, name, at_once=wanted.at_once, dry_run=dry_run)
    if isinstance(wanted, UndrainRequest):
        return functools.partial(control.undrain, name, dry_run=dry_run)
    if isinstance(wanted, JobMoveRequest):
        return functools.partial(control.move_job, name, wanted.worker, dry_run=dry_run)
    return functools.partial(control.change_job, name, word, dry_run=dry_run)


def _prove(served: Served, request: Request) -> Account:
    account = account_of(request)
    account.prove_administers_all(served.instances, _WHAT)
    return account


def _needed(control: Control | None) -> Control:
    if control is None:
        raise SourceMissing("this daemon has no coordination store", hint="Set coordination in penstock.yaml")
    return control
