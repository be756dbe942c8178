# SPDX-License-Identifier: Apache-2.0
"""`penstock run` in a separate process: its report of each batch, and the memory of its processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

_LOOK_SECONDS = 0.1
_SECONDS_MAX = 3_600.0
_MASTER = "local[2]"
#: Settings of Spark on one machine that do not depend on the address of the host name.
_SPARK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


@dataclass(frozen=True)
class Batch:
    """One reported batch: the time of its report (by `time.perf_counter`), its duration, and its rows.

    An update has two rows.
    """

    ended: float
    seconds: float
    rows: int
    lag_seconds: float


@dataclass
class PipelineProcess:
    """A running pipeline.

    `resident` contains the peak memory in bytes of the driver, of the JVM, of one Python worker, of all
    Python processes together, and of all processes.
    """

    process: subprocess.Popen[str]
    log: Path
    started: float
    batches: list[Batch] = field(default_factory=list)
    resident: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    # CPU seconds of all processes together, up to the last sample.
    cpu_seconds: float = 0.0

    def wait(self) -> None:
        """Wait until the pipeline ends. Raises AssertionError with its log if it failed."""
        self.process.wait(_SECONDS_MAX)
        assert self.process.returncode == 0, self.log.read_text()[-4000:]

    def listen(self) -> None:
        """Read the pipeline's output until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith("{"):
                continue
            report = json.loads(line)
            # Other lines report a failure or a slow batch.
            if "rows" not in report or report["state"] not in ("loading", "running"):
                continue
            lag = float(report.get("lag_seconds") or 0.0)
            self.batches.append(
                Batch(time.perf_counter(), float(report["seconds"]), int(report["rows"]), lag)
            )
        self.seconds = time.perf_counter() - self.started

    def watch(self) -> None:
        """Sample the memory of the pipeline's processes until it ends."""
        this = psutil.Process(self.process.pid)
        while self.process.poll() is None:
            peak = {"driver": 0, "JVM": 0, "worker": 0, "all Python": 0, "all": 0}
            cpu_seconds = 0.0
            try:
                for process in (this, *this.children(recursive=True)):
                    kind, size = _kind(process, self.process.pid), process.memory_info().rss
                    peak[kind] = max(peak[kind], size)
                    peak["all"] += size
                    peak["all Python"] += 0 if kind == "JVM" else size
                    cpu_seconds += sum(process.cpu_times()[:2])
            except psutil.NoSuchProcess:
                continue
            self.cpu_seconds = max(self.cpu_seconds, cpu_seconds)
            for kind, size in peak.items():
                self.resident[kind] = max(self.resident.get(kind, 0), size)
            time.sleep(_LOOK_SECONDS)


def _kind(process: psutil.Process, driver: int) -> str:
    if process.pid == driver:
        return "driver"
    return "JVM" if process.name() == "java" else "worker"


@contextmanager
def running(
    settings: dict[str, Any], folder: Path, *words: str, local: bool = False
) -> Iterator[PipelineProcess]:
    """Run a pipeline on two cores inside the block, unless it ends earlier.

    `words` are additional arguments of `penstock run`. The pipeline runs on Spark, or if `local` is set, in
    its own process.
    """
    config = folder / f"{settings['name']}.yaml"
    config.write_text(yaml.safe_dump({"spark": _SPARK, **settings}))
    log = folder / f"{settings['name']}.log"
    argv = [str(Path(sys.executable).with_name("penstock")), "run", str(config)]
    argv += ["--json", *(["--local"] if local else ["--master", _MASTER]), *words]
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    started = time.perf_counter()
    with log.open("w") as said:
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=said, text=True, cwd=folder, env=environment
        )
    run = PipelineProcess(process, log, started)
    threads = [threading.Thread(target=work) for work in (run.listen, run.watch)]
    for thread in threads:
        thread.start()
    try:
        yield run
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        run.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for thread in threads:
            thread.join()


def run_until_caught_up(settings: dict[str, Any], folder: Path, *, local: bool = False) -> PipelineProcess:
    """Run a pipeline until every change that its log had at the start is in its target."""
    with running(settings, folder, "--until", "caught-up", local=local) as run:
        run.wait()
    return run
