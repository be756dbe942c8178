# SPDX-License-Identifier: Apache-2.0
"""Run the kernel's decoder over whole byte strings, and run statements on a server."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow

from penstock._native import Decoder, follow_events
from tests.support.binlog.events import MAGIC, first_event_end
from tools.servers import Server

Row = dict[str, Any]
Columns = Sequence[tuple[str, str, str | None, bool]]
BUFFER_BYTES = 1 << 20


@dataclass
class Decoded:
    """The output of one decoder: batches by table, statements, table requests, and how decoding ended."""

    batches: dict[str, list[pyarrow.RecordBatch]] = field(default_factory=dict)
    statements: list[Any] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    position: tuple[str, int] = ("", 0)
    gtid_set: str = ""

    def rows(self, table: str | None = None) -> list[Row]:
        """Return the rows of one table, or of all, in commit order."""
        chosen = self.batches if table is None else {table: self.batches.get(table, [])}
        actual_rows = [row for batches in chosen.values() for batch in batches for row in batch.to_pylist()]
        return sorted(actual_rows, key=place_in_log)

    def values(self, table: str) -> list[tuple[Any, ...]]:
        """Return change type and column values of each row of a table, in commit order."""
        return [
            (row["_change_type"], *(value for name, value in row.items() if not name.startswith("_")))
            for row in self.rows(table)
        ]


def place_in_log(row: Row) -> tuple[int, int]:
    """Return the key that orders rows as they were logged; the two images of an update share it."""
    return row["_commit_version"], row["_metadata"]["row"]


def decode(
    data: bytes | memoryview,
    file: str = "mysql-bin.000001",
    *,
    schemas: Mapping[str, Columns] | None = None,
    tables: str | None = None,
    buffer_bytes: int = BUFFER_BYTES,
    drop_open: bool = False,
    whole: bytes | None = None,
    **options: Any,
) -> Decoded:
    """Decode the bytes of one file or stream, which are passed to the decoder in pieces of `buffer_bytes`.

    The rows of XA transactions prepared before these bytes are searched for in `whole`, the complete file.
    `schemas` answers table requests by name; without it, the log's own column metadata is used. Only tables
    whose names start with `tables` are read. Errors of the decoder propagate.
    """
    decoder = Decoder(instance="test", file=file, **options)
    out = Decoded()
    for state in drive(decoder, data, out, schemas or {}, tables, buffer_bytes):
        if state == "prepared":
            read_prepared(decoder, data if whole is None else whole, out, schemas or {}, tables)
    finish(decoder, out, left=0 if decoder.state == "done" else out.counters["left"], drop_open=drop_open)
    return out


def drive(
    decoder: Decoder,
    data: bytes | memoryview,
    out: Decoded,
    schemas: Mapping[str, Columns],
    tables: str | None = None,
    buffer_bytes: int = BUFFER_BYTES,
) -> Iterator[str]:
    """Feed the decoder and answer its requests; yield each state except those that need more bytes."""
    view = memoryview(data)
    start, end = 0, min(buffer_bytes, len(view))
    while True:
        start += decoder.feed(view[start:end])
        state = decoder.state
        if state == "input":
            if end == len(view):
                break
            # If an event is longer than one buffer, offer it again with more bytes.
            end = min(max(end, start) + max(buffer_bytes, end - start), len(view))
            continue
        if state == "done":
            break
        if state != "prepared":
            answer(decoder, out, schemas, tables)
        yield state
    out.counters = {**decoder.counters, "left": len(view) - start}
    out.position, out.gtid_set = decoder.position, decoder.gtid_set


def answer(decoder: Decoder, out: Decoded, schemas: Mapping[str, Columns], tables: str | None) -> None:
    """Take the decoder's output, or answer its request."""
    if decoder.state == "batch":
        take_batch(decoder, out)
    elif decoder.state == "statement":
        out.statements.append(decoder.take_statement())
    else:
        request = decoder.table_request()
        name = f"{request.database}.{request.table}"
        out.requests.append(request)
        if tables is not None and not name.startswith(tables):
            decoder.answer_table(None)
        elif name in schemas:
            decoder.answer_table(list(schemas[name]))
        else:
            decoder.answer_table(from_log=True)


