# SPDX-License-Identifier: Apache-2.0
"""A binlog file with a BLOB full of forged transactions whose positions and checksums are valid."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from penstock._native import BlockCutter
from penstock.logstore.schemas import SchemaLog
from penstock.model import Position
from penstock.schema.history import SchemaHistory
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.tokens import ServerSpelling
from tests.support.binlog.events import (
    FLAG_IGNORABLE,
    MAGIC,
    TABLE_MAP,
    WRITE_ROWS,
    XID,
    Event,
    assemble,
    events,
    first_event_end,
)
from tests.support.logstore.folders import BLOCK_BYTES, append, open_log

NAME = "binlog.000001"
NOTES, ACCOUNTS = "shop.notes", "shop.accounts"
_TEMPLATE = Path(__file__).parents[3] / "native/kernel/tests/logs/mysql-9.7-1.binlog"
_GNO = slice(17, 25)
_LONG, _BLOB, _BINARY = 3, 252, 63
_IGNORABLE_EVENT, _EMPTY_EVENT_BYTES = 28, 23
_NOTES = 40
# The ids of the notes in order; the note in the middle holds the BLOB.
NOTE_IDS = tuple(range(1, 2 * _NOTES))


def forged_log(blob_bytes: int, spacing: int = 0) -> bytes:
    """Return a file of notes. One note has a BLOB of about `blob_bytes` bytes that contains copies of inserts
    into accounts.

    The copies are `spacing` bytes apart, or contiguous without `spacing`.
    """
    description, previous, *_ = events(_TEMPLATE.read_bytes())
    before = [event for gno in range(1, _NOTES) for event in insert(gno, NOTES, gno, b"note")]
    # The same transaction with an empty note shows where the BLOB's bytes start, after the length.
    start = len(assemble([description, previous, *before, *insert(_NOTES, NOTES, _NOTES, b"")[:-1]])) - 4
    note = forgeries(start, blob_bytes, spacing)
    after = [event for gno in range(_NOTES + 1, 2 * _NOTES) for event in insert(gno, NOTES, gno, b"note")]
    return assemble([description, previous, *before, *insert(_NOTES, NOTES, _NOTES, note), *after])


def log_head(server_id: int | None = None) -> bytes:
    """Return the start of a file as a real server wrote it, or with this server id."""
    description, *_ = events(_TEMPLATE.read_bytes())
    return assemble([description if server_id is None else replace(description, server_id=server_id)])


def forgeries(start: int, blob_bytes: int, spacing: int = 0) -> bytes:
    """Return copies of one transaction that are valid at their offsets; the first one is at `start`."""
    content = bytearray()
    while len(content) < blob_bytes:
        content += assemble(insert(999, ACCOUNTS, 1, b"forged"), offset=start + len(content))
        room = -len(content) % spacing if spacing else 0
        if room >= _EMPTY_EVENT_BYTES:
            # An ignorable event that links the copies into one chain.
            between = Event(0, _IGNORABLE_EVENT, 1, 0, FLAG_IGNORABLE, bytes(room - _EMPTY_EVENT_BYTES))
            content += assemble([between], offset=start + len(content))
    return bytes(content)


def insert(gno: int, table: str, number: int, note: bytes) -> list[Event]:
    """Return one transaction that inserts one row into a table (id INT PRIMARY KEY, note LONGBLOB)."""
    gtid, begin, commit = transaction_frame()
    body = gtid.body[: _GNO.start] + gno.to_bytes(8, "little") + gtid.body[_GNO.stop :]
    table_map = _table_map(*table.split("."))
    image = b"\x00" + number.to_bytes(4, "little") + len(note).to_bytes(4, "little") + note
    rows = (70).to_bytes(6, "little") + b"\x01\x00\x02\x00\x02\x03" + image
    return [
        replace(gtid, body=body),
        begin,
        Event(gtid.timestamp, TABLE_MAP, 1, 0, 0, table_map),
        Event(gtid.timestamp, WRITE_ROWS, 1, 0, 0, rows),
        commit,
    ]


@cache
def transaction_frame() -> Sequence[Event]:
    """Return a GTID event, a BEGIN and a commit written by a real server."""
    log_events = list(events(_TEMPLATE.read_bytes()))
    at = next(number for number, event in enumerate(log_events) if event.code == XID)
    begin = max(number for number in range(at) if b"BEGIN" in log_events[number].body)
    return log_events[begin - 1], log_events[begin], log_events[at]


def _table_map(database: str, table: str) -> bytes:
    names = b"".join(len(name).to_bytes(1, "little") + name for name in (b"id", b"note"))
    fields = ((1, b"\x00"), (2, bytes([_BINARY])), (4, names), (8, b"\x00"))
    metadata = b"".join(bytes([kind, len(value)]) + value for kind, value in fields)
    named = b"".join(len(name).to_bytes(1, "little") + name.encode() + b"\0" for name in (database, table))
    columns = bytes([2, _LONG, _BLOB, 1, 4, 0b10])
    return (70).to_bytes(6, "little") + b"\x01\x00" + named + columns + metadata


def write_forged_log(folder: Path, blob_bytes: int, spacing: int = 0) -> Path:
    """Write a forged file into a folder and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    path.write_bytes(forged_log(blob_bytes, spacing))
    assert path.read_bytes().startswith(MAGIC)
    return path


def keep_forged_log(folder: Path, content: bytes) -> None:
    """Write the forged file into the folder of a kept log."""
    log = open_log(folder, segment_bytes=1 << 30)
    start = first_event_end(content)
    cutter = BlockCutter(
        epoch=0,
        file=NAME,
        offset=start,
        flavor="mysql",
        live=False,
        block_bytes=BLOCK_BYTES,
        head=content[:start],
    )
    epoch_fields = {"epoch": 0, "server_id": 1, "flavor": "mysql", "file": NAME, "offset": start}
    log.begin_epoch(**epoch_fields, server_key="mysql:1", version="9.7.4", gtid_set="")
    log.begin_file(NAME, start, content[len(MAGIC) : start], "", epoch=0, server_id=1, flavor="mysql")
    schemas = SchemaLog(folder, SchemaHistory.from_json)
    defaults = ServerDefaults(ServerSpelling(), "utf8mb4", {}, False)
    schemas.seed(SchemaHistory(defaults), Position(0, NAME, start))
    for event in events(content, offset=start):
        assert cutter.feed(content[event.offset : event.offset + event.size]) == event.size
        append(log, schemas, cutter, 0)
    schemas.close()
    log.close()
