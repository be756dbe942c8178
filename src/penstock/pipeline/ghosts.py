# SPDX-License-Identifier: Apache-2.0
"""Recognizes the working tables of online schema change tools: gh-ost and pt-online-schema-change.

These tools copy a table into a new table, change the new table, and then swap the names of the two. Writes to
the new table are not changes of the original table, so a pipeline never reads these working tables as its
own.
"""

import re

from penstock.model import TableName, TablePatterns

# gh-ost: _t_gho, _t_ghc, _t_del, _t_20261121101500_del; pt-online-schema-change: _t_new, _t_old, __t_old.
_GHOST = re.compile(r"_+(?P<table>.+?)(?:_\d{14})?_(?:gho|ghc|del|new|old)\Z")


# The start of the statement by which gh-ost swaps in its copy, after copying every row.
_CUT_OVER = re.compile(r"\s*(?:rename|alter)\s+/\* gh-ost \*/", re.IGNORECASE)


def is_cut_over(statement: str) -> bool:
    """Return whether a statement is the one by which gh-ost swaps its copy with the table.

    Table names alone do not prove it, because a table filled by hand may have such a name. A swap by
    pt-online-schema-change cannot be distinguished from a statement written by hand.
    """
    return _CUT_OVER.match(statement) is not None


def table_of_ghost(name: TableName) -> TableName | None:
    """Return the table that a ghost table belongs to, None if the name is not a ghost table's."""
    match = _GHOST.fullmatch(name.table)
    return TableName(name.database, match.group("table")) if match else None


class PipelinePatterns(TablePatterns):
    """The tables of a source, except those in `left_out` and the ghost tables that belong to matching tables.

    A table that is listed without a wildcard is never treated as a ghost table. Can be pickled.
    """

    def __init__(self, patterns: TablePatterns, left_out: frozenset[TableName] = frozenset()) -> None:
        super().__init__(list(patterns.include) or None, list(patterns.exclude) or None)
        self._patterns = patterns
        self.left_out = left_out
        named = [TablePatterns([pattern]).single() for pattern in patterns.include]
        self._named = frozenset(name for name in named if name is not None)

    @property
    def selects_all(self) -> bool:
        """Whether the source's patterns select every table."""
        return self._patterns.selects_all and not self.left_out

    def may_match_in(self, database: str) -> bool:
        """Return whether the source's patterns may select a table of that database."""
        return self._patterns.may_match_in(database)

    def matches(self, database: str, table: str) -> bool:
        """Return whether the pipeline reads the table."""
        name = TableName(database, table)
        patterns = self._patterns
        if name in self.left_out or not patterns.matches(database, table):
            return False
        ghost_of = table_of_ghost(name)
        is_ghost = ghost_of is not None and patterns.matches(ghost_of.database, ghost_of.table)
        return name in self._named or not is_ghost