def read_prepared(
    decoder: Decoder,
    whole: bytes | memoryview,
    out: Decoded,
    schemas: Mapping[str, Columns],
    tables: str | None,
) -> None:
    """Give the decoder the bytes of the prepared transaction that it requests."""
    request = decoder.prepared_request()
    assert request is not None
    xid, (file, before), position = request
    if position is None:
        passing = Decoder(instance="test", file=file, statements=False, passing=True)
        passing.feed(memoryview(whole)[:before])
        position = passing.prepared_place(xid)
    assert position is not None, f"{xid} was not prepared before {before}"
    file, start, end = position
    decoder.answer_prepared(file, start, end, whole[: first_event_end(bytes(whole[:200]))])
    while decoder.reads_prepared:
        start += decoder.feed_prepared(memoryview(whole)[start:end])
        if decoder.reads_prepared:
            answer(decoder, out, schemas, tables)


def finish(decoder: Decoder, out: Decoded, left: int, drop_open: bool) -> None:
    """End the input and take the remaining batches."""
    while True:
        decoder.finish(left, drop_open=drop_open)
        if decoder.state != "batch":
            return
        take_batch(decoder, out)


def take_batch(decoder: Decoder, out: Decoded) -> None:
    """Take the batch that is ready."""
    batch = decoder.take_batch()
    assert batch is not None
    name = f"{batch.database}.{batch.table}" if batch.table else ""
    out.batches.setdefault(name, []).append(pyarrow.record_batch(batch))


def decode_file(path: Path, **options: Any) -> Decoded:
    """Decode one binlog file."""
    return decode(path.read_bytes(), path.name, **options)


def decode_range(
    data: bytes, start: int, stop: int, file: str = "mysql-bin.000001", **options: Any
) -> Decoded:
    """Decode the transactions that start in [start, stop), as an executor that does not know any transaction
    boundaries.
    """
    number = int(file.rpartition(".")[2])
    opened, _ = follow_events(data[len(MAGIC) :], len(MAGIC), max(start, len(MAGIC)))
    assert opened is not None, "the bytes hold an event"
    return decode(
        memoryview(data)[opened:],
        file,
        offset=opened,
        head=data[: first_event_end(data)],
        aligned=opened == len(MAGIC),
        start=(number, start),
        stop=(number, stop),
        whole=data,
        **options,
    )


def run_logged(server: Server, *statements: str, database: str | None = None, **arguments: Any) -> Path:
    """Run statements in one session and return the closed binlog file that holds only them."""
    server.sql("FLUSH BINARY LOGS")
    path = server.binlog_files()[-1]
    with server.connect(database=database, **arguments) as connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
    server.sql("FLUSH BINARY LOGS")
    return path


def select(server: Server, table: str, order: str = "id", columns: str = "*") -> list[tuple[Any, ...]]:
    """Return the rows of a table as the server returns them to a client."""
    return server.sql(f"SELECT {columns} FROM {table} ORDER BY {order}")


def replay(rows: Sequence[Row], key: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return what a table holds after its changes, by key. Each change must find the row it changes."""
    held: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for row in rows:
        values = tuple(value for name, value in row.items() if not name.startswith("_"))
        key_values = tuple(row[name] for name in key)
        if row["_change_type"] in ("insert", "update_postimage"):
            assert key_values not in held, f"a row twice: {row}"
            held[key_values] = values
        else:
            assert held.pop(key_values) == values, f"the row before a change is another: {row}"
    return [held[log_position] for log_position in sorted(held)]


def decode_in_pieces(data: bytes, file: str, buffer_bytes: int) -> Decoded:
    """Decode a file like a reader that keeps only the bytes that the decoder has not consumed."""
    decoder, out = Decoder(instance="test", file=file), Decoded()
    held = b""
    for start in range(0, len(data), buffer_bytes):
        held += data[start : start + buffer_bytes]
        while True:
            held = held[decoder.feed(held) :]
            if decoder.state == "input":
                break
            answer(decoder, out, {}, None)
    out.counters = decoder.counters
    finish(decoder, out, len(held), drop_open=False)
    return out
