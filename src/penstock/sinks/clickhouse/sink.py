# SPDX-License-Identifier: Apache-2.0
"""ClickHouse: mirror tables, in which the highest version of a key wins, or feeds of changes.

Every task inserts its rows as Arrow, in large blocks. Each row of a mirror has a version, so inserts may
arrive in any order.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import pyarrow
import pyarrow.compute as pc
from pydantic import Field

from penstock import _native
from penstock.changes import Changes, Origin, Target
from penstock.errors import OptionInvalid, SchemaChanged, ValueMalformed
from penstock.model import TableName
from penstock.settings.values import Bytes
from penstock.sinks.clickhouse.connection import ClickHouseSession
from penstock.sinks.clickhouse.tables import (
    DELETED,
    FEED,
    VERSION,
    TableLocation,
    literal,
    quoted,
    statements,
)
from penstock.sinks.clickhouse.types import read_cast, stored_columns
from penstock.sinks.client_sink import ClientSink
from penstock.sinks.endpoint import Endpoint
from penstock.sinks.images import LastImages, puts, refuse_partial, unrepresentable_counts
from penstock.sinks.sink import (
    HINT_GONE,
    BatchMark,
    Delivery,
    Evolution,
    Finding,
    Receipt,
    Spread,
    Writer,
    typed,
)
from penstock.sinks.sql.table_owner import comment_of, is_taken_over, refuse_foreign

EXTRA = "clickhouse"

# Inserts of a feed have this fixed number of rows, so that a retry repeats the same inserts.
FEED_ROWS = 32_768
_BYTES_DEFAULT = 64 << 20


class Settings(Endpoint):
    """A ClickHouse server, and how tables are stored there."""

    url: str = Field(default="http://127.0.0.1:8123", description="http://host:8123, or https:// with TLS")
    write: Literal["mirror", "append"] = Field(
        default="mirror", description="mirror: the current rows of the source; append: every change as a row"
    )
    database: str | None = Field(
        default=None,
        min_length=1,
        description="the target database; default: the source database's name",
    )
    insert_bytes: Bytes = Field(
        default=_BYTES_DEFAULT, ge=1, description="bytes to buffer before an insert into a mirror"
    )
    take_over: bool = Field(
        default=False,
        description="true: take over tables that another pipeline created, and alter them",
    )


class ClickHouseSink(ClientSink[ClickHouseSession]):
    """Writes to the tables of a ClickHouse server."""

    settings: Settings
    kind = "clickhouse"
    delivery = Delivery.IDEMPOTENT
    spread = Spread.RANGES
    makes_files = True
    # A String column holds every type, so an existing String column is not converted.
    keeps_types = False

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.keeps_state = settings.write == "mirror"

    def connect(self) -> ClickHouseSession:
        return ClickHouseSession(self.settings, self.password)

    def check(self) -> Sequence[Finding]:
        findings = []
        [(version,)] = self.client.rows("SELECT version()")
        if tuple(map(int, version.split(".")[:2])) < (23, 2):
            findings.append(Finding("version", f"ClickHouse {version} has no deletes in ReplacingMergeTree"))
        return findings

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        location = self.location(target)
        layout = self.client.layout(location)
        mirror = self.settings.write == "mirror"
        changes = statements(target, location, layout, evolution, mirror, self.pipeline)
        if layout is not None and changes:
            owner = layout.owner
            refuse_foreign(location.sql, owner, self.pipeline, changes, take_over=self.settings.take_over)
            if is_taken_over(owner, self.pipeline):
                changes.append(
                    f"ALTER TABLE {location.sql} MODIFY COMMENT {literal(comment_of(self.pipeline))}"
                )
        return changes

    def prepare(self, target: Target, evolution: Evolution) -> None:
        for statement in self.plan(target, evolution):
            self.client.run(statement)

    def columns_missing(self, targets: Sequence[Target]) -> Mapping[TableName, Sequence[str]]:
        missing: dict[TableName, list[str]] = {}
        for target in targets:
            # Look at all columns: computed columns exist too, although rows are not written to them.
            existing = self.client.column_names(self.location(target))
            if existing and (absent := [name for name in target.column_names if name not in existing]):
                missing[target.name] = absent
        return missing

    def location(self, target: Target) -> TableLocation:
        """Return the table of a target."""
        return TableLocation(self.settings.database or target.name.database, target.name.table)

    def remembers(self, pipeline: str, targets: Sequence[Target]) -> bool:
        """Look for rows in tables that the pipeline created, according to their comments."""
        locations = map(self.location, targets)
        return any(
            (layout := self.client.layout(location)) is not None
            and layout.owner == pipeline
            and self.client.rows(f"SELECT 1 FROM {location.sql} LIMIT 1")
            for location in locations
        )

    def open(self, mark: BatchMark, part: int) -> Writer:
        # Reuse the sink's connection if it has one, for many small batches.
        session = self.writers_client()
        return _MirrorWriter(self, session) if self.keeps_state else _FeedWriter(self, session, mark, part)

    def commit(self, mark: BatchMark, receipts: Sequence[Receipt]) -> None:
        # Another task may have written rows since this task started, and those rows may be older than the
        # statement that empties the table.
        emptied = {(database, table): 0 for receipt in receipts for database, table, _ in receipt.staged}
        for receipt in receipts:
            for database, table, version in receipt.staged:
                emptied[database, table] = max(emptied[database, table], version)
        for (database, table), version in emptied.items():
            location = TableLocation(database, table)
            self.client.run(
                f"DELETE FROM {location.sql} WHERE {VERSION} <= {version_of(version, Origin.LOG)}"
            )

    def read(
        self, target: Target, low: Mapping[str, Any] | None = None, high: Mapping[str, Any] | None = None
    ) -> Iterator[pyarrow.RecordBatch]:
        if not self.keeps_state:
            raise OptionInvalid("a clickhouse sink with write: append keeps no table that can be compared")
        schema = target.arrow()
        columns = ", ".join(
            stored.select_expression(quoted(stored.name)) for stored in stored_columns(target)
        )
        where = [f"{DELETED} = 0", *_bounds(target, low, ">="), *_bounds(target, high, "<")]
        statement = f"SELECT {columns} FROM {self.location(target).sql} FINAL WHERE {' AND '.join(where)}"
        for batch in self.client.batches(statement):
            table = pyarrow.Table.from_batches([batch])
            cast = []
            for name in schema.names:
                with typed(target, name):
                    cast.append(read_cast(table.column(name), schema.field(name).type))
            yield from pyarrow.Table.from_arrays(cast, schema=schema).to_batches()

    def held(self, target: Target, rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        for index, stored in enumerate(stored_columns(target)):
            if stored.name in target.primary_key:
                continue
            values = rows.column(index)
            kept = stored.within(values).cast(values.type)
            if kept.null_count > values.null_count:
                rows = rows.set_column(index, rows.schema.field(index).with_nullable(True), kept)
        return rows


make = ClickHouseSink


def version_of(commit_version: Any, origin: Origin) -> Any:
    """Return the version of one row or of an array of rows.

    At equal commit versions, rows of the log are newer than rows of a load.
    """
    return commit_version * 2 + (origin is Origin.LOG)


class _TableWriter(Writer):
    """The common part of both kinds of writer: rows by table, and the counts of a receipt."""

    def __init__(self, sink: ClickHouseSink, session: ClickHouseSession) -> None:
        self._sink = sink
        self._session = session
        self._columns: dict[TableLocation, dict[str, str]] = {}
        self._rows: Counter[str] = Counter()
        self._bytes = 0
        self._unrepresentable: Counter[str] = Counter()
        self._staged: list[Any] = []
        self._columns_missing: dict[str, list[str]] = {}

    def abort(self) -> None:
        self._sink.release(self._session)

    def receipt(self) -> Receipt:
        """Return the receipt, and release the connection."""
        self.abort()
        rows = sum(self._rows.values())
        return Receipt(
            rows,
            self._bytes,
            self._rows,
            tuple(self._staged),
            self._unrepresentable,
            columns_missing=self._columns_missing,
        )

    def insert(
        self, target: Target, rows: pyarrow.Table, own: Mapping[str, Any], token: str | None = None
    ) -> None:
        """Write rows with additional columns of the sink."""
        with self.working_on(target.name):
            self._insert_into(self._sink.location(target), target, rows, own, token)

    def _insert_into(
        self,
        location: TableLocation,
        target: Target,
        rows: pyarrow.Table,
        own: Mapping[str, Any],
        token: str | None,
    ) -> None:
        if location not in self._columns:
            self._columns[location] = self._session.columns(location)
            if not self._columns[location]:
                raise SchemaChanged(f"the target has no table {location.sql} any more", hint=HINT_GONE)
            columns_written = self._columns[location]
            if absent := [name for name in target.column_names if name not in columns_written]:
                self._columns_missing[str(target.name)] = absent
        table_columns = self._columns[location]
        columns: dict[str, Any] = {}
        self._unrepresentable += unrepresentable_counts(target, rows)
        for stored in stored_columns(target):
            if stored.name not in table_columns:
                continue
            values = rows.column(stored.name)
            try:
                columns[stored.name] = stored.cast(values)
            except pyarrow.ArrowInvalid as problem:
                raise ValueMalformed(
                    f"column {stored.name} of {target.name}: {problem}", position=location.sql
                ) from problem
            missing = columns[stored.name].null_count - values.null_count
            if missing > 0:
                self._unrepresentable[f"{target.name}.{stored.name}"] += missing
            if stored.name in target.primary_key and columns[stored.name].null_count:
                raise ValueMalformed(
                    f"a key of {target.name} has no value that its column {stored.name} could hold",
                    position=location.sql,
                    hint="Make a text of it with a map step, or set errors: {table: skip_table}",
                )
        # Combine chunks, because the server deduplicates inserts block by block.
        sent = pyarrow.table({**columns, **own}).combine_chunks()
        self._session.insert(location, sent, token)
        self._rows[str(target.name)] += rows.num_rows
        self._bytes += sent.nbytes


class _MirrorWriter(_TableWriter):
    """Buffers the last image of each key, and writes it with its version."""

    def __init__(self, sink: ClickHouseSink, session: ClickHouseSession) -> None:
        super().__init__(sink, session)
        self._gathered: dict[tuple[Target, Origin], LastImages] = {}

    def write(self, changes: Changes) -> None:
        group = (changes.target, changes.origin)
        for target, origin in list(self._gathered):
            if target.name == changes.target.name and (target, origin) != group:
                # The columns or the origin changed, so write the earlier rows first.
                self._flush(target, origin)
        gathered = self._gathered.setdefault(group, LastImages(changes.target))
        gathered.add(changes)
        if gathered.bytes >= self._sink.settings.insert_bytes:
            self._flush(*group)

    def empty(self, target: Target, version: int) -> None:
        location = self._sink.location(target)
        self._staged.append((location.database, location.table, version))

    def finish(self) -> Receipt:
        for group in list(self._gathered):
            self._flush(*group)
        return self.receipt()

    def _flush(self, target: Target, origin: Origin) -> None:
        rows = self._gathered.pop((target, origin)).rows()
        if rows is None or not rows.num_rows:
            return
        deleted = pc.cast(pc.invert(puts(rows)), pyarrow.uint8())
        versions = pc.cast(rows.column("_commit_version"), pyarrow.uint64())
        versions = pc.add(pc.multiply(versions, 2), int(origin is Origin.LOG))
        self.insert(target, rows, {VERSION: versions.cast(pyarrow.uint64()), DELETED: deleted})


class _FeedWriter(_TableWriter):
    """Writes every change as a row, in inserts that a retry repeats exactly."""

    def __init__(self, sink: ClickHouseSink, session: ClickHouseSession, mark: BatchMark, part: int) -> None:
        super().__init__(sink, session)
        self._token = f"{mark.application}/{mark.number}/{part}"
        self._buffered: dict[Target, list[pyarrow.RecordBatch]] = {}
        # Counted per table, so that numbers are stable when a batch is retried without a skipped table.
        self._inserts: Counter[TableName] = Counter()

    def write(self, changes: Changes) -> None:
        # The feed has no column to distinguish a value that was not logged from null.
        refuse_partial(changes)
        for target in list(self._buffered):
            if target.name == changes.target.name and target != changes.target:
                self._flush(target, 1)
        self._buffered.setdefault(changes.target, []).append(changes.rows)
        self._flush(changes.target, FEED_ROWS)

    def finish(self) -> Receipt:
        for target in list(self._buffered):
            self._flush(target, 1)
        return self.receipt()

    def _flush(self, target: Target, rows_min: int) -> None:
        """Write inserts as long as at least `rows_min` rows are buffered."""
        rows = pyarrow.Table.from_batches(self._buffered.pop(target))
        while rows.num_rows >= rows_min:
            self._insert(target, rows.slice(0, FEED_ROWS))
            rows = rows.slice(FEED_ROWS)
        if rows.num_rows:
            self._buffered[target] = rows.to_batches()

    def _insert(self, target: Target, rows: pyarrow.Table) -> None:
        own = {name: rows.column(name) for name in FEED if name != "_row"}
        own["_row"] = pc.struct_field(rows.column("_metadata"), "row")
        number = self._inserts[target.name]
        self.insert(target, rows, own, f"{self._token}/{number}/{_digest(target, rows)}")
        self._inserts[target.name] += 1


def _digest(target: Target, rows: pyarrow.Table) -> str:
    """Return a digest of rows. If a retry cuts parts differently, the digest differs as well.

    Columns without values are ignored, because in a retry, a later definition may have added such columns.
    """
    own = [name for name in target.column_names if rows.column(name).null_count < rows.num_rows]
    columns = [*own, "_change_type", "_commit_version"]
    digest = hashlib.blake2b(digest_size=16)
    for batch in rows.select(columns).to_batches():
        digest.update(pyarrow.array(_native.row_hashes(batch, columns)).to_numpy().tobytes())
    return digest.hexdigest()


def _bounds(target: Target, bound: Mapping[str, Any] | None, comparison: str) -> list[str]:
    """Return a bound of keys as SQL."""
    if bound is None:
        return []
    keys = [stored for stored in stored_columns(target) if stored.name in target.primary_key]
    by_name = {stored.name: stored for stored in keys}
    columns = ", ".join(quoted(name) for name in target.primary_key)
    schema = target.arrow()
    values = []
    for name in target.primary_key:
        sent = by_name[name].cast(pyarrow.array([bound[name]], schema.field(name).type))
        value = sent.cast(pyarrow.string())[0].as_py()
        values.append(f"CAST({literal(value)}, {literal(by_name[name].sql)})")
    return [f"({columns}) {comparison} ({', '.join(values)})"]
