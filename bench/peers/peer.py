# SPDX-License-Identifier: Apache-2.0
"""The contract of a peer, and the pinned process each measurement runs in.

A peer is a module of this folder with a `TITLE`, a `version()` and one or more verbs:

    decode_file(job)     decode every row of `job.corpus.path`
    decode_stream(job)   the same over a replication connection to 127.0.0.1:`job.port`
    receive_raw(job)     receive the file's bytes over that connection, unchanged, and drop or write them
    encode_json(job)     write every change as JSON, read over that connection: what a program would do itself
    encode_debezium(job), encode_maxwell(job), encode_canal_flat(job)
                         write every change of `job.corpus.path` as that dialect's JSON
    capture_log(job)     keep the file durably on the disk, searchable by position, `job.copies` times at once

A peer that must build something first does it in `prepare()`, before the clock starts.

A verb returns a `Tally` of the rows that it processed. If it processed the whole file, its counts must equal
the corpus's own, so a peer cannot be fast by omitting rows. A verb that `job.seconds_max` stopped reports its
part.
"""

import json
import mmap
import os
import pkgutil
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

from bench.compiled import ToolMissing
from bench.corpora.corpus import Corpus, cache_directory, check_rows, corpus, memory_directory

VERBS = (
    "decode_file",
    "decode_stream",
    "encode_json",
    "encode_debezium",
    "encode_maxwell",
    "encode_canal_flat",
    "receive_raw",
    "capture_log",
)
#: The core every peer runs on: the last core, since interrupts and other work tend to stay on the first.
CORE = max(os.sched_getaffinity(0))
_WARM_BYTES = 1 << 22
_WARM_SPARE_BYTES = 256 << 20


@dataclass(frozen=True)
class Job:
    """The input of a verb. The verb stores received data in memory, or with `on_disk` in the folder of the
    corpora.
    """

    corpus: Corpus
    port: int | None = None
    seconds_max: float | None = None
    on_disk: bool = False
    copies: int = 1

    @property
    def directory(self) -> Path:
        """The parent directory of a verb's folder for received data."""
        return cache_directory() if self.on_disk else memory_directory()


@dataclass(frozen=True)
class Tally:
    """What a verb observed.

    `rows` counts changes; an update counts as one. `complete` is true if the whole file was processed.
    `rows_by_kind` is None if the peer does not print such counts. `verify` runs after the clock has stopped,
    and raises `AssertionError` if the result is wrong.
    """

    rows: int
    bytes: int
    rows_by_kind: dict[str, int] | None = None
    complete: bool = True
    note: str = ""
    verify: Callable[[], None] | None = None


@dataclass(frozen=True)
class Outcome:
    """One measurement: a tally and its time. CPU seconds include child processes, but not the server."""

    peer: str
    verb: str
    workload: str
    rows: int
    bytes: int
    seconds_cpu: float
    seconds_wall: float
    complete: bool
    rows_by_kind: dict[str, int] | None
    version: str
    note: str

    @property
    def rows_per_second(self) -> float:
        """Rows per second of CPU: the throughput of one core with no other load."""
        return self.rows / self.seconds_cpu

    @property
    def rows_per_second_wall(self) -> float:
        """Rows per second of the clock."""
        return self.rows / self.seconds_wall

    @property
    def megabytes_per_second(self) -> float:
        """Binlog megabytes (10^6) per second of CPU."""
        return self.bytes / self.seconds_cpu / 1e6

    @property
    def megabytes_per_second_wall(self) -> float:
        """Binlog megabytes (10^6) per second of the clock."""
        return self.bytes / self.seconds_wall / 1e6


class PeerFailed(RuntimeError):
    """A peer could not run, or its result was wrong. The message ends with the peer's output."""


def peer(name: str) -> ModuleType:
    """Return the module of the peer called `name`; its package must be installed."""
    try:
        return import_module(f"bench.peers.{name}")
    except ModuleNotFoundError as error:
        raise PeerFailed(f"peer {name} needs {error.name}: run pip install 'penstock[bench]'") from error


def can_run(name: str) -> str | None:
    """Build a peer and return None, or return the reason why it is not available on this machine."""
    try:
        getattr(peer(name), "prepare", lambda: None)()
    except ToolMissing as problem:
        return str(problem)
    return None


