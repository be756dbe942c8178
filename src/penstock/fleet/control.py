# SPDX-License-Identifier: Apache-2.0
"""The members and jobs of a fleet, which operators query and change through its coordination store."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, replace
from typing import Any

from penstock.coordinate.snapshot import snapshot_of
from penstock.coordinate.store import CoordinationStore
from penstock.errors import SchemaInvalid
from penstock.fleet import draining
from penstock.fleet.jobs import (
    JobSpec,
    change_job,
    delete_job,
    job_status,
    move_job,
    read_job,
    read_run,
    refuse_worker,
)
from penstock.fleet.records import DRAINED, FLEET, JOB_RUNS, JOBS, WORKERS, names_below
from penstock.fleet.status import worker_statuses

# The function that changes the desired state of a job, for each verb of the command line.
JOB_CHANGES: dict[str, Callable[[JobSpec], JobSpec]] = {
    "pause": lambda job: replace(job, paused=True),
    "resume": lambda job: replace(job, paused=False),
    "restart": lambda job: replace(job, restarts=job.restarts + 1),
}


class FleetControl:
    """Controls the members and jobs of a coordination store. Thread-safe: each call opens its own connection.

    Every call raises CoordinationLost if the store does not answer, and SchemaInvalid for an unreadable
    record. A dry run returns the same value and raises the same errors as the change.
    """

    def __init__(self, open_store: Callable[[], CoordinationStore]) -> None:
        self._open = open_store

    def jobs(self) -> dict[str, list[dict[str, Any]]]:
        """Return the workers, and the status of every job. In the status, the number of failures replaces the
        list of exits.

        The store is queried once for all jobs.
        """
        with closing(self._open()) as store:
            records = snapshot_of(store, FLEET, _is_of_jobs)
            return {
                "jobs": [_listed(records, name) for name in names_below(records, JOBS)],
                "workers": worker_statuses(records, names_below(records, DRAINED)),
            }

    def job(self, name: str) -> dict[str, Any]:
        """Return the status of a job, its command and the newest lines of its output.

        Raises SourceMissing.
        """
        with closing(self._open()) as store:
            job = read_job(store, name)
            command = ["penstock", job.verb, f"{name}.yaml", *job.options]
            return {**job_status(store, name), "command": command, "lines": list(read_run(store, name).lines)}

    def change_job(self, name: str, word: str, *, dry_run: bool) -> dict[str, Any]:
        """Pause, resume, restart or delete a job; return its previous status. Raises SourceMissing."""
        with closing(self._open()) as store:
            before = job_status(store, name)
            if dry_run:
                return before
            if word == "delete":
                delete_job(store, name)
            else:
                change_job(store, name, JOB_CHANGES[word])
            return before

    def move_job(self, name: str, worker: str | None, *, dry_run: bool) -> dict[str, Any]:
        """Assign a job to a worker, or with None to any worker; return its previous status.

        Raises SourceMissing, OptionInvalid.
        """
        with closing(self._open()) as store:
            before = job_status(store, name)
            if worker is not None:
                refuse_worker(store, worker)
            if not dry_run:
                move_job(store, name, worker)
            return before

    def drain(self, member: str, *, at_once: bool, dry_run: bool) -> list[str]:
        """Drain a member; return its instances and jobs. Raises SourceMissing, OptionInvalid."""
        with closing(self._open()) as store:
            draining.refuse_drain(store, member)
            held = draining.held_by(store, member)
            if not dry_run:
                draining.drain(store, member, at_once=at_once)
            return held

    def undrain(self, member: str, *, dry_run: bool) -> list[str]:
        """Let a member receive work again; return its instances and jobs. Raises SourceMissing."""
        with closing(self._open()) as store:
            draining.refuse_undrain(store, member)
            held = draining.held_by(store, member)
            if not dry_run:
                draining.undrain(store, member)
            return held


def _is_of_jobs(path: str) -> bool:
    return path.startswith((f"{JOBS}/", f"{JOB_RUNS}/", f"{WORKERS}/"))


def _listed(records: CoordinationStore, name: str) -> dict[str, Any]:
    """Return a job as an entry of the list, even if its record cannot be read."""
    try:
        status = job_status(records, name)
    except SchemaInvalid as problem:
        job = asdict(JobSpec(name, "", (), ""))
        unreadable = {"state": "unreadable", "starts": 0, "failures": 0, "why": str(problem)}
        return {
            **{key: job[key] for key in ("name", "version", "worker", "labels", "updated_us")},
            **unreadable,
        }
    failures = sum(1 for job_exit in status.pop("exits") if job_exit["status"])
    return {**status, "failures": failures}
