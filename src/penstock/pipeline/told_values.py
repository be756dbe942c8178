# SPDX-License-Identifier: Apache-2.0
"""What `_metadata` tells of single columns: values that a row image lacks, and those no type can hold.

A step that renames or drops columns says so here, so that nothing is told of a column by a name it no longer
has.
"""

from collections.abc import Collection, Mapping

import pyarrow
import pyarrow.compute as compute

from penstock.changes import PUTS
from penstock.errors import ServerUnsupported
from penstock.model import TableName

_METADATA = "_metadata"


def refuse_absent(rows: pyarrow.RecordBatch, read: Collection[str], step: str) -> None:
    """Raise ServerUnsupported where a row image lacks a column that a step reads."""
    absent = compute.struct_field(rows.column(_METADATA), "absent")
    if absent.null_count == len(absent):
        return
    lacking = set(compute.list_flatten(absent).unique().to_pylist()) & set(read)
    if lacking:
        place = rows.column(_METADATA)[0].as_py()
        raise ServerUnsupported(
            f"{step}: row images lack {', '.join(sorted(lacking))}",
            position=f"{place['file']}:{place['offset']}",
            hint="SET GLOBAL binlog_row_image = FULL on the server",
        )


def renamed(
    rows: pyarrow.RecordBatch, names: Mapping[str, str], *, keep_absent: bool = False
) -> pyarrow.RecordBatch:
    """Return rows whose `_metadata` tells of columns under new names, and not of those without one.

    With `keep_absent` what is told of columns that an image lacks stays as it is.
    """
    index = rows.schema.get_field_index(_METADATA)
    metadata = rows.column(index)
    kind = metadata.type
    fields = {kind.field(number).name: number for number in range(kind.num_fields)}
    # `flatten` gives the fields under the struct's own validity, also where the batch is a slice of another.
    parts = metadata.flatten()
    absent, exact = parts[fields["absent"]], parts[fields["unrepresentable"]]
    if absent.null_count == len(absent) and exact.null_count == len(exact):
        return rows
    if not keep_absent:
        parts[fields["absent"]] = _listed(absent, names)
    parts[fields["unrepresentable"]] = _mapped(exact, names)
    made = pyarrow.StructArray.from_arrays(parts, fields=list(kind))
    return rows.set_column(index, rows.schema.field(index), made)


def _listed(absent: pyarrow.Array, names: Mapping[str, str]) -> pyarrow.Array:
    """Rename in lists of names. Rows that lack columns are few, and their lists short."""
    lists = [
        None if one is None else [names[name] for name in one if name in names] or None
        for one in absent.to_pylist()
    ]
    return pyarrow.array(lists, absent.type)


def _mapped(exact: pyarrow.Array, names: Mapping[str, str]) -> pyarrow.Array:
    """Rename in maps of names. Values that no type can hold are few."""
    maps = [
        None if one is None else [(names[name], text) for name, text in one if name in names] or None
        for one in exact.to_pylist()
    ]
    return pyarrow.array(maps, exact.type)


def exact_texts(rows: pyarrow.RecordBatch, column: str) -> pyarrow.Array | None:
    """Return the texts of a column's values that its type cannot hold, null elsewhere; None for no value."""
    exact = compute.struct_field(rows.column(_METADATA), "unrepresentable")
    if exact.null_count == len(exact):
        return None
    found = compute.map_lookup(exact, column, "first")
    return None if found.null_count == len(found) else found


def refuse_partial(name: TableName, rows: pyarrow.RecordBatch) -> None:
    """Raise ServerUnsupported where a row that is put there lacks columns: null would not be their value."""
    absent = compute.struct_field(rows.column("_metadata"), "absent")
    lengths = compute.fill_null(compute.list_value_length(absent), 0)
    if not compute.any(compute.greater(lengths, 0)).as_py():
        return
    put = compute.is_in(rows.column("_change_type"), value_set=pyarrow.array(PUTS))
    partial = compute.and_(put, compute.greater(lengths, 0))
    if compute.any(partial).as_py():
        at = compute.index(partial, True).as_py()
        place = rows.column("_metadata")[at].as_py()
        raise ServerUnsupported(
            f"a row of {name} was logged without {', '.join(place['absent'])}, so what it is cannot be told",
            position=f"{place['file']}:{place['offset']}",
            hint="SET GLOBAL binlog_row_image = FULL on the server, then penstock resnapshot the table",
        )
