# SPDX-License-Identifier: Apache-2.0
"""Delta Lake tables, through the `deltalake` package: their columns, files and commits."""

import itertools
import json
import math
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow
import pyarrow.compute as pc
import pyarrow.fs

from penstock.errors import ConnectionLost, DiskFailed, OptionInvalid, ServerUnsupported, VersionConflict
from penstock.sinks.lake.copy_on_write import in_schema
from penstock.sinks.lake.parquet_files import Bounds, DataFile, Folder, local_folder
from penstock.sinks.lake.table import LakeTable
from penstock.sinks.sink import extra_missing

try:
    import deltalake
    from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction
    from deltalake.exceptions import CommitFailedError, DeltaError, DeltaProtocolError, TableNotFoundError
    from deltalake.fs import DeltaStorageHandler
    from deltalake.transaction import AddAction, RemoveAction

    from penstock.sinks.delta.table_cache import keep, take
except ImportError as _absent:
    raise extra_missing("deltalake", "delta") from _absent

# Only the first columns get bounds, as is Delta's default.
_BOUNDED_COLUMNS_MAX = 32
# Readers and other writers take decimal bounds as doubles, which are exact only up to 15 digits.
_BOUND_DIGITS_MAX = 15
# Other writers, such as Spark, round both bounds of times down to milliseconds.
_BOUND_MICROSECONDS = 1000
_FILE_COLUMNS = ["path", "num_records", "size_bytes"]
# Commits and readers replay the log after its last checkpoint. This is Spark's default interval.
_CHECKPOINT_INTERVAL = 10
DEFAULT_PROPERTIES = {"delta.checkpointInterval": str(_CHECKPOINT_INTERVAL)}
# The table feature that deletes rows of a file without rewriting it.
_VECTORS = "deletionVectors"
# The property of tables whose files have other column names.
_MAPPING = "delta.columnMapping.mode"


