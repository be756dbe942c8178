# SPDX-License-Identifier: Apache-2.0
"""Jobs: pipelines and relays that users want the fleet to run. They are stored in the coordination store,
together with the state of their runs.
"""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import structlog

from penstock.coordinate.lease import Holder
from penstock.coordinate.store import ABSENT, CoordinationStore, Record, path_of
from penstock.errors import OptionInvalid, SchemaInvalid, SourceMissing
from penstock.fleet.placement import Work
from penstock.fleet.records import (
    DRAINED,
    JOB_RUNS,
    JOBS,
    WORKERS,
    encode_record,
    job_lease_path,
    names_below,
    reading_fields,
)

# The number of exits and lines of output that the store keeps for each job.
EXITS_KEPT = 10
LINES_KEPT = 100

_log = structlog.get_logger(__name__)

_NAME = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{0,99}")


@dataclass(frozen=True)
class JobSpec:
    """The desired state of a job:

    `verb` and `options` of the command line, and the text of the pipeline file. `version` counts changes of
    the job's work, and `restarts` counts requested restarts. `${NAME}` in the text is replaced by its value
    in `values`, or else in the environment where the job runs. If an operator has moved the job to a worker,
    `worker` is that worker, and runs the job for as long as possible. `created` is the number of the change
    that created the record, which distinguishes the job from a deleted job with the same name.
    """

    name: str
    verb: str
    options: tuple[str, ...]
    text: str = field(repr=False)
    version: int = 1
    restarts: int = 0
    paused: bool = False
    weight: float = 1.0
    zone: str | None = None
    worker: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    updated_us: int = 0
    created: int = field(default=0, compare=False)

    def encode(self) -> bytes:
        """Return the value of the record."""
        values = asdict(self)
        del values["name"], values["created"]
        return encode_record(values)

    @classmethod
    def of(cls, name: str, record: Record | None) -> Self | None:
        """Read a job's record, None if there is none. Raises SchemaInvalid."""
        if record is None:
            return None
        with reading_fields(f"the record of job {name}", record) as values:
            return cls(
                name,
                str(values["verb"]),
                tuple(map(str, values["options"])),
                str(values["text"]),
                int(values["version"]),
                int(values["restarts"]),
                bool(values["paused"]),
                float(values["weight"]),
                values["zone"],
                values.get("worker"),
                dict(values["labels"]),
                dict(values.get("values", {})),
                int(values["updated_us"]),
                record.created,
            )

    @property
    def work(self) -> tuple[int, int, int]:
        """Identifies the work of this job's process. The value changes when a different process is needed."""
        return self.created, self.version, self.restarts

    @property
    def process(self) -> tuple[object, ...]:
        """The inputs with which the job's process is started."""
        return self.verb, self.options, self.text, self.values

    def is_same_work(self, other: "JobSpec") -> bool:
        """Return whether a running process of this job can continue with another version of the job."""
        return (self.work, self.paused) == (other.work, other.paused)


@dataclass(frozen=True)
class JobExit:
    """How a job's process ended: its exit status (negative for a signal) and the last lines of its output."""

    status: int
    why: str
    time_us: int


@dataclass(frozen=True)
class JobRun:
    """What a worker last recorded about a job.

    `state` is running, waiting (for the next try), ended or stopped. `lines` are the newest lines of the
    output; the worker's file `log` contains the complete output. `ended` is the newest `JobSpec.work` that
    ended without an error.
    """

    worker: str = ""
    state: str = ""
    version: int = 0
    process: int | None = None
    since_us: int = 0
    starts: int = 0
    exits: tuple[JobExit, ...] = ()
    lines: tuple[str, ...] = ()
    log: str = ""
    ended: tuple[int, ...] = ()

    def encode(self) -> bytes:
        """Return the value of the record."""
        return encode_record(asdict(self))

    @classmethod
    def of(cls, name: str, record: Record | None) -> Self:
        """Read the record; without a record, the job has never run. Raises SchemaInvalid."""
        if record is None:
            return cls()
        with reading_fields(f"the run of job {name}", record) as values:
            return cls(
                str(values["worker"]),
                str(values["state"]),
                int(values["version"]),
                values["process"],
                int(values["since_us"]),
                int(values["starts"]),
                tuple(JobExit(**exit_values) for exit_values in values["exits"]),
                tuple(map(str, values["lines"])),
                str(values["log"]),
                tuple(map(int, values.get("ended", ()))),
            )


def check_job_name(name: str) -> None:
    """Raise OptionInvalid for a name that a worker cannot use as a folder and file name."""
    if not _NAME.fullmatch(name):
        raise OptionInvalid(
            f"{name!r} cannot name a job: use letters, digits, _ - and ., and begin with no . or -",
            hint="Set name in the pipeline file",
        )


def job_path(name: str) -> str:
    """Return the path of a job's desired state."""
    return JOBS + path_of(name)


def run_path(name: str) -> str:
    """Return the path of a job's run."""
    return JOB_RUNS + path_of(name, "state")


