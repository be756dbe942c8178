# SPDX-License-Identifier: Apache-2.0
"""Searches of a kept log for one row: `python -m bench.kept_log --gigabytes 1`.

A log is written into a folder, or an existing log is used again. It contains single-row updates of many
tables, and the number of updates per table follows Zipf's law. For tables of several ranks, the program
prints which share of the log contains the table, which share must still be read after the index has been
used, and the cost of a row's history: the time until the first part and until all parts are returned, and the
processor time. Before the measurements, the log is read once, so that it is in the page cache if it fits.
"""

import argparse
import resource
import time
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy

from penstock._native import BlockCutter
from penstock.gtid_sets import LoggedSet
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.logstore.schemas import SchemaLog
from penstock.model import Position, TableName
from penstock.schema.history import SchemaHistory
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.tokens import ServerSpelling
from penstock.settings.daemon import LogSettings
from penstock.source.log import LogSource
from penstock.source.row_history import Progress, RowChange, RowHistory, RowKey
from penstock.source.source import SourceOptions
from tests.support.binlog.events import MAGIC, TABLE_MAP, UPDATE_ROWS, Event, assemble
from tests.support.binlog.forged_log import insert, log_head
from tests.support.logstore.folders import append

_TABLES = 300
_ROWS = 10_000
_FILE_BYTES = 1 << 30
_TRANSACTIONS_AT_ONCE = 8192
_LONG, _LONGLONG, _VARCHAR = 3, 8, 15
_NOTE = b"the order was paid by card and is on its way to the customer"
# The fields of an event's header that differ between transactions, and the number in the GTID event's body.
_END, _HEADER_BYTES, _CRC_BYTES, _GNO_AT = 13, 19, 4, 17


def _table_map(table: bytes) -> bytes:
    """Return a table map of (id INT PRIMARY KEY, customer INT, amount BIGINT, note VARCHAR(200))."""
    names = b"".join(
        len(name).to_bytes(1, "little") + name for name in (b"id", b"customer", b"amount", b"note")
    )
    fields = ((1, b"\x00"), (2, b"\x08"), (4, names), (8, b"\x00"))
    metadata = b"".join(bytes([kind, len(value)]) + value for kind, value in fields)
    columns = bytes([4, _LONG, _LONG, _LONGLONG, _VARCHAR, 2]) + (200).to_bytes(2, "little") + b"\x00"
    return (
        (70).to_bytes(6, "little")
        + b"\x01\x00\x04shop\x00"
        + bytes([len(table)])
        + table
        + b"\0"
        + columns
        + metadata
    )


def _template() -> list[Event]:
    """Return a transaction that updates a row; its values have fixed lengths."""
    gtid, begin, _, _, commit = insert(1, "shop.template", 1, b"")
    image = b"\x00" + bytes(4 + 4 + 8) + bytes([len(_NOTE)]) + _NOTE
    rows = (70).to_bytes(6, "little") + b"\x01\x00\x02\x00\x04\x0f\x0f" + image + image
    table_map = replace(begin, code=TABLE_MAP, body=_table_map(b"orders_000"))
    return [gtid, begin, table_map, replace(begin, code=UPDATE_ROWS, body=rows), commit]


class _Writer:
    """Makes transactions of one size by filling in a template."""

    def __init__(self, seed: int) -> None:
        parts = _template()
        self._base = numpy.frombuffer(assemble(parts, offset=1), numpy.uint8)
        sizes = [part.size for part in parts]
        self._starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._ends = [start + size for start, size in zip(self._starts, sizes, strict=True)]
        self._random = numpy.random.default_rng(seed)
        weights = 1 / numpy.arange(1, _TABLES + 1)
        self._shares = weights / weights.sum()
        self._digits = numpy.array([list(f"{table:03d}".encode()) for table in range(_TABLES)], numpy.uint8)
        self._name_at = bytes(self._base).index(b"orders_000") + len("orders_")
        self.bytes = len(self._base)

    def write(self, offset: int, first_gno: int, count: int) -> bytes:
        """Return transactions for an offset of a file."""
        out = numpy.tile(self._base, (count, 1))
        row_bytes = len(self._base)
        _put(
            out,
            self._starts[0] + _HEADER_BYTES + _GNO_AT,
            numpy.arange(first_gno, first_gno + count, dtype="<u8"),
        )
        out[:, self._name_at : self._name_at + 3] = self._digits[
            self._random.choice(_TABLES, count, p=self._shares)
        ]
        ids = self._random.integers(1, _ROWS + 1, count, "<u4")
        values = self._random.integers(0, 1 << 40, (2, count), "<u8")
        image_bytes = 1 + 16 + 1 + len(_NOTE)
        first = self._starts[3] + _HEADER_BYTES + 6 + 2 + 2 + 3
        for image, start in enumerate((first, first + image_bytes)):
            _put(out, start + 1, ids)
            _put(out, start + 5, (values[0] & 0xFFFF).astype("<u4"))
            _put(out, start + 9, values[image])
        positions = offset + row_bytes * numpy.arange(count, dtype="<u8")
        for start, end in zip(self._starts, self._ends, strict=True):
            _put(out, start + _END, (positions + end).astype("<u4"))
        view = out.data.cast("B")
        for start, end in zip(self._starts, self._ends, strict=True):
            stop = end - _CRC_BYTES
            sums = [zlib.crc32(view[at + start : at + stop]) for at in range(0, count * row_bytes, row_bytes)]
            _put(out, stop, numpy.array(sums, "<u4"))
        return out.tobytes()


