# SPDX-License-Identifier: Apache-2.0
"""Tables of any Spark catalog: mirrors written by MERGE INTO, or feeds of all changes.

Tasks stage their rows as Parquet files. The process that drives the pipeline commits the files with one
statement per table, through a session separate from the pipeline's session. Delta stores the batch number in
the same commit and ignores a commit whose number it has already stored. Iceberg stores the batch number with
the rows of a feed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import pyarrow
from pydantic import Field, model_validator

from penstock.changes import Target
from penstock.errors import OptionInvalid, SchemaChanged, ValueMalformed
from penstock.settings.values import Section
from penstock.sinks.lake.rows import feed_fields, read_rows, stored_schema
from penstock.sinks.lake.types import is_widened
from penstock.sinks.sink import (
    HINT_GONE,
    BatchMark,
    Delivery,
    Evolution,
    Finding,
    Receipt,
    Sink,
    Spread,
    Writer,
    is_repeated,
)
from penstock.sinks.spark import statements
from penstock.sinks.spark.catalog import (
    BATCH_PROPERTY,
    PIPELINE_PROPERTY,
    CatalogTable,
    batch_mark,
    numbered,
    session_of_process,
    translate_errors,
)
from penstock.sinks.spark.staging import Staging, StagingWriter

EXTRA = "spark"

# Iceberg has no narrower integers, and other formats read these as well.
_INTEGER_BITS_MIN = 32
_STAGED = "penstock_staged_rows"
_HINT_CHANGED = "Set schema_changes, or drop the target table and run: penstock resnapshot"


class Settings(Section):
    """Which tables, and how they are created."""

    table: str = Field(
        default="{database}.{table}",
        description="a table's name in Spark's catalogs, a template: main.{database}.{table}",
    )
    mode: Literal["mirror", "feed"] = Field(
        default="mirror", description="mirror: the current rows of the source; feed: every change"
    )
    using: str = Field(
        default="delta",
        pattern="^[a-z][a-z0-9_]*$",
        description="the tables' format: delta, iceberg, or another that has MERGE INTO",
    )
    staging: str = Field(
        min_length=1,
        pattern=r"^[^\[\]{}*?\\]+$",
        description="a folder for rows of a batch that all tasks and Spark reach: a path, s3://, gs://, hdfs://",
    )
    staging_in_spark: str | None = Field(
        default=None, description="the same folder as Spark names it, if that differs: s3a://bucket/staging"
    )
    partition_by: tuple[str, ...] = Field(
        default=(), description="partition expressions of new tables: country, days(created)"
    )
    cluster_by: tuple[str, ...] = Field(default=(), description="clustering columns of new tables")
    properties: Mapping[str, str] = Field(
        default_factory=dict, description="properties of new tables: delta.enableDeletionVectors: 'true'"
    )

    @model_validator(mode="after")
    def _one_layout(self) -> Self:
        if self.partition_by and self.cluster_by:
            raise ValueError("partition_by and cluster_by: a table has one of them")
        return self


class SparkSink(Sink):
    """Writes tables through the Spark session of the pipeline."""

    kind = "spark"
    makes_files = True
    remembers_alone = True
    reads_in_driver = True
    metadata_read = ("absent", "unrepresentable")

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.staging = Staging(settings.staging, settings.staging_in_spark)
        self.keeps_state = settings.mode == "mirror"
        # One writer receives all changes of a table, so that one statement applies each key once.
        self.spread = Spread.TABLES if self.keeps_state else Spread.RANGES
        self.load_spread = Spread.RANGES
        self._stores_number = settings.using == "delta" or (
            settings.using == "iceberg" and not self.keeps_state
        )
        self.delivery = Delivery.IDEMPOTENT if self.keeps_state else Delivery.AT_LEAST_ONCE
        if self._stores_number:
            self.delivery = Delivery.EXACTLY_ONCE
        self._own_session: Any = None
        # The tables, by application, whose last stored number this process has already compared with a batch.
        self._compared: set[tuple[str, str]] = set()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_own_session": None, "_compared": set()}

    def close(self) -> None:
        self._own_session = None

    # --- Tables -----------------------------------------------------------------------------

    def check(self) -> Sequence[Finding]:
        self.staging.check()
        with translate_errors("list tables"):
            self._session.sql("SELECT 1").collect()
        return ()

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        return self._statements(target, evolution)

    def check_together(self, targets: Sequence[Target]) -> None:
        """Raise OptionInvalid if two targets are the same table.

        Delta and Iceberg would skip the second target's commit, because it has the same number as the first.
        Names that differ only in case are refused in every catalog, because Spark's own and Hive's fold them.
        """
        owners: dict[str, Target] = {}
        for target in targets:
            name = statements.table_name(self._parts(target))
            owner = owners.setdefault(name.casefold(), target)
            if owner.name != target.name:
                raise OptionInvalid(
                    f"{owner.name} and {target.name} are both {name} in Spark, where case may not count",
                    hint="Name {database} and {table} in the setting table of the sink, or rename one of them"
                    " with a route step",
                )

    def prepare(self, target: Target, evolution: Evolution) -> None:
        table = self._table(target)
        for statement in self._statements(target, evolution):
            with translate_errors(f"prepare {table.name}"):
                is_altered = table.exists()
                table.create_namespace()
            try:
                with translate_errors(statement):
                    self._session.sql(statement)
            except OptionInvalid as problem:
                if not is_altered:
                    raise
                raise SchemaChanged(
                    f"{table.name} cannot follow the columns of {target.name}: {problem}", hint=_HINT_CHANGED
                ) from problem

    def schema_of(self, target: Target) -> pyarrow.Schema:
        """Return the columns of a target's table, as they are stored."""
        further: Sequence[pyarrow.Field] = ()
        if not self.keeps_state:
            further = feed_fields(_INTEGER_BITS_MIN)
        return stored_schema(target, further, _INTEGER_BITS_MIN)

    def remembers(self, pipeline: str, targets: Sequence[Target]) -> bool:
        """Look for tables that this pipeline created and that have rows."""
        tables = map(self._table, targets)
        with translate_errors("read the tables' properties"):
            return any(table.exists() and table.remembers(pipeline) for table in tables)

    # --- Rows -------------------------------------------------------------------------------

    def open(self, mark: BatchMark, part: int) -> Writer:
        return StagingWriter(self, mark)

    def commit(self, mark: BatchMark, receipts: Sequence[Receipt]) -> None:
        targets: dict[str, Target] = {}
        files: dict[str, list[str]] = {}
        emptied: set[str] = set()
        for staged in (staged for receipt in receipts for staged in receipt.staged):
            target = Target.from_json(staged["target"])
            name = str(target.name)
            targets[name] = target
            files.setdefault(name, []).extend(staged["files"])
            if staged["emptied"]:
                emptied.add(name)
        # Targets whose names come from rows may have been added since the last check.
        self.check_together(list(targets.values()))
        for name, target in targets.items():
            if files[name] or name in emptied:
                self._commit_table(mark, target, files[name], emptied=name in emptied)
        self.staging.remove_earlier(mark)

    def settle_load(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        """Raise OptionInvalid if only some of several tables have the batch, because each table has its own
        commit.
        """
        if self.keeps_state or not self._stores_number:
            return None
        tables = list(map(self._table, targets))
        with translate_errors("read the tables' commits"):
            committed = [
                table
                for table in tables
                if table.exists() and is_repeated(mark, table.number(mark.application))
            ]
            if committed and len(committed) < len(tables):
                raise OptionInvalid(
                    f"a load was interrupted between the commits of its targets: {committed[0].name} has it,"
                    f" others of {len(tables)} do not",
                    hint="Empty the targets, then start over: penstock pipelines reset FILE --yes",
                )
            versions = [table.last_version() for table in committed]
        return max((version for version in versions if version is not None), default=None)

    def last_number(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        if not self._stores_number:
            return None
        numbers = []
        for table in map(self._table, targets):
            try:
                with translate_errors(f"read the commits of {table.name}"):
                    number = table.number(mark.application) if table.exists() else None
            except OptionInvalid:
                # Ignore the error here. Writing the table's rows will raise it again, and then `errors.table`
                # decides.
                continue
            if number is not None:
                numbers.append(number)
        return max(numbers, default=None)

    def read(
        self, target: Target, low: Mapping[str, Any] | None = None, high: Mapping[str, Any] | None = None
    ) -> Iterator[pyarrow.RecordBatch]:
        if not self.keeps_state:
            raise OptionInvalid("a feed of changes is no table that can be compared", hint="Compare a mirror")
        table, schema = self._table(target), target.arrow()
        keys = [self.schema_of(target).field(name) for name in target.primary_key]
        with translate_errors(f"read {table.name}"):
            if not table.exists():
                return
            condition = statements.key_range(keys, low, high)
            names = [statements.quoted(name) for name in target.column_names]
            rows = self._session.table(table.name).where(condition).select(*names).toArrow()
        yield from read_rows(rows, schema).to_batches()

    # --- In the driver ----------------------------------------------------------------------

    @property
    def _session(self) -> Any:
        if self._own_session is None:
            self._own_session = session_of_process()
        return self._own_session

    def _parts(self, target: Target) -> tuple[str, ...]:
        """Return the parts of the name of a target's table."""
        names = {"database": target.name.database, "table": target.name.table}
        return tuple(part.format(**names) for part in self.settings.table.split("."))

    def _table(self, target: Target) -> CatalogTable:
        return CatalogTable(self._session, self._parts(target), self.settings.using)

    def _statements(self, target: Target, evolution: Evolution) -> list[str]:
        """Return the statements that create the target's table, or alter it. Raises SchemaChanged."""
        if self.keeps_state and not target.primary_key:
            raise OptionInvalid(
                f"{target.name} has no primary key, so its rows cannot be told apart in a mirror",
                hint="Give it one, name one with a map step, leave it out, or use mode: feed",
            )
        table, schema = self._table(target), self.schema_of(target)
        with translate_errors(f"prepare {table.name}"):
            existing = table.column_types() if table.exists() else None
        if existing is None:
            properties = {PIPELINE_PROPERTY: self.pipeline, **self.settings.properties}
            settings = self.settings
            return [
                statements.create_table(
                    table.name,
                    schema,
                    using=settings.using,
                    partition_by=settings.partition_by,
                    cluster_by=settings.cluster_by,
                    properties=properties,
                )
            ]
        return _changes(table.name, target, existing, schema, evolution)

    def _commit_table(self, mark: BatchMark, target: Target, files: Sequence[str], *, emptied: bool) -> None:
        session, table, schema = self._session, self._table(target), self.schema_of(target)
        columns = statements.column_list(schema)
        if self.keeps_state:
            columns += f", {statements.quoted(statements.DELETED)} BOOLEAN"
        paths = [self.staging.in_spark(mark, name) for name in files]
        with translate_errors(f"commit batch {mark.number} to {table.name}"):
            if not table.exists():
                raise OptionInvalid(f"the table {table.name} is gone", hint=HINT_GONE)
            existing = table.column_types()
            # With schema_changes: ignore, the table may lack columns of the source.
            stored = pyarrow.schema([field for field in schema if field.name in existing])
            if paths:
                rows = session.read.schema(columns).parquet(*paths)
            else:
                rows = session.createDataFrame([], columns)
            _refuse_inexact(rows, table.name, stored, existing)
            if self.settings.using == "iceberg" and not self.keeps_state:
                if not is_repeated(mark, table.number(mark.application)):
                    option = f"snapshot-property.{BATCH_PROPERTY}"
                    named = rows.select(*map(statements.quoted, stored.names))
                    named.writeTo(table.name).option(
                        option, batch_mark(mark.application, mark.number)
                    ).append()
                return
            rows.createOrReplaceTempView(_STAGED)
            statement = statements.append(table.name, stored, _STAGED)
            if self.keeps_state:
                key = target.primary_key
                statement = statements.merge(table.name, stored, key, _STAGED, emptied=emptied)
            if self.settings.using == "delta" and (mark.application, table.name) not in self._compared:
                # Delta skips every number up to the last number that it has. Only the batch with that last
                # number may be repeated.
                is_repeated(mark, table.number(mark.application))
                self._compared.add((mark.application, table.name))
            with numbered(session, mark.application, mark.number):
                session.sql(statement).collect()


make = SparkSink


def _refuse_inexact(
    rows: Any, table: str, schema: pyarrow.Schema, existing: Mapping[str, pyarrow.DataType]
) -> None:
    """Raise ValueMalformed if Spark would round or cut a value of the rows to fit a narrower column."""
    for field in _outgrown(schema, existing):
        inexact = statements.is_inexact(field, existing[field.name])
        if not rows.where(inexact).isEmpty():
            raise ValueMalformed(
                f"{table}: the column {field.name} of the target would round or cut a value",
                hint="Let the target's columns evolve: set schema_changes, or load the table again",
            )


def _outgrown(schema: pyarrow.Schema, existing: Mapping[str, pyarrow.DataType]) -> list[pyarrow.Field]:
    """Return the fields whose existing column has a different type, unless that type is wider."""
    return [
        field
        for field in schema
        if field.name in existing
        and statements.type_text(existing[field.name]) != statements.type_text(field.type)
        and not is_widened(field.type, existing[field.name])
    ]


def _changes(
    table: str,
    target: Target,
    existing: Mapping[str, pyarrow.DataType],
    schema: pyarrow.Schema,
    evolution: Evolution,
) -> list[str]:
    """Return the statements that alter a table to a schema. Raises SchemaChanged if that is not allowed."""
    added = [field for field in schema if field.name not in existing]
    changed = _outgrown(schema, existing)
    if evolution is Evolution.IGNORE or not (added or changed):
        return []
    narrow = [field for field in changed if not is_widened(existing[field.name], field.type)]
    refused = narrow or (changed if evolution is Evolution.ADD_ONLY else [])
    if evolution is Evolution.STOP:
        refused = [*added, *changed]
    if refused:
        raise SchemaChanged(
            f"the columns of {target.name} do not fit {table}: {', '.join(field.name for field in refused)}",
            hint=_HINT_CHANGED,
        )
    statement = [statements.add_columns(table, added)] if added else []
    return [*statement, *(statements.widen_column(table, field) for field in changed)]
