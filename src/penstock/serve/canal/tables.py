# SPDX-License-Identifier: Apache-2.0
"""The filter of a client of Canal: which tables it wants, as a list of regular expressions.

`db\\..*,db2\\.(a|b)`: commas divide, but not inside brackets; each expression has to fit the whole of
`database.table`, whatever the case; one of them is enough. No expression means every table.
"""

import re

import pyarrow
import pyarrow.compute

from penstock.errors import OptionInvalid
from penstock.limits import REQUEST_PATTERNS_MAX
from penstock.model import TablePatterns

# A filter is sent by a client, and kept as long as its cursor.
FILTER_LENGTH_MAX = 16 * 1024
# Each expression is compiled by itself, and tried on every table.
EXPRESSIONS_MAX = REQUEST_PATTERNS_MAX

# What has been judged is kept for so many tables; beyond, it is judged anew.
_VERDICTS_MAX = 65_536

# How clients write that they want everything.
_EVERYTHING = (".*\\..*", ".*")

_OPENING, _CLOSING = "([{", ")]}"

# Open-ended repeats of an expression that is tried backwards: at most the cube of a name's length.
_REPEATS_MAX = 3


class CanalTables(TablePatterns):
    """The tables of a filter, as far as they may be read. Raises OptionInvalid.

    Expressions are RE2's, whose time is linear in the name, since whoever sends one shares the daemon with
    others; one that looks ahead or behind is left to Python where its time is bounded too.
    """

    def __init__(self, text: str, within: TablePatterns) -> None:
        super().__init__()
        if len(text) > FILTER_LENGTH_MAX:
            raise OptionInvalid(f"a filter of {len(text)} characters; at most {FILTER_LENGTH_MAX} are taken")
        self.filter = text
        self.within = within
        parts = list(dict.fromkeys(split_filter(text)))
        if len(parts) > EXPRESSIONS_MAX:
            raise OptionInvalid(f"a filter of {len(parts)} expressions; at most {EXPRESSIONS_MAX} are taken")
        linear = [part for part in parts if _is_linear(part)]
        # RE2 anchors nothing by itself.
        self._linear = "(?s)^(?:" + "|".join(f"(?:{part})" for part in linear) + ")$" if linear else None
        self._backtracking = [_compiled(part) for part in parts if part not in linear]
        self._verdicts: dict[tuple[str, str], bool] = {}

    def matches(self, database: str, table: str) -> bool:
        """Tell whether the client wants the table and may read it."""
        verdict = self._verdicts.get((database, table))
        if verdict is None:
            verdict = self._wants(f"{database}.{table}") and self.within.matches(database, table)
            if len(self._verdicts) < _VERDICTS_MAX:
                self._verdicts[database, table] = verdict
        return verdict

    @property
    def selects_all(self) -> bool:
        """Whether every table is wanted and may be read."""
        return (not self.filter or self.filter in _EVERYTHING) and self.within.selects_all

    def may_match_in(self, database: str) -> bool:
        """Tell whether a table of that database may be read; what an expression fits is not told."""
        return self.within.may_match_in(database)

    def _wants(self, name: str) -> bool:
        if self._linear is None and not self._backtracking:
            return True
        if self._linear is not None and _fits(name, self._linear):
            return True
        return any(one.fullmatch(name) for one in self._backtracking)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CanalTables) and self.filter == other.filter and self.within == other.within

    def __hash__(self) -> int:
        return hash((self.filter, self.within))

    def __repr__(self) -> str:
        return f"CanalTables({self.filter!r}, within={self.within!r})"


def split_filter(text: str) -> list[str]:
    """Cut a filter at its commas, but for those inside brackets and behind a backslash."""
    parts, current, depth, escaped = [], "", 0, False
    for character in text:
        if character == "," and depth == 0 and not escaped:
            parts.append(current)
            current = ""
            continue
        if not escaped:
            depth += (character in _OPENING) - (character in _CLOSING)
            depth = max(depth, 0)
        escaped = character == "\\" and not escaped
        current += character
    return [part.strip() for part in [*parts, current] if part.strip()]


def _fits(name: str, expression: str) -> bool:
    found = pyarrow.compute.match_substring_regex(pyarrow.scalar(name), expression, ignore_case=True)
    return bool(found.as_py())


def _is_linear(expression: str) -> bool:
    """Tell whether RE2 knows the expression."""
    try:
        _fits("", f"^(?:{expression})$")
    except pyarrow.ArrowInvalid:
        return False
    return True


def _compiled(expression: str) -> re.Pattern[str]:
    plain = re.sub(r"\[(?:\\.|[^\]\\])*\]|\\.", "x", expression)
    repeats = re.findall(r"[*+]|\{\d*,\d*\}", plain)
    if len(repeats) > _REPEATS_MAX or re.search(r"\)[*+{]", plain):
        raise OptionInvalid(
            f"filter {expression!r} may take very long to try",
            hint="Leave out what looks ahead or behind, or repeat less",
        )
    try:
        return re.compile(expression, re.IGNORECASE | re.DOTALL)
    except (re.error, RecursionError, OverflowError) as problem:
        raise OptionInvalid(f"filter {expression!r} is not a regular expression: {problem}") from problem
