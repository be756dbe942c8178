# SPDX-License-Identifier: Apache-2.0
"""The pages of a fleet: its members and workers, its jobs, and the output of a job."""

import sys
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from penstock.console.fleet import Answers
from penstock.console.visit import Visit
from penstock.errors import AccessDenied, PenstockError, SourceMissing

# The maximum number of rows of a page. More rows would take too long to render, send and draw every 5
# seconds.
_ROWS_MAX = 200
# The states of jobs that need no operator.
_CALM = ("running", "ended", "paused")


def show_fleet(visit: Visit) -> Response:
    """Show which member captures which instance, and which worker runs which job."""
    find = visit.query("find")
    fleets = visit.fleet.ask_all("fleet")
    jobs, stored, pumps = (
        visit.fleet.ask_all(call) if visit.is_admin else Answers({}, {})
        for call in ("jobs", "stored-instances", "pumps")
    )
    return visit.render(
        "fleet.html",
        fleets=_distinct_fleets(fleets) or _workers_alone(jobs),
        jobs=[job for job in _distinct_jobs(jobs) if find in job["name"] or find == job["state"]],
        find=find,
        rows_max=sys.maxsize if visit.is_export else _ROWS_MAX,
        instances=_distinct_instances(stored),
        pumps=[{"daemon": url, **pump} for url, answer in pumps.values.items() for pump in answer["pumps"]],
        stores=[url for url, answer in stored.values.items() if answer["coordination"]],
        problems={
            url: problem
            for answers in (fleets, jobs, stored)
            for url, problem in answers.problems.items()
            if not _is_absent(problem)
        },
    )


def _is_absent(problem: PenstockError) -> bool:
    """Return whether a daemon belongs to no fleet, or shows no jobs to the account."""
    return isinstance(problem, SourceMissing | AccessDenied)


def _distinct_fleets(answers: Answers) -> list[dict[str, Any]]:
    """Return each fleet once, even if several of its members answer."""
    fleets: dict[tuple[str, ...], dict[str, Any]] = {}
    for url, fleet in answers.values.items():
        names = tuple(sorted(member["member"] for member in (*fleet["members"], *fleet["workers"])))
        fleets.setdefault(names, {"daemon": url, **fleet})
    return list(fleets.values())


def _workers_alone(answers: Answers) -> list[dict[str, Any]]:
    """For each store whose daemons belong to no fleet, return its workers as an entry in the form of a
    fleet.
    """
    workers = {url: answer["workers"] for url, answer in answers.values.items() if answer["workers"]}
    nobody: dict[str, Any] = {"leader": None, "members": [], "instances": []}
    return _distinct_fleets(
        Answers({url: {**nobody, "workers": known} for url, known in workers.items()}, {})
    )


def _distinct_jobs(answers: Answers) -> list[dict[str, Any]]:
    """Return each job once, even if several daemons of its store return it. Failed jobs come first."""
    jobs: dict[tuple[str, int], dict[str, Any]] = {}
    for url, answer in answers.values.items():
        for job in answer["jobs"]:
            jobs.setdefault((job["name"], job["updated_us"]), {"daemon": url, **job})
    return sorted(jobs.values(), key=lambda job: (job["state"] in _CALM, -job["failures"], job["name"]))


def _distinct_instances(answers: Answers) -> list[dict[str, Any]]:
    """Return each stored instance once, even if several daemons of its store return it."""
    instances: dict[tuple[str, int], dict[str, Any]] = {}
    for url, answer in answers.values.items():
        for instance in answer["instances"]:
            key = instance["instance"], instance["updated_us"]
            instances.setdefault(key, {"daemon": url, **instance})
    return [instances[key] for key in sorted(instances)]


def show_job(visit: Visit) -> Response:
    """Show what a job does, why it ended, and what it printed."""
    visit.prove_admin()
    url, name = visit.query("daemon"), visit.query("job")
    job, problem = None, None
    try:
        job = visit.fleet.ask_daemon(url, f"jobs/{quote(name, safe='')}")
    except PenstockError as refusal:
        problem = refusal
    return visit.render("job.html", daemon=url, name=name, job=job, problem=problem)


PAGES: dict[str, Callable[[Visit], Response]] = {"/fleet": show_fleet, "/job": show_job}
