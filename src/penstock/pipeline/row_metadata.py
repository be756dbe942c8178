# SPDX-License-Identifier: Apache-2.0
"""Handles the entries for single columns in `_metadata`: columns missing from a row image, and
unrepresentable values.

A step that renames or drops columns updates this metadata, so that it only refers to existing columns.
"""

from collections.abc import Collection, Mapping, Sequence

import pyarrow
import pyarrow.compute as compute

from penstock.changes import PUTS, Target
from penstock.errors import ServerUnsupported
from penstock.model import TableName
from penstock.schema.table_definition import HASH_COLUMN
from penstock.sinks.images import absent_lists

_METADATA = "_metadata"
_HINT = (
    "SET GLOBAL binlog_row_image = FULL on the server, then penstock resnapshot the table. MariaDB 11.8.9"
    " logs no generated columns of changed rows even so: remove them with a map step (drop)"
)


def absent_columns(rows: pyarrow.RecordBatch) -> set[str]:
    """Return the columns that some of the row images do not have."""
    absent = compute.struct_field(rows.column(_METADATA), "absent")
    if absent.null_count == len(absent):
        return set()
    return set(compute.list_flatten(absent).unique().to_pylist())


def refuse_absent(rows: pyarrow.RecordBatch, read: Collection[str], reader: str) -> None:
    """Raise ServerUnsupported if a row image does not have a column that is read."""
    missing = absent_columns(rows) & set(read)
    if missing:
        metadata = rows.column(_METADATA)[0].as_py()
        raise ServerUnsupported(
            f"{reader}: row images lack {', '.join(sorted(missing))}",
            position=f"{metadata['file']}:{metadata['offset']}",
            hint=_HINT,
        )


def rename_metadata(
    rows: pyarrow.RecordBatch, names: Mapping[str, Sequence[str]], *, keep_absent: bool = False
) -> pyarrow.RecordBatch:
    """Rename columns in the `_metadata` of rows. A column without a new name is removed from `_metadata`.

    With `keep_absent`, leave the list of columns that are missing from an image unchanged.
    """
    index = rows.schema.get_field_index(_METADATA)
    metadata = rows.column(index)
    kind = metadata.type
    fields = {kind.field(number).name: number for number in range(kind.num_fields)}
    # `flatten` applies the struct's own validity, even if the batch is a slice.
    parts = metadata.flatten()
    absent, exact = parts[fields["absent"]], parts[fields["unrepresentable"]]
    if absent.null_count == len(absent) and exact.null_count == len(exact):
        return rows
    if not keep_absent:
        parts[fields["absent"]] = _rename_in_lists(absent, names)
    parts[fields["unrepresentable"]] = _rename_in_maps(exact, names)
    renamed_metadata = pyarrow.StructArray.from_arrays(parts, fields=list(kind))
    return rows.set_column(index, rows.schema.field(index), renamed_metadata)


def _rename_in_lists(absent: pyarrow.Array, names: Mapping[str, Sequence[str]]) -> pyarrow.Array:
    """Rename columns in lists of names. Few rows have such a list, and the lists are short."""
    lists = [
        None
        if absent_names is None
        else [new for name in absent_names for new in names.get(name, ())] or None
        for absent_names in absent.to_pylist()
    ]
    return pyarrow.array(lists, absent.type)


def _rename_in_maps(exact: pyarrow.Array, names: Mapping[str, Sequence[str]]) -> pyarrow.Array:
    """Rename columns in maps of names. Unrepresentable values are rare."""
    maps = [
        None
        if exact_values is None
        else [(new, text) for name, text in exact_values for new in names.get(name, ())] or None
        for exact_values in exact.to_pylist()
    ]
    return pyarrow.array(maps, exact.type)


def add_exact_texts(rows: pyarrow.RecordBatch, added: pyarrow.Array) -> pyarrow.RecordBatch:
    """Add the texts of unrepresentable values to the `_metadata` of rows, as a map by column for each row."""
    if added.null_count == len(added):
        return rows
    index = rows.schema.get_field_index(_METADATA)
    kind = rows.column(index).type
    parts = rows.column(index).flatten()
    number = kind.get_field_index("unrepresentable")
    # Unrepresentable values are rare.
    texts = [
        [*(own or ()), *(more or ())] or None
        for own, more in zip(parts[number].to_pylist(), added.to_pylist(), strict=True)
    ]
    parts[number] = pyarrow.array(texts, parts[number].type)
    metadata = pyarrow.StructArray.from_arrays(parts, fields=list(kind))
    return rows.set_column(index, rows.schema.field(index), metadata)


def exact_texts(rows: pyarrow.RecordBatch, column: str) -> pyarrow.Array | None:
    """Return the texts of a column's unrepresentable values, null elsewhere; None if there are none."""
    exact = compute.struct_field(rows.column(_METADATA), "unrepresentable")
    if exact.null_count == len(exact):
        return None
    texts = compute.map_lookup(exact, column, "first")
    return None if texts.null_count == len(texts) else texts


def without_hashes(rows: pyarrow.RecordBatch, target: Target, current: Target) -> pyarrow.RecordBatch:
    """Return rows that do not list MariaDB's hidden hash columns as absent.

    MariaDB 11.8.9 omits these columns from its log, as it omits generated columns. The `current` definition
    of the table comes from the server, which does not show hidden columns.
    """
    absent = absent_lists(rows)
    if absent.null_count == len(absent):
        return rows
    shown = {name for name in target.column_names if not name.startswith(HASH_COLUMN)}
    return rename_metadata(rows, {name: (name,) for name in shown.union(current.column_names)})


def refuse_partial(name: TableName, rows: pyarrow.RecordBatch) -> None:
    """Raise ServerUnsupported if an inserted or updated row is missing columns, because null would be a wrong
    value for them.
    """
    absent = absent_lists(rows)
    if absent.null_count == len(absent):
        return
    lengths = compute.fill_null(compute.list_value_length(absent), 0)
    if not compute.any(compute.greater(lengths, 0)).as_py():
        return
    writes_row = compute.is_in(rows.column("_change_type"), value_set=pyarrow.array(PUTS))
    partial = compute.and_(writes_row, compute.greater(lengths, 0))
    if compute.any(partial).as_py():
        index = compute.index(partial, True).as_py()
        first = rows.column("_metadata")[index].as_py()
        raise ServerUnsupported(
            f"a row of {name} was logged without {', '.join(first['absent'])}, so the row is not identified",
            position=f"{first['file']}:{first['offset']}",
            hint=_HINT,
        )
