# SPDX-License-Identifier: Apache-2.0
"""Counts the rows of a batch by stage and operation."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow

from penstock.changes import Origin
from penstock.engine.row_counts import count_changes, count_operations
from penstock.pipeline.step import Rejected, run_steps
from tests.support.binlog.forged_log import NOTE_IDS
from tests.support.pipeline.changes_made import changes_of, delete, insert, update
from tests.support.pipeline.local_runs import notes_pipeline, run_here
from tests.support.pipeline.steps_run import ORDERS, step


def order(number: int, status: str) -> dict[str, Any]:
    return {"id": number, "status": status, "email": None, "total": None}


CHANGES = changes_of(
    ORDERS,
    insert(1, **order(1, "open")),
    insert(2, **order(2, "test")),
    update(3, order(3, "open"), order(3, "paid")),
    # The filter converts these updates to a delete and an insert.
    update(4, order(4, "open"), order(4, "test")),
    update(5, order(5, "test"), order(5, "open")),
    update(6, order(6, "test"), order(6, "test")),
    delete(7, **order(7, "open")),
    delete(8, **order(8, "test")),
)


def test_update_counts_once_in_every_part_of_a_batch() -> None:
    assert count_changes(CHANGES) == {"insert": 2, "update": 4, "delete": 2}
    total = Counter[str]()
    for at in range(len(CHANGES)):
        total.update(count_operations(CHANGES.rows.slice(at, 1)))
    assert total == count_changes(CHANGES), "a slice has the buffers of the whole"
    assert count_operations(CHANGES.rows, Origin.LOAD) == {"load": len(CHANGES)}
    assert count_operations(CHANGES.rows.slice(0, 0)) == {}


def test_kinds_of_another_string_type_are_counted() -> None:
    at = CHANGES.rows.schema.get_field_index("_change_type")
    kinds = CHANGES.rows.column(at).cast(pyarrow.large_string())
    rows = CHANGES.rows.set_column(at, "_change_type", kinds)
    assert count_operations(rows) == count_changes(CHANGES)


def test_update_that_a_filter_turns_into_a_delete_counts_as_one_change() -> None:
    outcomes = list(run_steps([step("filter", "status <> 'test'")], CHANGES))
    passed = [count_changes(outcome) for outcome in outcomes if not isinstance(outcome, Rejected)]
    assert passed == [{"insert": 2, "update": 1, "delete": 2}]


def test_run_reports_filtered_and_rejected_rows_by_operation(tmp_path: Path) -> None:
    reports: list[Mapping[str, Any]] = []
    steps = [
        {"filter": f"id <> {NOTE_IDS[0]}"},
        {"python": {"function": "tests.unit.test_row_counts:refuse_a_note", "on_error": "dead_letter"}},
    ]
    settings = notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}}, steps=steps)
    run_here(settings, report=reports.append)
    totals: dict[str, int] = {}
    for report in reports:
        for stage, operations in report["operations"].items():
            totals[stage] = totals.get(stage, 0) + operations.pop("insert")
            assert not operations, "the notes are only inserted"
        totals["filtered"] = totals.get("filtered", 0) + report["filtered"]
    count = len(NOTE_IDS)
    assert totals == {"read": count, "filtered": 1, "dead": 1, "written": count - 2}


def refuse_a_note(table: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """A step that cannot read a note."""
    if NOTE_IDS[1] in table.column("id").to_pylist():
        raise ValueError("a note that nobody can read")
    return table
