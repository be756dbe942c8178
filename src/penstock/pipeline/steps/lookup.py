# SPDX-License-Identifier: Apache-2.0
"""`lookup`: add columns from a row of another table, found by a key in the current row.

- lookup:
    tables: shop.orders
    server: {url: "mysql://reader@db1:3306", password_file: /run/secrets/reader}
    table: shop.customers
    on: {customer_id: id}
    add: {customer: {column: name, type: varchar(100)}}

Rows that were looked up stay in memory for `max_age`. A key that is not in memory is always looked up, so a
row that existed when the change was committed, and still exists, is found.
"""

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy
import numpy.typing as npt
import pyarrow
import pyarrow.compute as compute
from pydantic import Field, field_validator

from penstock import _native
from penstock._native import ResultSet
from penstock.changes import SYSTEM_COLUMNS, Changes, Target
from penstock.errors import (
    ConnectionLost,
    OptionInvalid,
    PenstockError,
    SchemaChanged,
    ServerUnsupported,
    StepFailed,
)
from penstock.model import Column, TableName, quote_name
from penstock.pipeline.expressions import type_known
from penstock.pipeline.load.reader import column_expression
from penstock.pipeline.load.session import LoadSession, open_session
from penstock.pipeline.pairs import INSERT, POSTIMAGE, kinds_of, try_splitting
from penstock.pipeline.row_metadata import add_exact_texts, refuse_absent
from penstock.pipeline.step import Rejected, Step
from penstock.pipeline.step_section import OnError, StepSection, resolve_column
from penstock.schema.reader import read_table
from penstock.settings.values import Seconds, Section, validate_option
from penstock.sinks.endpoint import MysqlEndpoint

VERB = "lookup"
# A server analyzes a condition of this size as ranges of an index (range_optimizer_max_mem_size).
_CONDITION_BYTES_MAX = 64 << 10

_CONVERTIBLE = {
    "text": frozenset({"char", "varchar", "tinytext", "text", "mediumtext", "longtext"}),
    "decimal": frozenset({"decimal"}),
    "integer": frozenset({"tinyint", "smallint", "mediumint", "int", "bigint"}),
}
_LENGTH = re.compile(r"(?:var)?char\((\d+)\)", re.IGNORECASE)

Places = npt.NDArray[numpy.int64]


class LookupServer(MysqlEndpoint):
    """The server of the looked-up table."""


class AddedColumn(Section):
    """A column of the looked-up table that is added to rows."""

    column: str = Field(description="the column of the table")
    type: str = Field(description="its SQL type, in MySQL's syntax")


class Settings(StepSection):
    """Which table to look up, by which columns, and which columns to add to rows."""

    server: LookupServer = Field(description="the server of the table: url, and its account")
    table: str = Field(description="the table that is looked up: database.table")
    on: dict[str, str] = Field(
        min_length=1, description="columns of a row to columns of the table, which identify one of its rows"
    )
    add: dict[str, AddedColumn] = Field(
        min_length=1, description="new columns: name to the table's column and its SQL type"
    )
    max_age: Seconds = Field(
        default=60.0, ge=0, description="how long a row that was looked up is used; 0: for one batch of rows"
    )
    rows_max: int = Field(
        default=1_000_000, ge=1, description="rows that are kept in memory; more begin an empty memory"
    )
    missing: Literal["null", "reject"] = Field(
        default="null",
        description="what a row gets whose key the table does not have: nulls, or the treatment of on_error",
    )
    on_error: OnError = Field(default=None, description="what to do with rows that are rejected")

    @field_validator("table")
    @classmethod
    def _valid_table(cls, table: str) -> str:
        validate_option(lambda: TableName.parse(table))
        return table

    @field_validator("add")
    @classmethod
    def _valid_types(cls, add: dict[str, AddedColumn]) -> dict[str, AddedColumn]:
        for column in add.values():
            validate_option(lambda kind=column.type: type_known(kind, mariadb=False))  # type: ignore[misc]
        return add

    @property
    def name(self) -> TableName:
        """The table that is looked up."""
        return TableName.parse(self.table)


@dataclass
class _Memory:
    """The rows that were looked up for the rows of a target: keys as in the rows, the added columns, and the
    texts of their unrepresentable values.
    """

    rows: pyarrow.Table
    begun: float