class Delta(LakeTable):
    """A Delta table at the version that was opened."""

    def __init__(
        self,
        table: DeltaTable,
        url: str,
        options: Mapping[str, str],
        folder: Folder,
        schema: pyarrow.Schema | None = None,
    ) -> None:
        self._table = table
        self._url = url
        self._options = dict(options)
        self.schema = pyarrow.schema(table.schema().to_arrow()) if schema is None else schema
        self.folder = folder
        # The first version that this object may have committed, None for none.
        self._committed: int | None = None

    @property
    def name(self) -> str | None:
        """The name that the table was created with."""
        name: str | None = self._table.metadata().name
        return name

    def release(self) -> None:
        """Keep the table in this process. See `LakeTable`."""
        keep(self._table, self.schema, self._url, self._options, self.folder)

    def number(self, application: str) -> int | None:
        """Return the last batch number that an application committed. See `LakeTable`."""
        with translate_errors(self._url):
            number: int | None = self._table.transaction_version(application)
        return number

    def files(self) -> list[DataFile]:
        """Return the data files. See `LakeTable`.

        Raises ServerUnsupported if another writer has deleted rows with deletion vectors.
        """
        with translate_errors(self._url):
            features = self._table.protocol().reader_features or ()
            has_vectors = _VECTORS in features and pyarrow.table(self._table.deletion_vectors()).num_rows
            actions = pyarrow.table(self._table.get_add_actions(flatten=True))
        if has_vectors:
            raise ServerUnsupported(
                f"rows of the table {self._url} were deleted by deletion vectors",
                hint="Set delta.enableDeletionVectors to false, then in Spark: REORG TABLE ... APPLY (PURGE)",
            )
        names = [name for name in self.schema.names if f"min.{name}" in actions.column_names]
        bounds_of_column = {name: _column_bounds(actions, name) for name in names}
        return [
            DataFile(
                row["path"],
                _known(row["num_records"]),
                row["size_bytes"],
                {name: bounds[number] for name, bounds in bounds_of_column.items()},
            )
            for number, row in enumerate(actions.select(_FILE_COLUMNS).to_pylist())
        ]

    def commit(
        self, added: Sequence[DataFile], removed: Sequence[DataFile], numbers: Mapping[str, int]
    ) -> None:
        """Commit added and removed files with batch numbers. See `LakeTable`."""
        now = int(time.time() * 1000)
        actions: list[Any] = add_actions(added, now)
        actions += [RemoveAction(file.path, True, now, file.bytes, {}) for file in removed]
        with translate_errors(self._url):
            self._table.create_write_transaction(
                actions,
                "append",
                self._table.schema(),
                # deltalake would commit on top of a compaction that has removed the same files.
                commit_properties=with_numbers(numbers, now, is_exclusive=bool(removed)),
                post_commithook_properties=hook_of(self._table.version() + 1),
            )
            # The object keeps its version, and a concurrent commit may have come first.
            self._committed = self._table.version() + 1
            self.release()

    def unsynced(self) -> list[str]:
        """Return the log entries to sync. See `LakeTable`."""
        return log_paths(self.folder, self._table.version() if self._committed is None else self._committed)

    def add_columns(self, columns: Sequence[pyarrow.Field]) -> None:
        """Add columns, which are null in existing rows."""
        fields = deltalake.Schema.from_arrow(pyarrow.schema(columns)).fields
        with translate_errors(self._url):
            self._table.alter.add_columns(fields)

    def widen(self, schema: pyarrow.Schema) -> None:
        """Rewrite all files in wider types, in one commit."""

        def cast_batches() -> Iterator[pyarrow.RecordBatch]:
            for batch in self.batches(self.schema.names):
                yield from in_schema(pyarrow.Table.from_batches([batch]), schema).to_batches()

        reader = pyarrow.RecordBatchReader.from_batches(schema, cast_batches())
        with translate_errors(self._url):
            exclusive = CommitProperties(max_commit_retries=0)
            deltalake.write_deltalake(
                self._table, reader, mode="overwrite", schema_mode="overwrite", commit_properties=exclusive
            )


def open_delta(url: str, options: Mapping[str, str]) -> Delta | None:
    """Return a table, None if it does not exist. Raises ConnectionLost, DiskFailed, ServerUnsupported."""
    with translate_errors(url):
        try:
            folder = folder_of(url, options, make=False)
            # `deltalake` takes much longer to say that there is no table, as for every new one.
            if folder.local and not _exists(folder, "_delta_log"):
                return None
            table, schema = take(url, options, folder) or (
                DeltaTable(url, storage_options=dict(options) or None),
                None,
            )
        except TableNotFoundError:
            return None
        if schema is None:
            _refuse_unreadable(table, url)
    return Delta(table, url, options, folder, schema)


def create_delta(
    url: str, options: Mapping[str, str], name: str, schema: pyarrow.Schema, properties: Mapping[str, str]
) -> Delta:
    """Create a table, or return the table that someone has just created."""
    with translate_errors(url):
        table = DeltaTable.create(
            url,
            schema,
            mode="ignore",
            name=name,
            configuration={**DEFAULT_PROPERTIES, **properties},
            storage_options=dict(options) or None,
        )
        _refuse_unreadable(table, url)
    return Delta(table, url, options, folder_of(url, options))


def _refuse_unreadable(table: DeltaTable, url: str) -> None:
    """Raise ServerUnsupported for a table whose files do not have its columns under their names."""
    metadata = table.metadata()
    mapping = metadata.configuration.get(_MAPPING, "none")
    if metadata.partition_columns or mapping != "none":
        what = f"{_MAPPING} {mapping}" if mapping != "none" else "partitions"
        raise ServerUnsupported(
            f"the table {url} has {what}, so its files do not have all columns under their names",
            hint="Let the pipeline create the table, or write it again without",
        )


