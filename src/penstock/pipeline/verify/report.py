# SPDX-License-Identifier: Apache-2.0
"""What a comparison found: kept in a file, and told."""

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

# One row for each difference. Rows are JSON objects with the values as the server's client shows them.
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
    """Write every difference to a file: Arrow's own format, or JSON lines where its name ends in .json or
    .jsonl. Raises DiskFailed."""
    table = pyarrow.Table.from_batches([_batch(one) for one in results], SCHEMA)
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
        "not_compared": [{"table": one.name, "why": one.why} for one in result.table.left_out],
        "open": result.open,
        "complete": result.whole,
    }


def lines(result: TableResult, shown: int) -> Iterator[str]:
    """Yield a table's outcome as a person reads it: one line, and one for each of its first differences."""
    name = result.table.target.name
    rows = f"{result.source_rows:,} rows"
    if result.equal:
        yield f"{name}: equal, {rows}"
    elif result.open and not (result.source_rows or result.target_rows):
        yield f"{name}: not compared: {result.open}"
    else:
        told = [f"{result.count(kind):,} {kind}" for kind in Kind if result.count(kind)]
        if result.beyond:
            told.append(f"{result.beyond:,} keys more that were not looked at closely")
        if result.open:
            told.append(result.open)
        outcome = ", ".join(told) or "no difference found, but the comparison is incomplete"
        yield f"{name}: {outcome}; {rows} in the source, {result.target_rows:,} in the target"
    for left in result.table.left_out:
        if not result.open:
            yield f"  the rows of {left.name} were left out: {left.why}"
    if result.rejected:
        yield f"  {result.rejected:,} rows that a step cannot work on were left out"
    if result.not_held:
        columns = ", ".join(f"{column}: {count:,}" for column, count in sorted(result.not_held.items()))
        yield f"  values that the target cannot hold are null there ({columns})"
    for one in result.found[:shown]:
        yield f"  {_told(result.table.target, one)}"
    if len(result.found) > shown:
        yield f"  ... and {len(result.found) - shown:,} more"


def _told(target: Target, one: Difference) -> str:
    key = ", ".join(f"{name}={one.row[name]!r}" for name in target.primary_key or target.column_names)
    if not one.columns or one.source is None or one.target is None:
        return f"{one.kind}: {key}"
    source, found = one.source, one.target
    unlike = "; ".join(f"{name} is {_shown(found, name)}, not {_shown(source, name)}" for name in one.columns)
    return f"{one.kind}: {key}: {unlike}"[:500]


def _shown(row: dict[str, Any], name: str) -> str:
    """Return a value as a person reads it; of one that no type of Arrow holds its text."""
    return repr(row.get(TEXTS, {}).get(name, row[name]))


def _batch(result: TableResult) -> pyarrow.RecordBatch:
    target = result.table.target
    found = result.found
    key = target.primary_key or target.column_names
    return pyarrow.record_batch(
        [
            pyarrow.repeat(str(target.name), len(found)),
            pyarrow.array([str(one.kind) for one in found], pyarrow.string()),
            _objects(target, [one.row for one in found], key),
            pyarrow.array([list(one.columns) for one in found], SCHEMA.field("columns").type),
            _objects(target, [one.source for one in found], target.column_names),
            _objects(target, [one.target for one in found], target.column_names),
        ],
        schema=SCHEMA,
    )


def _objects(target: Target, rows: Sequence[dict[str, Any] | None], names: Sequence[str]) -> pyarrow.Array:
    """Return rows as JSON objects, null for None."""
    there = [row for row in rows if row is not None]
    batch = pyarrow.RecordBatch.from_pylist(there, schema=target.arrow())
    columns = [(one.name, one.type_text, one.charset, one.nullable) for one in target.columns]
    texts = pyarrow.array(_native.json_objects(batch, columns, mariadb=target.mariadb, names=list(names)))
    index, places = iter(range(len(there))), []
    for row in rows:
        places.append(next(index) if row is not None else None)
    return texts.take(pyarrow.array(places, pyarrow.int64())).cast(pyarrow.string())
