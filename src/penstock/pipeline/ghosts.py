# SPDX-License-Identifier: Apache-2.0
"""The tables that tools for changing a schema online work with: gh-ost's and pt-online-schema-change's.

They copy a table into one of another name, change that, and swap the two. What they write to the copy is no
change of the table, so their tables are never a pipeline's own.
"""

import re

from penstock.model import TableName, TablePatterns

# gh-ost: _t_gho, _t_ghc, _t_del, _t_20261121101500_del; pt-online-schema-change: _t_new, _t_old, __t_old.
_GHOST = re.compile(r"_+(?P<table>.+?)(?:_\d{14})?_(?:gho|ghc|del|new|old)\Z")


# How gh-ost begins the statement that puts its copy in place, once it has copied every row.
_CUT_OVER = re.compile(r"\s*(?:rename|alter)\s+/\* gh-ost \*/", re.IGNORECASE)


def is_cut_over(statement: str) -> bool:
    """Tell whether gh-ost itself swaps tables by a statement.

    Names alone do not tell: a table that somebody filled by hand may have the name of a ghost. The statement
    of pt-online-schema-change is no other than one written by hand.
    """
    return _CUT_OVER.match(statement) is not None


def table_of_ghost(name: TableName) -> TableName | None:
    """Return the table that a ghost belongs to, None where the name is no ghost's."""
    match = _GHOST.fullmatch(name.table)
    return TableName(name.database, match.group("table")) if match else None


class PipelinePatterns(TablePatterns):
    """A source's tables, without the ghosts of those that match, and without some that are left out.

    A table that is named without a star is no ghost. Pickles.
    """

    def __init__(self, patterns: TablePatterns, left_out: frozenset[TableName] = frozenset()) -> None:
        super().__init__(list(patterns.include) or None, list(patterns.exclude) or None)
        self.left_out = left_out
        named = [TablePatterns([pattern]).single() for pattern in patterns.include]
        self._named = frozenset(name for name in named if name is not None)

    def matches(self, database: str, table: str) -> bool:
        """Tell whether rows of the table are wanted."""
        name = TableName(database, table)
        if name in self.left_out or not super().matches(database, table):
            return False
        ghost_of = table_of_ghost(name)
        return (
            ghost_of is None or name in self._named or not super().matches(ghost_of.database, ghost_of.table)
        )
