# SPDX-License-Identifier: Apache-2.0
"""The time that a change spends in each stage of its path, from one trace of all processes on the path.

`python -m bench.stages FILE ARGUMENT...` runs Penstock's command line with a clock at the functions where
stages end. When the command ends, FILE contains the marks: the log position that had passed a stage, and the
time. All processes are on one host, so their clocks agree. A mark costs a microsecond.
"""

import bisect
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from bench.result import Line
from penstock.model import Position
from penstock.source.offsets import Offset

#: (the commit version up to which the log has passed the stage, seconds since 1970), in ascending order.
Marks = list[tuple[int, float]]

_ROOT = Path(__file__).parents[1]
_END_SECONDS_MAX = 120.0

#: The stage of a pipeline after which the target shows a change.
TARGET = "visible in the target"


class Clock:
    """The marks that one process has recorded, by stage."""

    def __init__(self) -> None:
        self.marks: dict[str, Marks] = {}

    def mark(self, stage: str, end: Position | None, when: float | None = None) -> None:
        """Record that everything before a position has passed a stage."""
        if end is not None:
            marked = end.commit_version, time.time() if when is None else when
            self.marks.setdefault(stage, []).append(marked)

    def after(self, owner: Any, name: str, stage: str, end: Callable[..., Position | None]) -> None:
        """Mark a stage whenever a function returns; `end` gets its result and its arguments."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*arguments: Any, **more: Any) -> Any:
            result = function(*arguments, **more)
            self.mark(stage, end(result, *arguments))
            return result

        setattr(owner, name, timed)

    def before(self, owner: Any, name: str, stage: str, end: Callable[..., Position | None]) -> None:
        """Mark a stage whenever a function that yields or waits is called; `end` gets its arguments."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*arguments: Any, **more: Any) -> Any:
            self.mark(stage, end(*arguments))
            return function(*arguments, **more)

        setattr(owner, name, timed)

    def watch_daemon(self) -> None:
        """Mark the stages of a daemon."""
        receive: Any = import_module("penstock.capture.receive")
        pieces: Any = import_module("penstock.serve.pieces")
        changes: Any = import_module("penstock.serve.http.changes")
        received_at = 0.0
        wait_for_bytes = receive.ReplicaStream.receive_into
        append, send, make = receive.Log.append, changes.ChangesAnswer._send_piece, pieces.make_piece

        def receive_into(stream: Any, buffer: memoryview) -> int:
            nonlocal received_at
            size: int = wait_for_bytes(stream, buffer)
            received_at = time.time()
            return size

        def append_block(log: Any, *arguments: Any, **more: Any) -> None:
            append(log, *arguments, **more)
            self.mark("received", log.visible, received_at)
            self.mark("visible in the log", log.visible)

        def make_piece(*arguments: Any) -> Any:
            begun = time.time()
            made = make(*arguments)
            if made is not None:
                self.mark("a follower woke", made[0].end, begun)
                self.mark("decoded", made[0].end)
            return made

        async def send_piece(answer: Any, sender: Any, piece: Any) -> Any:
            sent = await send(answer, sender, piece)
            self.mark("sent by the daemon", piece.end)
            return sent

        receive.ReplicaStream.receive_into = receive_into
        receive.Log.append = append_block
        pieces.make_piece = make_piece
        changes.ChangesAnswer._send_piece = send_piece

    @contextmanager
    def watching_client(self) -> Iterator[None]:
        """Mark the stages of the subscribers that this process has inside the block."""
        intake = import_module("penstock.client.intake").Intake
        deliver = intake._deliver
        self.before(intake, "_deliver", "received by the client", lambda *arguments: arguments[3].position)
        try:
            yield
        finally:
            intake._deliver = deliver

    def watch_pipeline(self) -> None:
        """Mark the stages of a pipeline in one process, with one source."""
        run = import_module("penstock.engine.run").PipelineRun
        batches = import_module("penstock.engine.batches")
        source = import_module("penstock.source.daemon").DaemonSource
        state = import_module("penstock.pipeline.state").PipelineState
        follower = import_module("penstock.engine.head_follower").HeadFollower
        self.after(
            follower, "next", "read by the pipeline", lambda stretch, *_: stretch and stretch.end.position
        )
        self.after(source, "wait_behind", "reported to the pipeline", lambda listing, *_: _head_of(listing))
        self.after(run, "_next", "planned", lambda record, *_: _end_of(record))
        self.after(state, "begin", "the plan is recorded", lambda _none, _state, record: _end_of(record))
        self.after(batches._Tasks, "run", "written", lambda _outcome, tasks: _end_of(tasks.record))
        self.before(
            batches.Batches, "_record", TARGET, lambda _batches, _checkpoint, record, *_: _end_of(record)
        )

    def write(self, file: Path) -> None:
        """Write the marks to a file."""
        file.write_text(json.dumps(self.marks))