def read_job(store: CoordinationStore, name: str) -> JobSpec:
    """Return a job's desired state. Raises SourceMissing, SchemaInvalid, CoordinationLost."""
    return _read(store, name)[0]


def read_run(store: CoordinationStore, name: str) -> JobRun:
    """Return the last record about a job. Raises SchemaInvalid, CoordinationLost."""
    return JobRun.of(name, store.get(run_path(name)))


def apply_job(store: CoordinationStore, wanted: JobSpec) -> tuple[JobSpec, bool]:
    """Store the desired state of a job; return it, and whether it has changed.

    If the job is paused or was moved to a worker, that also applies to its new version. Raises
    VersionConflict if another client changes the job at the same time, CoordinationLost, LimitExceeded.
    """
    check_job_name(wanted.name)
    record = store.get(job_path(wanted.name), latest=True)
    before = JobSpec.of(wanted.name, record)
    now_us = time.time_ns() // 1000
    if before is None or record is None:
        store.put(job_path(wanted.name), replace(wanted, updated_us=now_us).encode(), ABSENT)
        return wanted, True
    is_same_process = before.process == wanted.process
    applied = replace(
        wanted,
        version=before.version + (0 if is_same_process else 1),
        restarts=before.restarts,
        paused=before.paused,
        worker=before.worker,
        updated_us=before.updated_us,
    )
    if applied == before:
        return before, False
    store.put(job_path(wanted.name), replace(applied, updated_us=now_us).encode(), record.version)
    return applied, True


def change_job(store: CoordinationStore, name: str, change: Callable[[JobSpec], JobSpec]) -> JobSpec:
    """Change a job's desired state. Raises SourceMissing, VersionConflict, CoordinationLost."""
    job, record = _read(store, name)
    changed = change(job)
    if changed != job:
        store.put(
            job_path(name), replace(changed, updated_us=time.time_ns() // 1000).encode(), record.version
        )
    return changed


def move_job(store: CoordinationStore, name: str, worker: str | None) -> JobSpec:
    """Assign a job to a worker, which runs it whenever it can; None allows any worker again.

    Raises SourceMissing for an unknown job, or a worker that is not running; OptionInvalid for a drained
    worker; VersionConflict, CoordinationLost.
    """
    if worker is not None:
        refuse_worker(store, worker)
    return change_job(store, name, lambda job: replace(job, worker=worker))


def refuse_worker(store: CoordinationStore, worker: str) -> None:
    """Raise SourceMissing for a worker that is not running, OptionInvalid for a drained worker."""
    if worker not in names_below(store, f"{WORKERS}/members"):
        raise SourceMissing(f"no worker {worker!r} runs", hint="See the workers: penstock fleet status")
    if worker in names_below(store, DRAINED):
        raise OptionInvalid(f"worker {worker} is drained", hint=f"Run: penstock fleet undrain {worker}")


def delete_job(store: CoordinationStore, name: str) -> None:
    """Stop running a job. Its target, its pipeline's state and the worker's log stay.

    Raises SourceMissing, VersionConflict, CoordinationLost.
    """
    _, record = _read(store, name)
    store.delete(job_path(name), record.version)
    store.delete(run_path(name))


def job_status(store: CoordinationStore, name: str) -> dict[str, Any]:
    """Return a job's desired state, without its text, and its current run, as plain JSON values."""
    job, run = read_job(store, name), read_run(store, name)
    holder = Holder.of(store.get(job_lease_path(name)))
    if holder is None or holder.name != run.worker:
        # The worker that wrote the record no longer has the job.
        run = replace(run, state="placed" if holder is not None else "unplaced", process=None)
    wanted = {key: value for key, value in asdict(job).items() if key not in ("text", "values", "created")}
    return {
        **wanted,
        "state": "paused" if job.paused and run.state in ("unplaced", "stopped") else run.state,
        "worker": None if holder is None else holder.name,
        "process": run.process,
        "since_us": run.since_us,
        "starts": run.starts,
        "exits": [asdict(job_exit) for job_exit in run.exits],
        "log": run.log,
    }


def works_of_jobs(store: CoordinationStore) -> list[Work]:
    """Return every job that should run, and every job whose record cannot be read. Raises
    CoordinationLost.
    """
    works = []
    for name in names_below(store, JOBS):
        try:
            job = JobSpec.of(name, store.get(job_path(name)))
        except SchemaInvalid as problem:
            # Keep the job, because it may already be running. The other jobs must run in any case.
            _log.error("a job cannot be read", job=name, why=str(problem), hint=problem.hint)
            works.append(Work(name))
            continue
        if job is not None and not job.paused:
            works.append(Work(job.name, job.weight, job.zone, member=job.worker))
    return works


def _read(store: CoordinationStore, name: str) -> tuple[JobSpec, Record]:
    record = store.get(job_path(name), latest=True)
    job = JobSpec.of(name, record)
    if job is None or record is None:
        raise SourceMissing(f"there is no job {name!r}", hint="See the jobs: penstock jobs list")
    return job, record
