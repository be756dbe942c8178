# SPDX-License-Identifier: Apache-2.0
"""Run `penstock run --local` in a separate process that a test can kill."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers import Server

# A short lease, so that the test does not wait ten seconds after it kills a runner.
_PROGRAM = (
    "import penstock.pipeline.state as state\n"
    "state._LEASE_SECONDS = 1.0\n"
    "from penstock.cli.app import main\n"
    "main()\n"
)


def write_pipeline(folder: Path, server: Server, database: str, sink: dict[str, Any], load: str) -> Path:
    """Write the file of a pipeline with small batches, from a database into a sink."""
    file = folder / "shop.yaml"
    source = {"url": server.url("root"), "name": "shop", "tables": f"{database}.*"}
    values = {"source": source, "sink": sink, "load": load, "batch": {"interval": 0, "rows": 200}}
    file.write_text(json.dumps(values), encoding="utf-8")
    return file


@contextmanager
def penstock(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command line in a separate process; kill it at the end of the block if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(WAIT_SECONDS_MAX)


def lines(process: subprocess.Popen[str], batches: int) -> list[dict[str, Any]]:
    """Return the progress lines of a process's next batches."""
    assert process.stdout is not None
    batch_lines: list[dict[str, Any]] = []
    while len(batch_lines) < batches:
        line = json.loads(process.stdout.readline())
        batch_lines += [line] if "batch" in line else []
    return batch_lines
