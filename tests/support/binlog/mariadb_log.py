# SPDX-License-Identifier: Apache-2.0
"""Binlog files of a MariaDB server to which transactions with given GTIDs are written, and the GTIDs that a
reader obtains from these files.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow

from penstock.gtid_sets import LoggedSet
from penstock.logstore.log import Log
from penstock.source.bounds import Bound, locate
from penstock.source.decoding import RangeDecoding
from penstock.source.source import Source
from tests.support.binlog.events import MAGIC, MARIADB_GTID, MARIADB_GTID_LIST, XID, Event, assemble, events
from tests.support.logstore.source import SourceFile, server_files

_GTID_BODY = struct.Struct("<QIB6x")
_LISTED = struct.Struct("<IIQ")


def _gtids(text: str) -> Iterator[tuple[int, int, int]]:
    for gtid in filter(None, text.split(",")):
        domain, server, sequence = map(int, gtid.split("-"))
        yield domain, server, sequence


def mariadb_file(before: str, transactions: Sequence[str]) -> bytes:
    """Return a file of empty transactions with these GTIDs. `before` is the file's list of earlier GTIDs."""
    sample = next(file for file in server_files() if file.flavor == "mariadb")
    described = next(events(sample.content))
    listed = list(_gtids(before))
    body = struct.pack("<I", len(listed)) + b"".join(_LISTED.pack(*gtid) for gtid in listed)
    parts = [described, Event(described.timestamp, MARIADB_GTID_LIST, 1, 0, 0, body)]
    for number, gtid in enumerate(transactions, 1):
        domain, server, sequence = next(_gtids(gtid))
        begin = Event(described.timestamp, MARIADB_GTID, server, 0, 0, _GTID_BODY.pack(sequence, domain, 0))
        parts += [begin, replace(begin, code=XID, body=struct.pack("<Q", number))]
    return assemble(parts)


def write_mariadb_files(folder: Path, *files: tuple[str, Sequence[str]]) -> None:
    """Write files, each with its list of earlier GTIDs and its transactions, into a new folder."""
    folder.mkdir()
    for number, (before, transactions) in enumerate(files, 1):
        (folder / f"mariadb-bin.{number:06d}").write_bytes(mariadb_file(before, transactions))


def keep_mariadb_file(
    log: Log,
    epoch: int,
    server: int,
    before: str,
    transactions: Sequence[str],
    number: int = 1,
    lost: str = "",
) -> None:
    """Append a server's file, as `mariadb_file` returns it, to a log. The first file of an epoch begins the
    epoch.

    `lost` contains the transactions of the log that are missing from the server.
    """
    content = mariadb_file(before, transactions)
    name = f"mariadb-bin.{number:06d}"
    cutter = SourceFile(epoch, "mariadb", name, content, before, log.time_max_us).cutter()
    fields = {"epoch": epoch, "server_id": server, "flavor": "mariadb"}
    if number == 1:
        log.begin_epoch(
            **fields,
            server_key=f"mariadb:0-{server}",
            version="11.8",
            file=name,
            offset=len(MAGIC),
            gtid_set=LoggedSet(before),
            lost=LoggedSet(lost),
        )
    at = 0
    while at < len(content):
        at += cutter.feed(content[at:])
        if cutter.state == "file":
            cutter.take_file()
            log.begin_file(name, cutter.offset, cutter.format_description, cutter.gtid_set, **fields)
    start, end = cutter.data_start, cutter.data_end
    log.append(
        cutter.take_data(),
        start,
        end,
        cutter.boundary,
        cutter.take_records(),
        time_max_us=cutter.time_max_us,
        gtid_set=cutter.gtid_set,
    )


def gtids_between(source: Source, start: str | None, end: str | None = None) -> list[str]:
    """Return the GTIDs that a read from one set to another yields, range by range."""
    first, last = (Bound(gtid_set=gtid_set) if gtid_set else None for gtid_set in (start, end))
    bounds = locate(source, first, last)
    gtids: list[str] = []
    for byte_range in source.split(bounds.start, ranges_min=4, range_bytes=1):
        decoding = RangeDecoding(
            source,
            byte_range,
            emit="transactions",
            gtid_after=bounds.gtid_after,
            gtid_until=bounds.gtid_until,
        )
        for _ in decoding.states():
            gtids += pyarrow.record_batch(decoding.take_batch())["gtid"].to_pylist()
    return gtids
