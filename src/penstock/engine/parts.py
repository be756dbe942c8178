# SPDX-License-Identifier: Apache-2.0
"""Assigns rows to the parts of a batch by key, and packs rows of any tables into one blob."""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import pyarrow
import pyarrow.compute as pc

from penstock.changes import Changes, Origin, Target
from penstock.model import TableName
from penstock.sinks.key_hashes import key_hashes
from penstock.sinks.sink import Spread

# The approximate number of bytes of rows in one blob.
BLOB_BYTES = 4 << 20

_OPTIONS = pyarrow.ipc.IpcWriteOptions(compression="lz4")


def table_part(name: TableName, parts: int) -> int:
    """Return the part of all rows of a table, the same in every process."""
    return zlib.crc32(str(name).encode()) % parts


def parts_of(
    target: Target, rows: pyarrow.RecordBatch | pyarrow.Table, spread: Spread, parts: int, divided: bool
) -> numpy.ndarray | int:
    """Return the part of each row, or a single part for all.

    Rows are `divided` only by their primary key, so only tables without another unique key may be divided.
    """
    if spread is Spread.WHOLE or parts == 1:
        return 0
    if spread is Spread.TABLES or not divided or not target.primary_key:
        return table_part(target.name, parts)
    hashes = key_hashes(rows, target.primary_key, str(target.name))
    part: numpy.ndarray = (hashes % numpy.uint64(parts)).astype(numpy.int32)
    return part


# --- Blobs ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """Consecutive rows from one of a blob's tables."""

    table: int
    first: int
    rows: int


def blob_of(tables: Sequence[Changes], runs: Sequence[Run] | None = None) -> bytes:
    """Return changes as one blob; `runs` is their order, None for one table after another."""
    heads, streams = [], []
    for changes in tables:
        sink = pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, changes.rows.schema, options=_OPTIONS) as stream:
            stream.write_batch(changes.rows)
        data = sink.getvalue()
        streams.append(data)
        name = changes.source
        heads.append(
            {
                "target": changes.target.to_json(),
                "source": [name.database, name.table],
                "origin": str(changes.origin),
                "bytes": data.size,
            }
        )
    order = None if runs is None else [[run.table, run.first, run.rows] for run in runs]
    head = json.dumps({"tables": heads, "runs": order}).encode()
    return b"".join([len(head).to_bytes(4, "little"), head, *streams])


def changes_of(blob: bytes) -> Iterator[Changes]:
    """Yield the changes in a blob, in the order of its runs."""
    view = memoryview(blob)
    end = 4 + int.from_bytes(view[:4], "little")
    head = json.loads(bytes(view[4:end]))
    tables = []
    for table_head in head["tables"]:
        with pyarrow.ipc.open_stream(view[end : end + table_head["bytes"]]) as stream:
            rows = stream.read_next_batch()
        end += table_head["bytes"]
        tables.append(
            Changes(
                Target.from_json(table_head["target"]),
                rows,
                TableName(*table_head["source"]),
                Origin(table_head["origin"]),
            )
        )
    if head["runs"] is None:
        yield from tables
        return
    for table, first, count in head["runs"]:
        yield tables[table].with_rows(tables[table].rows.slice(first, count))


def slices(changes: Changes) -> Iterator[Changes]:
    """Yield changes in pieces of about BLOB_BYTES, keeping both images of an update in the same piece."""
    rows = changes.rows
    if rows.nbytes <= BLOB_BYTES or rows.num_rows < 2:
        yield changes
        return
    step = max(1, rows.num_rows * BLOB_BYTES // rows.nbytes)
    kinds = rows.column(rows.schema.get_field_index("_change_type"))
    first = 0
    while first < rows.num_rows:
        stop = min(first + step, rows.num_rows)
        if stop < rows.num_rows and kinds[stop].as_py() == "update_postimage":
            stop += 1
        yield changes.with_rows(rows.slice(first, stop - first))
        first = stop


def in_log_order(wave: Sequence[Changes]) -> list[Run]:
    """Return the runs of changes of several tables, in the order of the log."""
    versions = numpy.concatenate(
        [changes.rows.column("_commit_version").to_numpy(zero_copy_only=False) for changes in wave]
    )
    numbers = numpy.concatenate(
        [
            pc.struct_field(changes.rows.column("_metadata"), "row").to_numpy(zero_copy_only=False)
            for changes in wave
        ]
    )
    table = numpy.repeat(numpy.arange(len(wave)), [len(changes) for changes in wave])
    index = numpy.concatenate([numpy.arange(len(changes)) for changes in wave])
    order = numpy.lexsort((index, numbers, versions))
    table, index = table[order], index[order]
    # A run ends where the table changes, or where the next row is not the table's following row.
    breaks = numpy.flatnonzero((numpy.diff(table) != 0) | (numpy.diff(index) != 1)) + 1
    starts = numpy.concatenate([[0], breaks])
    stops = numpy.concatenate([breaks, [len(order)]])
    return [
        Run(int(table[start]), int(index[start]), int(stop - start))
        for start, stop in zip(starts, stops, strict=True)
    ]
