# SPDX-License-Identifier: Apache-2.0
"""How a target changes when the columns of its source change, according to the pipeline's policy.

A mirror has only the current columns, and existing rows are converted to them. A target that keeps every
change contains rows of every past definition, so its columns are only added or widened.
"""

from dataclasses import replace

from penstock.changes import Target
from penstock.errors import SchemaChanged
from penstock.model import Column
from penstock.pipeline.column_types import common_column
from penstock.sinks.sink import Evolution


def evolve_target(before: Target, after: Target, evolution: Evolution, *, keeps_state: bool) -> Target:
    """Return the prepared target `before`, changed so that rows of `after` can be written to it. Raises
    SchemaChanged.
    """
    if evolution is Evolution.STOP and not _same_types(before, after):
        raise SchemaChanged(
            f"the columns of {after.name} changed",
            hint="schema_changes: evolve follows them; penstock run --dry-run shows how",
        )
    if not keeps_state:
        return _grown(before, after, evolution)
    if evolution is Evolution.EVOLVE:
        known = {column.name: column for column in before.columns}
        # An added column is null in older rows until their table is read again.
        columns = tuple(
            column if column.name in known and not known[column.name].nullable else _optional(after, column)
            for column in after.columns
        )
        return replace(after, columns=columns)
    joined = joined_targets(before, after)
    if evolution is not Evolution.ADD_ONLY:
        joined = replace(joined, columns=joined.columns[: len(before.columns)])
    return replace(joined, unique_keys=after.unique_keys)


def accepts_rows(prepared: Target, target: Target, evolution: Evolution) -> bool:
    """Return whether a prepared target that keeps every change accepts rows of a definition.

    It does if `evolve_target` would change nothing but its keys.
    """
    if prepared.columns == target.columns:
        return True
    if evolution is Evolution.STOP and not _same_types(prepared, target):
        return False
    return _grown(prepared, target, evolution).columns == prepared.columns


def joined_targets(first: Target, second: Target) -> Target:
    """Return a target with the columns of both targets. A column of only one of them becomes nullable."""
    known = set(first.column_names)
    required = {column.name for column in second.columns if not column.nullable}
    # A column that only one target has is null in rows of the other.
    kept = tuple(column if column.name in required else _optional(first, column) for column in first.columns)
    more = tuple(_optional(second, column) for column in second.columns if column.name not in known)
    return replace(first, columns=kept + more)


def _grown(before: Target, after: Target, evolution: Evolution) -> Target:
    """Return a target with the keys of `after` and columns that hold the values of both targets."""
    current = {column.name: column for column in after.columns}
    columns: list[Column] = []
    for column in before.columns:
        other = current.get(column.name)
        if other is None:
            kept = replace(column, nullable=True)
        elif evolution is Evolution.EVOLVE:
            kept = common_column(column, other)
        else:
            kept = replace(column, nullable=column.nullable or other.nullable)
        columns.append(kept)
    if evolution in (Evolution.EVOLVE, Evolution.ADD_ONLY):
        known = set(before.column_names)
        columns += [replace(column, nullable=True) for column in after.columns if column.name not in known]
    return replace(after, columns=tuple(columns))


def _same_types(before: Target, after: Target) -> bool:
    return before.column_names == after.column_names and before.arrow().types == after.arrow().types


def _optional(target: Target, column: Column) -> Column:
    return column if column.name in target.primary_key else replace(column, nullable=True)
