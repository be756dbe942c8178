# SPDX-License-Identifier: Apache-2.0
"""A feed of changes as Parquet files, in local folders or an object store. Every change is written exactly
once.

Writers stage files outside the table folders. The commit moves them into place under deterministic names,
which a replayed batch reuses, and writes the batch's manifest last. A batch with a manifest is complete.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import pyarrow
import pyarrow.compute as compute
import pyarrow.fs
import pyarrow.parquet as parquet
from pydantic import Field

from penstock.changes import Changes, Target
from penstock.errors import (
    ConnectionLost,
    DiskFailed,
    OperatorError,
    OptionInvalid,
    PenstockError,
    SchemaChanged,
)
from penstock.model import TableName
from penstock.settings.values import Bytes, Section
from penstock.sinks.concurrent_calls import call_for_each
from penstock.sinks.images import unrepresentable_counts
from penstock.sinks.lake.buffered_tables import BufferedTables
from penstock.sinks.lake.parquet_files import DataFile, Folder, PartFiles
from penstock.sinks.lake.rows import feed_fields, stored_rows, stored_schema
from penstock.sinks.lake.syncing import sync_paths
from penstock.sinks.lake.types import is_widened
from penstock.sinks.sink import (
    BatchMark,
    Delivery,
    Evolution,
    Finding,
    Receipt,
    Sink,
    Spread,
    Writer,
    applications_of,
    is_repeated,
)

EXTRA = ""

_FILE_BYTES_DEFAULT = 128 << 20
# The rows of all tables that one task buffers.
_BUFFERED_BYTES_MAX = 128 << 20
# How many files a task closes at once: it encodes and compresses the rows of small tables only then.
_CLOSING_THREADS_MAX = 2
# How many tables a commit publishes at once.
_THREADS_MAX = 16
# How many different schema files are kept in memory.
_DEFINITIONS_MAX = 256
# The schemas of the folders that this process wrote last, each with the stamp of its file.
_SCHEMAS_MAX = 8192
_schemas: dict[str, tuple[tuple[int, int, int], pyarrow.Schema]] = {}
# Readers of Parquet folders ignore names that start with an underscore.
_STAGED, _MANIFESTS, _SCHEMA = "_staged", "_penstock", "_schema.parquet"
_MANIFEST = re.compile(r"\d{12,}\.json")


class Settings(Section):
    """Where the files are, and how they are written."""

    path: str = Field(
        min_length=1,
        description="the feed's folder, or a URL that pyarrow supports: s3://, gs://, hdfs://; files are"
        " in path/database/table",
    )
    file_bytes: Bytes = Field(
        default=_FILE_BYTES_DEFAULT, ge=1 << 16, description="approximate maximum size of a file"
    )
    compression: Literal["snappy", "zstd", "gzip", "none"] = Field(
        default="snappy", description="compression of the files"
    )


class FilesSink(Sink):
    """Writes changes with all their columns."""

    kind = "files"
    delivery = Delivery.EXACTLY_ONCE
    spread = Spread.RANGES
    makes_files = True
    keeps_state = False
    remembers_alone = True
    remembers_by_target = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # Within `preparing`: the folders whose new schema file is written but not yet in place.
        self._prepared: dict[str, Folder] | None = None

    def check(self) -> Sequence[Finding]:
        try:
            folder = self._folder("")
            with _TranslateErrors(self.settings.path):
                folder.filesystem.get_file_info(folder.path)
        except OperatorError as problem:
            return [Finding(self.settings.path, str(problem))]
        above = Path(folder.path)
        while folder.local and not above.exists():
            above = above.parent
        if folder.local and not os.access(above, os.W_OK | os.X_OK):
            return [Finding(self.settings.path, f"nothing can be written to {above}")]
        return []

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        folder = self._folder(path_of(target))
        known = _known_schema(folder)
        schema = self._changed_schema(folder, known, target, evolution)
        if known is None:
            return [f"begin a feed of changes in {self.location(target)}"]
        return (
            [] if known.equals(schema) else [f"write the files of {self.location(target)} with other columns"]
        )

    def prepare(self, target: Target, evolution: Evolution) -> None:
        folder = self._folder(path_of(target))
        known = _known_schema(folder)
        schema = self._changed_schema(folder, known, target, evolution)
        if known is None or not known.equals(schema):
            with _TranslateErrors(self.settings.path):
                folder.filesystem.create_dir(folder.file(_STAGED), recursive=True)
                _write_beside(
                    folder,
                    _SCHEMA,
                    lambda stream: stream.write(_schema_file(schema.serialize().to_pybytes())),
                )
                if self._prepared is None:
                    _put_in_place([folder], _SCHEMA)
                else:
                    self._prepared[folder.path] = folder

    @contextmanager
    def preparing(self) -> Iterator[None]:
        prepared: dict[str, Folder] = {}
        self._prepared = prepared
        try:
            yield
        finally:
            self._prepared = None
        with _TranslateErrors(self.settings.path):
            _put_in_place(list(prepared.values()), _SCHEMA)

    def remembers(self, pipeline: str, targets: Sequence[Target]) -> bool:
        """Look for manifests."""
        manifests = self._folder(f"{_MANIFESTS}/{applications_of(pipeline).rstrip('/')}")
        with _TranslateErrors(self.settings.path):
            folder_info = manifests.filesystem.get_file_info(manifests.path)
            return bool(folder_info.type == pyarrow.fs.FileType.Directory)

    def last_number(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        manifests = self._folder(f"{_MANIFESTS}/{mark.application}")
        with _TranslateErrors(self.settings.path):
            return _last_number(manifests)

    def open(self, mark: BatchMark, part: int) -> Writer:
        return _FeedWriter(self, mark, part)

    def commit(self, mark: BatchMark, receipts: Sequence[Receipt]) -> None:
        manifests = self._folder(f"{_MANIFESTS}/{mark.application}")
        published: list[dict[str, Any]] = []
        tables: dict[str, list[tuple[str, str]]] = {}
        for receipt in receipts:
            for table, name, rows, size in receipt.staged:
                files = tables.setdefault(table, [])
                final = f"{table}/{prefix_of(mark)}-{len(files):05}.parquet"
                published.append({"path": final, "rows": rows, "bytes": size})
                files.append((f"{table}/{_STAGED}/{name}", final))

        with _TranslateErrors(self.settings.path):
            manifests.filesystem.create_dir(manifests.path, recursive=True)
            is_published = _is_published(manifests, mark)

            def publish_table(table: str) -> None:
                if not is_published:
                    self._remove(table, prefix_of(mark), {final for _, final in tables[table]})
                    for staged, final in tables[table]:
                        self._publish(staged, final)
                # Files that are still staged come from failed or repeated tasks.
                self._remove(f"{table}/{_STAGED}", prefix_of(mark), set())

            call_for_each(publish_table, tables, _THREADS_MAX)
            if not is_published:
                _sync_names(map(self._folder, tables))
                text = json.dumps({"batch": mark.number, "files": published}).encode()
                _write_atomically(manifests, _manifest_of(mark), lambda stream: stream.write(text))

    def settle_load(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        manifests = self._folder(f"{_MANIFESTS}/{mark.application}")
        with _TranslateErrors(self.settings.path):
            if not _is_published(manifests, mark):
                # The commit publishes its files before the manifest, so readers may see some of them.
                for target in targets:
                    self._remove(path_of(target), prefix_of(mark), set())
                return None
            versions = [
                compute.max(parquet.read_table(stream, columns=["_commit_version"]).column(0)).as_py()
                for target in targets
                for stream in self._published(target, prefix_of(mark))
            ]
        return max((version for version in versions if version is not None), default=None)

    def _published(self, target: Target, prefix: str) -> Iterator[pyarrow.NativeFile]:
        """Open the files that a batch added to a table, and yield them."""
        folder = self._folder(path_of(target))
        chosen = pyarrow.fs.FileSelector(folder.path, allow_not_found=True)
        for file in folder.filesystem.get_file_info(chosen):
            if file.base_name.startswith(f"{prefix}-"):
                with folder.filesystem.open_input_file(file.path) as stream:
                    yield stream

    def _remove(self, table: str, prefix: str, kept: set[str]) -> None:
        """Delete a folder's files whose names start with a prefix, except for the kept files."""
        folder = self._folder(table)
        selector = pyarrow.fs.FileSelector(folder.path, allow_not_found=True)
        names = [file.base_name for file in folder.filesystem.get_file_info(selector)]
        folder.delete(
            [name for name in names if name.startswith(f"{prefix}-") and f"{table}/{name}" not in kept]
        )

    def _publish(self, staged: str, final: str) -> None:
        """Move a staged file to its final name, replacing the file of an earlier attempt."""
        root = self._folder("")
        try:
            root.filesystem.move(root.file(staged), root.file(final))
        except FileNotFoundError:
            # An earlier attempt at this commit already moved the file.
            if not _is_there(root, final):
                raise

    def location(self, target: Target) -> str:
        """Return the path of a target's files."""
        return f"{self.settings.path.rstrip('/')}/{path_of(target)}"

    def feed_schema(self, target: Target) -> pyarrow.Schema:
        """Return the columns of a target's files, as they were prepared."""
        known = _known_schema(self._folder(path_of(target)))
        if known is None:
            raise OptionInvalid(
                f"the folder {self.location(target)} is gone", hint="penstock pipelines reset, then run"
            )
        return known

    def output(self, mark: BatchMark, part: int, target: Target, schema: pyarrow.Schema) -> PartFiles:
        """Return the writer that stages files of a target."""
        return PartFiles(
            self._folder(f"{path_of(target)}/{_STAGED}"),
            schema,
            bytes_max=self.settings.file_bytes,
            compression=self.settings.compression,
            prefix=f"{prefix_of(mark)}-{part}",
            with_bounds=False,
        )

    def _changed_schema(
        self, folder: Folder, known: pyarrow.Schema | None, target: Target, evolution: Evolution
    ) -> pyarrow.Schema:
        """Return the columns for new files. `known` is the folder's current schema. Raises SchemaChanged."""
        wanted = stored_schema(target, feed_fields())
        if known is None or evolution is Evolution.IGNORE:
            return wanted if known is None else known
        changed = [
            field.name
            for field in wanted
            if field.name in known.names and not _agree(known.field(field.name).type, field.type)
        ]
        added = [field.name for field in wanted if field.name not in known.names]
        obsolete = [field for field in known if field.name not in wanted.names]
        refused = {
            Evolution.EVOLVE: [
                name for name in changed if not is_widened(known.field(name).type, wanted.field(name).type)
            ],
            Evolution.ADD_ONLY: changed,
            Evolution.STOP: [*added, *changed, *(field.name for field in obsolete)],
        }[evolution]
        if refused:
            raise SchemaChanged(
                f"the columns of {target.name} are not those of {self.location(target)}:"
                f" {', '.join(refused)}",
                hint="Set schema_changes, or move the folder away so that another is begun",
            )
        if evolution is Evolution.ADD_ONLY and obsolete:
            own = len(target.columns)
            wanted = pyarrow.schema([*list(wanted)[:own], *obsolete, *list(wanted)[own:]])
        return wanted

    def _folder(self, name: str) -> Folder:
        """Return a folder below the feed's folder."""
        path = self.settings.path.rstrip("/")
        filesystem: pyarrow.fs.FileSystem = pyarrow.fs.LocalFileSystem()
        if "://" in path:
            with _TranslateErrors(path):
                filesystem, path = pyarrow.fs.FileSystem.from_uri(path)
        local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
        return Folder(filesystem, f"{path.rstrip('/')}/{name}".rstrip("/"), local)


