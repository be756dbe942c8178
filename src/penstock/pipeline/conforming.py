# SPDX-License-Identifier: Apache-2.0
"""Rows of one definition in the columns of another: those that a target was prepared for."""

import pyarrow
import pyarrow.compute as pc

from penstock.changes import SYSTEM_COLUMNS, Changes, Target
from penstock.errors import SchemaChanged
from penstock.sinks.template import column_texts


def check_key(prepared: Target, target: Target) -> None:
    """Raise SchemaChanged where rows of a target lack a column of the key of that for which they are."""
    missing = [name for name in prepared.primary_key if name not in target.column_names]
    if missing:
        raise SchemaChanged(
            f"the key of {target.name} became {', '.join(prepared.primary_key)}, and its older rows have no"
            f" {', '.join(missing)}",
            hint="Drop the target's table and load it anew: penstock pipelines reset",
        )


def conformed(changes: Changes, prepared: Target) -> Changes:
    """Return changes in the columns of their prepared target: all rows of a table in a batch have the same.

    A column that the target no longer has goes, one that the rows do not have yet is null, and one of another
    type is converted: to text as the server shows it. Raises SchemaChanged where a value cannot be.
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
            if array.type != field.type:
                array = _converted(changes, field.name, array, field.type)
        arrays.append(array)
        fields.append(pyarrow.field(field.name, field.type))
    for name in SYSTEM_COLUMNS:
        arrays.append(rows.column(name))
        fields.append(rows.schema.field(name))
    made = pyarrow.RecordBatch.from_arrays(arrays, schema=pyarrow.schema(fields))
    return Changes(prepared, made, changes.source, changes.origin)


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
