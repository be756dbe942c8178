# SPDX-License-Identifier: Apache-2.0
"""Converts source rows to values that the target can represent, so that both sides can be compared.

A value that the target's type cannot represent is null in the target. If the sink writes the source's text
for such a value, the text is compared instead.
"""

import json
from collections import Counter
from collections.abc import Collection

import pyarrow
import pyarrow.compute as pc

from penstock.changes import Target
from penstock.sinks.images import unrepresentable_counts
from penstock.sinks.sink import Sink

# An extra column for texts of values that Arrow cannot represent: a JSON object, or null.
TEXTS = "_unrepresentable"


def expected_values(
    sink: Sink, target: Target, columns: Collection[str], rows: pyarrow.RecordBatch
) -> pyarrow.RecordBatch:
    """Return rows of changes as the target should store them."""
    kept = sink.held(target, rows.select(target.column_names))
    return with_texts(kept, rows, columns) if sink.keeps_texts else kept


def with_texts(
    values: pyarrow.RecordBatch, rows: pyarrow.RecordBatch, columns: Collection[str]
) -> pyarrow.RecordBatch:
    """Return values with an extra column TEXTS, from the `_metadata` of `rows` for `columns`."""
    maps = pc.struct_field(rows.column("_metadata"), "unrepresentable")
    texts = pyarrow.nulls(rows.num_rows, pyarrow.string())
    if maps.null_count < len(maps):
        texts_by_column = [
            {name: text for name, text in pairs or () if name in columns} for pairs in maps.to_pylist()
        ]
        texts = pyarrow.array(
            [json.dumps(row_texts, sort_keys=True) if row_texts else None for row_texts in texts_by_column],
            texts.type,
        )
    return values.append_column(TEXTS, texts)


def values_not_held(
    sink: Sink, target: Target, columns: Collection[str], rows: pyarrow.RecordBatch
) -> Counter[str]:
    """Count, by column, the values in rows of changes that the target stores as null instead."""
    before = rows.select(target.column_names)
    after = sink.held(target, before)
    counts: Counter[str] = Counter()
    if not sink.keeps_texts:
        of_table = unrepresentable_counts(target, pyarrow.Table.from_batches([rows]))
        counts.update({name.removeprefix(f"{target.name}."): count for name, count in of_table.items()})
    for name in columns:
        counts[name] += after.column(name).null_count - before.column(name).null_count
    return Counter({name: counts[name] for name in columns if counts[name]})