make = FilesSink


class _FeedWriter(Writer):
    """Stages one part's changes."""

    def __init__(self, sink: FilesSink, mark: BatchMark, part: int) -> None:
        self._sink = sink
        self._mark = mark
        self._part = part
        self._tables: dict[TableName, tuple[Target, pyarrow.Schema, PartFiles]] = {}
        self._buffered = BufferedTables(min(_BUFFERED_BYTES_MAX, mark.buffered_bytes_max))
        self._counts: Counter[str] = Counter()
        self._bytes = 0
        self._unrepresentable: Counter[str] = Counter()

    def write(self, changes: Changes) -> None:
        with self.working_on(changes.target.name):
            self._stage(changes)

    def _stage(self, changes: Changes) -> None:
        name = changes.target.name
        table_files = self._tables.get(name)
        if table_files is None:
            schema = self._sink.feed_schema(changes.target)
            table_files = (
                changes.target,
                schema,
                self._sink.output(self._mark, self._part, changes.target, schema),
            )
            self._tables[name] = table_files
        rows = pyarrow.Table.from_batches([changes.rows])
        self._unrepresentable += unrepresentable_counts(changes.target, rows)
        with _TranslateErrors(self._sink.settings.path):
            table_files[2].write(stored_rows(rows, table_files[1]))
            self._buffered.note(table_files[2])
        self._counts[str(name)] += len(changes)
        self._bytes += changes.rows.nbytes

    def finish(self) -> Receipt:
        written: dict[TableName, list[DataFile]] = {}

        def close_table(name: TableName) -> None:
            with _TranslateErrors(self._sink.settings.path):
                written[name] = self._tables[name][2].close()

        self.call_for_targets(close_table, self._tables, _CLOSING_THREADS_MAX)
        staged, unsynced = list[Any](), list[str]()
        for name, (target, _, files) in self._tables.items():
            staged += [_staged_entry(target, file) for file in written[name]]
            unsynced += files.take_unsynced()
        with _TranslateErrors(self._sink.settings.path):
            sync_paths(unsynced)
        return Receipt(
            rows=self._counts.total(),
            bytes=self._bytes,
            tables=dict(self._counts),
            staged=tuple(staged),
            unrepresentable=dict(self._unrepresentable),
        )

    def abort(self) -> None:
        for _, _, files in self._tables.values():
            files.abort()


