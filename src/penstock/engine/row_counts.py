# SPDX-License-Identifier: Apache-2.0
"""Counts rows by batch stage and operation, for the progress of a run.

An update counts once, even if it has two images. Rows of a full load count as the operation `load`.
"""

from collections import Counter

import pyarrow

from penstock.changes import Changes, Origin, kinds_text

READ, DEAD = "read", "dead"
_INSERT, _UPDATE, _DELETE, _LOAD = "insert", "update", "delete", "load"


def count_operations(rows: pyarrow.RecordBatch, origin: Origin = Origin.LOG) -> Counter[str]:
    """Return the number of row changes by operation."""
    if origin is Origin.LOAD:
        return Counter({_LOAD: rows.num_rows} if rows.num_rows else {})
    text = kinds_text(rows)
    # No change type contains the name of another, and no two joined types spell a third.
    counts = {
        _INSERT: text.count(b"insert"),
        _UPDATE: text.count(b"update_postimage"),
        _DELETE: text.count(b"delete"),
    }
    return Counter({operation: count for operation, count in counts.items() if count})


def count_changes(changes: Changes) -> Counter[str]:
    """Return the number of changes by operation."""
    return count_operations(changes.rows, changes.origin)
