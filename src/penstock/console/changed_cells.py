# SPDX-License-Identifier: Apache-2.0
"""The values of a changed row before and after, side by side."""

from collections.abc import Mapping
from typing import Any


def changed_cells(part: Mapping[str, Any]) -> list[tuple[str, str | None, str | None, bool]]:
    """Return name, value before and after of each column, None if not logged, and whether it changed."""
    before, after = part["before"] or {}, part["after"] or {}
    return [
        (name, _cell(before, name), _cell(after, name), before.get(name) != after.get(name))
        for name in {**before, **after}
    ]


def _cell(values: Mapping[str, Any], name: str) -> str | None:
    if name not in values:
        return None
    return "NULL" if values[name] is None else str(values[name])
