# SPDX-License-Identifier: Apache-2.0
"""The pages of comparisons: which rows of the target differ, and what does a repair do?"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from penstock.console.changed_cells import changed_cells
from penstock.console.visit import Visit
from penstock.pipeline.verify.differences import Kind

_KINDS = tuple(str(kind) for kind in Kind)


def compare(visit: Visit) -> Response:
    """Is the target equal to the source, and which rows differ?"""
    visit.prove_sees_pipelines()
    key = store, name, sink = visit.pipeline_query()
    visit.files.path(store, name)
    comparison = visit.comparisons.newest(key)
    differences = [] if comparison is None else comparison.differences
    return visit.render(
        "compare.html",
        store=store,
        name=name,
        sink=sink,
        comparison=comparison,
        kinds=_KINDS,
        differences=[_side_by_side(difference) for difference in differences],
        differing=_differing(comparison.tables if comparison else ()),
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
        kinds=_KINDS,
        differing=_differing(tables),
    )


def _differing(tables: Any) -> int:
    """Return the number of differing rows, as far as they were counted."""
    return sum(table.get(kind, 0) for table in tables for kind in (*_KINDS, "beyond"))


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
