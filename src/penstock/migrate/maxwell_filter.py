# SPDX-License-Identifier: Apache-2.0
"""Translates Maxwell's filter language into table patterns.

`exclude: shop.*, include: shop.orders, include: shop./^log_\\d+$/`: the last rule that matches a table
decides, and a table that no rule matches is included (maxwells-daemon.io/filtering).
"""

import re
from dataclasses import dataclass

from penstock.errors import OptionInvalid
from penstock.migrate.table_filters import name_expression, pattern_of

_PART = r"""(?:\*|/(?:[^/\\]|\\.)*/|`[^`]*`|'[^']*'|"[^"]*"|[\w$-]+)"""
_RULE = re.compile(
    rf"\s*(include|exclude|blacklist)\s*:\s*({_PART})\s*\.\s*({_PART})(?:\s*\.\s*(\w+)\s*=\s*({_PART}))?\s*(?:,|$)",
    re.IGNORECASE,
)
_EVERYTHING = r"[^.]*\..*"


@dataclass(frozen=True)
class MaxwellFilter:
    """The tables of a filter, as patterns to read and patterns to exclude. `column_rules` is the number of
    rules on column values.
    """

    tables: list[str]
    exclude: list[str]
    column_rules: int


def parse_filter(text: str) -> MaxwellFilter:
    """Parse a filter. Raises OptionInvalid."""
    rules: list[tuple[bool, str]] = []
    column_rules, end = 0, 0
    text = text.strip()
    while end < len(text):
        match = _RULE.match(text, end)
        if match is None:
            raise OptionInvalid(
                f"filter: {text[end : end + 60]!r} is not a rule of Maxwell's",
                hint="Write include: database.table, or exclude: database./regex/",
            )
        if match[4] is None:
            rules.append((match[1].lower() == "include", f"{_part(match[2])}\\.{_part(match[3])}"))
        else:
            column_rules += 1
        end = match.end()
    excluded = [expression for included, expression in rules if not included]
    if all(not included for included, _ in rules):
        return MaxwellFilter([], [_pattern(expression) for expression in excluded], column_rules)
    # A table is read if a rule includes it and no later rule excludes it.
    by_default = _without(_EVERYTHING, excluded)
    tables = [] if _selects_nothing(excluded) else [by_default]
    for index, (included, expression) in enumerate(rules):
        if included:
            tables.append(
                _without(expression, [later for include, later in rules[index + 1 :] if not include])
            )
    return MaxwellFilter([_pattern(expression) for expression in tables], [], column_rules)


def _part(text: str) -> str:
    """Return the expression of a database or table name. A regex may match anywhere in the name."""
    if text == "*":
        return "[^.]*"
    if text[0] != "/":
        return re.escape(text.strip("`'\""))
    return name_expression(text[1:-1].replace("\\/", "/"), "filter")


def _without(expression: str, excluded: list[str]) -> str:
    return "".join(f"(?!(?:{other})\\Z)" for other in excluded) + expression


def _selects_nothing(excluded: list[str]) -> bool:
    return "[^.]*\\.[^.]*" in excluded


def _pattern(expression: str) -> str:
    return pattern_of(expression, "filter", ignore_case=False)