def path_of(target: Target) -> str:
    """Return the path of a target's files, below the feed's folder."""
    return f"{quote(target.name.database, safe=' ')}/{quote(target.name.table, safe=' ')}"


def prefix_of(mark: BatchMark) -> str:
    """Return the prefix of a batch's file names. They sort by batch until the pipeline is reset."""
    application = hashlib.sha256(mark.application.encode()).hexdigest()[:8]
    return f"{application}-{mark.number:012}"


def _manifest_of(mark: BatchMark) -> str:
    return f"{mark.number:012}.json"


def _is_published(manifests: Folder, mark: BatchMark) -> bool:
    """Return whether a batch has its manifest. Raises StateOutdated if a later batch also has a manifest."""
    # The folder grows with every batch, so list it only for a batch that seems to be repeated.
    return _is_there(manifests, _manifest_of(mark)) and is_repeated(mark, _last_number(manifests))


def _last_number(manifests: Folder) -> int | None:
    """Return the number of the last batch with a manifest, None if there is none."""
    selector = pyarrow.fs.FileSelector(manifests.path, allow_not_found=True)
    names = [file.base_name for file in manifests.filesystem.get_file_info(selector)]
    numbers = [int(name.removesuffix(".json")) for name in names if _MANIFEST.fullmatch(name)]
    return max(numbers, default=None)


