# SPDX-License-Identifier: Apache-2.0
"""The values of a changed row before and after, side by side."""

from collections.abc import Mapping
from typing import Any

from penstock.source.shown_values import shown_text

# Shown in place of a value that the account may not see.
MASKED = "(masked)"


def changed_cells(part: Mapping[str, Any]) -> list[tuple[str, str | None, str | None, bool]]:
    """Return for each column its name, its values before and after (None if not logged), and whether its
    value changed.

    The image after an update has every column that the update changes. Masked columns come last; whether they
    changed is unknown.
    """
    before, after = part["before"] or {}, part["after"] or {}
    cells: list[tuple[str, str | None, str | None, bool]] = [
        (
            name,
            _cell(before, name),
            _cell(after, name),
            before.get(name) != after.get(name) and (name in after or part["after"] is None),
        )
        for name in {**before, **after}
    ]
    return cells + [(name, MASKED, MASKED, False) for name in part.get("masked", ())]


def _cell(values: Mapping[str, Any], name: str) -> str | None:
    if name not in values:
        return None
    return shown_text(values[name])
