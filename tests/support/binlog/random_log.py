# SPDX-License-Identifier: Apache-2.0
"""Random transactions over tables (id INT PRIMARY KEY, region VARCHAR(40), amount INT), and their binlog."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock._native import BlockCutter
from penstock.logstore.log import Log
from penstock.model import Position
from tests.support.binlog.events import (
    DELETE_ROWS,
    MAGIC,
    ROWS_QUERY,
    TABLE_MAP,
    UPDATE_ROWS,
    WRITE_ROWS,
    Event,
    assemble,
    compressed,
    events,
    first_event_end,
    query_body,
)
from tests.support.binlog.forged_log import NAME, log_head, transaction_frame
from tests.support.logstore.source import BLOCK_BYTES, SimulatedDisk, open_log

COLUMNS = ("id", "region", "amount")
TABLES = ("orders", "users", "notes", "hidden")
REGIONS = ("eu", "us", "EU", "", None)
_TYPES, _TYPE_METADATA, _NULLABLE = bytes((3, 15, 3)), b"\xa0\x00", 0b110
_UTF8MB4 = 45
_GNO = slice(17, 25)
_ALL = 0b111

Image = dict[str, int | str | None]
Change = tuple[Image | None, Image | None]


@dataclass(frozen=True)
class RowsEvent:
    """A rows event: the changes of one kind of one table."""

    table: str
    changes: tuple[Change, ...]

    @property
    def code(self) -> int:
        """The type of the event."""
        before, after = self.changes[0]
        return UPDATE_ROWS if before and after else DELETE_ROWS if before else WRITE_ROWS


@dataclass(frozen=True)
class Statement:
    """A statement that changes rows, with its text, or DDL without rows."""

    text: str
    events: tuple[RowsEvent, ...] = ()


Transaction = tuple[Statement, ...]


def random_image(seeded: random.Random) -> Image:
    """Return the values of a row."""
    amount = seeded.choice([None, *range(-3, 4)])
    return {"id": seeded.randrange(10), "region": seeded.choice(REGIONS), "amount": amount}


def random_transactions(seeded: random.Random, count: int) -> list[Transaction]:
    """Return transactions of inserts, updates and deletes, and DDL statements among them."""

    def rows_event(table: str) -> RowsEvent:
        kind = seeded.choice(["insert", "update", "update", "delete"])
        changes = [(random_image(seeded), random_image(seeded)) for _ in range(seeded.randrange(1, 6))]
        return RowsEvent(
            table,
            tuple(
                (None if kind == "insert" else before, None if kind == "delete" else after)
                for before, after in changes
            ),
        )

    def statement(number: int) -> Statement:
        tables = seeded.sample(TABLES, seeded.choice([1, 1, 1, 2]))
        return Statement(f"UPDATE number {number}", tuple(rows_event(table) for table in tables))

    transactions: list[Transaction] = []
    for number in range(count):
        if seeded.random() < 0.1:
            transactions.append((Statement(f"ALTER TABLE `orders` COMMENT 'of {number}'"),))
        else:
            transactions.append(tuple(statement(number) for _ in range(seeded.randrange(1, 4))))
    return transactions


def binlog_of(
    transactions: Sequence[Transaction], seeded: random.Random, *, after_columns: int = _ALL
) -> bytes:
    """Return a binlog file with the transactions, some of them compressed.

    `after_columns` are the columns of images after an update, as bits.
    """
    log_events = list(events(log_head()))
    for gno, transaction in enumerate(transactions, 1):
        gtid, begin, commit = transaction_frame()
        body = gtid.body[: _GNO.start] + gno.to_bytes(8, "little") + gtid.body[_GNO.stop :]
        log_events.append(replace(gtid, body=body))
        if not transaction[0].events:
            log_events.append(replace(begin, body=query_body(transaction[0].text, "shop", ["shop"])))
            continue
        inner = [begin, *(event for part in transaction for event in _events_of(part, after_columns)), commit]
        log_events += [compressed(inner)] if seeded.random() < 0.2 else inner
    return assemble(log_events)


def _events_of(statement: Statement, after_columns: int) -> Iterator[Event]:
    timestamp = transaction_frame()[0].timestamp
    yield Event(timestamp, ROWS_QUERY, 1, 0, 0, bytes((len(statement.text),)) + statement.text.encode())
    for rows in statement.events:
        yield Event(timestamp, TABLE_MAP, 1, 0, 0, _table_map(rows.table))
    for rows in statement.events:
        yield Event(timestamp, rows.code, 1, 0, 0, _rows_body(rows, after_columns))


def _table_id(table: str) -> bytes:
    return (70 + TABLES.index(table)).to_bytes(6, "little") + b"\x01\x00"


def _table_map(table: str) -> bytes:
    names = b"".join(bytes((len(name),)) + name.encode() for name in COLUMNS)
    fields = ((1, b"\x00"), (2, bytes((_UTF8MB4,))), (4, names), (8, b"\x00"))
    metadata = b"".join(bytes((kind, len(value))) + value for kind, value in fields)
    named = b"".join(bytes((len(name),)) + name.encode() + b"\0" for name in ("shop", table))
    types = bytes((len(COLUMNS),)) + _TYPES + bytes((len(_TYPE_METADATA),)) + _TYPE_METADATA
    return _table_id(table) + named + types + bytes((_NULLABLE,)) + metadata


def _rows_body(rows: RowsEvent, after_columns: int) -> bytes:
    is_update = rows.code == UPDATE_ROWS
    present = bytes((_ALL, after_columns)) if is_update else bytes((_ALL,))
    body = _table_id(rows.table) + b"\x02\x00" + bytes((len(COLUMNS),)) + present
    for before, after in rows.changes:
        for image, columns in ((before, _ALL), (after, after_columns if is_update else _ALL)):
            if image is not None:
                body += _image_bytes(image, columns)
    return body


def _image_bytes(image: Image, columns: int) -> bytes:
    values = [image[name] for number, name in enumerate(COLUMNS) if columns >> number & 1]
    nulls = sum(1 << number for number, value in enumerate(values) if value is None)
    content = bytes((nulls,))
    for value in values:
        if isinstance(value, int):
            content += value.to_bytes(4, "little", signed=True)
        elif value is not None:
            content += bytes((len(value.encode()),)) + value.encode()
    return content


def keep_log(content: bytes, name: str = NAME, flavor: str = "mysql", version: str = "9.7.4") -> Log:
    """Return a log in memory that holds a file."""
    log = open_log(SimulatedDisk())
    start = first_event_end(content)
    cutter = BlockCutter(
        epoch=0,
        file=name,
        offset=start,
        flavor=flavor,
        live=False,
        block_bytes=BLOCK_BYTES,
        head=content[:start],
    )
    epoch_fields = {"epoch": 0, "server_id": 1, "flavor": flavor, "file": name, "offset": start}
    log.begin_epoch(**epoch_fields, server_key=f"{flavor}:1", version=version, gtid_set="")
    log.begin_file(name, start, content[len(MAGIC) : start], "", epoch=0, server_id=1, flavor=flavor)
    at = start
    while at < len(content):
        at += cutter.feed(content[at:])
        cutter.take_statements()
        if cutter.gathered:
            begin, until, boundary = cutter.data_start, cutter.data_end, cutter.boundary
            log.append(
                cutter.take_data(),
                begin,
                until,
                boundary,
                cutter.take_records(),
                time_max_us=cutter.time_max_us,
                gtid_set=cutter.gtid_set,
            )
    assert log.visible == Position(0, name, len(content)), "the log has the whole file"
    return log
