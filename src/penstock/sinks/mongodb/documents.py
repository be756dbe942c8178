# SPDX-License-Identifier: Apache-2.0
"""Converts rows to MongoDB documents and back.

`_id` is the primary key: the value of its column, or a document if it has several columns. `_commit_version`
is stored with the columns. Values without a BSON type are stored exactly in another type: DECIMAL of more
than 34 digits and times finer than a millisecond as text, TIME as a number of microseconds.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import pyarrow
import pyarrow.compute as pc

from penstock import _native
from penstock.changes import Target
from penstock.errors import OptionInvalid, ValueMalformed
from penstock.sinks.sink import typed

KEY = "_id"
VERSION = "_commit_version"

_DIGITS_MAX = 34
_MILLISECOND_DIGITS = 3
_FRACTION = re.compile(r"\((\d)\)")
_WIDE_INTEGER = pyarrow.decimal128(20, 0)

# Limits of one command. A server accepts 100,000 statements and 48 MB.
_STATEMENTS_MAX = 20_000
_COMMAND_BYTES_MAX = 16 << 20


def check_columns(target: Target) -> None:
    """Raise OptionInvalid if a target's rows cannot be documents."""
    if not target.primary_key:
        raise OptionInvalid(
            f"{target.name} has no primary key that could be the _id of its documents",
            hint="Leave it out of this pipeline, or give it a key in the source",
        )
    taken = [name for name in (KEY, VERSION) if name in target.column_names and (name,) != target.primary_key]
    if taken:
        raise OptionInvalid(
            f"{target.name} has a column {taken[0]}, and so has every document",
            hint="Rename the column with a map step",
        )


def bson_type(target: Target, column: str) -> str:
    """Return the BSON type of a column's values."""
    stored = _stored_type(target, target.arrow().field(column))
    types = pyarrow.types
    if types.is_unsigned_integer(stored):
        return "long, or decimal"
    if types.is_integer(stored):
        return "long" if stored == pyarrow.int64() else "int"
    for fits, name in (
        (types.is_floating, "double"),
        (types.is_decimal, "decimal"),
        (types.is_string, "string"),
        (types.is_binary, "binData"),
        (types.is_list, "array of double"),
    ):
        if fits(stored):
            return name
    return "date"


def update_statements(target: Target, rows: pyarrow.Table) -> Iterator[pyarrow.Buffer]:
    """Yield the statements of update commands that write rows, as concatenated documents."""
    fields = _fields(target, rows)
    key = _key(target, fields)
    columns = {KEY: key, **fields, VERSION: _chunk(rows.column(VERSION))}
    document = pyarrow.StructArray.from_arrays(list(columns.values()), names=list(columns))
    query = pyarrow.StructArray.from_arrays([key], names=[KEY])
    upsert = pyarrow.repeat(True, rows.num_rows)
    return _statements({"q": query, "u": document, "upsert": upsert})


def delete_statements(target: Target, rows: pyarrow.Table) -> Iterator[pyarrow.Buffer]:
    """Yield the statements of delete commands that remove rows, as concatenated documents."""
    key = _key(target, _fields(target, rows))
    query = pyarrow.StructArray.from_arrays([key], names=[KEY])
    return _statements(
        {"q": query, "limit": pyarrow.repeat(pyarrow.scalar(1, pyarrow.int32()), rows.num_rows)}
    )


def key_document(target: Target, key: dict[str, Any]) -> bytes:
    """Return a document whose `_id` is a key."""
    schema = pyarrow.schema([target.arrow().field(name) for name in target.primary_key])
    rows = pyarrow.Table.from_pylist([key], schema)
    encoded = _native.bson_documents(pyarrow.record_batch({KEY: _key(target, _fields(target, rows))}))
    return bytes(pyarrow.array(encoded)[0].as_py())


def rows_of_documents(target: Target, documents: Sequence[Any]) -> pyarrow.RecordBatch:
    """Return documents as rows of a target, null for missing fields."""
    schema = target.arrow()
    columns = []
    for field in schema:
        values = [_plain(document.get(field.name)) for document in documents]
        stored = _stored_type(target, field)
        with typed(target, field.name):
            columns.append(_read(pyarrow.array(values, stored), field.type))
    return pyarrow.RecordBatch.from_arrays(columns, schema=schema)


def _fields(target: Target, rows: pyarrow.Table) -> dict[str, pyarrow.Array]:
    schema = target.arrow()
    return {
        name: _stored(_chunk(rows.column(name)), _stored_type(target, schema.field(name)))
        for name in schema.names
        if name in rows.schema.names
    }


def _key(target: Target, fields: dict[str, pyarrow.Array]) -> pyarrow.Array:
    parts = [fields[name] for name in target.primary_key]
    for name, part in zip(target.primary_key, parts, strict=True):
        if part.null_count:
            raise ValueMalformed(
                f"a key of {target.name} has no value that its column {name} could hold",
                hint="Make a text of it with a map step, or set errors: {table: skip_table}",
            )
    if len(parts) == 1:
        return parts[0]
    return pyarrow.StructArray.from_arrays(parts, names=list(target.primary_key))


def _stored_type(target: Target, field: pyarrow.Field) -> pyarrow.DataType:
    types = pyarrow.types
    if field.type == _WIDE_INTEGER and not target.column(field.name).type_text.lower().startswith("dec"):
        return pyarrow.uint64()
    if types.is_decimal(field.type) and field.type.precision > _DIGITS_MAX:
        return pyarrow.string()
    if types.is_duration(field.type):
        return pyarrow.int64()
    if types.is_timestamp(field.type):
        fraction = _FRACTION.search(target.column(field.name).type_text)
        is_fine = fraction is not None and int(fraction[1]) > _MILLISECOND_DIGITS
        return pyarrow.string() if is_fine else pyarrow.timestamp("ms")
    return field.type


def _stored(values: pyarrow.Array, wanted: pyarrow.DataType) -> pyarrow.Array:
    if pyarrow.types.is_timestamp(values.type):
        # A timestamp in text form that has no time zone is in UTC.
        values = values.cast(pyarrow.timestamp("us"))
    return values.cast(wanted)


def _read(values: pyarrow.Array, wanted: pyarrow.DataType) -> pyarrow.Array:
    if pyarrow.types.is_timestamp(wanted) and wanted.tz is not None:
        return pc.assume_timezone(values.cast(pyarrow.timestamp("us")), wanted.tz)
    return values.cast(wanted)


def _plain(value: Any) -> Any:
    """Convert a driver's value to one that Arrow accepts."""
    return value.to_decimal() if hasattr(value, "to_decimal") else value


def _chunk(column: pyarrow.ChunkedArray) -> pyarrow.Array:
    return column.combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column


def _statements(columns: dict[str, pyarrow.Array]) -> Iterator[pyarrow.Buffer]:
    """Yield concatenated documents, up to the limits of a command."""
    documents = pyarrow.array(_native.bson_documents(pyarrow.record_batch(columns)))
    ends = numpy.frombuffer(documents.buffers()[1], numpy.int32, len(documents) + 1)
    first = 0
    while first < len(documents):
        fits = int(numpy.searchsorted(ends, ends[first] + _COMMAND_BYTES_MAX, "right")) - 1
        last = min(max(fits, first + 1), first + _STATEMENTS_MAX)
        yield documents.buffers()[2].slice(int(ends[first]), int(ends[last] - ends[first]))
        first = last
