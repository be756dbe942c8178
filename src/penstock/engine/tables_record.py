# SPDX-License-Identifier: Apache-2.0
"""The record of a pipeline's tables in its state: their definitions and their prepared targets."""

import operator
from collections.abc import Collection, Mapping
from typing import Any

from penstock.changes import Target
from penstock.engine.tracked_table import TrackedTable
from penstock.model import TableName
from penstock.pipeline.state import PipelineState


class TablesRecord:
    """Reads the record of tables once, and writes it only when it has changed."""

    def __init__(self, state: PipelineState) -> None:
        self._state = state
        self._saved: list[Any] | None = None

    def read(self) -> tuple[dict[str, TrackedTable], dict[TableName, Target], set[TableName]]:
        """Return the tables by key, the prepared targets, and the targets from before a reset."""
        recorded = self._state.get_large("tables")
        value = recorded or {"tables": {}, "targets": []}
        tables = {key: TrackedTable.from_json(tracked) for key, tracked in value["tables"].items()}
        targets = {target.name: target for target in map(Target.from_json, value["targets"])}
        written = {TableName.parse(name) for name in value.get("written", ())}
        if recorded is not None:
            self._saved = _parts_of(tables, targets, written)
        return tables, targets, written

    def save(
        self,
        tables: Mapping[str, TrackedTable],
        targets: Mapping[TableName, Target],
        written: Collection[TableName],
    ) -> None:
        """Write the record if anything in it was replaced after the last write."""
        # This method is called for every batch, but few batches change anything. Objects are replaced and
        # never modified, so identical objects have identical JSON.
        parts, saved = _parts_of(tables, targets, written), self._saved
        if saved is not None and len(saved) == len(parts) and all(map(operator.is_, saved, parts)):
            return
        value = {
            "tables": {key: table.to_json() for key, table in tables.items()},
            "targets": [target.to_json() for target in targets.values()],
            "written": sorted(str(name) for name in written if name not in targets),
        }
        self._state.put_large("tables", value)
        self._saved = parts


def _parts_of(
    tables: Mapping[str, TrackedTable], targets: Mapping[TableName, Target], written: Collection[TableName]
) -> list[Any]:
    """Return the objects that the record consists of."""
    parts = [*tables, *targets.values(), *written]
    return parts + [part for table in tables.values() for part in table.parts]
