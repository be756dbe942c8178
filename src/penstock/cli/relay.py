# SPDX-License-Identifier: Apache-2.0
"""`penstock relay`: another name for `penstock run --local --standby`, for one version."""

from pathlib import Path
from typing import Annotated

import structlog
import typer

from penstock.cli import run as run_verb

_log = structlog.get_logger(__name__)


def run(
    file: Annotated[
        Path, typer.Argument(metavar="pipeline.yaml", help="The pipeline file; see docs/guides/pipelines.md.")
    ],
    until: Annotated[
        str | None, typer.Option("--until", metavar=run_verb.CAUGHT_UP, help="As for penstock run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per batch.")] = False,
) -> None:
    """Run a pipeline like `penstock run --local --standby`, which replaces this command."""
    _log.warning("penstock relay is replaced", command=f"penstock run --local --standby {file}")
    run_verb.run(file, until=until, local=True, standby=True, as_json=as_json)