def add_actions(files: Sequence[DataFile], now: int) -> list[AddAction]:
    """Return the actions of a commit that add files. `now` is in milliseconds since 1970."""
    return [AddAction(file.path, file.bytes, {}, now, True, _statistics(file)) for file in files]


def with_numbers(numbers: Mapping[str, int], now: int, *, is_exclusive: bool) -> CommitProperties:
    """Return the properties of a commit that stores batch numbers by application.

    An exclusive commit fails if there is another commit after the version that was opened.
    """
    return CommitProperties(
        max_commit_retries=0 if is_exclusive else None,
        app_transactions=[Transaction(name, number, now) for name, number in numbers.items()],
    )


def log_paths(folder: Folder, first: int) -> list[str]:
    """Return the log entries of a local table from a version on, and their checkpoints."""
    paths: list[str] = []
    if not folder.local:
        return paths
    for version in itertools.count(first):
        entry, checkpoint = (
            folder.file(f"_delta_log/{version:020}.{kind}") for kind in ("json", "checkpoint.parquet")
        )
        if not os.path.exists(entry):
            break
        paths += [entry, checkpoint] if os.path.exists(checkpoint) else [entry]
    return paths


def hook_of(version: int) -> PostCommitHookProperties:
    """Return what `deltalake` does after the commit of a version.

    By default it lists the log after every commit, to delete expired entries. It only deletes entries before
    a checkpoint, so it is enough to look for some whenever a checkpoint may be written.
    """
    looks_for_expired = (version + 1) % _CHECKPOINT_INTERVAL == 0
    return PostCommitHookProperties(cleanup_expired_logs=None if looks_for_expired else False)


def is_local(url: str) -> bool:
    """Return whether a table is on this host's disk."""
    return "://" not in url or url.startswith("file://")


def folder_of(url: str, options: Mapping[str, str], *, make: bool = True) -> Folder:
    """Return the folder of a table: on this host's disk, or where `deltalake` can reach it.

    A local folder is created if `make` is set.
    """
    if is_local(url):
        return local_folder(url.removeprefix("file://"), make=make)
    handler = ObjectStorage(url, dict(options) or None)
    return Folder(pyarrow.fs.PyFileSystem(handler), "", local=False)


class ObjectStorage(DeltaStorageHandler):
    """Wraps the file system of `deltalake`. Its output streams accept only `bytes`, while pyarrow writes
    buffers.
    """

    def open_output_stream(self, path: str, metadata: dict[str, str] | None = None) -> pyarrow.PythonFile:
        stream = self._handler.open_output_stream(path, metadata)
        return pyarrow.PythonFile(_BytesStream(stream), mode="w")


