# SPDX-License-Identifier: Apache-2.0
"""The filter of a Canal client: the tables it wants, as a list of regular expressions.

`db\\..*,db2\\.(a|b)`: expressions are separated by commas outside brackets. Each is matched against the whole
`database.table`, ignoring case; one match is enough. No expression means every table.
"""

import re

import pyarrow
import pyarrow.compute

from penstock.errors import OptionInvalid
from penstock.limits import REQUEST_PATTERNS_MAX
from penstock.model import TablePatterns

# The maximum length of a filter. The daemon keeps a client's filter for as long as the client's cursor.
FILTER_LENGTH_MAX = 16 * 1024
# The maximum number of expressions. Each is compiled separately and tried on every table.
EXPRESSIONS_MAX = REQUEST_PATTERNS_MAX

# The maximum number of cached results. Further tables are matched each time.
_VERDICTS_MAX = 65_536

# The filters with which clients request everything.
_EVERYTHING = (".*\\..*", ".*")

_OPENING, _CLOSING = "([{", ")]}"

# The maximum number of unbounded repeats in a backtracking expression, so that the matching time is at most
# cubic in the length of the table's name.
_REPEATS_MAX = 3


class CanalTables(TablePatterns):
    """The tables of a filter, limited to the readable ones. Raises OptionInvalid.

    Expressions are matched by RE2, which takes linear time, because many clients share the daemon. An
    expression with lookaround is matched by Python's re, if its running time is bounded.
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
        # RE2 does not anchor an expression by itself.
        self._linear = "(?s)^(?:" + "|".join(f"(?:{part})" for part in linear) + ")$" if linear else None
        self._backtracking = [_compiled(part) for part in parts if part not in linear]
        self._verdicts: dict[tuple[str, str], bool] = {}

    def matches(self, database: str, table: str) -> bool:
        """Return whether the client wants the table and may read it."""
        verdict = self._verdicts.get((database, table))
        if verdict is None:
            verdict = self._wants(f"{database}.{table}") and self.within.matches(database, table)
            if len(self._verdicts) < _VERDICTS_MAX:
                self._verdicts[database, table] = verdict
        return verdict

    @property
    def selects_all(self) -> bool:
        """Whether all tables are wanted and readable."""
        return (not self.filter or self.filter in _EVERYTHING) and self.within.selects_all

    def may_match_in(self, database: str) -> bool:
        """Return whether tables of a database may be readable; the expressions are not considered."""
        return self.within.may_match_in(database)

    def _wants(self, name: str) -> bool:
        if self._linear is None and not self._backtracking:
            return True
        if self._linear is not None and _fits(name, self._linear):
            return True
        return any(pattern.fullmatch(name) for pattern in self._backtracking)

    def __getstate__(self) -> dict[str, object]:
        # Leave out the cached results: another process of the daemon evaluates the filter itself.
        return {**self.__dict__, "_verdicts": {}}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CanalTables) and self.filter == other.filter and self.within == other.within

    def __hash__(self) -> int:
        return hash((self.filter, self.within))

    def __repr__(self) -> str:
        return f"CanalTables({self.filter!r}, within={self.within!r})"


def split_filter(text: str) -> list[str]:
    """Split a filter at its commas, except for commas within brackets or after a backslash."""
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
    is_match = pyarrow.compute.match_substring_regex(pyarrow.scalar(name), expression, ignore_case=True)
    return bool(is_match.as_py())


def _is_linear(expression: str) -> bool:
    """Return whether RE2 supports the expression."""
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
