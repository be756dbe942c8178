# SPDX-License-Identifier: Apache-2.0
"""Apache Iceberg tables, through the `pyiceberg` package: their columns, files and commits.

A pipeline's batch number is a table property, set in the commit of the batch's rows. A commit is attempted
only once. If it fails because of a concurrent commit, the batch is retried, and the retry first checks
whether the table already has the batch number.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pyarrow

from penstock.errors import (
    AccessDenied,
    ConnectionLost,
    OptionInvalid,
    SchemaChanged,
    ServerUnsupported,
    VersionConflict,
)
from penstock.sinks.lake.parquet_files import Bounds, DataFile, Folder, translate_file_errors
from penstock.sinks.lake.syncing import sync_paths
from penstock.sinks.lake.table import LakeTable
from penstock.sinks.sink import extra_missing

try:
    from pyiceberg import exceptions
    from pyiceberg.catalog import Catalog, load_catalog
    from pyiceberg.conversions import from_bytes
    from pyiceberg.io.pyarrow import (
        PyArrowFileIO,
        _ConvertToIceberg,
        parquet_file_to_data_file,
        schema_to_pyarrow,
        visit_pyarrow,
    )
    from pyiceberg.table import Table
    from pyiceberg.types import IcebergType
    from sqlalchemy.exc import DBAPIError, OperationalError
except ImportError as _absent:
    raise extra_missing("pyiceberg", "iceberg") from _absent

# The prefix of table properties that hold batch numbers.
_NUMBER = "penstock.number."
# pyiceberg would retry a commit on top of another commit, which may be a commit of the same batch.
_RETRIES = "commit.retry.num-retries"
_ONCE = "0"


class Iceberg(LakeTable):
    """An Iceberg table at the version that was loaded."""

    file_prefix = "data/part"

    def __init__(self, table: Table) -> None:
        self._table = table
        self._full_name = ".".join(table.name())
        self.schema = _small_schema(schema_to_pyarrow(table.schema()))
        scheme, host, path = PyArrowFileIO.parse_location(table.location())
        files = table.io if isinstance(table.io, PyArrowFileIO) else PyArrowFileIO(table.io.properties)
        filesystem = files.fs_by_scheme(scheme, host)
        self.folder = Folder(filesystem, path.rstrip("/"), local=scheme == "file")
        if self.folder.local:
            os.makedirs(f"{self.folder.path}/data", exist_ok=True)
        # pyiceberg's manifest entries of the table's files, once `files` has read them.
        self._entries: dict[str, Any] = {}

    def number(self, application: str) -> int | None:
        """Return the last batch number that an application committed. See `LakeTable`."""
        text = self._table.properties.get(_NUMBER + application)
        return None if text is None else int(text)

    def files(self) -> list[DataFile]:
        """Return the data files. See `LakeTable`.

        Raises ServerUnsupported if another writer has deleted rows with delete files.
        """
        fields = {
            field.field_id: field for field in self._table.schema().fields if field.field_type.is_primitive
        }
        data_files = []
        location = self._table.location().rstrip("/") + "/"
        with translate_errors(self._full_name):
            tasks = list(self._table.scan().plan_files())
        for task in tasks:
            if task.delete_files or not task.file.file_path.startswith(location):
                raise ServerUnsupported(
                    f"{self._full_name} has a file that others wrote, or deleted from: {task.file.file_path}",
                    hint="Let engines that change it copy on write, and compact it: rewrite_data_files",
                )
            name = task.file.file_path.removeprefix(location)
            self._entries[name] = task.file
            bounds = {field.name: _bounds(task.file, number, field) for number, field in fields.items()}
            data_files.append(DataFile(name, task.file.record_count, task.file.file_size_in_bytes, bounds))
        return data_files

    def commit(
        self, added: Sequence[DataFile], removed: Sequence[DataFile], numbers: Mapping[str, int]
    ) -> None:
        """Commit added and removed files with batch numbers. See `LakeTable`."""
        number_properties = {_NUMBER + name: str(number) for name, number in numbers.items()}
        location = self._table.location().rstrip("/")
        with translate_errors(self._full_name):
            if self._table.properties.get(_RETRIES) != _ONCE:
                with self._table.transaction() as settings_change:
                    settings_change.set_properties({_RETRIES: _ONCE})
            change = self._table.transaction()
            if added or removed:
                update = change.update_snapshot(snapshot_properties=number_properties)
                with update.overwrite() if removed else update.fast_append() as snapshot:
                    for file in added:
                        snapshot.append_data_file(
                            parquet_file_to_data_file(
                                self._table.io, change.table_metadata, f"{location}/{file.path}"
                            )
                        )
                    for file in removed:
                        snapshot.delete_data_file(self._entries[file.path])
            change.set_properties(number_properties)
            self._table = change.commit_transaction()
            self.sync()

    def add_columns(self, columns: Sequence[pyarrow.Field]) -> None:
        """Add columns. See `LakeTable`."""
        with translate_errors(self._full_name), self._table.update_schema() as change:
            for field in columns:
                change.add_column(field.name, _iceberg_type(field.type))
        self.sync()

    def sync(self) -> None:
        """Make the last change of the table durable, if the table is on this host's disk.

        The catalog refers to its metadata and to the manifests of its snapshot.
        """
        if not self.folder.local:
            return
        locations, snapshot = [self._table.metadata_location], self._table.current_snapshot()
        with translate_errors(self._full_name):
            if snapshot is not None:
                added = [
                    manifest.manifest_path
                    for manifest in snapshot.manifests(self._table.io)
                    if manifest.added_snapshot_id == snapshot.snapshot_id
                ]
                locations += [snapshot.manifest_list, *added]
            sync_paths(PyArrowFileIO.parse_location(location)[2] for location in locations)

    def widen(self, schema: pyarrow.Schema) -> None:
        """Widen columns in place. See `LakeTable`.

        Raises SchemaChanged for a type that Iceberg cannot widen in place.
        """
        added = [candidate for candidate in schema if candidate.name not in self.schema.names]
        wider = [
            candidate
            for candidate in schema
            if candidate.name in self.schema.names
            and candidate.type != self.schema.field(candidate.name).type
        ]
        try:
            with translate_errors(self._full_name), self._table.update_schema() as change:
                for field in wider:
                    change.update_column(field.name, _iceberg_type(field.type))
                for field in added:
                    change.add_column(field.name, _iceberg_type(field.type))
        except exceptions.ValidationError as problem:
            raise SchemaChanged(
                f"Iceberg cannot widen columns of {self._full_name} in place: {problem}",
                hint="Drop the table, then run: penstock resnapshot",
            ) from problem
        self.sync()

    def describe(self, file: DataFile) -> DataFile:
        """Return the file unchanged, because the commit reads its footer."""
        return file


def _iceberg_type(declared: pyarrow.DataType) -> IcebergType:
    converted = visit_pyarrow(declared, _ConvertToIceberg())
    assert isinstance(converted, IcebergType), f"{declared} is one column's type"
    return converted


def open_iceberg(properties: Mapping[str, str], namespace: str, name: str) -> Iceberg | None:
    """Return a table, None if it does not exist. Propagates errors from `translate_errors`."""
    with translate_errors(f"{namespace}.{name}"):
        try:
            return Iceberg(catalog_of(properties).load_table((namespace, name)))
        except (exceptions.NoSuchTableError, exceptions.NoSuchNamespaceError):
            return None


def create_iceberg(
    properties: Mapping[str, str],
    namespace: str,
    name: str,
    schema: pyarrow.Schema,
    table_properties: Mapping[str, str],
) -> Iceberg:
    """Create a table, or return the table that someone has just created."""
    with translate_errors(f"{namespace}.{name}"):
        catalog = catalog_of(properties)
        catalog.create_namespace_if_not_exists(namespace)
        table = catalog.create_table_if_not_exists(
            (namespace, name), schema, properties={_RETRIES: _ONCE, **table_properties}
        )
        created = Iceberg(table)
        created.sync()
        return created


def reach(properties: Mapping[str, str]) -> None:
    """List a catalog's namespaces to check it. Propagates errors from `translate_errors`."""
    with translate_errors("the sink"):
        catalog_of(properties).list_namespaces()


