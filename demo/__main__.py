# SPDX-License-Identifier: Apache-2.0
"""Run the demo; see `main`."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from demo import shop
from demo.pipeline import Pipeline, write_pipeline
from demo.screen import Screen
from tools.servers import REPLICATION_PASSWORD, REPLICATION_USER, PartMissing, Server, ServerFailed
from tools.servers.child import end, spawn

ROOT = Path(__file__).parents[1]
MEASURE_EVERY_SECONDS = 0.25
STALL_SECONDS_MAX = 180.0
WRITER_END_SECONDS_MAX = 20.0
PASSWORD_VARIABLE = "DEMO_PASSWORD"


class DemoFailed(RuntimeError):
    """A part of the demo ended with an error; the message says which and where to look."""


def main(words: list[str] | None = None) -> int:
    """Start a server and a writer, run a pipeline into Delta tables, kill it once, and verify the tables.

    Returns the exit status: that of `penstock verify` (0 equal, 1 a difference), 1 a failure, 3 the machine
    lacks a part, 130 Ctrl-C.
    """
    arguments = _parser().parse_args(words)
    # A shell gives background commands an ignored SIGINT; and SIGTERM is to end the demo as cleanly.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        if not arguments.local and shutil.which("java") is None:
            raise PartMissing("no java is on PATH, and Spark needs Java 17 or newer")
        return run(arguments)
    except KeyboardInterrupt:
        print("interrupted; server, writer and pipeline have ended")
        return 130
    except (DemoFailed, ServerFailed) as error:
        print(error, file=sys.stderr)
        return 1
    except PartMissing as error:
        print(error, file=sys.stderr)
        return 3


def run(arguments: argparse.Namespace) -> int:
    """Do what `main` says, with everything it starts gone when it returns."""
    directory = arguments.directory.resolve()
    file = _fresh(directory)
    os.environ[PASSWORD_VARIABLE] = REPLICATION_PASSWORD
    pipeline = Pipeline(file, ["--local"] if arguments.local else ["--master", "local[2]"])
    progress = pipeline.progress
    with ExitStack() as parts:
        screen = parts.enter_context(Screen(progress))
        server = parts.enter_context(Server(arguments.flavor))
        screen.tell(f"server {server.version} listens on 127.0.0.1:{server.port}")
        shop.create(server.sql)
        source = {
            "url": f"mysql://{REPLICATION_USER}@127.0.0.1:{server.port}",
            "password_env": PASSWORD_VARIABLE,
            "tables": [f"{shop.DATABASE}.*"],
        }
        write_pipeline(file, source, directory / "lake")
        connection = parts.enter_context(server.connect())
        writer = parts.enter_context(_writer(server, arguments.seconds, directory / "writer.log"))
        screen.tell(
            "a writer changes three tables, adds a column, and goes on for"
            f" {arguments.seconds:g} s after the load"
        )
        parts.callback(pipeline.stop)
        # The first thing to happen on the way out: a second Ctrl-C does not cut short what ends the parts.
        parts.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)
        pipeline.start()
        screen.tell(f"penstock run {_short(file)}")
        _follow(pipeline, screen, connection, writer, kills=arguments.kills)
        pipeline.stop()
        screen.tell(f"{progress.rows:,} rows in {progress.batches} batches are in the Delta tables")
        screen.tell(f"penstock verify {_short(file)}")
        status = pipeline.verify()
    print(f"The Delta tables are in {directory / 'lake' / shop.DATABASE}: {', '.join(shop.TABLES)}.")
    print(f'Open one with Polars: polars.read_delta("{directory / "lake" / shop.DATABASE / "orders"}")')
    return status


def _follow(
    pipeline: Pipeline, screen: Screen, connection: Any, writer: "subprocess.Popen[bytes]", *, kills: int
) -> None:
    """Wait until the writer has ended and the pipeline has reached the end of the server's log.

    While the writer writes, the pipeline is killed after its batches a few times, and started again.
    """
    progress = pipeline.progress
    moved_at, reached_before, batches_before = time.monotonic(), ("", 0), progress.batches
    writing = False
    while True:
        if pipeline.exit_status is not None:
            raise DemoFailed(f"the pipeline ended with {pipeline.exit_status}: see {pipeline.log}")
        # The writer is looked at before the log's end, which then covers all that it wrote.
        writer_ended = writer.poll() is not None
        head, reached = shop.log_end(connection), pipeline.look().position
        screen.refresh()
        if writer_ended and writer.returncode:
            raise DemoFailed(
                f"the writer ended with {writer.returncode}: see writer.log beside {pipeline.log}"
            )
        if writer_ended and reached >= head:
            return
        if progress.phase == "running" and not writing:
            writing = True
            writer.send_signal(signal.SIGUSR1)
        if kills and progress.phase == "running" and progress.batches > batches_before:
            kills -= 1
            pipeline.kill()
            screen.tell("killed the pipeline with SIGKILL; it starts again where its last batch ended")
            batches_before, moved_at = progress.batches, time.monotonic()
            pipeline.start()
        if reached != reached_before:
            moved_at, reached_before = time.monotonic(), reached
        elif time.monotonic() > moved_at + STALL_SECONDS_MAX and reached < head:
            raise DemoFailed(f"the pipeline stays at {reached}, and the server's log ends at {head}")
        time.sleep(MEASURE_EVERY_SECONDS)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _writer(server: Server, seconds: float, output: Path) -> Iterator["subprocess.Popen[bytes]"]:
    process = spawn([sys.executable, "-m", "demo.shop", str(server.port), str(seconds)], output)
    try:
        yield process
    finally:
        end(process, WRITER_END_SECONDS_MAX)


def _fresh(directory: Path) -> Path:
    """Remove what an earlier run left, and nothing else; return the pipeline's file."""
    shutil.rmtree(directory / "lake", ignore_errors=True)
    # The pipeline keeps its progress beside its file, in SQLite.
    for path in (*directory.glob("penstock-pipelines.db*"), *directory.glob("*.log")):
        path.unlink()
    directory.mkdir(parents=True, exist_ok=True)
    return directory / "pipeline.yaml"


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m demo", description="A live server into Delta tables.")
    parser.add_argument(
        "--seconds", type=float, default=25.0, help="how long the writer writes (%(default)s)"
    )
    parser.add_argument(
        "--directory", type=Path, default=ROOT / "build" / "demo", help="where the Delta tables go"
    )
    parser.add_argument("--flavor", default="host", help="the server: host, mysql, mariadb or mariadb11")
    parser.add_argument(
        "--kills", type=int, default=1, help="how often the pipeline is killed with SIGKILL (%(default)s)"
    )
    parser.add_argument("--local", action="store_true", help="run the pipeline without Spark")
    return parser


if __name__ == "__main__":
    sys.exit(main())
