# SPDX-License-Identifier: Apache-2.0
"""`penstock run` as a process of its own: what it tells of each batch, and the memory of its processes."""

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
#: Spark on one machine, whatever its name resolves to.
_SPARK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


@dataclass(frozen=True)
class Batch:
    """One batch as the pipeline told it: when that was (by `time.perf_counter`), how long it took, and its
    rows, of which an update has two."""

    ended: float
    seconds: float
    rows: int
    lag_seconds: float


@dataclass
class PipelineProcess:
    """A pipeline that runs. `resident` has, in bytes, the most that was seen of the driver, of the JVM, of
    one Python worker, of all Python processes at once, and of all processes."""

    process: subprocess.Popen[str]
    log: Path
    started: float
    batches: list[Batch] = field(default_factory=list)
    resident: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def wait(self) -> None:
        """Wait until it ends by itself. Raises AssertionError with its log where it failed."""
        self.process.wait(_SECONDS_MAX)
        assert self.process.returncode == 0, self.log.read_text()[-4000:]

    def listen(self) -> None:
        """Take what it says until it ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith("{"):
                continue
            told = json.loads(line)
            if told["state"] == "failed":
                continue
            lag = float(told.get("lag_seconds") or 0.0)
            self.batches.append(Batch(time.perf_counter(), float(told["seconds"]), int(told["rows"]), lag))
        self.seconds = time.perf_counter() - self.started

    def watch(self) -> None:
        """Look at the memory of its processes until it ends."""
        this = psutil.Process(self.process.pid)
        while self.process.poll() is None:
            found = {"driver": 0, "JVM": 0, "worker": 0, "all Python": 0, "all": 0}
            try:
                for one in (this, *this.children(recursive=True)):
                    kind, size = _kind(one, self.process.pid), one.memory_info().rss
                    found[kind] = max(found[kind], size)
                    found["all"] += size
                    found["all Python"] += 0 if kind == "JVM" else size
            except psutil.NoSuchProcess:
                continue
            for kind, size in found.items():
                self.resident[kind] = max(self.resident.get(kind, 0), size)
            time.sleep(_LOOK_SECONDS)


def _kind(process: psutil.Process, driver: int) -> str:
    if process.pid == driver:
        return "driver"
    return "JVM" if process.name() == "java" else "worker"


@contextmanager
def running(settings: dict[str, Any], folder: Path, *words: str) -> Iterator[PipelineProcess]:
    """Run a pipeline on two cores for as long as the block runs, unless it ends before. `words` are further
    ones of `penstock run`."""
    config = folder / f"{settings['name']}.yaml"
    config.write_text(yaml.safe_dump({"spark": _SPARK, **settings}))
    log = folder / f"{settings['name']}.log"
    argv = [str(Path(sys.executable).with_name("penstock")), "run", str(config)]
    argv += ["--json", "--master", _MASTER, *words]
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


def run_until_caught_up(settings: dict[str, Any], folder: Path) -> PipelineProcess:
    """Run a pipeline until all that stood in its log at its start is in its target."""
    with running(settings, folder, "--until", "caught-up") as run:
        run.wait()
    return run
