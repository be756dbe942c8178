# SPDX-License-Identifier: Apache-2.0
"""Rows as a target keeps them, so that both sides are compared by what the target can hold.

A value that the target's type cannot hold is null there. A sink that writes such values as the source's text
has that text compared instead.
"""

import json
from collections import Counter
from collections.abc import Collection

import pyarrow
import pyarrow.compute as pc

from penstock.changes import Target
from penstock.sinks.images import unrepresentable_counts
from penstock.sinks.sink import Sink

# Beside a row's columns: the texts of values that Arrow's types cannot hold, as a JSON object, null for none.
TEXTS = "_unrepresentable"


def expected_values(
    sink: Sink, target: Target, columns: Collection[str], rows: pyarrow.RecordBatch
) -> pyarrow.RecordBatch:
    """Return rows of changes as the target has to keep them."""
    kept = sink.held(target, rows.select(target.column_names))
    return with_texts(kept, rows, columns) if sink.keeps_texts else kept


def with_texts(
    values: pyarrow.RecordBatch, rows: pyarrow.RecordBatch, columns: Collection[str]
) -> pyarrow.RecordBatch:
    """Return values with the column TEXTS behind them, which `_metadata` of `rows` has of `columns`."""
    maps = pc.struct_field(rows.column("_metadata"), "unrepresentable")
    texts = pyarrow.nulls(rows.num_rows, pyarrow.string())
    if maps.null_count < len(maps):
        told = [{name: text for name, text in one or () if name in columns} for one in maps.to_pylist()]
        texts = pyarrow.array([json.dumps(one, sort_keys=True) if one else None for one in told], texts.type)
    return values.append_column(TEXTS, texts)


def values_not_held(
    sink: Sink, target: Target, columns: Collection[str], rows: pyarrow.RecordBatch
) -> Counter[str]:
    """Count, by column, the values of rows of changes that the target keeps as null instead."""
    before = rows.select(target.column_names)
    after = sink.held(target, before)
    found: Counter[str] = Counter()
    if not sink.keeps_texts:
        of_table = unrepresentable_counts(target, pyarrow.Table.from_batches([rows]))
        found.update({name.removeprefix(f"{target.name}."): count for name, count in of_table.items()})
    for name in columns:
        found[name] += after.column(name).null_count - before.column(name).null_count
    return Counter({name: found[name] for name in columns if found[name]})
