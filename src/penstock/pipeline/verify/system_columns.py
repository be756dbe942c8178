# SPDX-License-Identifier: Apache-2.0
"""Converts rows that are not from a log or a load into changes, by adding the system columns."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import pyarrow

from penstock import _native
from penstock.changes import SYSTEM_COLUMNS, Changes, Origin, Target
from penstock.model import Position


def as_changes(
    target: Target,
    rows: pyarrow.RecordBatch,
    kind: str,
    position: Position,
    *,
    instance: str,
    texts: Sequence[Mapping[str, str] | None] | None = None,
    version: int | None = None,
) -> Changes:
    """Return rows of `target.arrow()` as changes of one kind, as if made just before a position.

    `texts` maps, for each row, columns to the texts of values that Arrow cannot represent. By default, the
    version of the changes is above that of every transaction before the position, and below that of every
    later transaction.
    """
    version = position.commit_version - 1 if version is None else version
    count = rows.num_rows
    fields = pyarrow.schema(_native.arrow_schema([], mariadb=target.mariadb))
    now = pyarrow.scalar(time.time_ns() // 1000, fields.field("_commit_timestamp").type)
    metadata = fields.field("_metadata").type
    metadata_values = {
        "instance": instance,
        "database": target.name.database,
        "table": target.name.table,
        "file": position.file,
        "offset": position.offset,
        "server_id": 0,
        "schema_version": 0,
    }
    by_row: dict[str, Any] = {"row": numpy.arange(count)}
    if texts is not None:
        by_row["unrepresentable"] = [list(row_texts.items()) if row_texts else None for row_texts in texts]
    columns = [
        pyarrow.array(by_row[metadata_field.name], metadata_field.type)
        if metadata_field.name in by_row
        else pyarrow.repeat(
            pyarrow.scalar(metadata_values.get(metadata_field.name), metadata_field.type), count
        )
        for metadata_field in metadata
    ]
    system = {
        "_change_type": pyarrow.repeat(pyarrow.scalar(kind, fields.field("_change_type").type), count),
        "_commit_version": pyarrow.repeat(pyarrow.scalar(version), count),
        "_commit_timestamp": pyarrow.repeat(now, count),
        "_metadata": pyarrow.StructArray.from_arrays(columns, fields=list(metadata)),
    }
    own = [rows.column(name) for name in target.column_names]
    schema = pyarrow.schema([*target.arrow(), *(fields.field(name) for name in SYSTEM_COLUMNS)])
    batch = pyarrow.RecordBatch.from_arrays([*own, *(system[name] for name in SYSTEM_COLUMNS)], schema=schema)
    return Changes(target, batch, target.name, Origin.LOG)


def with_version(changes: Changes, version: int, kinds: Sequence[str] | None = None) -> Changes:
    """Return changes at another commit version, and optionally of other kinds."""
    rows = changes.rows
    values = {"_commit_version": pyarrow.repeat(pyarrow.scalar(version), rows.num_rows)}
    if kinds is not None:
        values["_change_type"] = pyarrow.array(kinds, rows.schema.field("_change_type").type)
    for name, column in values.items():
        index = rows.schema.get_field_index(name)
        rows = rows.set_column(index, rows.schema.field(index), column)
    return Changes(changes.target, rows, changes.source, Origin.LOG)
