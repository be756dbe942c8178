# SPDX-License-Identifier: Apache-2.0
"""Converts rows of one table definition to the columns that a target was prepared for."""

from dataclasses import replace

import pyarrow
import pyarrow.compute as pc

from penstock.changes import SYSTEM_COLUMNS, Changes, Target
from penstock.errors import SchemaChanged
from penstock.model import Column
from penstock.pipeline.column_types import keeps_logged_values, refuses_negative
from penstock.sinks.template import column_texts


def check_key(prepared: Target, target: Target) -> None:
    """Raise SchemaChanged if a key column of the prepared target is missing from the rows of `target`."""
    missing = [name for name in prepared.primary_key if name not in target.column_names]
    if missing:
        raise SchemaChanged(
            f"the key of {target.name} became {', '.join(prepared.primary_key)}, and its older rows have no"
            f" {', '.join(missing)}",
            hint="Drop the target's table and load it again: penstock pipelines reset",
        )


def key_is_reread(older: Target, prepared: Target, current: Target | None) -> bool:
    """Return whether rows are missing key columns that were added to the table later, according to `current`.

    The statement that added the key is still ahead in the log. That statement causes the table to be read
    again and compared, so nothing is lost if these rows are skipped.
    """
    return (
        current is not None
        and current.primary_key == prepared.primary_key
        and not set(current.primary_key).issubset(older.column_names)
    )


def conform_changes(changes: Changes, prepared: Target, reread: frozenset[str] = frozenset()) -> Changes:
    """Convert changes to the columns of the prepared target, so that all rows of a batch have the same
    columns.

    Columns that the prepared target does not have are dropped, and columns missing from the rows are null.
    Values are converted to the type of the target's column. If that type is text, they become the text that
    the server displays. A value that cannot be converted raises SchemaChanged, or is null in columns of
    `reread`, whose table is read again.
    """
    if changes.target is prepared:
        return changes
    if changes.target.columns == prepared.columns:
        return Changes(prepared, changes.rows, changes.source, changes.origin)
    rows, wanted = changes.rows, prepared.arrow()
    arrays, fields = [], []
    for field in wanted:
        if field.name not in rows.schema.names:
            array = pyarrow.nulls(rows.num_rows, field.type)
        else:
            array = rows.column(field.name)
            if array.type == field.type and field.name in reread:
                # The SQL type became narrower but kept its Arrow type, so the column may refuse these values.
                array = pyarrow.nulls(rows.num_rows, field.type)
            elif array.type != field.type:
                try:
                    array = _converted(changes, field.name, array, field.type)
                except SchemaChanged:
                    if field.name not in reread:
                        raise
                    array = pyarrow.nulls(rows.num_rows, field.type)
        arrays.append(array)
        fields.append(pyarrow.field(field.name, field.type))
    for name in SYSTEM_COLUMNS:
        arrays.append(rows.column(name))
        fields.append(rows.schema.field(name))
    conforming = pyarrow.RecordBatch.from_arrays(arrays, schema=pyarrow.schema(fields))
    return Changes(prepared, conforming, changes.source, changes.origin)


def columns_reread(changes: Changes, prepared: Target, current: Target | None) -> frozenset[str]:
    """Return the columns whose type in the `current` target is newer than these rows: the type was changed
    after the rows were logged.

    The statement that changed the type is still ahead in the log, and causes the table to be read again. A
    column whose type only seems different, because the log describes types in less detail than the server,
    keeps its values.
    """
    if current is None or changes.target.columns == prepared.columns:
        return frozenset()
    of_rows = {column.name: column for column in changes.target.columns}
    wanted = {column.name: column.type_text for column in prepared.columns}
    return frozenset(
        column.name
        for column in current.columns
        if column.name in of_rows
        and column.name not in prepared.primary_key
        and wanted.get(column.name) == column.type_text
        and not _fits(changes, of_rows[column.name], replace(column, nullable=True))
    )


def _fits(changes: Changes, older: Column, column: Column) -> bool:
    """Return whether the older rows' values of a column remain unchanged in the column's current type."""
    if not keeps_logged_values(older, column):
        return False
    if refuses_negative(column) and not refuses_negative(older):
        values = changes.rows.column(older.name)
        # A decimal with more digits than Arrow supports is represented as text.
        if pyarrow.types.is_string(values.type) or pyarrow.types.is_binary(values.type):
            negative = pc.starts_with(values, "-")
        else:
            negative = pc.less(values, pyarrow.scalar(0, values.type))
        return not pc.any(negative).as_py()
    return True


def _converted(changes: Changes, name: str, array: pyarrow.Array, kind: pyarrow.DataType) -> pyarrow.Array:
    try:
        if pyarrow.types.is_string(kind) and not pyarrow.types.is_binary(array.type):
            return column_texts(changes, name).cast(kind)
        return pc.cast(array, kind)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as problem:
        raise SchemaChanged(
            f"column {name} of {changes.target.name} is {kind} in the target, and a value is none: {problem}",
            hint=f"Where it became that, run penstock resnapshot for {changes.target.name}; where it was that"
            " before, set schema_changes: evolve",
        ) from problem