def names() -> list[str]:
    """Return the names of all peers."""
    here = Path(__file__).parent
    return sorted(m.name for m in pkgutil.iter_modules([str(here)]) if m.name not in ("peer", "__main__"))


def measure(name: str, verb: str, job: Job, repeat: int = 1) -> Outcome:
    """Run one verb `repeat` times; see `measure_all`."""
    return measure_all([(name, verb, job)], repeat)[0]


def measure_all(orders: Sequence[tuple[str, str, Job]], repeat: int) -> list[Outcome]:
    """Run each (peer, verb, job) `repeat` times and return their medians, in the given order.

    Each run has a separate process, pinned to `CORE`. The peers take turns, so that other load on the machine
    affects all of them equally. The medians of CPU time and clock time are computed separately.
    """
    rounds = [[_run(name, verb, job) for name, verb, job in orders] for _ in range(repeat)]
    return [_median(outcomes) for outcomes in zip(*rounds, strict=True)]


def _median(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome with the median CPU time, with its clock time replaced by the median clock time."""
    middle = statistics.median_low(outcome.seconds_cpu for outcome in outcomes)
    chosen = next(outcome for outcome in outcomes if outcome.seconds_cpu == middle)
    if not chosen.complete:
        # The rows of a partial run belong to the time of that run.
        return chosen
    return replace(chosen, seconds_wall=statistics.median_low(outcome.seconds_wall for outcome in outcomes))


def _run(name: str, verb: str, job: Job) -> Outcome:
    order: dict[str, object] = {"peer": name, "verb": verb, "name": job.corpus.name, "size": job.corpus.size}
    order |= {"port": job.port, "seconds_max": job.seconds_max, "on_disk": job.on_disk, "copies": job.copies}
    argv = [sys.executable, "-m", "bench.peers", json.dumps(order)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    if done.returncode:
        raise PeerFailed(f"peer {name} {verb} on {job.corpus.name}:\n{done.stderr.strip()}")
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def carry_out(order_text: str) -> str:
    """Run one order in this process and return its outcome as JSON; `measure` calls it in a child process."""
    order = json.loads(order_text)
    os.sched_setaffinity(0, {CORE})
    module = peer(order["peer"])
    job_options = {name: order[name] for name in ("port", "seconds_max", "on_disk", "copies")}
    job = Job(corpus(order["name"], order["size"]), **job_options)
    verb: Callable[[Job], Tally] = getattr(module, order["verb"])
    getattr(module, "prepare", lambda: None)()
    _warm(job.corpus)
    cpu, wall = _cpu_seconds(), time.perf_counter()
    tally = verb(job)
    cpu, wall = _cpu_seconds() - cpu, time.perf_counter() - wall
    if tally.complete:
        check_rows(order["peer"], tally.rows, job.copies * job.corpus.rows, job.corpus)
        if tally.rows_by_kind is not None:
            check_rows(order["peer"], tally.rows_by_kind, job.corpus.rows_by_kind, job.corpus)
    if tally.verify:
        tally.verify()
    outcome = Outcome(
        peer=order["peer"],
        verb=order["verb"],
        workload=job.corpus.name,
        rows=tally.rows,
        bytes=tally.bytes,
        seconds_cpu=cpu,
        seconds_wall=wall,
        complete=tally.complete,
        rows_by_kind=tally.rows_by_kind,
        version=module.version(),
        note=tally.note,
    )
    return json.dumps(asdict(outcome))


def _warm(binlog: Corpus) -> None:
    """Load the file into the page cache, and touch enough memory for a copy of it.

    Otherwise, the first run would also measure the disk, and memory that is new to a virtual machine. The
    host must first provide such memory, and touching it takes longer than copying a file into it.
    """
    with mmap.mmap(-1, binlog.bytes + _WARM_SPARE_BYTES) as memory:
        for offset in range(0, len(memory), mmap.PAGESIZE):
            memory[offset] = 1
    with open(binlog.path, "rb", buffering=0) as file:
        while file.read(_WARM_BYTES):
            continue


def _cpu_seconds() -> float:
    both = [resource.getrusage(scope) for scope in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)
