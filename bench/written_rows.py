# SPDX-License-Identifier: Apache-2.0
"""Rows that are decoded before the clock starts, and what writing them costs the client and the server."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import psutil
import pyarrow
import pyarrow.compute as pc

from bench.corpora.corpus import Corpus
from penstock import read_binlog
from penstock.changes import Changes, Target
from penstock.model import TableName
from penstock.sinks.sink import BatchMark, Sink, make_sink, settings_of

_BATCH_ROWS = 65_536
# Every write of a process is a separate batch.
_numbers = count(1)


@dataclass(frozen=True)
class Cost:
    """The cost of writing rows: the time by the clock, and the CPU time of the client and the server."""

    rows: int
    seconds: float
    client: float
    server: float

    @property
    def rates(self) -> dict[str, float]:
        """The figures of a line. A time below the resolution of the system's clock is left out."""
        micros = {
            "µs of client CPU per row": self.client / self.rows * 1e6,
            "µs of server CPU per row": self.server / self.rows * 1e6,
        }
        return {"rows/s": self.rows / self.seconds} | {
            title: time for title, time in micros.items() if time > 0
        }


def decoded_changes(binlog: Corpus, table: str, kinds: Sequence[str] = ()) -> list[Changes]:
    """Return the changes of a table, or only those of some kinds."""
    decoded = []
    for batch in read_binlog(str(binlog.path), tables=table, batch_rows_max=_BATCH_ROWS):
        name, rows = TableName.parse(batch.table), batch.to_arrow()
        if kinds:
            rows = rows.filter(pc.is_in(rows.column("_change_type"), pyarrow.array(list(kinds))))
        decoded.append(Changes(Target(name, batch.columns, batch.primary_key), rows, name))
    return decoded


def sink_of(kind: str, **settings: Any) -> Sink:
    """Return a sink with these settings."""
    section: Any = settings_of(kind)
    return make_sink(kind, section(**settings))


def write_part(sink: Sink, changes: Iterable[Changes]) -> int:
    """Write changes as a batch of one part, and return the number of its rows."""
    mark = BatchMark("bench", "1", next(_numbers))
    writer = sink.open(mark, 0)
    for part in changes:
        writer.write(part)
    receipt = writer.finish()
    sink.commit(mark, [receipt])
    return receipt.rows


def costs(
    server: int, writes: Mapping[str, Callable[[], int]], clear: Callable[[], object], repeat: int
) -> dict[str, Cost]:
    """Return the median cost of each write. A write returns the number of rows that it wrote.

    The writes take turns, so that other work on the machine affects all of them equally. `clear` removes the
    rows of the previous write. `server` is the process whose CPU time counts, together with that of its
    children.
    """
    measured: dict[str, list[Cost]] = {title: [] for title in writes}
    for _ in range(repeat):
        for title, write in writes.items():
            clear()
            measured[title].append(_cost(server, write))
    return {title: _median(of_title) for title, of_title in measured.items()}


def _cost(server: int, write: Callable[[], int]) -> Cost:
    server_before, client_before, began = _seconds_of_tree(server), time.process_time(), time.perf_counter()
    rows = write()
    seconds, client = time.perf_counter() - began, time.process_time() - client_before
    return Cost(rows, seconds, client, _seconds_of_tree(server) - server_before)


def _median(costs_of_title: Sequence[Cost]) -> Cost:
    return Cost(
        costs_of_title[0].rows,
        statistics.median(cost.seconds for cost in costs_of_title),
        statistics.median(cost.client for cost in costs_of_title),
        statistics.median(cost.server for cost in costs_of_title),
    )


def _seconds_of_tree(process: int) -> float:
    """Return the CPU time of a process and its children, running and ended."""
    parent, seconds = psutil.Process(process), 0.0
    for member in (parent, *parent.children(recursive=True)):
        # A child that has just ended is counted by its parent.
        with suppress(psutil.NoSuchProcess):
            times = member.cpu_times()
            seconds += times.user + times.system + times.children_user + times.children_system
    return seconds
