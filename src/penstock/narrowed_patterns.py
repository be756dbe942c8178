# SPDX-License-Identifier: Apache-2.0
"""A table selection that is narrowed by another selection, and suggestions for mistyped patterns."""

import difflib
from collections.abc import Iterable

from penstock.model import TableName, TablePatterns

# Comparing two names takes about 30 microseconds, so only some are compared, starting with names in the same
# database.
_NAMES_COMPARED_MAX = 5000


class NarrowedPatterns(TablePatterns):
    """Selects the tables that both of two selections contain. `include` and `exclude` belong to the first
    selection.

    Like its base class, it is hashable and can be pickled.
    """

    def __init__(self, requested: TablePatterns, narrower: TablePatterns) -> None:
        super().__init__(list(requested.include), list(requested.exclude))
        self.requested = requested
        self.narrower = narrower

    def matches(self, database: str, table: str) -> bool:
        """Return whether both selections contain the table."""
        return self.requested.matches(database, table) and self.narrower.matches(database, table)

    @property
    def selects_all(self) -> bool:
        """Whether both selections contain every table."""
        return self.requested.selects_all and self.narrower.selects_all

    def may_match_in(self, database: str) -> bool:
        """Return whether both selections may contain a table of that database."""
        return self.requested.may_match_in(database) and self.narrower.may_match_in(database)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NarrowedPatterns):
            return False
        return (self.requested, self.narrower) == (other.requested, other.narrower)

    def __hash__(self) -> int:
        return hash((self.requested, self.narrower))


def nearest_table(
    pattern: str,
    names: Iterable[TableName],
    otherwise: str = "Write database.table, with * for any characters",
) -> str:
    """Return the hint for a pattern that matches none of the tables: the table that was probably meant."""
    text = pattern.replace("`", "")
    database = text.partition(".")[0] + "."
    first = sorted(map(str, names), key=lambda name: not name.startswith(database))[:_NAMES_COMPARED_MAX]
    near = difflib.get_close_matches(text, first, 1)
    return f"Did you mean {near[0]}?" if near else otherwise