class LookupStep(Step):
    """Adds columns from rows of another table."""

    verb = VERB

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._memories: dict[Target, _Memory] = {}
        self._session: LoadSession | None = None
        # The table's columns as the server declares them, by name in lower case. Read once per connection.
        self._stored: dict[str, Column] = {}

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_memories": {}, "_session": None}

    def target(self, target: Target) -> Target | None:
        if not self.settings.applies_to(target):
            return target
        self._keys(target)
        known = {name.casefold() for name in target.column_names}
        if taken := [name for name in self.settings.add if name.casefold() in known]:
            raise OptionInvalid(
                f"{VERB}: {target.name} already has a column {taken[0]}",
                hint="Give the new column another name",
            )
        return replace(target, columns=(*target.columns, *self._added(target)))

    def apply(self, changes: Changes) -> Iterable[Changes | Rejected]:
        if not self.settings.applies_to(changes.target):
            return [changes]
        return try_splitting(changes, self._look_up, self.settings.on_error, VERB)

    def close(self) -> None:
        self._memories.clear()
        self.close_session()

    def _look_up(self, changes: Changes) -> Changes:
        target, keys = self.target(changes.target), self._keys(changes.target)
        assert target is not None, "rows of every table pass"
        refuse_absent(changes.rows, keys, VERB)
        columns = [changes.rows.column(name) for name in keys]
        memory = self._memory(changes)
        places = _places(columns, memory.rows)
        has_key = numpy.ones(len(changes), dtype=bool)
        for column in columns:
            has_key &= compute.is_valid(column).to_numpy(zero_copy_only=False)
        unknown = has_key & (places < 0)
        if unknown.any():
            self._read(changes.target, memory, changes.rows.filter(pyarrow.array(unknown)))
            places = _places(columns, memory.rows)
        if self.settings.missing == "reject":
            self._refuse_missing(
                changes, keys, (places < 0) & numpy.isin(kinds_of(changes.rows), (INSERT, POSTIMAGE))
            )
        chosen = pyarrow.array(places, mask=places < 0)
        *added, exact = [
            memory.rows.column(number).take(chosen).combine_chunks()
            for number in range(len(keys), memory.rows.num_columns)
        ]
        own = [changes.rows.column(name) for name in changes.target.column_names]
        system = [changes.rows.column(name) for name in SYSTEM_COLUMNS]
        fields = [*target.arrow(), *(changes.rows.schema.field(name) for name in SYSTEM_COLUMNS)]
        rows = pyarrow.RecordBatch.from_arrays([*own, *added, *system], schema=pyarrow.schema(fields))
        return replace(changes, target=target, rows=add_exact_texts(rows, exact))

    def _refuse_missing(
        self, changes: Changes, keys: Sequence[str], missing: npt.NDArray[numpy.bool_]
    ) -> None:
        if not missing.any():
            return
        row = changes.rows.slice(int(missing.argmax()), 1).to_pylist()[0]
        shown = ", ".join(
            f"{column}={row[name]!r}" for name, column in zip(keys, self.settings.on.values(), strict=True)
        )
        raise StepFailed(f"{VERB}: {self.settings.name} has no row with {shown}")

    # --- The table -------------------------------------------------------------------------------

    def _keys(self, target: Target) -> list[str]:
        """Return the names of the rows' columns that form the lookup key, spelled as in the rows' table."""
        return [resolve_column(name, target.column_names, VERB, target.name) for name in self.settings.on]

    def _added(self, target: Target) -> list[Column]:
        columns = []
        for name, added in self.settings.add.items():
            kind = type_known(added.type, target.mariadb)
            columns.append(Column(name, kind.type_text, kind.charset, True))
        return columns

    def _memory(self, changes: Changes) -> _Memory:
        """Return the looked-up rows for changes. Rows that are too old, or too many, are dropped."""
        target, now = changes.target, time.monotonic()
        memory = self._memories.get(target)
        too_old = memory is not None and now - memory.begun >= self.settings.max_age
        if memory is None or too_old or memory.rows.num_rows > self.settings.rows_max:
            after = self.target(target)
            assert after is not None, "rows of every table pass"
            fields = [target.arrow().field(name).with_name(f"key {name}") for name in self._keys(target)]
            fields += [after.arrow().field(name) for name in self.settings.add]
            fields.append(changes.rows.schema.field("_metadata").type.field("unrepresentable"))
            # Forget the rows that were looked up for an earlier definition of this table. That definition
            # will not return.
            self._memories = {
                known: kept for known, kept in self._memories.items() if known.name != target.name
            }
            memory = self._memories[target] = _Memory(pyarrow.schema(fields).empty_table(), now)
        return memory

    def _read(self, target: Target, memory: _Memory, rows: pyarrow.RecordBatch) -> None:
        """Look up the keys of rows in the table, and add the rows found to the memory."""
        asked = rows.select(self._keys(target)).rename_columns(
            memory.rows.schema.names[: len(self.settings.on)]
        )
        asked_once = pyarrow.Table.from_batches([asked]).group_by(asked.schema.names, use_threads=False)
        keys = asked_once.aggregate([]).combine_chunks().to_batches()[0]
        answers = self._select(target, memory.rows.schema, keys)
        # The server also returns rows whose key texts are equal only in the server's collation.
        exact = [
            answer.filter(pyarrow.array(_places(answer.columns[: keys.num_columns], keys) >= 0))
            for answer in answers
        ]
        looked_up = pyarrow.Table.from_batches(exact, schema=memory.rows.schema)
        found_keys = looked_up.select(keys.schema.names)
        if found_keys.group_by(keys.schema.names).aggregate([]).num_rows < looked_up.num_rows:
            raise OptionInvalid(
                f"{VERB}: {self.settings.name} has several rows for one value of"
                f" {', '.join(self.settings.on.values())}",
                hint="Name the columns of its primary key, or of a unique key, in `on`",
            )
        memory.rows = pyarrow.concat_tables([memory.rows, looked_up]).combine_chunks()

    def _select(
        self, target: Target, schema: pyarrow.Schema, keys: pyarrow.RecordBatch
    ) -> list[pyarrow.RecordBatch]:
        """Return the table's rows that have the given keys, as batches in the given schema.

        If the connection is lost, it is reopened once, because the server closes a connection after a long
        time without changes. It is also reopened if the table's columns have changed since they were read.
        """
        was_open = self._session is not None
        try:
            return list(self._answers(target, schema, keys))
        except (ConnectionLost, SchemaChanged, ServerUnsupported) as problem:
            self.close_session()
            if was_open:
                return self._select(target, schema, keys)
            if isinstance(problem, ConnectionLost):
                raise
            raise OptionInvalid(
                f"{VERB}: {self.settings.name} cannot be read: {problem.message}",
                hint="Check table, on and add of the step",
            ) from problem
        except PenstockError:
            self.close_session()
            raise

    def _answers(
        self, target: Target, schema: pyarrow.Schema, keys: pyarrow.RecordBatch
    ) -> Iterator[pyarrow.RecordBatch]:
        if self._session is None:
            self._session = open_session(self.settings.server.address())
            self._stored = _columns_of(self._session, self.settings.name)
        names = list(self.settings.on.values())
        columns = [
            replace(target.column(own), name=name)
            for own, name in zip(self._keys(target), names, strict=True)
        ]
        columns += [
            replace(column, name=added.column)
            for column, added in zip(self._added(target), self.settings.add.values(), strict=True)
        ]
        stored = [_stored_as(column, self._stored.get(column.name.casefold())) for column in columns]
        selected = ", ".join(map(column_expression, stored))
        before = [f"{' AND ' if number else '('}{quote_name(name)}=" for number, name in enumerate(names)]
        conditions = _native.sql_values(
            keys, keys.schema.names, before=before, between=" OR ", bytes_max=_CONDITION_BYTES_MAX
        )
        for _, condition in conditions:
            result = ResultSet(
                [
                    (name, column.type_text, column.charset, True)
                    for name, column in zip(schema.names, stored, strict=False)
                ],
                mariadb=target.mariadb,
                instance="",
                database=self.settings.name.database,
                table=self.settings.name.table,
                file="",
                offset=0,
                commit_version=0,
                timestamp_us=0,
            )
            sql = f"SELECT {selected} FROM {self.settings.name.sql} WHERE ".encode()
            for batch in self._session.batches(sql + condition, result):
                rows = pyarrow.record_batch(batch)
                arrays = [
                    self._converted(rows.column(field.name), field.type, column)
                    for field, column in zip(schema, columns, strict=False)
                ]
                for values, column in zip(arrays[len(names) :], columns[len(names) :], strict=True):
                    self._prove_length(values, column)
                exact = compute.struct_field(rows.column("_metadata"), "unrepresentable")
                yield pyarrow.RecordBatch.from_arrays([*arrays, exact], schema=schema)

    def _converted(self, values: pyarrow.Array, kind: pyarrow.DataType, column: Column) -> pyarrow.Array:
        """Return values of the table in the type of a row's key or of an added column. Raises StepFailed."""
        try:
            return values if values.type == kind else values.cast(kind)
        except pyarrow.ArrowInvalid as problem:
            raise self._misfit(column, str(problem)) from problem

    def _prove_length(self, values: pyarrow.Array, column: Column) -> None:
        """Raise StepFailed for a text that is longer than the declared type of an added column."""
        length = _LENGTH.fullmatch(column.type_text)
        if length and compute.any(compute.greater(compute.utf8_length(values), int(length[1]))).as_py():
            raise self._misfit(column, f"it has more than {length[1]} characters")

    def _misfit(self, column: Column, why: str) -> StepFailed:
        return StepFailed(
            f"{VERB}: a value of {self.settings.name}.{column.name} does not fit {column.type_text}: {why}",
            hint="Declare a wider type in `add`",
        )

    def close_session(self) -> None:
        """Close the connection to the server, if it is open."""
        if self._session is not None:
            self._session.close()
            self._session = None