def read_marks(file: Path) -> dict[str, Marks]:
    """Return the marks of a process that has ended."""
    marks: dict[str, Marks] = json.loads(file.read_text())
    return marks


@contextmanager
def following(settings: Mapping[str, Any], folder: Path, marks: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a pipeline in one process, which the block gets; afterwards `marks` has the times of its stages."""
    config, output = folder / "pipeline.yaml", folder / "pipeline.output"
    config.write_text(yaml.safe_dump(dict(settings)))
    program = [sys.executable, "-m", "bench.stages", str(marks), "run", "--local", str(config)]
    with output.open("wb") as said:
        process = subprocess.Popen(program, stdout=said, stderr=said, cwd=_ROOT)
    try:
        yield process
        assert process.poll() is None, output.read_text()[-4000:]
    finally:
        process.terminate()
        process.wait(_END_SECONDS_MAX)


@dataclass(frozen=True)
class Change:
    """A change that has arrived: its commit version, when it was committed, and when it arrived."""

    version: int
    committed: float
    arrived: float


def arrivals_of(committed: Iterable[tuple[int, float]], marks: Marks) -> list[Change]:
    """Return the changes, by commit version and time, with the time at which each passed a stage."""
    ends = [end for end, _ in marks]
    arrived = ((bisect.bisect_right(ends, version), version, when) for version, when in committed)
    return [Change(version, when, marks[index][1]) for index, version, when in arrived if index < len(marks)]


def stage_lines(changes: Iterable[Change], marks: Mapping[str, Marks], arrival: str) -> list[Line]:
    """Return how long changes took to pass each stage, and how long after their commit they had passed it.

    The stages are sorted by the median time at which they ended. A change before the first mark of a stage
    has no figure for that stage.
    """
    ends = {stage: [end for end, _ in marked] for stage, marked in marks.items()}
    since: dict[str, list[float]] = {}
    for change in changes:
        for stage, marked in marks.items():
            index = bisect.bisect_right(ends[stage], change.version)
            if 0 < index < len(marked):
                since.setdefault(stage, []).append((marked[index][1] - change.committed) * 1000)
        since.setdefault(arrival, []).append((change.arrived - change.committed) * 1000)
    medians = sorted((statistics.median(delays), stage) for stage, delays in since.items())
    lines, before = [], 0.0
    for median, stage in medians:
        rates = {
            "ms of the stage, p50": median - before,
            "ms": median,
            "ms, p99": percentile(since[stage], 0.99),
        }
        lines.append(Line("stages", stage, rates))
        before = median
    return lines


def statement_line(seconds: Sequence[float]) -> Line:
    """Return how long the statements took for their clients. Most of that time is the commit."""
    rates = {"ms": statistics.median(seconds) * 1000, "ms, p99": percentile(seconds, 0.99) * 1000}
    return Line("writers", "a statement with its commit", rates)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def _end_of(record: Any) -> Position | None:
    """Return the end of a batch of one source."""
    return Offset.from_json(next(iter(record.end.values()))).position if record and record.end else None


def _head_of(listing: Any) -> Position | None:
    head = listing.answer["position"]
    return None if head is None else Position.parse(head)


def main() -> None:
    """Run the command line, then write the marks."""
    file, *arguments = sys.argv[1:]
    clock = Clock()
    if arguments[0] == "serve":
        clock.watch_daemon()
    else:
        clock.watch_pipeline()
    sys.argv = ["penstock", *arguments]
    try:
        import_module("penstock.cli.app").main()
    finally:
        clock.write(Path(file))


if __name__ == "__main__":
    main()
