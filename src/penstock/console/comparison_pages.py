# SPDX-License-Identifier: Apache-2.0
"""The pages of comparisons: which rows of the target differ, and what does a repair do?"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.responses import Response

from penstock.console.changed_cells import changed_cells
from penstock.console.comparisons import REPAIRED_KEYS_MAX
from penstock.console.visit import Visit
from penstock.pipeline.verify.differences import Kind

# The kinds of differing rows, and the further keys that were not read in full.
_COUNTS = (*(str(kind) for kind in Kind), "beyond")


def compare(visit: Visit) -> Response:
    """Is the target equal to the source, and which rows differ?"""
    visit.prove_sees_pipelines()
    key = store, name, sink = visit.pipeline_query()
    visit.files.path(store, name)
    comparison = visit.comparisons.newest(key)
    differences = [] if comparison is None else comparison.differences
    tables = () if comparison is None else comparison.tables
    return visit.render(
        "compare.html",
        store=store,
        name=name,
        sink=sink,
        comparison=comparison,
        kinds=_COUNTS,
        beyond=_sum_of(tables, ("beyond",)),
        differences=[_side_by_side(difference) for difference in differences],
        differing=_sum_of(tables, _COUNTS),
    )


def preview_repair(visit: Visit) -> Response:
    """What happens if the target is repaired?"""
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
    """Return the number of rows of all tables that have one of these counts."""
    return sum(table.get(count, 0) for table in tables for count in counts)


def _side_by_side(difference: Mapping[str, Any]) -> dict[str, Any]:
    """Return a differing row with its values in the source and in the target."""
    source, target = (
        json.loads(difference[side]) if difference[side] else None for side in ("source", "target")
    )
    part = {"before": source, "after": target}
    return {**difference, **part, "cells": changed_cells(part)}


PAGES: dict[str, Callable[[Visit], Response]] = {
    "/compare": compare,
    "/compare/repair": preview_repair,
}