class _BytesStream:
    """An output stream that converts every buffer to `bytes` before passing it on."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, buffer: Any) -> int:
        """Write a buffer; return its number of bytes."""
        return int(self._stream.write(bytes(buffer)))


@contextmanager
def translate_errors(url: str) -> Iterator[None]:
    """Translate deltalake exceptions into Penstock errors."""
    try:
        yield
    except CommitFailedError as problem:
        raise VersionConflict(
            f"the table {url} was changed by somebody else meanwhile",
            hint="The batch is tried again; let one pipeline write a table, and compact it while it rests",
        ) from problem
    except DeltaProtocolError as problem:
        raise ServerUnsupported(
            f"the table {url} has a feature that `deltalake` cannot write: {problem}",
            hint="Let the pipeline make the table, or take the feature away",
        ) from problem
    except DeltaError as problem:
        raise OptionInvalid(
            f"the table {url} cannot be used: {problem}", hint="See the sink's path and storage_options"
        ) from problem
    except OSError as problem:
        kind = DiskFailed if is_local(url) else ConnectionLost
        raise kind(
            f"the table {url} cannot be reached: {problem}", hint="See the sink's path and storage_options"
        ) from problem


def _exists(folder: Folder, name: str) -> bool:
    return bool(folder.filesystem.get_file_info(folder.file(name)).type != pyarrow.fs.FileType.NotFound)


def _known(count: Any) -> int:
    return -1 if count is None else int(count)


def _column_bounds(actions: pyarrow.Table, name: str) -> list[Bounds]:
    """Return the bounds of a column in each file. Bounds that another writer may have rounded are widened, or
    unknown.
    """
    lows, highs = (
        _safe_bounds(actions.column(f"{side}.{name}"), up=side == "max") for side in ("min", "max")
    )
    counts = f"null_count.{name}"
    nulls = actions.column(counts).to_pylist() if counts in actions.column_names else [None] * len(lows)
    return [Bounds(low, high, _known(count)) for low, high, count in zip(lows, highs, nulls, strict=True)]


def _safe_bounds(column: pyarrow.ChunkedArray, *, up: bool) -> list[Any]:
    """Return minima, or maxima if `up` is set. Days and times are numbers, because Python has no year 0."""
    kind = column.type
    if pyarrow.types.is_timestamp(kind):
        moments = column.cast(pyarrow.timestamp("us", kind.tz)).cast(pyarrow.int64())
        column = pc.add(moments, _BOUND_MICROSECONDS if up else 0)
    elif pyarrow.types.is_date32(kind):
        column = column.cast(pyarrow.int32())
    bounds: list[Any] = column.to_pylist()
    if pyarrow.types.is_decimal(kind):
        is_exact = [
            bound is not None and len(bound.as_tuple().digits) <= _BOUND_DIGITS_MAX for bound in bounds
        ]
        return [bound if exact else None for bound, exact in zip(bounds, is_exact, strict=True)]
    return bounds


def _statistics(file: DataFile) -> str:
    """Return Delta's statistics of a file: its rows, and its columns' bounds and null counts."""
    bounded = dict(list(file.bounds.items())[:_BOUNDED_COLUMNS_MAX])
    bounds = {name: bound for name, bound in bounded.items() if _bound_value(bound.low, up=False) is not None}
    bounds = {name: bound for name, bound in bounds.items() if _bound_value(bound.high, up=True) is not None}
    return json.dumps(
        {
            "numRecords": file.rows,
            "minValues": {name: _bound_value(bound.low, up=False) for name, bound in bounds.items()},
            "maxValues": {name: _bound_value(bound.high, up=True) for name, bound in bounds.items()},
            "nullCount": {name: bound.nulls for name, bound in bounded.items() if bound.nulls >= 0},
        }
    )


def _bound_value(value: Any, *, up: bool) -> Any:
    """Return a value as a bound in Delta's log, None if the bound cannot be written there."""
    if isinstance(value, datetime):
        # Delta bounds have millisecond precision: round the minimum down and the maximum up.
        step = math.ceil(value.microsecond / 1000) if up else value.microsecond // 1000
        if step == 1000:
            return None
        zone = "Z" if value.tzinfo is not None else ""
        if value.tzinfo is not None:
            value = value.astimezone(UTC)
        return f"{value.year:04}-{value:%m-%dT%H:%M:%S}.{step:03}{zone}"
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        digits = len(value.as_tuple().digits)
        exponent = value.as_tuple().exponent
        whole = digits <= _BOUND_DIGITS_MAX and exponent == 0
        return int(value) if whole else None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def can_write(url: str, options: Mapping[str, str]) -> None:
    """Write and delete a file below a URL.

    Raises OptionInvalid if the bucket does not exist, or an error from `translate_errors`.
    """
    with translate_errors(url):
        folder = folder_of(url, options)
        name = f".penstock-{uuid.uuid4().hex}"
        try:
            with folder.filesystem.open_output_stream(folder.file(name)) as stream:
                stream.write(b"penstock")
        except FileNotFoundError as problem:
            # An object store creates folders on demand, but not the bucket.
            raise OptionInvalid(
                f"the bucket of {url} does not exist", hint="Create it, or check path"
            ) from problem
        folder.delete([name])