def _staged_entry(target: Target, file: DataFile) -> list[Any]:
    return [path_of(target), file.path, file.rows, file.bytes]


def _agree(known: pyarrow.DataType, wanted: pyarrow.DataType) -> bool:
    """Return whether a file's type equals a wanted type, ignoring Parquet's names of nested fields."""
    if pyarrow.types.is_nested(known):
        return bool(known.id == wanted.id)
    return bool(known == wanted)


def _known_schema(folder: Folder) -> pyarrow.Schema | None:
    if not folder.local:
        return _read_schema(folder) if _is_there(folder, _SCHEMA) else None
    try:
        written = os.stat(folder.file(_SCHEMA))
    except FileNotFoundError:
        return None
    # A batch of many small tables would spend more on reading their schemas than on writing their rows.
    stamp = written.st_ino, written.st_mtime_ns, written.st_size
    known = _schemas.get(folder.path)
    if known is None or known[0] != stamp:
        known = stamp, _read_schema(folder)
        if len(_schemas) >= _SCHEMAS_MAX:
            _schemas.clear()
        _schemas[folder.path] = known
    return known[1]


def _read_schema(folder: Folder) -> pyarrow.Schema:
    with folder.filesystem.open_input_file(folder.file(_SCHEMA)) as opened:
        return _schema_in(opened.read())


