# SPDX-License-Identifier: Apache-2.0
"""`penstock apply`: have the fleet run a pipeline."""

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.shared.fleet_store import opened_store
from penstock.cli.shared.options import Coordination, MemberConfig, PipelineFile
from penstock.errors import OptionInvalid


def run(
    file: PipelineFile,
    config: MemberConfig = None,
    coordination: Coordination = None,
    local: Annotated[
        bool, typer.Option("--local", help="Run it without Spark, as penstock run --local.")
    ] = False,
    relay: Annotated[bool, typer.Option("--relay", help="Run it as penstock relay.")] = False,
    master: Annotated[str | None, typer.Option(help="Spark's master, as of penstock run.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="A label, name=value. May be repeated.")] = None,
    zone: Annotated[str | None, typer.Option(help="The zone whose workers run it, while it has any.")] = None,
    weight: Annotated[float, typer.Option(min=0.001, help="Its share of a worker's load.")] = 1.0,
) -> None:
    """Store a pipeline as a job; the fleet's workers run it from then on, and restart it when it fails.

    Applying a changed file restarts the job with it. The job has the pipeline's name. ${NAME} in the file is
    read by the worker; any other text, also a password, is stored as it is.
    """
    from penstock.fleet.jobs import JobSpec, apply_job

    if sum((local, relay, master is not None)) > 1:
        raise OptionInvalid("--local, --relay and --master exclude each other", hint="Name one place to run")
    options = ["--local"] if local else ["--master", master] if master is not None else []
    job = JobSpec(
        _name_of(file),
        "relay" if relay else "run",
        tuple(options),
        file.read_text(encoding="utf-8"),
        weight=weight,
        zone=zone,
        labels=dict(map(_label, label or ())),
    )
    with opened_store(config, coordination) as store:
        applied, changed = apply_job(store, job)
    typer.echo(f"{applied.name}: version {applied.version}{'' if changed else ', unchanged'}")


def _name_of(file: Path) -> str:
    """Return the pipeline's name. Raises OptionInvalid if its state would depend on the host it runs on."""
    from penstock.pipeline.settings import place_of_state
    from penstock.settings.file import read_yaml

    state = place_of_state(file)
    values = read_yaml(file, os.environ).value
    written = values.get("state") if isinstance(values, dict) else None
    if written != state.state:
        raise OptionInvalid(
            f"{file}: state must name a store that every worker reaches, by its whole path",
            hint="Write state: zookeeper://host:2181/path, or on one host sqlite:///absolute/path.db",
        )
    return state.name


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise OptionInvalid(f"label {text!r} has no value", hint="Write --label team=orders")
    return name, value
