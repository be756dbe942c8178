# SPDX-License-Identifier: Apache-2.0
"""`penstock run` as a process of its own, on the pipeline file that the demo writes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock import Position
from tools.servers.child import end, spawn

COMMAND = Path(sys.executable).with_name("penstock")
# SIGTERM ends a run within 15 seconds; Spark's JVM takes a little longer.
END_SECONDS_MAX = 60.0
# Spark on one machine, whatever its name resolves to. The JVM's options halve the time it takes to start.
SPARK = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


@dataclass
class Progress:
    """What `penstock run --json` reported last; `rows` counts those of all batches."""

    phase: str = "starting"
    batches: int = 0
    rows: int = 0
    rows_per_second: int = 0
    lag_seconds: float = 0.0
    position: tuple[str, int] = ("", 0)

    def update(self, report: Mapping[str, Any]) -> None:
        """Take in one line of the pipeline's output, as docs/guides/pipelines.md describes it."""
        if "rows" not in report or report["state"] not in ("loading", "running"):
            return
        self.phase = report["state"]
        self.batches = max(self.batches, report["batch"])
        self.rows += report["rows"]
        self.rows_per_second = report["rows_per_second"]
        self.lag_seconds = report.get("lag_seconds", self.lag_seconds)
        for offset in report.get("positions", {}).values():
            position = Position.parse(offset.partition(" ")[0])
            self.position = position.file, position.offset

    def __str__(self) -> str:
        return (
            f"{self.phase}: {self.rows:,} rows in {self.batches} batches,"
            f" {self.rows_per_second:,} rows/s, lag {self.lag_seconds:.1f} s"
        )


class Pipeline:
    """A pipeline file, and the process that runs it, whose output is appended to `log`."""

    def __init__(self, file: Path, words: Sequence[str]) -> None:
        self.file = file
        self.log = file.with_name("pipeline.log")
        self.progress = Progress()
        self._words = words
        self._process: subprocess.Popen[bytes] | None = None
        self._bytes_read = 0

    @property
    def exit_status(self) -> int | None:
        """How the process ended; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def start(self) -> None:
        """Start the process, in a group of its own: a terminal's Ctrl-C reaches the demo, which ends it."""
        self._process = spawn([str(COMMAND), "run", str(self.file), "--json", *self._words], self.log)

    def kill(self) -> None:
        """Kill the process and all that it started with SIGKILL."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self.progress.phase = "starting again"

    def stop(self) -> None:
        """Ask the process to finish its batch and end; kill it where it does not."""
        if self._process is not None and not end(self._process, END_SECONDS_MAX):
            self.kill()

    def look(self) -> Progress:
        """Take in what the process has reported since the last look."""
        with self.log.open("rb") as output:
            output.seek(self._bytes_read)
            for line in output:
                # The last line may be in the making.
                if line.endswith(b"\n"):
                    self._bytes_read += len(line)
                    if line.startswith(b"{"):
                        self.progress.update(json.loads(line))
        return self.progress

    def verify(self) -> int:
        """Print the comparison of the target with the source, and return the exit status."""
        return subprocess.run([str(COMMAND), "verify", str(self.file)], check=False).returncode


def write_pipeline(file: Path, source: Mapping[str, Any], lake: Path) -> None:
    """Write the pipeline: load the tables, follow their changes, and keep Delta tables equal to them."""
    settings = {
        "name": "demo",
        "source": dict(source),
        "load": {"mode": "full"},
        "sink": {"delta": {"mode": "mirror", "path": str(lake)}},
        "spark": SPARK,
    }
    file.write_text(yaml.safe_dump(settings, sort_keys=False))