make = LookupStep


def _columns_of(session: LoadSession, name: TableName) -> dict[str, Column]:
    """Return the columns of a table by name in lower case; {} for a view or a missing table."""
    definition = read_table(session.connection, name)
    columns = () if definition is None else definition.schema.columns
    return {column.name.casefold(): column for column in columns}


def _stored_as(declared: Column, stored: Column | None) -> Column:
    """Return the column by which the server's bytes are decoded, with the declared name.

    The session returns values unconverted, so decoding a text requires the character set of its column, and
    decoding a number requires its size. If the kind of the stored values differs from the declared kind,
    nothing is converted: the decoder rejects the column by name.
    """
    if stored is None or (kind := _kind_of(stored)) is None or kind != _kind_of(declared):
        return declared
    return replace(stored, name=declared.name, nullable=True)


def _kind_of(column: Column) -> str | None:
    word = re.split(r"[ (]", column.type_text.lower())[0]
    return next((kind for kind, words in _CONVERTIBLE.items() if word in words), None)


def _places(columns: Sequence[pyarrow.Array], rows: pyarrow.Table | pyarrow.RecordBatch) -> Places:
    """Look up each row of `columns` in `rows`. Return the index of the row in `rows` whose first columns have
    the same values, or -1 if there is none.

    Null is not equal to any value, not even to null.
    """
    # Few of many remembered rows have a value that is looked up, and numbering their values costs much more
    # than finding these rows.
    is_near = compute.is_in(_in_one_chunk(rows.column(0)), value_set=columns[0].drop_null().unique())
    near = compute.indices_nonzero(is_near).cast(pyarrow.int64())
    codes: Any = None
    own_codes: Any = None
    for column, own in zip(columns, rows.columns, strict=False):
        values = _in_one_chunk(own).take(near)
        distinct = values.drop_null().unique()
        code, own_code = (
            compute.index_in(each, value_set=distinct, skip_nulls=True) for each in (column, values)
        )
        if codes is not None:
            # Renumber the pairs of codes, so that the codes stay small even with many columns.
            pairs, own_pairs = (
                compute.add(compute.multiply(left.cast(pyarrow.int64()), len(distinct)), right)
                for left, right in ((codes, code), (own_codes, own_code))
            )
            distinct = own_pairs.drop_null().unique()
            code, own_code = (
                compute.index_in(each, value_set=distinct, skip_nulls=True) for each in (pairs, own_pairs)
            )
        codes, own_codes = code, own_code
    places = near.take(compute.index_in(codes, value_set=own_codes, skip_nulls=True))
    answer: Places = compute.fill_null(places, -1).to_numpy(zero_copy_only=False)
    return answer


def _in_one_chunk(column: pyarrow.Array | pyarrow.ChunkedArray) -> pyarrow.Array:
    return column.combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column
