# SPDX-License-Identifier: Apache-2.0
"""One batch of updates to Delta and Iceberg mirrors, compared with deltalake's merge and pyiceberg's upsert.

Every case starts with the same rows in a separate table. Then an evenly distributed share of the keys gets
new values: Penstock writes the changes as a pipeline's batch, and the peers merge the new rows by key.
"""

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy
import pyarrow
import pyarrow.compute
import pyiceberg.table
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.sql import SqlCatalog

from bench.corpora.corpus import CountsDiffer, cache_directory
from bench.result import CaseResult, Line, Options, Target
from penstock import _native
from penstock.changes import SYSTEM_COLUMNS, Changes, Origin
from penstock.changes import Target as Table
from penstock.model import Column, TableName
from penstock.sinks.sink import BatchMark, Evolution, Sink, make_sink, settings_of

TITLE = "One batch of updates into a lake table, keys spread evenly (by the clock, one writer)"

_ROWS = {"tiny": 20_000, "small": 200_000}
_ROWS_DEFAULT = 2_000_000
_PERCENTS = (1, 10, 50)
_TABLE = Table(
    TableName("bench", "lake"),
    (
        Column("id", "bigint", None, False),
        Column("note", "varchar(40)", "utf8mb4", True),
        Column("amount", "bigint", None, True),
    ),
    ("id",),
)


