# SPDX-License-Identifier: Apache-2.0
"""SQL expressions over the rows of changes, written in Spark SQL and evaluated by DuckDB on Arrow.

An expression yields one value per row, and always the same value for the same row. Otherwise the images of an
update, a retried batch, or a comparison of source and target could disagree. Expressions that depend on time,
randomness, other rows or files are therefore rejected.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow
import pyarrow.compute as compute

from penstock import _native
from penstock.changes import Target
from penstock.errors import OptionInvalid, StepFailed
from penstock.sinks.sink import extra_missing

# A node of sqlglot's tree. Its class depends on the version of sqlglot.
Part = Any

_ROWS = "changes_at_hand"
# Every batch has this column, so there is always a column to select from.
_ALWAYS = "_commit_version"

# For each DuckDB type, the SQL type of the target's column, and the cast to its Arrow type.
_TYPES: Mapping[str, tuple[str, str]] = {
    "BOOLEAN": ("tinyint(1)", "CAST({} AS TINYINT)"),
    "TINYINT": ("tinyint", "{}"),
    "SMALLINT": ("smallint", "{}"),
    "INTEGER": ("int", "{}"),
    "BIGINT": ("bigint", "{}"),
    "HUGEINT": ("decimal(38,0)", "CAST({} AS DECIMAL(38,0))"),
    "UTINYINT": ("smallint", "CAST({} AS SMALLINT)"),
    "USMALLINT": ("int", "CAST({} AS INTEGER)"),
    "UINTEGER": ("bigint", "CAST({} AS BIGINT)"),
    "UBIGINT": ("bigint unsigned", "CAST({} AS DECIMAL(20,0))"),
    "FLOAT": ("float", "{}"),
    "DOUBLE": ("double", "{}"),
    "VARCHAR": ("longtext", "{}"),
    "JSON": ("longtext", "CAST({} AS VARCHAR)"),
    "UUID": ("char(36)", "CAST({} AS VARCHAR)"),
    "BLOB": ("longblob", "{}"),
    "DATE": ("date", "{}"),
    "TIME": ("time(6)", "date_diff('microsecond', TIME '00:00:00', {})"),
    "INTERVAL": ("time(6)", "epoch_us({})"),
    "TIMESTAMP": ("datetime(6)", "{}"),
    "TIMESTAMP_S": ("datetime(6)", "CAST({} AS TIMESTAMP)"),
    "TIMESTAMP_MS": ("datetime(6)", "CAST({} AS TIMESTAMP)"),
    "TIMESTAMP_NS": ("datetime(6)", "CAST({} AS TIMESTAMP)"),
    "TIMESTAMP WITH TIME ZONE": ("timestamp(6)", "{}"),
    '"NULL"': ("longtext", "CAST({} AS VARCHAR)"),
}
_TEXT_TYPES = ("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set")

_NOT_DETERMINISTIC = "{} gives another value each time"
_REFUSED: Mapping[str, str] = {
    "AggFunc": "{} needs more than one row",
    "Window": "{} needs more than one row",
    "Query": "{} is a query of its own",
    "CurrentTimestamp": _NOT_DETERMINISTIC,
    "CurrentDate": _NOT_DETERMINISTIC,
    "CurrentTime": _NOT_DETERMINISTIC,
    "CurrentDatetime": _NOT_DETERMINISTIC,
    "CurrentUser": _NOT_DETERMINISTIC,
    "UnixSeconds": "",
    "Rand": _NOT_DETERMINISTIC,
    "Randn": _NOT_DETERMINISTIC,
    "Uuid": _NOT_DETERMINISTIC,
    "GenerateSeries": "{} gives more than one row",
    "Explode": "{} gives more than one row",
    "Unnest": "{} gives more than one row",
}
_REFUSED_NAMES = {
    "now", "today", "sysdate", "current_localtime", "current_localtimestamp", "get_current_timestamp",
    "transaction_timestamp", "txid_current", "random", "setseed", "nextval", "currval", "gen_random_uuid",
    "uuidv4", "uuidv7", "getenv", "getvariable", "current_setting", "read_text", "read_blob", "query",
    "query_table",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """The type of an expression's result: the SQL type and character set of a column that can hold it."""

    type_text: str
    charset: str | None


@dataclass
class _Bound:
    """Expressions bound to one schema: the statement, and the Arrow type of each result."""

    statement: str
    columns: tuple[str, ...]
    kinds: dict[str, Column]
    arrow: pyarrow.Schema
    # The columns that the expressions read, under their names in the rows.
    read: frozenset[str]