def catalog_of(properties: Mapping[str, str]) -> Catalog:
    """Return a catalog, cached per process."""
    return _catalog(tuple(sorted(properties.items())), os.getpid())


@lru_cache(maxsize=8)
def _catalog(properties: tuple[tuple[str, str], ...], _: int) -> Catalog:
    return load_catalog("penstock", **dict(properties))


@contextmanager
def translate_errors(location: str) -> Iterator[None]:
    """Translate pyiceberg exceptions into Penstock errors."""
    hint = "See the sink's catalog"
    try:
        # A catalog's HTTP errors are subclasses of OSError.
        with translate_file_errors(location):
            yield
    except OperationalError as problem:
        raise ConnectionLost(
            f"the catalog of {location} does not answer: {problem.orig}", hint=hint
        ) from problem
    except DBAPIError as problem:
        raise OptionInvalid(
            f"the catalog of {location} cannot be used: {problem.orig}", hint=hint
        ) from problem
    except (exceptions.CommitFailedException, exceptions.CommitStateUnknownException) as problem:
        raise VersionConflict(
            f"the table {location} was changed by somebody else meanwhile: {problem}",
            hint="The batch is tried again; let one pipeline write a table, and compact it while it rests",
        ) from problem
    except (
        exceptions.UnauthorizedError,
        exceptions.ForbiddenError,
        exceptions.OAuthError,
        exceptions.AuthorizationExpiredError,
    ) as problem:
        raise AccessDenied(f"the catalog of {location} refuses: {problem}", hint=hint) from problem
    except (
        exceptions.ServerError,
        exceptions.ServiceUnavailableError,
        exceptions.TooManyRequestsError,
    ) as problem:
        raise ConnectionLost(f"the catalog of {location} does not answer: {problem}", hint=hint) from problem
    except exceptions.RESTError as problem:
        raise OptionInvalid(f"the catalog of {location} cannot be used: {problem}", hint=hint) from problem


def _bounds(file: Any, number: int, field: Any) -> Bounds:
    low, high = (file.lower_bounds or {}).get(number), (file.upper_bounds or {}).get(number)
    nulls = (file.null_value_counts or {}).get(number, -1)
    if low is None or high is None:
        return Bounds(None, None, nulls)
    return Bounds(from_bytes(field.field_type, low), from_bytes(field.field_type, high), nulls)


def _small_schema(schema: pyarrow.Schema) -> pyarrow.Schema:
    """Return columns whose texts and lists have 32-bit offsets, like rows of changes."""
    return pyarrow.schema([_small(field) for field in schema])


def _small(field: pyarrow.Field) -> pyarrow.Field:
    types, kind = pyarrow.types, field.type
    if types.is_large_string(kind):
        return field.with_type(pyarrow.string())
    if types.is_large_binary(kind):
        return field.with_type(pyarrow.binary())
    if types.is_large_list(kind) or types.is_list(kind):
        return field.with_type(pyarrow.list_(_small(kind.value_field)))
    if types.is_map(kind):
        return field.with_type(pyarrow.map_(_small(kind.key_field), _small(kind.item_field)))
    if types.is_struct(kind):
        return field.with_type(pyarrow.struct([_small(child) for child in kind]))
    return field
