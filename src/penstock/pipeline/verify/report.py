# SPDX-License-Identifier: Apache-2.0
"""Writes the result of a comparison to a file, and as text."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow

from penstock import _native
from penstock.changes import Target
from penstock.errors import DiskFailed
from penstock.pipeline.verify.comparison import TableResult
from penstock.pipeline.verify.differences import Difference, Kind
from penstock.pipeline.verify.kept_values import TEXTS

# One row per difference. Rows are JSON objects with values as the server's client displays them.
SCHEMA = pyarrow.schema(
    [
        pyarrow.field("table", pyarrow.string(), nullable=False),
        pyarrow.field("kind", pyarrow.string(), nullable=False),
        pyarrow.field("key", pyarrow.string(), nullable=False),
        pyarrow.field("columns", pyarrow.list_(pyarrow.string()), nullable=False),
        pyarrow.field("source", pyarrow.string()),
        pyarrow.field("target", pyarrow.string()),
    ]
)


def store(results: Sequence[TableResult], path: Path) -> None:
    """Write every difference to a file. Raises DiskFailed.

    The format is Arrow IPC, or JSON lines if the name ends in .json or .jsonl.
    """
    table = pyarrow.Table.from_batches([_batch(result) for result in results], SCHEMA)
    try:
        if path.suffix in (".json", ".jsonl"):
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()), encoding="utf-8")
        else:
            with pyarrow.ipc.new_file(str(path), SCHEMA) as file:
                file.write_table(table)
    except OSError as problem:
        raise DiskFailed(f"{path}: {problem.strerror}", hint="Name another file: --output") from problem


def counts(result: TableResult) -> dict[str, Any]:
    """Return a table's outcome as plain JSON values."""
    return {
        "table": str(result.table.target.name),
        "equal": result.equal,
        "source_rows": result.source_rows,
        "target_rows": result.target_rows,
        **{str(kind): result.count(kind) for kind in Kind},
        "beyond": result.beyond,
        "rejected": result.rejected,
        "not_held": dict(sorted(result.not_held.items())),
        "not_compared": [{"table": left_out.name, "why": left_out.why} for left_out in result.table.left_out],
        "open": result.open,
        "complete": result.whole,
    }


def lines(result: TableResult, shown: int) -> Iterator[str]:
    """Yield a table's outcome for people: one line, and one for each of its first differences."""
    name = result.table.target.name
    rows = f"{result.source_rows:,} {'row' if result.source_rows == 1 else 'rows'}"
    if result.equal:
        yield f"{name}: equal, {rows}"
    elif result.open and not (result.source_rows or result.target_rows):
        yield f"{name}: not compared: {result.open}"
    else:
        parts = [f"{result.count(kind):,} {kind}" for kind in Kind if result.count(kind)]
        if result.beyond:
            parts.append(f"{result.beyond:,} keys more that were not looked at closely")
        if result.open:
            parts.append(result.open)
        outcome = ", ".join(parts) or "no difference found, but the comparison is incomplete"
        yield f"{name}: {outcome}; {rows} in the source, {result.target_rows:,} in the target"
    for left_out in result.table.left_out:
        if not result.open:
            yield f"  the rows of {left_out.name} were left out: {left_out.why}"
    if result.rejected:
        yield f"  {result.rejected:,} source rows were left out, because a step failed on them"
    if result.not_held:
        columns = ", ".join(f"{column}: {count:,}" for column, count in sorted(result.not_held.items()))
        yield f"  values that the target cannot hold are null there ({columns})"
    for difference in result.found[:shown]:
        yield f"  {_describe_difference(result.table.target, difference)}"
    if len(result.found) > shown:
        yield f"  ... and {len(result.found) - shown:,} more"


def _describe_difference(target: Target, difference: Difference) -> str:
    key = ", ".join(f"{name}={difference.row[name]!r}" for name in target.primary_key or target.column_names)
    if not difference.columns or difference.source is None or difference.target is None:
        return f"{difference.kind}: {key}"
    source_row, target_row = difference.source, difference.target
    unlike = "; ".join(
        f"{name} is {_format_value(target_row, name)}, not {_format_value(source_row, name)}"
        for name in difference.columns
    )
    return f"{difference.kind}: {key}: {unlike}"[:500]


def _format_value(row: dict[str, Any], name: str) -> str:
    """Return a value for people; for a value that Arrow cannot represent, its text."""
    return repr(row.get(TEXTS, {}).get(name, row[name]))


def _batch(result: TableResult) -> pyarrow.RecordBatch:
    target = result.table.target
    differences = result.found
    key = target.primary_key or target.column_names
    return pyarrow.record_batch(
        [
            pyarrow.repeat(str(target.name), len(differences)),
            pyarrow.array([str(difference.kind) for difference in differences], pyarrow.string()),
            _objects(target, [difference.row for difference in differences], key),
            pyarrow.array(
                [list(difference.columns) for difference in differences], SCHEMA.field("columns").type
            ),
            _objects(target, [difference.source for difference in differences], target.column_names),
            _objects(target, [difference.target for difference in differences], target.column_names),
        ],
        schema=SCHEMA,
    )


def _objects(target: Target, rows: Sequence[dict[str, Any] | None], names: Sequence[str]) -> pyarrow.Array:
    """Return rows as JSON objects, null for None."""
    present = [row for row in rows if row is not None]
    batch = pyarrow.RecordBatch.from_pylist(present, schema=target.arrow())
    columns = [(column.name, column.type_text, column.charset, column.nullable) for column in target.columns]
    texts = pyarrow.array(_native.json_objects(batch, columns, mariadb=target.mariadb, names=list(names)))
    index, indexes = iter(range(len(present))), []
    for row in rows:
        indexes.append(next(index) if row is not None else None)
    return texts.take(pyarrow.array(indexes, pyarrow.int64())).cast(pyarrow.string())