class Expressions:
    """Named expressions for one step. Can be pickled; used by one thread.

    `texts` maps the name of each result to its expression, and `casts` maps names of results to SQL types.
    Each error message begins with `step`. Raises OptionInvalid if an expression cannot be parsed, and
    DependencyMissing.
    """

    def __init__(self, texts: Mapping[str, str], step: str, casts: Mapping[str, str] | None = None) -> None:
        self._step = step
        self._casts = dict(casts or {})
        self._parts = {name: self._parse(text) for name, text in texts.items()}
        self._texts = dict(texts)
        self._bound: dict[tuple[pyarrow.Schema, bool], _Bound] = {}
        self._engine: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # A connection cannot be pickled. The process that unpickles this object opens its own connection.
        return self.__dict__ | {"_engine": None, "_bound": {}}

    def columns(self, schema: pyarrow.Schema, mariadb: bool) -> dict[str, Column]:
        """Return the column of each result over rows of a schema.

        Raises OptionInvalid if an expression does not fit the rows.
        """
        return self._bind(schema, mariadb).kinds

    def reads(self, schema: pyarrow.Schema, mariadb: bool) -> frozenset[str]:
        """Return the columns that the expressions read. Raises OptionInvalid."""
        return self._bind(schema, mariadb).read

    def values(self, rows: pyarrow.RecordBatch, mariadb: bool) -> dict[str, pyarrow.Array]:
        """Return the value of each expression for every row, in the Arrow type of its SQL type.

        Raises StepFailed if a row cannot be evaluated, OptionInvalid if an expression does not fit the rows.
        """
        duckdb = _duckdb()
        bound = self._bind(rows.schema, mariadb)
        try:
            table = self._run(rows.select(list(bound.columns)), bound.statement).to_arrow_table()
            results = table.combine_chunks()
            return {
                name: _as(results.column(index), bound.arrow.field(name).type)
                for index, name in enumerate(bound.kinds)
            }
        except (duckdb.Error, pyarrow.ArrowInvalid) as problem:
            raise StepFailed(f"{self._step}: {_first_line(problem)}") from problem

    # --- Parsing ----------------------------------------------------------------------------

    def _parse(self, text: str) -> Part:
        # Imported here because the import takes longer than decoding a small file.
        import sqlglot
        from sqlglot.errors import SqlglotError

        try:
            # Of sqlglot's dialects of Spark, only in this dialect does CAST fail on invalid values, as it
            # does in Spark.
            part = sqlglot.parse_one(text, dialect="databricks")
        except SqlglotError as problem:
            raise OptionInvalid(
                f"{self._step}: {text!r} is no SQL expression: {_first_line(problem)}",
                hint="Write it as Spark SQL: status <> 'draft' AND total > 0",
            ) from problem
        self._refuse(part, text)
        return part

    def _refuse(self, part: Part, text: str) -> None:
        from sqlglot import expressions

        if isinstance(part, expressions.Alias | expressions.Star):
            raise OptionInvalid(
                f"{self._step}: {text!r} is more than one value", hint="Write NAME: EXPRESSION"
            )
        for node in part.walk():
            for kind, what in _REFUSED.items():
                refused = getattr(expressions, kind, None)
                if what and refused is not None and isinstance(node, refused):
                    raise OptionInvalid(f"{self._step}: {what.format(node.sql(dialect='databricks'))}")
            name = node.name.lower() if isinstance(node, expressions.Anonymous) else ""
            if name in _REFUSED_NAMES:
                raise OptionInvalid(f"{self._step}: {_NOT_DETERMINISTIC.format(name + '()')}")

    # --- Binding ----------------------------------------------------------------------------

    def _bind(self, schema: pyarrow.Schema, mariadb: bool) -> _Bound:
        key = (schema, mariadb)
        if key not in self._bound:
            self._bound[key] = self._bind_to_schema(schema, mariadb)
        return self._bound[key]

    def _bind_to_schema(self, schema: pyarrow.Schema, mariadb: bool) -> _Bound:
        duckdb = _duckdb()
        texts: dict[str, str] = {}
        read: set[str] = set()
        for name, part in self._parts.items():
            texts[name], part_columns = self._named(part, schema)
            read |= part_columns
        columns = tuple(dict.fromkeys([*sorted(read), _ALWAYS]))
        empty = schema.empty_table().select(list(columns)).to_batches() or [
            pyarrow.RecordBatch.from_pylist(
                [], schema=pyarrow.schema([schema.field(column) for column in columns])
            )
        ]
        selected = ", ".join(f"{text} AS {_quoted(name)}" for name, text in texts.items())
        try:
            types = self._run(empty[0], f"SELECT {selected} FROM {_ROWS}").types
        except duckdb.Error as problem:
            raise OptionInvalid(
                f"{self._step}: {_first_line(problem)}",
                hint=f"It was read as: {'; '.join(texts.values())}",
            ) from problem
        kinds, results = {}, []
        for (name, text), duckdb_type in zip(texts.items(), types, strict=True):
            kinds[name], result = self._result(name, text, str(duckdb_type), mariadb)
            results.append(f"{result} AS {_quoted(name)}")
        return _Bound(
            f"SELECT {', '.join(results)} FROM {_ROWS}",
            columns,
            kinds,
            _arrow_of(kinds, mariadb),
            frozenset(read),
        )

    def _named(self, part: Part, schema: pyarrow.Schema) -> tuple[str, set[str]]:
        """Return an expression in DuckDB's SQL, and the columns that it reads, spelled as in the rows."""
        from sqlglot import expressions

        part = part.copy()
        read = set()
        for column in part.find_all(expressions.Column):
            first = column.parts[0]
            name = _match_name(first.name, schema.names)
            if name is None:
                near = difflib.get_close_matches(first.name, schema.names, n=1, cutoff=0.6)
                raise OptionInvalid(
                    f"{self._step}: there is no column {first.name!r}",
                    hint=f"Did you mean {near[0]}?" if near else f"There are {', '.join(schema.names)}",
                )
            read.add(name)
            first.replace(expressions.to_identifier(name, quoted=True))
        return part.sql(dialect="duckdb"), read

    def _result(self, name: str, text: str, duckdb_type: str, mariadb: bool) -> tuple[Column, str]:
        """Return the column that holds a result, and the SQL that casts the result to its Arrow type."""
        if name in self._casts:
            column = _column_of(self._casts[name])
            cast_type = _duckdb_type(_arrow_of({name: column}, mariadb).field(name).type)
            if cast_type == "INTERVAL":
                return column, f"epoch_us(CAST({text} AS INTERVAL))"
            return column, f"CAST({text} AS {cast_type})"
        if duckdb_type.startswith("DECIMAL("):
            return _column_of(duckdb_type.lower().replace(" ", "")), text
        if duckdb_type.startswith("ENUM("):
            return _column_of("longtext"), f"CAST({text} AS VARCHAR)"
        if duckdb_type in _TYPES:
            type_text, form = _TYPES[duckdb_type]
            return _column_of(type_text), form.format(f"({text})")
        # Lists, structs and maps become one JSON document.
        return _column_of("longtext"), f"CAST(to_json({text}) AS VARCHAR)"

    # --- Evaluating -------------------------------------------------------------------------

    def _run(self, rows: pyarrow.RecordBatch, statement: str) -> Any:
        if self._engine is None:
            self._engine = _open_engine()
        table = pyarrow.Table.from_batches([rows])
        self._engine.register(_ROWS, table)
        return self._engine.sql(statement)


