# SPDX-License-Identifier: Apache-2.0
"""The pages of comparisons: which rows of the target differ from the source, and what a repair would do."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from penstock.console.changed_cells import changed_cells
from penstock.console.comparison_files import export_differences
from penstock.console.comparisons import REPAIRED_KEYS_MAX, Comparison, ComparisonKey
from penstock.console.pipeline_files import RENAMING_STEPS
from penstock.console.visit import Visit
from penstock.pipeline.verify.differences import Kind
from penstock.pipeline.verify.kept_values import TEXTS
from penstock.serve.masking import HIDDEN_TEXT

# The maximum number of differing rows on the page.
_DIFFERENCES_SHOWN = 200
# The kinds of differing rows, and the kind for keys that were not read in full.
_COUNTS = (*(str(kind) for kind in Kind), "beyond")


def compare(visit: Visit) -> Response:
    """Show whether the target equals the source, and which rows differ."""
    visit.prove_sees_pipelines()
    key = store, name, sink = visit.pipeline_query()
    visit.files.path(store, name)
    comparison = visit.comparisons.newest(key)
    differences = _differences_of(visit, key, comparison)[:_DIFFERENCES_SHOWN]
    tables = () if comparison is None else comparison.tables
    return visit.render(
        "compare.html",
        store=store,
        name=name,
        sink=sink,
        comparison=None if comparison is None else _without_texts(visit, comparison),
        recorded=visit.states.last_comparison(store, name, sink),
        kinds=_COUNTS,
        beyond=_sum_of(tables, ("beyond",)),
        differences=[_side_by_side(difference) for difference in differences],
        exported=0 if comparison is None else len(comparison.differences),
        differing=_sum_of(tables, _COUNTS),
    )


def export_rows(visit: Visit) -> Response:
    """Return the differing rows of the newest comparison as a file, with the masks of the account."""
    visit.prove_sees_pipelines()
    key = store, name, _ = visit.pipeline_query()
    visit.files.path(store, name)
    comparison = visit.comparisons.newest(key)
    return export_differences(
        "differing-rows", _differences_of(visit, key, comparison), visit.query("format")
    )


def _differences_of(
    visit: Visit, key: ComparisonKey, comparison: Comparison | None
) -> Sequence[Mapping[str, Any]]:
    """Return the differing rows of a comparison, without the values that are masked for the account."""
    differences = () if comparison is None else comparison.differences
    if not visit.masking:
        return differences
    # Steps may have renamed the table, so the masks of all tables apply.
    renames = any(step.verb in RENAMING_STEPS for step in visit.files.settings(*key).steps)
    masked = visit.masking.all_columns
    return [
        _without_masked(difference, lambda column: renames or column.casefold() in masked)
        for difference in differences
    ]


def preview_repair(visit: Visit) -> Response:
    """Show what happens if the target is repaired."""
    visit.prove_sees_pipelines()
    key = store, name, sink = visit.pipeline_query()
    visit.files.path(store, name)
    comparison = visit.comparisons.newest(key)
    tables = () if comparison is None else comparison.tables
    return visit.render(
        "repair.html",
        store=store,
        name=name,
        sink=sink,
        tables=[table for table in tables if not table["equal"]],
        kinds=_COUNTS,
        differing=_sum_of(tables, _COUNTS),
        repaired_max=REPAIRED_KEYS_MAX,
    )


def _sum_of(tables: Sequence[Mapping[str, Any]], counts: Sequence[str]) -> int:
    """Return the sum of these counts of rows over all tables."""
    return sum(table.get(count, 0) for table in tables for count in counts)


def _without_texts(visit: Visit, comparison: Comparison) -> Comparison:
    """Return a comparison without texts that may contain a value that is masked for the account."""
    if not visit.masking:
        return comparison
    tables = [
        {
            **table,
            "open": HIDDEN_TEXT if table["open"] else None,
            "not_compared": [{**left_out, "why": HIDDEN_TEXT} for left_out in table["not_compared"]],
        }
        for table in comparison.tables
    ]
    return replace(comparison, tables=tables, error=HIDDEN_TEXT if comparison.error else "")


def _without_masked(difference: Mapping[str, Any], is_masked: Callable[[str], bool]) -> Mapping[str, Any]:
    """Return a differing row without the values of masked columns. The row lists the names of these
    columns.
    """
    masked: set[str] = set()
    parts = {}
    for part in ("key", "source", "target"):
        row = json.loads(difference[part]) if difference[part] else {}
        hidden = {column for column in row if is_masked(column)}
        masked |= hidden
        # Leave out the texts about unrepresentable values, because they may concern masked columns.
        shown = {column: row[column] for column in row if column not in hidden and column != TEXTS}
        parts[part] = json.dumps(shown) if difference[part] else None
    return {**difference, **parts, "masked": sorted(masked)}


def _side_by_side(difference: Mapping[str, Any]) -> dict[str, Any]:
    """Return a differing row with its values in the source and in the target."""
    source, target = (
        json.loads(difference[side]) if difference[side] else None for side in ("source", "target")
    )
    part = {"before": source, "after": target}
    return {**difference, **part, "cells": changed_cells(part)}


FILES: dict[str, Callable[[Visit], Response]] = {"/compare/rows": export_rows}

PAGES: dict[str, Callable[[Visit], Response]] = {
    "/compare": compare,
    "/compare/repair": preview_repair,
}
