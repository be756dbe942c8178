# SPDX-License-Identifier: Apache-2.0
"""Run the demo; see `main`."""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from pyspark.sql.streaming.query import StreamingQuery

from demo import shop
from demo.mirror import Mirror
from demo.screen import Place, Progress, Screen
from demo.stream import spark_session, start_stream
from demo.verdict import judge
from tools.servers import REPLICATION_PASSWORD, REPLICATION_USER, PartMissing, Server, ServerFailed
from tools.servers.child import end, spawn

ROOT = Path(__file__).parents[1]
MEASURE_EVERY_SECONDS = 0.25
STALL_SECONDS_MAX = 180.0
WRITER_END_SECONDS_MAX = 20.0


_interrupted = threading.Event()


class DemoFailed(RuntimeError):
    """A part of the demo ended with an error; the message says which and where to look."""


def main(words: list[str] | None = None) -> int:
    """Start a server and a writer, stream into Delta tables, and compare them with the server.

    Returns the exit status: 0 equal, 1 a difference or a failure, 3 the machine lacks a part, 130 Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="python -m demo", description="A live server into Delta tables.")
    parser.add_argument(
        "--seconds", type=float, default=25.0, help="how long the writer writes (%(default)s)"
    )
    parser.add_argument(
        "--directory", type=Path, default=ROOT / "build" / "demo", help="where the Delta tables go"
    )
    parser.add_argument("--flavor", default="host", help="the server: host, mysql, mariadb or mariadb11")
    arguments = parser.parse_args(words)
    # A shell gives background commands an ignored SIGINT; and SIGTERM is to end the demo as cleanly.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        if shutil.which("java") is None:
            raise PartMissing("no java is on PATH, and Spark needs Java 17 or newer")
        return run(arguments.flavor, arguments.seconds, arguments.directory.resolve())
    except KeyboardInterrupt:
        print("interrupted; server, writer and Spark have ended")
        return 130
    except (DemoFailed, ServerFailed) as error:
        print(error, file=sys.stderr)
        return 1
    except PartMissing as error:
        print(error, file=sys.stderr)
        return 3


def run(flavor: str, seconds: float, directory: Path) -> int:
    """Do what `main` says, with everything it starts gone when it returns."""
    work = _fresh(directory)
    progress = Progress()
    mirrors = [Mirror(directory, name, key) for name, key in shop.TABLES.items()]
    with ExitStack() as parts:
        screen = parts.enter_context(Screen(progress))
        server = parts.enter_context(Server(flavor))
        screen.tell(f"server {server.version} listens on 127.0.0.1:{server.port}")
        shop.create(server.sql)
        session = parts.enter_context(spark_session(work))
        screen.tell(f"Spark {session.version} runs in this process's own JVM")
        source = {
            "source": f"mysql://{REPLICATION_USER}@127.0.0.1:{server.port}",
            "password": REPLICATION_PASSWORD,
        }
        query = start_stream(
            session, source, shop.DATABASE, mirrors, work / "checkpoint", progress.batch_done
        )
        parts.callback(query.stop)
        _await_first_batch(query)
        connection = parts.enter_context(server.connect())
        writer = parts.enter_context(_writer(server, seconds, work / "writer.log"))
        # The first thing to happen on the way out: a second Ctrl-C does not cut short what ends the parts.
        parts.callback(signal.signal, signal.SIGINT, signal.SIG_IGN)
        screen.tell(f"a writer changes three tables for {seconds:g} s, and adds a column half way")
        _follow(progress, screen, query, connection, writer)
        screen.tell(f"drained: {progress.changes:,} changes in {progress.batches} batches")
        verdicts = [judge(connection, shop.DATABASE, mirror, _tally(work)[mirror.name]) for mirror in mirrors]
    screen.show_verdicts(verdicts)
    _tell_where(directory)
    return 0 if all(verdict.equal for verdict in verdicts) else 1


def _follow(
    progress: Progress,
    screen: Screen,
    query: StreamingQuery,
    connection: Any,
    writer: "subprocess.Popen[bytes]",
) -> None:
    """Measure until the writer has ended and the stream has reached the end of the server's log."""
    moved_at, reached_before = time.monotonic(), ("", 0)
    while True:
        head, reached = shop.log_end(connection), _reached(query)
        progress.measure(head, reached)
        screen.refresh()
        _check(query)
        if writer.poll() is None:
            progress.phase = "writing"
        elif writer.returncode:
            raise DemoFailed(f"the writer ended with {writer.returncode}: see work/writer.log")
        elif reached >= head:
            return
        else:
            progress.phase = "draining"
        if reached != reached_before:
            moved_at, reached_before = time.monotonic(), reached
        elif time.monotonic() > moved_at + STALL_SECONDS_MAX and reached < head:
            raise DemoFailed(f"the stream stays at {reached}, and the server's log ends at {head}")
        time.sleep(MEASURE_EVERY_SECONDS)


def _await_first_batch(query: StreamingQuery) -> None:
    """Wait until Spark has warmed up on the batch before the first change, which has no rows."""
    while query.lastProgress is None:
        _check(query)
        time.sleep(MEASURE_EVERY_SECONDS)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the demo, at its next look at the stream where the exception raised here does not.

    Python drops an exception that comes up while an object is let go of, as py4j's are all the time.
    """
    _interrupted.set()
    raise KeyboardInterrupt


def _check(query: StreamingQuery) -> None:
    if _interrupted.is_set():
        raise KeyboardInterrupt
    if query.exception() is not None:
        raise DemoFailed(f"the stream ended: {query.exception()}")


def _reached(query: StreamingQuery) -> Place:
    """Return the end of the last batch that is whole in the Delta tables."""
    last = query.lastProgress
    if last is None:
        return ("", 0)
    offset = json.loads(last.sources[0].endOffset)
    return offset["file"], offset["offset"]


@contextmanager
def _writer(server: Server, seconds: float, output: Path) -> Iterator["subprocess.Popen[bytes]"]:
    process = spawn([sys.executable, "-m", "demo.shop", str(server.port), str(seconds)], output)
    try:
        yield process
    finally:
        end(process, WRITER_END_SECONDS_MAX)


def _tally(work: Path) -> Mapping[str, Mapping[str, int]]:
    """Return the writer's last word."""
    tally: dict[str, dict[str, int]] = json.loads((work / "writer.log").read_text().splitlines()[-1])
    return tally


def _fresh(directory: Path) -> Path:
    """Remove what an earlier run left, and nothing else; return the directory for logs and the checkpoint."""
    work = directory / "work"
    for name in shop.TABLES:
        shutil.rmtree(directory / name, ignore_errors=True)
        shutil.rmtree(directory / f"{name}_changes", ignore_errors=True)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    return work


def _tell_where(directory: Path) -> None:
    print(f"The Delta tables lie in {directory}: {', '.join(shop.TABLES)}; and of each, its NAME_changes.")
    print("Open them with")
    print(f'  Polars   polars.read_delta("{directory}/orders")')
    print(f'  DuckDB   orders = deltalake.DeltaTable("{directory}/orders").to_pyarrow_dataset()')
    print('           duckdb.sql("FROM orders")')
    print(
        f'  Spark    spark.read.format("delta").load("{directory}/orders")   (with the delta-spark package)'
    )


if __name__ == "__main__":
    sys.exit(main())
