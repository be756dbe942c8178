# SPDX-License-Identifier: Apache-2.0
"""Spark's own processes for tests: a Connect server, and a standalone master with workers."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyspark

from tests.support.spark.patience import write_configuration
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers import child
from tools.servers.ports import free_port, is_free

SPARK_HOME = Path(pyspark.__file__).parent
ROOT = Path(__file__).resolve().parents[3]
PROGRAM_SECONDS_MAX = 400
# A process that has not ended after this time is killed.
END_SECONDS_MAX = 20

JVM_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


class SparkProcessFailed(RuntimeError):
    """A Spark process ended or does not respond. The message ends with the process's log."""


def environment(python: str = sys.executable) -> dict[str, str]:
    """Return the environment of a Spark process: everything on loopback, workers with this Python.

    It also configures the JVMs of executors and launchers, which no setting of a test reaches.
    """
    return os.environ | {
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": python,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "JAVA_TOOL_OPTIONS": JVM_OPTIONS,
    }


def environment_of(folder: Path, configuration: Path) -> dict[str, str]:
    """Return the environment of a process that uses the PySpark in a folder; see `tools.spark_versions`.

    `configuration` is an empty folder, to which a configuration for that version is written.
    """
    write_configuration(configuration, folder / "pyspark")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return environment() | {
        "SPARK_HOME": str(folder / "pyspark"),
        "SPARK_CONF_DIR": str(configuration),
        "PYTHONPATH": path,
    }


@contextmanager
def spark_process(
    words: Sequence[str], log: Path, port: int | None, env: Mapping[str, str], ready: str | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run one process inside the block; enter it once the port is open, or the log contains `ready`."""
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=dict(env), cwd=ROOT)
    try:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not (is_up := _is_up(log, port, ready)):
            if process.poll() is not None or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        if not is_up:
            raise SparkProcessFailed(
                f"{words[-1]} does not start:\n{log.read_text(errors='replace')[-4000:]}"
            )
        yield process
    finally:
        child.end(process, END_SECONDS_MAX)


def _is_up(log: Path, port: int | None, ready: str | None) -> bool:
    if ready is not None:
        return ready in log.read_text(errors="replace")
    return port is not None and not is_free(port)


@contextmanager
def connect_server(
    directory: Path,
    settings: Mapping[str, str],
    jars: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Run a Connect server on loopback with local[2], and yield its address."""
    port, env = free_port(), env or environment()
    words = [f"{env['SPARK_HOME']}/bin/spark-submit", "--master", "local[2]", "--driver-memory", "900m"]
    words += ["--driver-java-options", JVM_OPTIONS]
    if jars:
        words += ["--jars", ",".join(map(str, jars)), "--driver-class-path", ":".join(map(str, jars))]
    conf = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        **settings,
    }
    for name, value in conf.items():
        words += ["--conf", f"{name}={value}"]
    words += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    with spark_process(words, directory / "connect.log", port, env):
        yield f"sc://127.0.0.1:{port}"


@contextmanager
def standalone_cluster(directory: Path, workers: int, python: str) -> Iterator[str]:
    """Run a master and workers of one core each with this Python, and yield the master's URL."""
    port, spark_class = free_port(), str(SPARK_HOME / "bin" / "spark-class")
    deploy = "org.apache.spark.deploy"
    with ExitStack() as stack:
        master = [spark_class, f"{deploy}.master.Master", "--host", "127.0.0.1", "--port", str(port)]
        master += ["--webui-port", str(free_port())]
        # The workers must not see packages of the test's own Python.
        env = {name: value for name, value in environment(python).items() if name != "PYTHONPATH"}
        stack.enter_context(spark_process(master, directory / "master.log", port, env))
        for number in range(workers):
            worker = [spark_class, f"{deploy}.worker.Worker", "--host", "127.0.0.1", "--cores", "1"]
            worker += ["--memory", "900m", "--webui-port", str(free_port())]
            worker += ["--work-dir", str(directory / f"worker{number}"), f"spark://127.0.0.1:{port}"]
            log = directory / f"worker{number}.log"
            stack.enter_context(
                spark_process(worker, log, None, env, ready="Successfully registered with master")
            )
        yield f"spark://127.0.0.1:{port}"


def run_query(start: Callable[[], Any]) -> None:
    """Start a stream that ends by itself, wait for its end, and raise its error."""
    query = start()
    try:
        if not query.awaitTermination(PROGRAM_SECONDS_MAX):
            raise SparkProcessFailed("availableNow does not end")
    finally:
        query.stop()


def run_to_end(words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a program; return its exit status and its output."""
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        cwd=cwd,
        env=dict(env),
        timeout=PROGRAM_SECONDS_MAX,
        check=False,
    )


def run_program(name: str, order: str, env: Mapping[str, str] | None = None) -> str:
    """Run a program of tests.support.spark.programs and return the last line it prints."""
    words = [sys.executable, "-m", f"tests.support.spark.programs.{name}", order]
    done = run_to_end(words, ROOT, env or environment())
    if done.returncode != 0:
        raise SparkProcessFailed(f"{name}:\n{done.stderr[-6000:]}")
    return done.stdout.splitlines()[-1]
