# SPDX-License-Identifier: Apache-2.0
"""Locate positions, times and GTID sets in a log of many segments with uncached indexes."""

import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.corpora.corpus import FILE_NAME, Corpus, cache_directory, corpus
from bench.result import CaseResult, Line, Options, Target
from penstock import read_binlog
from penstock._native import BlockCutter
from penstock.logstore.locate import Located
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.model import Position
from penstock.settings.daemon import LogSettings

TITLE = "A place in a log of many segments, indexes not in the cache"

_WORKLOAD = "narrow"
#: A gigabyte is divided into about a thousand segments.
_SEGMENT_BYTES = 1 << 20
_PIECE_BYTES = 16 * 1024
_FIRST_EVENT_OFFSET = 4
_PLACES = 20
_MILLISECONDS_TARGET = 5.0


def run(options: Options) -> CaseResult:
    """Store a workload in small segments, and locate positions in the log."""
    folder = Path(tempfile.mkdtemp(prefix="bench-locate-", dir=cache_directory()))
    try:
        _store(corpus(_WORKLOAD, options.size), folder)
        return CaseResult("log_to_position", TITLE, _lines(folder), ratio_title="5 ms is")
    finally:
        shutil.rmtree(folder)


def _store(binlog: Corpus, folder: Path) -> None:
    """Create the log of a corpus, in chunks so small that every segment is closed as soon as it is full."""
    content = memoryview(binlog.path.read_bytes())
    base = _FIRST_EVENT_OFFSET + int.from_bytes(content[13:17], "little")
    head = bytes(content[:base])
    settings = LogSettings(folder=folder, segment_bytes=_SEGMENT_BYTES, mode="file", fsync="never")
    cutter = BlockCutter(epoch=0, file=FILE_NAME, offset=base, flavor="mysql", live=False, head=head)
    with Log.open(folder, settings) as log:
        log.begin_epoch(
            epoch=0,
            server_key=binlog.name,
            server_id=1,
            flavor="mysql",
            version=binlog.server_version,
            file=FILE_NAME,
            offset=base,
            gtid_set="",
        )
        log.begin_file(FILE_NAME, base, head[4:], "", epoch=0, server_id=1, flavor="mysql")
        at = base
        while at < len(content):
            at += cutter.feed(content[at : at + _PIECE_BYTES])
            start, end, boundary = cutter.data_start, cutter.data_end, cutter.boundary
            data, records = cutter.take_data(), cutter.take_records()
            log.append(
                data,
                start,
                end,
                boundary,
                records,
                time_max_us=cutter.time_max_us,
                gtid_set=cutter.gtid_set,
            )


def _lines(folder: Path) -> list[Line]:
    log = LogReader.open(folder)
    extent = log.extents()[0]
    positions = [
        Position(0, extent.file, random.Random(number).randrange(extent.start, extent.end))
        for number in range(_PLACES)
    ]
    marks = [_transaction_at(folder, log.locate_position(position)) for position in positions]
    segments = len(log.segments)
    questions: dict[str, list[Callable[[LogReader], Located]]] = {
        "by position": [
            lambda log, position=position: log.locate_position(position) for position in positions
        ],  # type: ignore[misc]
        "by time": [lambda log, mark=mark: log.locate_time(mark[0]) for mark in marks],  # type: ignore[misc]
        "by GTID set": [lambda log, mark=mark: log.locate_gtid_set(mark[1]) for mark in marks],  # type: ignore[misc]
    }
    return [_line(folder, segments, name, lookups) for name, lookups in questions.items()]


def _transaction_at(folder: Path, located: Located) -> tuple[int, str]:
    """Return the commit time in microseconds of a transaction near a position, and the GTID set up to that
    transaction.
    """
    assert located.record is not None, "a closed segment has records"
    start = Position(0, located.position.file, located.record.transaction_start)
    batch = next(iter(read_binlog(folder, start=str(start))))
    row = batch.to_arrow().slice(0, 1).to_pylist()[0]
    source, _, number = row["_metadata"]["gtid"].rpartition(":")
    return int(row["_commit_timestamp"].timestamp() * 1e6), f"{source}:1-{number}"


def _line(folder: Path, segments: int, name: str, lookups: list[Callable[[LogReader], Located]]) -> Line:
    milliseconds, pages, bytes_read = [], [], []
    for question in lookups:
        log = LogReader.open(folder)
        _forget(folder)
        begin = time.perf_counter()
        located = question(log)
        milliseconds.append((time.perf_counter() - begin) * 1000)
        pages.append(located.pages_read)
        bytes_read.append(located.bytes_read)
    worst = max(milliseconds)
    rates = {
        "p50 ms": statistics.median(milliseconds),
        "worst ms": worst,
        "pages read": statistics.median(pages),
        "bytes read": statistics.median(bytes_read),
    }
    note = f"{segments} segments, {len(lookups)} places"
    return Line(_WORKLOAD, name, rates, _MILLISECONDS_TARGET / worst, Target(1), note)


def _forget(folder: Path) -> None:
    """Evict the folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            opened = os.open(path, os.O_RDONLY)
            os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(opened)
