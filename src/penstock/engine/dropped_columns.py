# SPDX-License-Identifier: Apache-2.0
"""Finds columns of targets that were dropped by hand: writers leave them out without an error.

A writer cannot refuse such a table. It may replay rows from before a DROP COLUMN that the target follows
already, and with `schema_changes: ignore` a table may never have had the column.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from penstock.changes import Target
from penstock.errors import SchemaChanged
from penstock.model import TableName
from penstock.sinks.sink import Evolution, Sink


class DroppedColumns(NamedTuple):
    """A target without columns that its rows have, and the error for it."""

    target: TableName
    error: SchemaChanged


def find_dropped(
    sink: Sink, policy: Evolution, prepared: Mapping[TableName, Target], current: Mapping[TableName, Target]
) -> list[DroppedColumns]:
    """Return the targets that do not have columns which they were prepared with, and which rows have now.

    A column that the source has dropped is null in all new rows, so a target may be without it.
    """
    checked = [prepared[name] for name in current if name in prepared]
    if policy is Evolution.IGNORE or not checked:
        return []
    problems = []
    for name, missing in sink.columns_missing(checked).items():
        dropped = set(prepared[name].column_names) - set(current[name].column_names)
        names = [column for column in missing if column not in dropped]
        if names:
            problems.append(DroppedColumns(name, _error(name, names)))
    return problems


def refuse_dropped(sink: Sink, policy: Evolution, before: Target, wanted: Target) -> None:
    """Raise SchemaChanged if a target to be altered does not have columns that stay as they are.

    The statement would add them again, null in all rows.
    """
    if policy is Evolution.IGNORE:
        return
    unchanged = _unchanged(before, wanted)
    missing = sink.columns_missing([before]).get(before.name, ())
    if names := [column for column in missing if column in unchanged]:
        raise _error(before.name, names)


def _unchanged(before: Target, wanted: Target) -> Collection[str]:
    # Changing a type may drop a column and add it again, in two statements.
    types = {column.name: column.type_text for column in wanted.columns}
    return {column.name for column in before.columns if types.get(column.name) == column.type_text}


def _error(name: TableName, columns: Sequence[str]) -> SchemaChanged:
    return SchemaChanged(
        f"the target table {name} has no column {', '.join(columns)}, which the pipeline writes to",
        hint="Add it again in the target, or drop the table there; then read the table again, because rows"
        " may have been written without it: penstock resnapshot FILE TABLE",
    )
