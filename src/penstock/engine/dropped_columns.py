# SPDX-License-Identifier: Apache-2.0
"""Detects columns that were dropped from a target by hand. Writers silently leave such columns out.

A writer cannot reject such a table. The rows it writes may be older than a DROP COLUMN that has already been
applied to the target, and with `schema_changes: ignore` the table may never have had the column.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.changes import Target
from penstock.errors import SchemaChanged
from penstock.model import TableName
from penstock.sinks.sink import Evolution, Receipt, Sink


class DroppedColumns(NamedTuple):
    """A target that is missing some of the columns in its rows, and the error to raise for it."""

    target: TableName
    error: SchemaChanged


class ColumnCheck:
    """Checks every target at the start of a run, and afterwards the targets for which writers dropped
    columns.
    """

    def __init__(self, sink: Sink, policy: Evolution) -> None:
        self._sink = sink
        self._policy = policy
        # The targets to check; None for all.
        self._due: set[str] | None = None
        # By target: the columns that writers left out most recently. The writers may be right: see the
        # module's docstring.
        self._left_out: dict[str, tuple[str, ...]] = {}

    @property
    def is_due(self) -> bool:
        """Whether there are targets to check."""
        return self._due is None or bool(self._due)

    def note(self, receipts: Iterable[Receipt]) -> None:
        """Note the columns that writers left out of a batch."""
        for receipt in receipts:
            for name in receipt.tables:
                missing = tuple(receipt.columns_missing.get(name, ()))
                if missing and missing != self._left_out.get(name) and self._due is not None:
                    self._due.add(name)
                self._left_out[name] = missing

    def find(
        self, prepared: Mapping[TableName, Target], current: Mapping[TableName, Target]
    ) -> list[DroppedColumns]:
        """Return the targets that are missing columns. A missing column counts only if the target was
        prepared with it and new rows have it.

        A column that the source has dropped is null in all new rows, so a target need not have it.
        """
        names = [name for name in current if name in prepared]
        checked = [prepared[name] for name in names if self._due is None or str(name) in self._due]
        problems = []
        if checked and self._policy is not Evolution.IGNORE:
            for name, missing in self._sink.columns_missing(checked).items():
                dropped = set(prepared[name].column_names) - set(current[name].column_names)
                if columns := [column for column in missing if column not in dropped]:
                    problems.append(DroppedColumns(name, _error(name, columns)))
        self._due = set()
        return problems


def refuse_dropped(sink: Sink, policy: Evolution, before: Target, wanted: Target) -> None:
    """Raise SchemaChanged if a target that is about to be altered has lost columns that the change should not
    affect.

    Altering the target would add these columns again, with null in all rows.
    """
    if policy is Evolution.IGNORE:
        return
    unchanged = _unchanged(before, wanted)
    missing = sink.columns_missing([before]).get(before.name, ())
    if names := [column for column in missing if column in unchanged]:
        raise _error(before.name, names)


def _unchanged(before: Target, wanted: Target) -> Collection[str]:
    # A type change may drop a column and add it again, in two statements.
    types = {column.name: column.type_text for column in wanted.columns}
    return {column.name for column in before.columns if types.get(column.name) == column.type_text}


def _error(name: TableName, columns: Sequence[str]) -> SchemaChanged:
    return SchemaChanged(
        f"the target table {name} has no column {', '.join(columns)}, which the pipeline writes to",
        hint="Add it again in the target, or drop the table there; then read the table again, because rows"
        " may have been written without it: penstock resnapshot FILE TABLE",
    )