# Many tables of one definition, as of many tenants, have the same schema file.
@lru_cache(_DEFINITIONS_MAX)
def _schema_in(content: bytes) -> pyarrow.Schema:
    return parquet.read_schema(pyarrow.BufferReader(content))


@lru_cache(_DEFINITIONS_MAX)
def _schema_file(serialized: bytes) -> bytes:
    """Return the content of a schema file, for a serialized schema."""
    stream = pyarrow.BufferOutputStream()
    parquet.write_metadata(pyarrow.ipc.read_schema(pyarrow.py_buffer(serialized)), stream)
    content: bytes = stream.getvalue().to_pybytes()
    return content


def _is_there(folder: Folder, name: str) -> bool:
    file_info = folder.filesystem.get_file_info(folder.file(name))
    return bool(file_info.type == pyarrow.fs.FileType.File)


def _write_atomically(folder: Folder, name: str, write: Any) -> None:
    """Write a file that becomes visible only once it is complete and durable."""
    _write_beside(folder, name, write)
    _put_in_place([folder], name)


def _write_beside(folder: Folder, name: str, write: Any) -> None:
    """Write a file that `_put_in_place` will then make visible. On a disk, the file has a temporary name. In
    an object store, it has its final name, because object stores show a file only once it is closed.
    """
    first = _name_beside(name) if folder.local else name
    with folder.filesystem.open_output_stream(folder.file(first)) as stream:
        write(stream)


def _put_in_place(folders: Sequence[Folder], name: str) -> None:
    """Make the files that `_write_beside` wrote visible and durable, each of them atomically."""
    folders = [folder for folder in folders if folder.local]
    sync_paths(folder.file(_name_beside(name)) for folder in folders)
    for folder in folders:
        folder.filesystem.move(folder.file(_name_beside(name)), folder.file(name))
    _sync_names(folders)


def _name_beside(name: str) -> str:
    return f"_{name}.new"


def _sync_names(folders: Iterable[Folder]) -> None:
    """Make the names in local folders durable."""
    sync_paths(folder.path for folder in folders if folder.local)


class _TranslateErrors:
    """Translates file system exceptions into Penstock errors."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, problem: BaseException | None, trace: Any) -> None:
        if isinstance(problem, OSError | pyarrow.ArrowInvalid):
            local = "://" not in self._path or self._path.startswith("file://")
            raised: type[PenstockError] = (
                DiskFailed if local and isinstance(problem, OSError) else ConnectionLost
            )
            if isinstance(problem, pyarrow.ArrowInvalid):
                raised = OptionInvalid
            raise raised(
                f"the folder {self._path} cannot be used: {problem}", hint="See the sink's path"
            ) from problem
