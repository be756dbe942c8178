# SPDX-License-Identifier: Apache-2.0
"""Drain the log with Canal's protocol, over TCP with acknowledgements: a minimal client, and Canal's own.

Daemon and client share the machine's cores. A run ends when the client has received every row of the file.
Canal's own server, which reads the binlog itself, is measured beside it.
"""

import resource
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import clients
from bench.canal_server import VERSION, canal_server, prepare
from bench.compiled import ToolMissing, build_c, build_java, built, java_words
from bench.corpora.corpus import Corpus, cache_directory, check_rows, corpus
from bench.corpora.serve import serve
from bench.corpora.workload import DATABASE
from bench.daemon import INSTANCE, serving_corpus
from bench.result import CaseResult, Line, Options, Target
from tools.servers import Server

TITLE = "The log as Canal's protocol to one TCP client that drains and acknowledges (by the clock)"

#: Rows per second, for events with several rows and for transactions of one row.
_TARGETS = {"bulk": 400_000.0, "narrow": 200_000.0}
_CLIENT_VERSION = "canal.client 1.1.8"
_SOURCES = Path(clients.__file__).parent
_FILTER = rf"{DATABASE}\..*"
_RUN_SECONDS_MAX = 600.0

#: Limits of a destination that hide no row, so that the same number of rows arrives.
_LIMITS: dict[str, dict[str, Any]] = {
    "with a condition": {"canal_where": {f"{DATABASE}.*": "id >= 0"}},
    "with a list of columns": {"canal_columns": {f"{DATABASE}.*": ["amount", "k"]}},
}

_LEAST, _OFFICIAL, _PEER = "the least client, C", "Canal's Java client", "Canal's server"
#: About the rate of Canal's server, to limit the waiting time.
_PEER_ROWS_PER_SECOND = 100_000


@dataclass(frozen=True)
class _Drained:
    """The rows that a client received, how long it took, and the CPU time of the server and of the client.

    The client's CPU time includes its start.
    """

    rows: int
    entries: int
    bytes: int
    batches: int
    seconds: float
    cpu_seconds: float
    client_seconds: float


def run(options: Options) -> CaseResult:
    """Drain both files with both clients, and Canal's own server with the minimal client."""
    commands = {_LEAST: _least()}
    versions = {_OFFICIAL: _CLIENT_VERSION, _PEER: VERSION}
    peer = True
    try:
        commands[_OFFICIAL] = _official()
        prepare()
    except ToolMissing as problem:
        versions = dict.fromkeys(versions, str(problem))
        peer = False
    lines = []
    for workload in _TARGETS:
        lines += _lines(corpus(workload, options.size), options, commands, peer=peer)
    return CaseResult("log_to_canal", TITLE, lines, versions, ratio_title="the target is")


def _lines(binlog: Corpus, options: Options, commands: dict[str, list[str]], *, peer: bool) -> list[Line]:
    folder = Path(tempfile.mkdtemp(prefix="bench-canal-", dir=cache_directory()))
    try:
        with serve(binlog) as server:
            with serving_corpus(folder, server.port, binlog) as daemon:
                lines = []
                # The first client of a daemon waits for modules that are loaded on first use.
                _drain(daemon.ports["canal"], daemon.cpu_seconds, binlog, _least(), 1)
                for name, command in commands.items():
                    runs = [
                        _drain(daemon.ports["canal"], daemon.cpu_seconds, binlog, command, binlog.rows)
                        for _ in range(options.repeat)
                    ]
                    lines.append(_line(binlog, f"Penstock to {name}", runs, _TARGETS[binlog.name]))
            for title, limits in _LIMITS.items():
                with serving_corpus(folder / "limited", server.port, binlog, **limits) as daemon:
                    port, command = daemon.ports["canal"], commands[_LEAST]
                    _drain(port, daemon.cpu_seconds, binlog, command, 1)
                    runs = [
                        _drain(port, daemon.cpu_seconds, binlog, command, binlog.rows)
                        for _ in range(options.repeat)
                    ]
                    lines.append(
                        _line(binlog, f"Penstock to {_LEAST}, {title}", runs, note="every row is visible")
                    )
                shutil.rmtree(folder / "limited")
            if peer:
                lines.append(_line(binlog, f"{_PEER} to {_LEAST}", [_drain_peer(server, binlog, options)]))
            return lines
    finally:
        shutil.rmtree(folder)


def _line(
    binlog: Corpus, name: str, runs: list[_Drained], target: float | None = None, note: str = ""
) -> Line:
    middle = statistics.median_low(drained.seconds for drained in runs)
    chosen = next(drained for drained in runs if drained.seconds == middle)
    rows = chosen.rows / chosen.seconds
    rates = {
        "rows/s": rows,
        "entries/s": chosen.entries / chosen.seconds,
        "MB/s sent": chosen.bytes / chosen.seconds / 1e6,
        "rows/s of its CPU": chosen.rows / max(chosen.cpu_seconds, 1e-2),
        "rows/s of the client's CPU": chosen.rows / max(chosen.client_seconds, 1e-2),
    }
    if note:
        return Line(binlog.name, name, rates, note=note)
    if target is None:
        part = "" if chosen.rows >= binlog.rows else f"; first {chosen.rows:,} rows"
        return Line(binlog.name, name, rates, note=f"reads the server itself{part}")
    rows_each = f"{binlog.rows / binlog.transactions:.0f} rows a transaction"
    return Line(
        binlog.name, name, rates, rows / target, Target(1), f"{rows_each}; target {target:,.0f} rows/s"
    )


def _drain(
    port: int, cpu_seconds: Callable[[], float], binlog: Corpus, command: list[str], wanted: int
) -> _Drained:
    """Drain a destination with a client until it has received this many rows."""
    begun = cpu_seconds()
    words = [*command, str(port), INSTANCE, _FILTER, str(wanted)]
    client_begun = _children_seconds()
    done = subprocess.run(words, capture_output=True, text=True, timeout=_RUN_SECONDS_MAX, check=False)
    client_used = _children_seconds() - client_begun
    assert done.returncode == 0, done.stderr[-2000:]
    rows, entries, sent, batches, seconds = done.stdout.split()
    used = cpu_seconds() - begun
    if wanted == binlog.rows:
        check_rows("the client", int(rows), binlog.rows, binlog)
    return _Drained(int(rows), int(entries), int(sent), int(batches), float(seconds), used, client_used)


def _children_seconds() -> float:
    """Return the CPU time of this process's children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _drain_peer(server: Server, binlog: Corpus, options: Options) -> _Drained:
    """Drain Canal's own server; of a large file, only the part that a slow peer can process in time."""
    wanted = min(binlog.rows, int(options.seconds_max * _PEER_ROWS_PER_SECOND))
    with canal_server(server, _FILTER) as peer:
        return _drain(peer.port, peer.cpu_seconds, binlog, _least(), wanted)


def _least() -> list[str]:
    folder = built("canal-drain", [_SOURCES / "canal_drain.c"], build_c("canal_drain.c"))
    return [str(folder / "canal_drain")]


def _official() -> list[str]:
    sources = [_SOURCES / "pom.xml", _SOURCES / "CanalDrain.java"]
    folder = built("canal-java", sources, build_java("CanalDrain.java"))
    return java_words(folder, "CanalDrain")
