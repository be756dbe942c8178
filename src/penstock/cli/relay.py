# SPDX-License-Identifier: Apache-2.0
"""`penstock relay`: run a pipeline without Spark, milliseconds behind the commit."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer

from penstock.cli.shared.signals import stopped_by_signals
from penstock.pipeline.relay import Relay
from penstock.pipeline.settings import load_pipeline

_log = structlog.get_logger(__name__)


def run(
    file: Annotated[
        Path, typer.Argument(metavar="pipeline.yaml", help="The pipeline file; see docs/guides/pipelines.md.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per batch.")] = False,
) -> None:
    """Run a pipeline without Spark: apply a daemon's changes to its sink until SIGTERM.

    There is no full load. The file must set load: none, and its sources must be penstock:// URLs.
    """
    settings = load_pipeline(file)
    relay = Relay(settings, on_batch=_tell if as_json else None)
    names = ", ".join(source.name for source in settings.sources)
    _log.info("relaying", pipeline=settings.name, sources=names, sink=settings.sink.kind)
    with stopped_by_signals(relay.stop):
        relay.run()
    counts = relay.counts
    _log.info("relayed", batches=counts.batches, rows=counts.rows, rejected=counts.rejected)


def _tell(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