def _open_engine() -> Any:
    """Return an engine that runs in its caller's thread, keeps the order of rows, and opens no file."""
    engine = _duckdb().connect(":memory:", config={"threads": 1})
    engine.execute("SET TimeZone = 'UTC'")
    engine.execute("SET enable_external_access = false")
    engine.execute("SET lock_configuration = true")
    return engine


def _duckdb() -> Any:
    try:
        import duckdb
    except ImportError as problem:
        raise extra_missing("duckdb", "steps") from problem
    return duckdb


def type_known(type_text: str, mariadb: bool) -> Column:
    """Return a column of the given SQL type. Raises OptionInvalid, SchemaInvalid for an unknown type."""
    column = _column_of(type_text)
    _arrow_of({"value": column}, mariadb)
    return column


def rows_schema(target: Target) -> pyarrow.Schema:
    """Return the Arrow types of a table's change rows, including the system columns."""
    columns = [(column.name, column.type_text, column.charset, column.nullable) for column in target.columns]
    return pyarrow.schema(_native.arrow_schema(columns, mariadb=target.mariadb))


def _column_of(type_text: str) -> Column:
    is_text = type_text.split("(")[0].strip().lower() in _TEXT_TYPES
    return Column(type_text, "utf8mb4" if is_text else None)


def _arrow_of(columns: Mapping[str, Column], mariadb: bool) -> pyarrow.Schema:
    described = [(name, column.type_text, column.charset, True) for name, column in columns.items()]
    return pyarrow.schema(_native.arrow_schema(described, mariadb=mariadb))


def _duckdb_type(arrow: pyarrow.DataType) -> str:
    types = pyarrow.types
    if types.is_decimal(arrow):
        return f"DECIMAL({arrow.precision},{arrow.scale})"
    if types.is_timestamp(arrow):
        return "TIMESTAMP" if arrow.tz is None else "TIMESTAMP WITH TIME ZONE"
    if types.is_list(arrow):
        return "FLOAT[]"
    return {
        pyarrow.int8(): "TINYINT",
        pyarrow.int16(): "SMALLINT",
        pyarrow.int32(): "INTEGER",
        pyarrow.int64(): "BIGINT",
        pyarrow.float32(): "FLOAT",
        pyarrow.float64(): "DOUBLE",
        pyarrow.string(): "VARCHAR",
        pyarrow.binary(): "BLOB",
        pyarrow.date32(): "DATE",
        pyarrow.duration("us"): "INTERVAL",
    }[arrow]


def _as(values: pyarrow.ChunkedArray, kind: pyarrow.DataType) -> pyarrow.Array:
    """Return values as one array of exactly the requested type."""
    array = values.combine_chunks()
    if isinstance(array, pyarrow.ChunkedArray):
        array = pyarrow.concat_arrays(array.chunks) if array.num_chunks else pyarrow.array([], values.type)
    if array.type == kind:
        return array
    if pyarrow.types.is_duration(kind):
        return array.cast(pyarrow.int64()).cast(kind)
    return compute.cast(array, kind)


def _match_name(name: str, names: Sequence[str]) -> str | None:
    if name in names:
        return name
    wanted = name.casefold()
    return next((candidate for candidate in names if candidate.casefold() == wanted), None)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _first_line(problem: Exception) -> str:
    return str(problem).strip().split("\n")[0]
