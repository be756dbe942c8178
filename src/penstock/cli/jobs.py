# SPDX-License-Identifier: Apache-2.0
"""`penstock jobs`: show, pause, resume, restart, move and delete the jobs of a fleet."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.shared.fleet_store import opened_store
from penstock.cli.shared.options import AsJson, Coordination, MemberConfig
from penstock.cli.shared.rendering import write_json

HELP = "Show, pause, resume, restart, move and delete the jobs of a fleet."

_Name = Annotated[str, typer.Argument(metavar="JOB", help="The job, which has its pipeline's name.")]


def list_(
    config: MemberConfig = None,
    coordination: Coordination = None,
    label: Annotated[str | None, typer.Option(help="Only jobs with this label, name=value.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the jobs, where they run, and how often they have failed lately."""
    from penstock.fleet.jobs import job_status
    from penstock.fleet.records import JOBS, names_below

    with opened_store(config, coordination) as store:
        jobs = [job_status(store, name) for name in names_below(store, JOBS)]
    if label is not None:
        jobs = [job for job in jobs if label in {f"{name}={value}" for name, value in job["labels"].items()}]
    if as_json:
        write_json(sys.stdout, iter(jobs))
        return
    for job in jobs:
        failures = sum(1 for job_exit in job["exits"] if job_exit["status"])
        typer.echo(
            f"{job['name']:<24}{job['state']:<12}{job['worker'] or '-':<20}version {job['version']}"
            f"{f', {failures} failures kept' if failures else ''}"
        )


def show(
    job: _Name, config: MemberConfig = None, coordination: Coordination = None, as_json: AsJson = False
) -> None:
    """Show a job's desired state, its command, and the reasons for its last exits."""
    from penstock.fleet.jobs import job_status, read_job

    with opened_store(config, coordination) as store:
        shown, spec = job_status(store, job), read_job(store, job)
    if as_json:
        write_json(sys.stdout, iter([shown]))
        return
    for name in ("state", "worker", "process", "starts", "version", "zone", "weight", "log"):
        typer.echo(f"{name:<12}{'-' if shown[name] is None else shown[name]}")
    typer.echo(f"{'labels':<12}{', '.join(f'{k}={v}' for k, v in shown['labels'].items()) or '-'}")
    typer.echo(f"{'command':<12}penstock {spec.verb} {spec.name}.yaml {' '.join(spec.options)}".rstrip())
    for job_exit in shown["exits"]:
        typer.echo(f"exit {job_exit['status']}:")
        for line in job_exit["why"].splitlines():
            typer.echo(f"    {line}")


def logs(job: _Name, config: MemberConfig = None, coordination: Coordination = None) -> None:
    """Print the newest lines of a job's output. `penstock jobs show` names the file with all of it."""
    from penstock.fleet.jobs import read_job, read_run

    with opened_store(config, coordination) as store:
        read_job(store, job)
        for line in read_run(store, job).lines:
            typer.echo(line)


def pause(job: _Name, config: MemberConfig = None, coordination: Coordination = None) -> None:
    """Stop a job until penstock jobs resume."""
    _change(job, config, coordination, "pause", "is paused")


def resume(job: _Name, config: MemberConfig = None, coordination: Coordination = None) -> None:
    """Let a paused job run again."""
    _change(job, config, coordination, "resume", "is resumed")


def restart(job: _Name, config: MemberConfig = None, coordination: Coordination = None) -> None:
    """Stop a job's process and start it again. A job that has ended is started too."""
    _change(job, config, coordination, "restart", "is restarted")


def move(
    job: _Name,
    worker: Annotated[
        str | None, typer.Argument(help="The worker, as penstock fleet status names it; none: any worker.")
    ] = None,
    config: MemberConfig = None,
    coordination: Coordination = None,
) -> None:
    """Assign a job to a worker. Other workers run it while that worker is unavailable or drained."""
    from penstock.fleet.jobs import move_job

    with opened_store(config, coordination) as store:
        move_job(store, job, worker)
    typer.echo(f"{job} is moved to {worker or 'any worker'}")


def delete(job: _Name, config: MemberConfig = None, coordination: Coordination = None) -> None:
    """Stop a job and remove it. Its target and its pipeline's state stay: see penstock pipelines."""
    from penstock.fleet.jobs import delete_job

    with opened_store(config, coordination) as store:
        delete_job(store, job)
    typer.echo(f"{job} is deleted; its target and the pipeline's state stay")


def _change(name: str, config: Path | None, coordination: str | None, word: str, done: str) -> None:
    from penstock.fleet.control import JOB_CHANGES
    from penstock.fleet.jobs import change_job

    with opened_store(config, coordination) as store:
        change_job(store, name, JOB_CHANGES[word])
    typer.echo(f"{name} {done}")


VERBS = {
    "list": list_,
    "show": show,
    "logs": logs,
    "pause": pause,
    "resume": resume,
    "restart": restart,
    "move": move,
    "delete": delete,
}
