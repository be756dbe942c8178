# SPDX-License-Identifier: Apache-2.0
"""Prepares a target for a new definition of its table when existing rows may not fit that definition."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import structlog

from penstock.changes import Target
from penstock.engine.dropped_columns import refuse_dropped
from penstock.errors import SchemaChanged, ValueMalformed
from penstock.model import Column, TableName
from penstock.pipeline.column_types import keeps_values
from penstock.pipeline.evolution import evolve_target
from penstock.sinks.sink import Evolution, Sink
from penstock.sinks.sql.rows import refuse_other_key

_log = structlog.get_logger(__name__)


class TargetFitting:
    """Prepares the targets of a sink for the current definitions of their tables.

    `changes` counts column changes by outcome: applied, ignored or refused. A change made before the run
    began is counted only if it is applied or refused.
    """

    def __init__(self, sink: Sink, policy: Evolution) -> None:
        self.changes: Counter[str] = Counter()
        # A sink may prepare several targets at once.
        self._lock = threading.Lock()
        self._sink = sink
        self._policy = policy
        # For each table: the latest columns that required no change of the target.
        self._unneeded: dict[TableName, Sequence[Column]] = {}

    def prepare(self, before: Target | None, target: Target, *, again: bool) -> Target:
        """Prepare a target for a new definition; return the target's new definition.

        `before` is its current definition. A target that already has the new definition is prepared only with
        `again`. Raises SchemaChanged.
        """
        try:
            wanted = _evolved(self._sink, self._policy, before, target)
            if wanted == before and not again:
                self._note_unneeded(target)
                return before
            if before is not None and not again:
                refuse_dropped(self._sink, self._policy, before, wanted)
            prepared = _fitted(self._sink, self._policy, before, wanted)
        except SchemaChanged:
            self._count("refused")
            raise
        self._unneeded[target.name] = target.columns
        if before is not None and prepared.columns != before.columns:
            self._count("applied")
        return prepared

    def _count(self, outcome: str) -> None:
        with self._lock:
            self.changes[outcome] += 1

    def _note_unneeded(self, target: Target) -> None:
        known = self._unneeded.get(target.name)
        self._unneeded[target.name] = target.columns
        if known is not None and known != target.columns:
            self._count("ignored")


def _evolved(sink: Sink, policy: Evolution, before: Target | None, target: Target) -> Target:
    """Return the definition with which a target must be prepared for new rows. Raises SchemaChanged."""
    if before is None or before == target:
        return target
    if policy is not Evolution.EVOLVE and sink.keeps_state:
        # Rows that differ only in the new key would overwrite each other.
        refuse_other_key(target, before.primary_key)
    return evolve_target(before, target, policy, keeps_state=sink.keeps_state)


def _fitted(sink: Sink, policy: Evolution, before: Target | None, wanted: Target) -> Target:
    """Change a target's table; return its new definition.

    The definition comes from the server, which is ahead of the log. So rows of a mirror may not fit a new
    column type or unique key until reading the log reaches the statement that made the change, and the table
    is read again. Until then, the new column is null and the new key is missing. Raises SchemaChanged if rows
    do not fit the primary key.
    """
    try:
        sink.prepare(wanted, policy)
        return wanted
    except ValueMalformed:
        if before is None or policy is not Evolution.EVOLVE or not sink.keeps_state:
            raise
    types = {column.name: column.type_text for column in before.columns}
    columns = tuple(
        column
        for column in wanted.columns
        if column.name in wanted.primary_key
        or keeps_values(types.get(column.name, column.type_text), column.type_text)
    )
    names = {column.name for column in columns}
    keys = tuple(key for key in wanted.unique_keys if key in before.unique_keys and names.issuperset(key))
    _log.warning(
        "rows of a target do not fit its table's definition, until it is read again",
        table=str(wanted.name),
    )
    kept = replace(wanted, unique_keys=keys)
    try:
        sink.prepare(replace(wanted, columns=columns, unique_keys=keys), policy)
        sink.prepare(kept, policy)
    except ValueMalformed as problem:
        raise SchemaChanged(
            f"rows of the target {wanted.name} do not fit its table's definition, whose key is"
            f" {', '.join(wanted.primary_key)}: {problem.message}",
            hint=f"Drop the target's table, then run penstock resnapshot for {wanted.name}",
        ) from problem
    return kept