def _put(out: Any, at: int, values: Any) -> None:
    width = values.dtype.itemsize
    out[:, at : at + width] = values.view(numpy.uint8).reshape(-1, width)


def write_log(folder: Path, log_bytes: int) -> None:
    """Write a log of about this size into a folder."""
    head, writer, gno = log_head(), _Writer(seed=7), 1
    started = time.time()
    log = Log.open(folder, LogSettings(fsync="never"), clock=lambda: started)
    log.begin_epoch(
        epoch=0,
        server_key="mysql:bench",
        server_id=1,
        flavor="mysql",
        version="9.7.4",
        file="binlog.000001",
        offset=len(head),
        gtid_set=LoggedSet(""),
    )
    schemas = SchemaLog(folder, SchemaHistory.from_json)
    schemas.seed(
        SchemaHistory(ServerDefaults(ServerSpelling(), "utf8mb4", {}, False)),
        Position(0, "binlog.000001", len(head)),
    )
    written, gtid_set = 0, LoggedSet("")
    for number in range(1, 1 + -(-log_bytes // _FILE_BYTES)):
        file, offset = f"binlog.{number:06d}", len(head)
        cutter = BlockCutter(
            epoch=0,
            file=file,
            offset=offset,
            flavor="mysql",
            live=False,
            gtid_set=gtid_set,
            time_max_us=log.time_max_us,
            head=head,
        )
        log.begin_file(file, offset, head[len(MAGIC) :], gtid_set, epoch=0, server_id=1, flavor="mysql")
        while written < log_bytes and offset < _FILE_BYTES:
            piece = writer.write(offset, gno, _TRANSACTIONS_AT_ONCE)
            assert cutter.feed(piece) == len(piece), cutter.state
            append(log, schemas, cutter, 0)
            gno += _TRANSACTIONS_AT_ONCE
            offset += len(piece)
            written += len(piece)
        gtid_set = LoggedSet(cutter.gtid_set)
    schemas.close()
    log.close()


def parts_of(log: LogReader, folder: Path, table: str, key: str) -> Iterator[Any]:
    """Yield the parts of the search for a row in a log."""

    def open_source() -> LogSource:
        return LogSource(SourceOptions.parse(str(folder)))

    row = RowKey(TableName("shop", table), (key,))
    return RowHistory(log, open_source, row).parts()


def measure(folder: Path, table: str, key: str) -> str:
    """Return the cost of a row's history."""
    log = LogReader.open(folder)
    begun, before, first, changes = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF), 0.0, 0
    candidates, log_bytes = 0, 1
    with closing(parts_of(log, folder, table, key)) as parts:  # type: ignore[type-var]
        for part in parts:
            if isinstance(part, Progress):
                candidates, log_bytes = part.candidate_bytes, part.log_bytes
            elif isinstance(part, RowChange):
                first = first or time.perf_counter() - begun
                changes += 1
    seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    return (
        f"{table} {changes:6d} changes  index leaves {candidates / log_bytes:4.0%}"
        f"  first {first:5.2f} s  all {seconds:6.2f} s  cpu {user:6.2f} + {system:5.2f} s"
    )


def main() -> None:
    """Write a log, and print the cost of row histories."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--gigabytes", default=1.0, type=float)
    arguments.add_argument("--folder", type=Path, default=Path("build/kept_log"))
    arguments.add_argument("--ranks", default="0,3,30,100,299")
    options = arguments.parse_args()
    if not options.folder.exists():
        write_log(options.folder, int(options.gigabytes * 1e9))
    for path in sorted(options.folder.glob("*/*.binlog")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(bytearray(1 << 20)):
                pass
    for rank in options.ranks.split(","):
        print(measure(options.folder, f"orders_{int(rank):03d}", "4711"), flush=True)


if __name__ == "__main__":
    main()
