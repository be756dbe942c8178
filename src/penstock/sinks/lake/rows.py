# SPDX-License-Identifier: Apache-2.0
"""Converts rows of changes to the columns, types and column order of a lake table."""

from collections.abc import Sequence
from functools import cache

import pyarrow
import pyarrow.compute as pc

from penstock import _native
from penstock.changes import SYSTEM_COLUMNS, Target
from penstock.errors import ValueMalformed
from penstock.sinks.images import unrepresentable_text
from penstock.sinks.lake.types import cast, stored_type

# A zero date as text, for dates and for times.
_ZERO_DATE = r"^0000-00-00( 00:00:00(\.0*)?)?$"


def stored_schema(
    target: Target, further: Sequence[pyarrow.Field] = (), integer_bits_min: int = 8
) -> pyarrow.Schema:
    """Return the columns of a target's table in their stored types, followed by further columns."""
    own = [pyarrow.field(field.name, stored_type(field.type, integer_bits_min)) for field in target.arrow()]
    return pyarrow.schema([*own, *further])


@cache
def feed_fields(integer_bits_min: int = 8) -> tuple[pyarrow.Field, ...]:
    """Return the system columns as a feed stores them."""
    rows = pyarrow.schema(_native.arrow_schema([]))
    return tuple(
        pyarrow.field(name, stored_type(rows.field(name).type, integer_bits_min)) for name in SYSTEM_COLUMNS
    )


def stored_rows(rows: pyarrow.Table, schema: pyarrow.Schema) -> pyarrow.Table:
    """Return rows with a table's own columns. Missing columns are null, and other columns are dropped.

    Raises ValueMalformed if a value does not fit its column.
    """
    columns = []
    for field in schema:
        number = rows.schema.get_field_index(field.name)
        if number < 0:
            columns.append(pyarrow.nulls(rows.num_rows, field.type))
            continue
        try:
            columns.append(cast(rows.column(number), field.type))
        except pyarrow.ArrowInvalid as problem:
            raise ValueMalformed(
                f"column {field.name} of the target holds {field.type}, which cannot take a value: {problem}",
                hint="Load the table again, or let the target's columns evolve",
            ) from problem
    return pyarrow.Table.from_arrays(columns, schema=schema)


def read_rows(rows: pyarrow.Table, schema: pyarrow.Schema) -> pyarrow.Table:
    """Return stored rows in the types that a target declares, with only its columns.

    Raises ValueMalformed if the type of a stored column cannot be read as the declared type.
    """
    columns = [
        _read_column(rows.column(field.name), field)
        if field.name in rows.schema.names
        else pyarrow.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pyarrow.Table.from_arrays(columns, schema=schema)


def _read_column(column: pyarrow.ChunkedArray, field: pyarrow.Field) -> pyarrow.ChunkedArray:
    try:
        return cast(column, field.type)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as problem:
        raise ValueMalformed(
            f"column {field.name} of the target holds {column.type}, which cannot be read as {field.type}: "
            f"{problem}",
            hint="Drop the target's table, and load it again",
        ) from problem


def check_keys(target: Target, rows: pyarrow.Table) -> None:
    """Raise ValueMalformed for a key that its column cannot represent, because such a key could not be found
    again.

    A zero date can be found, because it is stored as null, and no other key is stored as null.
    """
    for name in target.primary_key:
        column = rows.column(name)
        if not column.null_count:
            continue
        text = pc.filter(unrepresentable_text(rows, name), pc.is_null(column))
        odd = pc.filter(text, pc.invert(pc.fill_null(pc.match_substring_regex(text, _ZERO_DATE), True)))
        if len(odd):
            raise ValueMalformed(
                f"the key column {name} of {target.name} cannot hold {odd[0].as_py()!r}",
                hint="Make a text of it with a map step, or set errors: {table: skip_table}",
            )
