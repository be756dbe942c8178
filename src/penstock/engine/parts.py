# SPDX-License-Identifier: Apache-2.0
"""Assigns rows to the parts of a batch by key, and packs rows of any tables into one blob.

Values that the source considers equal must be assigned to the same part, and its collations treat many
spellings as equal. The part therefore depends only on characters that no collation equates with others:
digits, and the letters that no other letter equals or expands to. This spreads rows well and never divides a
key.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import pyarrow
import pyarrow.compute as pc

from penstock.changes import Changes, Origin, Target
from penstock.model import TableName
from penstock.sinks.sink import Spread

# The approximate number of bytes of rows in one blob.
BLOB_BYTES = 4 << 20

_DROPPED = "[^0-9bcgkmpvwxz]"
_DIGITS = ["".join(chr(zero + digit) for zero in (0x660, 0x6F0, 0x966, 0x9E6, 0xE50)) for digit in range(10)]
_BYTES_COUNTED = 16
_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
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
    mixed = numpy.full(rows.num_rows, zlib.crc32(str(target.name).encode()), numpy.uint64)
    for name in target.primary_key:
        for numbers in _numbers(rows.column(name)):
            mixed ^= numbers
            # Mix every bit of a number into the low bits, which choose the part (splitmix64).
            for shift, factor in _MIXING:
                mixed = (mixed ^ (mixed >> numpy.uint64(shift))) * numpy.uint64(factor)
            mixed ^= mixed >> numpy.uint64(31)
    part: numpy.ndarray = (mixed % numpy.uint64(parts)).astype(numpy.int32)
    return part


def _numbers(column: pyarrow.Array | pyarrow.ChunkedArray) -> Iterator[numpy.ndarray]:
    """Yield numbers that are equal for any two values of a column that the source may consider equal."""
    if isinstance(column, pyarrow.ChunkedArray):
        column = column.combine_chunks()
        if isinstance(column, pyarrow.ChunkedArray):
            column = pyarrow.concat_arrays(column.chunks)
    kind = column.type
    if pyarrow.types.is_integer(kind) or pyarrow.types.is_boolean(kind):
        yield _filled(pc.cast(column, pyarrow.int64()))
    elif pyarrow.types.is_temporal(kind):
        if pyarrow.types.is_date32(kind):
            column = pc.cast(column, pyarrow.int32())
        yield _filled(pc.cast(column, pyarrow.int64()))
    elif pyarrow.types.is_binary(kind):
        yield from _last_bytes(column)
    elif pyarrow.types.is_string(kind) or pyarrow.types.is_decimal(kind):
        yield from _last_bytes(pc.cast(_essence(pc.cast(column, pyarrow.string())), pyarrow.binary()))
    # Positive and negative zero are the same key, so the sign is ignored. Lists cannot be keys and are
    # ignored as well.


def _essence(texts: pyarrow.Array) -> pyarrow.Array:
    plain = pc.all(pc.string_is_ascii(texts)).as_py()
    if plain is False:
        texts = pc.utf8_normalize(texts, "NFKD")
        for digit, others in enumerate(_DIGITS):
            texts = pc.replace_substring_regex(texts, f"[{others}]", str(digit))
    return pc.replace_substring_regex(pc.utf8_lower(texts), _DROPPED, "")


def _filled(column: pyarrow.Array) -> numpy.ndarray:
    numbers: numpy.ndarray = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
    return numbers.astype(numpy.int64).view(numpy.uint64)


def _last_bytes(column: pyarrow.Array) -> Iterator[numpy.ndarray]:
    """Yield the last bytes of each value, as two numbers."""
    _, offsets_buffer, data_buffer = column.buffers()
    count = len(column)
    offsets = numpy.frombuffer(offsets_buffer, numpy.int32, count + 1, column.offset * 4).astype(numpy.int64)
    data = (
        numpy.frombuffer(data_buffer, numpy.uint8) if data_buffer is not None else numpy.zeros(0, numpy.uint8)
    )
    lengths = numpy.diff(offsets)
    if column.null_count:
        lengths = numpy.where(column.is_valid().to_numpy(zero_copy_only=False), lengths, 0)
    taken = numpy.zeros((count, _BYTES_COUNTED), numpy.uint8)
    for back in range(1, _BYTES_COUNTED + 1):
        there = lengths >= back
        taken[there, -back] = data[offsets[1:][there] - back]
    both = taken.view(numpy.uint64)
    yield both[:, 0]
    yield both[:, 1]


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
