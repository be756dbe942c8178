# SPDX-License-Identifier: Apache-2.0
"""Finds the small tables, each of which is loaded as one chunk. One statement counts the rows of many tables.

Cutting a table by its key takes several statements, which would cost more than reading a small table.
"""

from collections.abc import Iterator, Sequence

from penstock.changes import Target
from penstock.errors import PenstockError, TransientError
from penstock.limits import SMALL_TABLE_ROWS
from penstock.model import TableName
from penstock.pipeline.load.chunks import Chunk
from penstock.pipeline.load.session import LoadSession

# The maximum number of tables that one statement counts. The statement holds the metadata locks of all of
# them.
_TABLES_PER_STATEMENT = 50


def small_chunks(session: LoadSession, targets: Sequence[Target], rows: int) -> Iterator[Chunk]:
    """For each small table, yield one chunk with all of its rows. A small table has few rows, and never more
    than `rows`.

    The chunk has no key and no order: it is read from its beginning if the connection is lost. Tables that
    cannot be read, and those of a TiDB cluster, are left to `plan_over`.
    """
    if session.tidb:
        return
    rows_max = min(rows, SMALL_TABLE_ROWS)
    for first in range(0, len(targets), _TABLES_PER_STATEMENT):
        names = [target.name for target in targets[first : first + _TABLES_PER_STATEMENT]]
        for name, count in zip(names, _count(session, names, rows_max), strict=False):
            if count <= rows_max:
                yield Chunk(name, rows=count)


def _count(session: LoadSession, names: Sequence[TableName], rows_max: int) -> list[int]:
    """Return the number of rows of each table, at most one more than `rows_max`; [] if the server refuses to
    read a table.
    """
    counts = (
        f"SELECT {number} AS number, COUNT(*) AS row_count"
        f" FROM (SELECT 1 FROM {name.sql} LIMIT {rows_max + 1}) AS first_rows"
        for number, name in enumerate(names)
    )
    try:
        rows = session.query(" UNION ALL ".join(counts))
    except TransientError:
        raise
    except PenstockError:
        # One of the tables may be gone. Reading the tables one by one reports which.
        return []
    return [int(row["row_count"]) for row in sorted(rows, key=lambda row: int(row["number"]))]
