# SPDX-License-Identifier: Apache-2.0
"""Joins the rows of several small responses, so that a slow member has less to do for each of them."""

from collections.abc import Sequence

import pyarrow

from penstock.client.fetch import RowFrame, RowsFrame


def merged(frames: Sequence[RowFrame], rows_max: int) -> list[RowFrame]:
    """Return frames with the rows of a table together, up to `rows_max`, as if they had arrived at once.

    The rows of a table keep their order. A change of a table's definition begins another frame.
    """
    if len({frame.table for frame in frames}) == len(frames):
        return list(frames)
    batches: list[tuple[RowFrame, list[pyarrow.RecordBatch]]] = []
    last_of_table: dict[str, int] = {}
    for frame in frames:
        rows = frame.to_arrow()
        last = last_of_table.get(frame.table)
        if last is not None:
            first, joined = batches[last]
            if (
                sum(part.num_rows for part in joined) + rows.num_rows <= rows_max
                and _are_alike(first, frame)
                and joined[0].schema.equals(rows.schema, check_metadata=True)
            ):
                joined.append(rows)
                continue
        last_of_table[frame.table] = len(batches)
        batches.append((frame, [rows]))
    return [
        RowsFrame(first.table, first.schema_version, first.key, pyarrow.concat_batches(joined))
        for first, joined in batches
    ]


def _are_alike(first: RowFrame, second: RowFrame) -> bool:
    return (first.schema_version, first.key) == (second.schema_version, second.key)
