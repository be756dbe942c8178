# SPDX-License-Identifier: Apache-2.0
"""`penstock apply`: store a pipeline, or the output of penstock export, for the fleet to run."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.shared.fleet_store import opened_store
from penstock.cli.shared.options import Coordination, MemberConfig, parse_pairs
from penstock.errors import OptionInvalid


def run(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE", help="A pipeline file, or the output of penstock export. Default: standard input."
        ),
    ] = None,
    config: MemberConfig = None,
    coordination: Coordination = None,
    local: Annotated[
        bool, typer.Option("--local", help="Run it without Spark, as penstock run --local.")
    ] = False,
    relay: Annotated[bool, typer.Option("--relay", help="Run it as penstock relay.")] = False,
    master: Annotated[str | None, typer.Option(help="Spark's master, as of penstock run.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="A label, name=value. May be repeated.")] = None,
    zone: Annotated[str | None, typer.Option(help="The zone whose workers run it, while it has any.")] = None,
    weight: Annotated[
        float | None, typer.Option(min=0.001, help="Its share of a worker's load. Default: 1.")
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A value, name=value, for ${name} in the file and for its label. May be repeated."
        ),
    ] = None,
) -> None:
    """Store a pipeline as a job, which the fleet's workers run, and restart when it fails.

    Applying a changed file restarts the job. The job has the pipeline's name. ${NAME} in the file is the
    value of --set, or else the worker's variable. Other text, including passwords, is stored as it is.
    """
    from penstock.cli.shared.units import (
        apply_documents,
        apply_line,
        check_values,
        job_name,
        values_in,
    )
    from penstock.fleet.jobs import JobSpec
    from penstock.settings.documents import InstanceDocument, read_documents

    if sum((local, relay, master is not None)) > 1:
        raise OptionInvalid("--local, --relay and --master exclude each other", hint="Name one place to run")
    path, text = _read(file)
    chosen = parse_pairs("--set", values)
    documents = read_documents(path, text)
    with opened_store(config, coordination) as store:
        if documents is not None:
            if any((local, relay, master, label, zone, weight)):
                raise OptionInvalid(
                    "the documents say how each job runs", hint="Use only --set, or change the documents"
                )
            if config is not None and any(isinstance(document, InstanceDocument) for document in documents):
                _prove_stored(config)
            typer.echo("\n".join(apply_documents(store, documents, chosen)))
            return
        used = values_in(text, chosen)
        check_values(chosen, used)
        job = JobSpec(
            job_name(path, text, used),
            "relay" if relay else "run",
            ("--local",) if local else ("--master", master) if master is not None else (),
            text,
            weight=weight or 1.0,
            zone=zone,
            labels=parse_pairs("--label", label),
            values=used,
        )
        typer.echo(apply_line(store, job))


def _read(file: Path | None) -> tuple[Path, str]:
    """Return the text of a file or of standard input, and its name in messages. Raises OptionInvalid."""
    if file is None and sys.stdin.isatty():
        raise OptionInvalid("no file is named", hint="Run: penstock apply pipeline.yaml")
    path = file or Path("standard-input.yaml")
    try:
        return path, sys.stdin.read() if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise OptionInvalid(f"{path} cannot be read: {problem}", hint="Name a file in UTF-8") from problem


def _prove_stored(config: Path) -> None:
    """Raise OptionInvalid if the daemon of a settings file does not read instances from a store."""
    from penstock.settings.daemon import load_settings

    if load_settings(config, with_secrets=False).coordination is None:
        raise OptionInvalid(
            f"{config} names no store that its daemon reads instances from",
            hint="Set coordination in the file, and restart the daemon once",
        )
