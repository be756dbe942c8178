# SPDX-License-Identifier: Apache-2.0
"""A writer of lake tables needs memory in proportion to its bound, not to its batch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# The memory for a writer, and the number of rows of a batch. As changes they need eleven times the memory.
MEMORY_BYTES = 4 << 20
ROWS = 1_000_000
ROWS_AT_ONCE = 20_000
# What a writer may need at most: its bound, the rows that arrive, and what is encoded for a file, which does
# not follow the bound. Without a bound, it would need twice this.
PEAK_BYTES_MAX = 4 * MEMORY_BYTES + (32 << 20)

# Runs in a separate process, because Arrow's peak is that of the whole process.
WRITER = f"""
import json, sys
import deltalake, numpy, pyarrow
from penstock.sinks.images import with_metadata
from penstock.sinks.sink import BatchMark, Evolution, make_sink, settings_of
from tests.support.pipeline.changes_made import changes_of, insert, rows_schema, target_of

path, mode, order = sys.argv[1:]
target = target_of({{"id": "bigint", "v": "int"}})
first = changes_of(target, insert(1, id=0, v=0))

def rows_of(keys, version):
    count = len(keys)
    columns = [pyarrow.array(keys), pyarrow.array(keys.astype(numpy.int32))]
    columns += [column.take(pyarrow.array(numpy.zeros(count, int))) for column in first.rows.columns[2:]]
    rows = pyarrow.RecordBatch.from_arrays(columns, schema=first.rows.schema)
    index = rows.schema.get_field_index("_commit_version")
    rows = rows.set_column(index, rows.schema.field(index), pyarrow.array(numpy.full(count, version)))
    return first.with_rows(with_metadata(rows, ("absent", "unrepresentable")))

sink = make_sink("delta", settings_of("delta").model_validate({{"path": path, "mode": mode}}))
sink.prepare(target, Evolution.EVOLVE)
chance, is_expected = numpy.random.default_rng(1), numpy.zeros({ROWS}, bool)
for number in (1, 2):
    mark = BatchMark("shop", "g", number, buffered_bytes_max={MEMORY_BYTES})
    writer = sink.open(mark, 0)
    for first_key in range(0, {ROWS}, {ROWS_AT_ONCE}):
        keys = numpy.arange(first_key, first_key + {ROWS_AT_ONCE})
        if order == "random":
            # A history rewrites its files once for as many keys as fit into the memory.
            keys = numpy.unique(chance.integers(0, {ROWS} if mode == "mirror" else 30_000, {ROWS_AT_ONCE}))
        is_expected[keys] = True
        changes = rows_of(keys, number * {ROWS} + first_key)
        total = {ROWS} // {ROWS_AT_ONCE} * changes.rows.nbytes
        writer.write(changes)
    sink.commit(mark, [writer.finish()])
peak = pyarrow.default_memory_pool().max_memory()
table = deltalake.DeltaTable(path + "/shop/orders").to_pyarrow_table()
if mode == "history":
    table = table.filter(pyarrow.compute.is_null(table["_valid_to_version"]))
is_complete = numpy.array_equal(numpy.sort(table["id"].to_numpy()), numpy.flatnonzero(is_expected))
print(json.dumps({{"peak": peak, "total": total, "is_complete": is_complete}}))
"""


@pytest.mark.parametrize(
    ("mode", "order"), [("mirror", "ascending"), ("mirror", "random"), ("history", "random")]
)
def test_writer_of_a_large_batch_keeps_its_memory_bound(mode: str, order: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path), mode, order]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    usage = json.loads(done.stdout)
    assert usage["is_complete"]
    assert usage["total"] > 8 * MEMORY_BYTES, usage
    assert usage["peak"] < PEAK_BYTES_MAX, usage