@dataclass(frozen=True)
class Updates:
    """The number of rows in the table, and the keys of the rows that get new values."""

    rows: int
    ids: numpy.ndarray

    @property
    def sum_after(self) -> int:
        """The sum of the amounts after the updates."""
        return 7 * (self.rows * (self.rows - 1) // 2) + len(self.ids)


@dataclass(frozen=True)
class Written:
    """The cost of one batch: wall-clock and CPU seconds, and the bytes of the files that the batch added."""

    seconds: float
    cpu_seconds: float
    file_bytes: int


def run(options: Options) -> CaseResult:
    """Measure each share of keys with each format, and compare the tables' contents."""
    rows = _ROWS.get(options.size, _ROWS_DEFAULT)
    lines = []
    for percent in _PERCENTS:
        updates = Updates(rows, numpy.arange(0, rows, 100 // percent, dtype=numpy.int64))
        for kind, peer_name, peer in _PEERS:
            own = _median(options, partial(mirror, kind, updates))
            peer_run = _median(options, partial(peer, updates))
            ratio = peer_run.seconds / own.seconds
            workload = f"{kind}, {percent}% of {rows:,} keys"
            lines.append(Line(workload, "Penstock", _rates(own, len(updates.ids)), ratio, Target(1)))
            lines.append(Line(workload, peer_name, _rates(peer_run, len(updates.ids))))
    versions = {name: metadata.version(name) for name in ("deltalake", "pyiceberg", "pyarrow")}
    return CaseResult("changes_to_lake", TITLE, lines, versions, ratio_title="of the peer's rate")


def _rates(written: Written, rows: int) -> dict[str, float]:
    return {
        "rows/s": rows / written.seconds,
        "µs of CPU per row": written.cpu_seconds / rows * 1e6,
        "bytes written per row": written.file_bytes / rows,
    }


def _median(options: Options, write: Callable[[Path], Written]) -> Written:
    """Run several times, each in a separate folder; return the run with the median duration."""
    runs = []
    for _ in range(options.repeat):
        folder = Path(tempfile.mkdtemp(prefix="bench-changes-to-lake-", dir=cache_directory()))
        try:
            runs.append(write(folder))
        finally:
            shutil.rmtree(folder)
    median = statistics.median_low([written.seconds for written in runs])
    return next(written for written in runs if written.seconds == median)


# --- The three writers ----------------------------------------------------------------------


def mirror(kind: str, updates: Updates, folder: Path) -> Written:
    """Load the rows and write the updates through one of Penstock's sinks."""
    sink = make_sink(kind, settings_of(kind)(path=str(folder)))
    sink.prepare(_TABLE, Evolution.EVOLVE)
    everything = numpy.arange(updates.rows, dtype=numpy.int64)
    loaded = changes(plain_rows(everything, 0), pyarrow.repeat("insert", updates.rows), everything + 1)
    _write(sink, 1, Changes(_TABLE, loaded, _TABLE.name, Origin.LOAD))
    versions = numpy.repeat(updates.rows + 1 + numpy.arange(len(updates.ids)), 2)
    pairs = pyarrow.concat_tables([plain_rows(updates.ids, 0), plain_rows(updates.ids, 1)])
    order = numpy.arange(2 * len(updates.ids)).reshape(2, -1).T.reshape(-1)
    kinds = pyarrow.array(["update_preimage", "update_postimage"] * len(updates.ids))
    updated = changes(pairs.take(pyarrow.array(order)), kinds, versions)
    started_at = _now()
    _write(sink, 2, Changes(_TABLE, updated, _TABLE.name))
    spent = _since(started_at)
    sink.close()
    if kind == "delta":
        return _delta_result(spent, DeltaTable(folder / "bench" / "lake"), updates.sum_after)
    return _iceberg_result(spent, _catalog(folder).load_table("bench.lake"), updates.sum_after)


def merge(updates: Updates, folder: Path) -> Written:
    """Write the rows with deltalake and merge the updates."""
    write_deltalake(folder / "peer", plain_rows(numpy.arange(updates.rows, dtype=numpy.int64), 0))
    table = DeltaTable(folder / "peer")
    source = plain_rows(updates.ids, 1)
    started_at = _now()
    (
        table.merge(source, "target.id = source.id", source_alias="source", target_alias="target")
        .when_matched_update_all()
        .when_not_matched_insert_all()
        .execute()
    )
    return _delta_result(_since(started_at), DeltaTable(folder / "peer"), updates.sum_after)


def upsert(updates: Updates, folder: Path) -> Written:
    """Write the rows with pyiceberg and upsert the updates."""
    catalog = _catalog(folder)
    catalog.create_namespace("bench")
    initial = plain_rows(numpy.arange(updates.rows, dtype=numpy.int64), 0)
    table = catalog.create_table("bench.lake", schema=initial.schema)
    table.append(initial)
    source = plain_rows(updates.ids, 1)
    started_at = _now()
    table.upsert(source, join_cols=["id"])
    return _iceberg_result(_since(started_at), catalog.load_table("bench.lake"), updates.sum_after)


_PEERS = (("delta", "deltalake merge", merge), ("iceberg", "pyiceberg upsert", upsert))


# --- Rows -----------------------------------------------------------------------------------


def plain_rows(ids: numpy.ndarray, round_number: int) -> pyarrow.Table:
    """Return the rows with these keys as they are in the given round: 0 is after the load, 1 is after the
    update.
    """
    keys = pyarrow.array(ids)
    note = pyarrow.compute.binary_join_element_wise(
        "note", keys.cast(pyarrow.string()), str(round_number), "-"
    )
    return pyarrow.table({"id": keys, "note": note, "amount": pyarrow.array(ids * 7 + round_number)})


def changes(table: pyarrow.Table, kinds: pyarrow.Array, versions: numpy.ndarray) -> pyarrow.RecordBatch:
    """Return rows as the kernel emits changes, each with the version of a separate commit."""
    fields = pyarrow.schema(_native.arrow_schema(_TABLE.declared, mariadb=False))
    schema = pyarrow.schema([fields.field(name) for name in (*_TABLE.column_names, *SYSTEM_COLUMNS)])
    one_row = {
        "instance": "bench",
        "database": "bench",
        "table": "lake",
        "gtid": None,
        "file": "mysql-bin.000001",
        "offset": 4,
        "row": 0,
        "server_id": 1,
        "thread_id": None,
        "schema_version": 1,
        "absent": None,
        "unrepresentable": None,
    }
    zeros = pyarrow.array(numpy.zeros(len(versions), dtype=numpy.int64))
    columns = [
        table.column(name).combine_chunks().cast(schema.field(name).type) for name in _TABLE.column_names
    ]
    columns += [
        kinds.cast(schema.field("_change_type").type),
        pyarrow.array(versions),
        pyarrow.array(versions).cast(schema.field("_commit_timestamp").type),
        pyarrow.array([one_row], schema.field("_metadata").type).take(zeros),
    ]
    return pyarrow.RecordBatch.from_arrays(columns, schema=schema)


def _write(sink: Sink, number: int, part: Changes) -> None:
    mark = BatchMark("bench", "1", number)
    writer = sink.open(mark, 0)
    writer.write(part)
    sink.commit(mark, [writer.finish()])


def _now() -> tuple[float, float]:
    """Return the wall-clock time and the CPU time of this process, which does all of the work."""
    return time.perf_counter(), time.process_time()


def _since(started_at: tuple[float, float]) -> tuple[float, float]:
    clock, cpu = _now()
    return clock - started_at[0], cpu - started_at[1]


# --- Results --------------------------------------------------------------------------------


def _catalog(folder: Path) -> SqlCatalog:
    """Return the catalog that the sink creates in a folder; the peer uses the same kind."""
    return SqlCatalog("penstock", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}")


def _delta_result(spent: tuple[float, float], table: DeltaTable, expected: int) -> Written:
    total = pyarrow.compute.sum(table.to_pyarrow_table(columns=["amount"])["amount"]).as_py()
    _compare(total, expected)
    log = Path(table.table_uri.removeprefix("file://")) / "_delta_log" / f"{table.version():020}.json"
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    return Written(*spent, sum(action["add"]["size"] for action in actions if "add" in action))


def _iceberg_result(spent: tuple[float, float], table: pyiceberg.table.Table, expected: int) -> Written:
    total = pyarrow.compute.sum(table.scan(selected_fields=("amount",)).to_arrow()["amount"]).as_py()
    _compare(total, expected)
    # The first snapshot has the initial rows. An upsert creates two more snapshots.
    added = [int((snapshot.summary or {})["added-files-size"] or 0) for snapshot in table.snapshots()[1:]]
    return Written(*spent, sum(added))


def _compare(total: int, expected: int) -> None:
    if total != expected:
        raise CountsDiffer(f"the table's amounts add up to {total}, and should to {expected}")
