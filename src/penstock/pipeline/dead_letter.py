# SPDX-License-Identifier: Apache-2.0
"""The dead letter: rows that a step rejected, exactly as the source sent them, with position and reason.

It is a folder, or a URL of an object store. Each entry is one Arrow file. It holds the rows of one table as
they were before every step, and the reason in its schema metadata. The file name contains the batch and part
numbers, so a retried batch writes the same files again.

When an entry is replayed, its source rows pass through the steps that are configured at the time of the
replay. If the sink keeps a feed, the resulting rows are written. If the sink keeps state, the rows may be
older than the target's rows. In this case the rows are not written; instead, the pipeline is asked to read
rows with the same keys from the source again.
"""

import copy
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow
import pyarrow.compute as compute
from pyarrow import fs

from penstock import _native
from penstock.changes import Changes, Origin, Target
from penstock.errors import DiskFailed, OptionInvalid, SchemaInvalid, SourceMissing
from penstock.model import TableName, quote_name
from penstock.pipeline.condition_text import condition_text
from penstock.pipeline.settings import PipelineSettings, StepSettings
from penstock.pipeline.state import PipelineState
from penstock.pipeline.step import Rejected, Step, run_steps
from penstock.sinks.sink import BatchMark, Delivery, Receipt, Sink, Spread

_DESCRIPTION_KEY = b"penstock"
_SUFFIX = ".arrow"
_REPLAYED = "replayed"
_PURGED = "purged"
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
# Rejected rows are buffered up to this size, then written.
_BUFFERED_BYTES_MAX = 64 << 20
# A condition on keys is stored in the state, whose records are small.
_CONDITION_BYTES_MAX = 64 << 10


@dataclass(frozen=True)
class DeadLetter:
    """One entry: `rows` changes of one table that a step rejected, and the reason.

    `position` is the position of the first row. `error` is the class of the exception. `noted_us` is when the
    entry was written, in microseconds since 1970, UTC.
    """

    name: str
    pipeline: str
    table: TableName
    instance: str
    step: str
    error: str
    message: str
    position: str | None
    rows: int
    noted_us: int
    target: Target
    origin: Origin

    def to_json(self) -> dict[str, Any]:
        """Return the fields to display, as plain JSON values."""
        return {
            "name": self.name,
            "table": str(self.table),
            "instance": self.instance,
            "step": self.step,
            "error": self.error,
            "message": self.message,
            "position": self.position,
            "rows": self.rows,
            "noted_us": self.noted_us,
        }


class DeadLetterPart:
    """Writes the rows that one task of a batch rejects.

    A few rows are buffered until `finish`. `part` is the task's number, which is the same when the batch is
    retried.
    """

    def __init__(self, folder: str, mark: BatchMark, part: int) -> None:
        self._folder = _Folder(folder)
        self._mark = mark
        self._stem = f"{mark.generation}-{mark.number:012}-{part:06}-"
        self._buffered: list[tuple[Rejected, Changes]] = []
        self._buffered_bytes = 0
        self._files = 0
        self.rows = 0

    def add(self, rejected: Rejected, source: Changes) -> None:
        """Add rows that a step rejected, and the source's changes that they came from."""
        if not rejected.kept:
            return
        exact = _source_rows(rejected, source)
        self._buffered.append((rejected, exact))
        self._buffered_bytes += exact.rows.nbytes
        self.rows += len(exact)
        if self._buffered_bytes >= _BUFFERED_BYTES_MAX:
            self._write()

    def finish(self) -> None:
        """Make the added rows durable, replacing the files of an earlier attempt. Raises DiskFailed."""
        self._write()
        stale = [name for name in self._folder.names(self._stem) if name >= self._name(self._files)]
        self._folder.delete(stale)

    def _name(self, number: int) -> str:
        return f"{self._stem}{number:04}{_SUFFIX}"

    def _write(self) -> None:
        for rejected, exact in self._buffered:
            description = {
                "pipeline": self._mark.pipeline,
                "source": [exact.source.database, exact.source.table],
                "origin": exact.origin.value,
                "target": exact.target.to_json(),
                "step": rejected.step,
                "error": type(rejected.error).__name__,
                "message": rejected.error.message,
                "position": rejected.error.position,
                "rows": len(exact),
                "noted_us": time.time_ns() // 1000,
            }
            self._folder.write(self._name(self._files), exact.rows, description)
            self._files += 1
        self._buffered, self._buffered_bytes = [], 0


def open_dead_letter(
    steps: Sequence[StepSettings], folder: str, mark: BatchMark, part: int
) -> DeadLetterPart | None:
    """Return the dead-letter part of a task, None if no step sends rows to the dead letter."""
    wanted = any(getattr(step.settings, "on_error", None) == "dead_letter" for step in steps)
    return DeadLetterPart(folder, mark, part) if wanted else None


def _source_rows(rejected: Rejected, source: Changes) -> Changes:
    """Return the rejected changes as rows of the source, with both images of updates."""
    wanted = _identities(rejected.changes.rows)
    mask = compute.is_in(_identities(source.rows), value_set=wanted.unique())
    return source.with_rows(source.rows.filter(mask))


def _identities(rows: pyarrow.RecordBatch) -> pyarrow.Array:
    """Return what identifies the changes of a table: commit version and number within the commit.

    Rows of a full load share one version, so only their number differs.
    """
    numbers = compute.struct_field(rows.column("_metadata"), "row").cast(pyarrow.string())
    versions = rows.column("_commit_version").cast(pyarrow.string())
    return compute.binary_join_element_wise(versions, numbers, "/")


# --- Listing and replaying ------------------------------------------------------------------


def dead_letters(settings: PipelineSettings, *, replayed: bool = False) -> list[DeadLetter]:
    """Return the entries that were not replayed, or with `replayed` the entries that were, oldest first.
    Raises DiskFailed.
    """
    folder = _folder_of(settings, replayed=replayed)
    return [folder.entry(name) for name in folder.names("")]


def count_letters(settings: PipelineSettings) -> int:
    """Return the number of entries that were neither replayed nor purged. Raises DiskFailed."""
    return len(_folder_of(settings, replayed=False).names(""))


def rows_of_letter(settings: PipelineSettings, name: str, *, replayed: bool = False) -> Changes:
    """Return the rows of an entry, as the source sent them. Raises SourceMissing, DiskFailed.

    Only names of listed entries are accepted, so that nobody can read another file by passing a path as the
    name.
    """
    folder = _folder_of(settings, replayed=replayed)
    folder.select([name])
    return folder.changes(name)


def _folder_of(settings: PipelineSettings, *, replayed: bool) -> "_Folder":
    folder = _Folder(settings.dead_letter)
    return folder.below(_REPLAYED) if replayed else folder


@dataclass(frozen=True)
class Replayed:
    """The outcome of replaying an entry, as numbers of rows.

    `written` rows were written, `read_again` rows have keys that the pipeline will read again, and `rejected`
    rows were rejected again.
    """

    name: str
    written: int = 0
    read_again: int = 0
    rejected: int = 0


def replay(settings: PipelineSettings, names: Sequence[str] = ()) -> Iterator[Replayed]:
    """Replay all entries, or the named ones, and yield the outcome of each.

    A replayed entry is moved to the folder `replayed` inside the dead letter. An entry interrupted halfway is
    replayed under the same number, which sinks with exactly-once delivery recognise. Raises SourceMissing for
    an unknown name, and OptionInvalid if rows for a sink that keeps state have no primary key.
    """
    folder = _Folder(settings.dead_letter)
    selected = folder.select(names)
    sink, steps = settings.make_sink(), settings.make_steps()
    for name in selected:
        changes = folder.changes(name)
        if overwrites(sink):
            outcome = Replayed(name, read_again=_request_reread(settings, folder.entry(name), changes))
        else:
            outcome = _replay_entry(settings, sink, steps, name, changes)
        folder.move(name, _REPLAYED)
        yield outcome


def overwrites(sink: Sink) -> bool:
    """Return whether a write replaces existing rows. If so, old rows must not be written late."""
    in_order = sink.spread is not Spread.RANGES
    return sink.keeps_state or (sink.delivery is Delivery.IDEMPOTENT and in_order)


def _request_reread(settings: PipelineSettings, letter: DeadLetter, changes: Changes) -> int:
    """Ask the pipeline to read the rows with these keys again, and return the number of rows."""
    key = changes.target.primary_key
    if not key:
        raise OptionInvalid(
            f"{letter.table} has no primary key to read its rows again by",
            hint=f"penstock resnapshot reads the whole table: penstock resnapshot FILE {letter.table}",
        )
    before = [f"{' AND ' if index else '('}{quote_name(name)}=" for index, name in enumerate(key)]
    pieces = _native.sql_values(
        changes.rows.select(list(dict.fromkeys([*key, "_metadata"]))),
        list(key),
        before=before,
        between=" OR ",
        bytes_max=_CONDITION_BYTES_MAX,
    )
    owner = next(
        part
        for part in settings.each_shard()
        if part.source(letter.instance).tables.matches(letter.table.database, letter.table.table)
    )
    with closing(PipelineState.of(owner)) as state:
        for number, (_, condition) in enumerate(pieces):
            state.request_resnapshot(
                letter.instance,
                letter.table,
                condition_text(condition),
                number=f"{letter.name.removesuffix(_SUFFIX)}-{number}",
            )
    return len(changes)


def _replay_entry(
    settings: PipelineSettings, sink: Sink, steps: Sequence[Step], name: str, changes: Changes
) -> Replayed:
    """Write the rows of an entry through the steps, as a separate batch."""
    mark = BatchMark(settings.name, f"dead-letter/{name.removesuffix(_SUFFIX)}", 1)
    aside = DeadLetterPart(settings.dead_letter, mark_for_rejects(mark), 0)
    written = rejected = 0
    receipt: Receipt | None = None
    writer = sink.open(mark, 0)
    try:
        for changed in run_steps(steps, changes):
            if isinstance(changed, Rejected):
                aside.add(changed, changes)
                rejected += len(changed.changes)
                continue
            sink.prepare(changed.target, settings.schema_changes)
            writer.write(changed)
            written += len(changed)
        aside.finish()
        receipt = writer.finish()
    finally:
        if receipt is None:
            writer.abort()
    sink.commit(mark, [receipt])
    return Replayed(name, written=written, rejected=rejected)


def mark_for_rejects(mark: BatchMark) -> BatchMark:
    """Return the mark under which rows rejected during a replay are written."""
    return BatchMark(mark.pipeline, f"again-{time.time_ns() // 1000:x}", mark.number)


# --- Purging --------------------------------------------------------------------------------


def purgeable_letters(
    settings: PipelineSettings,
    names: Sequence[str] = (),
    *,
    before_us: int | None = None,
    replayed: bool = False,
) -> list[DeadLetter]:
    """Return the entries to purge, oldest first. If names are given, only entries with these names are
    returned. If a time is given, only entries written before it are returned.

    With `replayed` only replayed entries are returned, otherwise only entries that were not replayed. Raises
    SourceMissing for an unknown name, DiskFailed.
    """
    folder = _folder_of(settings, replayed=replayed)
    letters = [folder.entry(name) for name in folder.select(names)]
    return [letter for letter in letters if before_us is None or letter.noted_us < before_us]


def purge(
    settings: PipelineSettings,
    letters: Sequence[DeadLetter],
    *,
    replayed: bool = False,
    user: str,
    reason: str = "",
) -> None:
    """Delete entries and their rows for good.

    Before the first entry is deleted, a record of who purged what is written to the folder `purged` inside
    the dead letter. The record contains neither row values nor error messages, which may quote values. Raises
    SourceMissing if an entry no longer exists, and DiskFailed.
    """
    if not letters:
        return
    folder = _folder_of(settings, replayed=replayed)
    names = folder.select([letter.name for letter in letters])
    now_us = time.time_ns() // 1000
    shown = ("name", "table", "step", "error", "position", "rows", "noted_us")
    record = {
        "purged_us": now_us,
        "user": user,
        "reason": reason,
        "pipeline": settings.name,
        "replayed": replayed,
        "entries": [{name: letter.to_json()[name] for name in shown} for letter in letters],
    }
    records = _Folder(settings.dead_letter).below(_PURGED)
    records.write_record(f"{now_us}-{uuid.uuid4().hex[:6]}.json", record)
    folder.delete(names)


# --- Files ----------------------------------------------------------------------------------


def _open_private(path: str, flags: int) -> int:
    entry = os.open(path, flags, _FILE_MODE)
    # A file left by an earlier attempt keeps its old mode.
    os.fchmod(entry, _FILE_MODE)
    return entry


class _Folder:
    """The folder of a dead letter, on a disk or in an object store."""

    def __init__(self, location: str) -> None:
        self.location = location
        self._is_disk = "://" not in location
        self._root: str = os.path.abspath(location)
        self._files = fs.LocalFileSystem()
        try:
            if not self._is_disk:
                self._files, self._root = fs.FileSystem.from_uri(location)
        except (pyarrow.ArrowInvalid, OSError) as problem:
            raise OptionInvalid(
                f"dead_letter: {problem}", hint="Write a folder, or a URL such as s3://bucket/folder"
            ) from problem

    def names(self, stem: str) -> list[str]:
        """Return the sorted names of the entries whose names start with a stem. Raises DiskFailed."""
        selector = fs.FileSelector(self._root, allow_not_found=True)
        files = self._translate_errors(lambda: self._files.get_file_info(selector))
        return sorted(
            file.base_name
            for file in files
            if file.is_file and file.base_name.startswith(stem) and file.base_name.endswith(_SUFFIX)
        )

    def select(self, names: Sequence[str]) -> list[str]:
        """Return the named entries, or all if none is named. Raises SourceMissing for an unknown name."""
        known = self.names("")
        for name in names:
            if name not in known:
                raise SourceMissing(
                    f"the dead letter {self.location} has no entry {name!r}",
                    hint="penstock pipelines dead-letters lists the entries, and those that were replayed"
                    " with --replayed",
                )
        return list(names) or known

    def below(self, name: str) -> Self:
        """Return a subfolder, which need not exist."""
        folder = copy.copy(self)
        folder.location, folder._root = f"{self.location}/{name}", f"{self._root}/{name}"
        return folder

    def write(self, name: str, rows: pyarrow.RecordBatch, description: Mapping[str, Any]) -> None:
        """Write an entry atomically.

        On a local disk, only the owner can read the entry, because it holds values that `mask` hides from the
        target.
        """
        schema = rows.schema.with_metadata({_DESCRIPTION_KEY: json.dumps(dict(description)).encode()})
        options = pyarrow.ipc.IpcWriteOptions(compression="zstd")

        def store(out: Any) -> None:
            with pyarrow.ipc.new_file(out, schema, options=options) as writer:
                writer.write_batch(rows.replace_schema_metadata(schema.metadata))

        self._store(name, store)

    def write_record(self, name: str, record: Mapping[str, Any]) -> None:
        """Write a JSON object atomically, readable by the owner alone."""
        self._store(name, lambda out: out.write(json.dumps(dict(record), ensure_ascii=False).encode()))

    def _store(self, name: str, write: Callable[[Any], object]) -> None:
        def store() -> None:
            self._make_folder(self._root)
            path = f"{self._root}/{name}"
            # An object becomes visible when it is closed, a file when it is renamed.
            partial = f"{path}.part" if self._is_disk else path
            with (
                open(partial, "wb", opener=_open_private)
                if self._is_disk
                else self._files.open_output_stream(partial) as out
            ):
                write(out)
            if partial != path:
                self._files.move(partial, path)

        self._translate_errors(store)

    def entry(self, name: str) -> DeadLetter:
        """Return an entry without its rows."""
        return self._read(name)[0]

    def changes(self, name: str) -> Changes:
        """Return the rows of an entry."""
        letter, table = self._read(name)
        rows = table.combine_chunks().to_batches()[0].replace_schema_metadata(None)
        return Changes(letter.target, rows, letter.table, letter.origin)

    def delete(self, names: Sequence[str]) -> None:
        """Delete entries."""
        for name in names:
            self._translate_errors(lambda name=name: self._files.delete_file(f"{self._root}/{name}"))

    def move(self, name: str, below: str) -> None:
        """Move an entry to a subfolder."""

        def store() -> None:
            self._make_folder(f"{self._root}/{below}")
            self._files.move(f"{self._root}/{name}", f"{self._root}/{below}/{name}")

        self._translate_errors(store)

    def _make_folder(self, path: str) -> None:
        if self._is_disk:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Path(path).mkdir(_FOLDER_MODE, exist_ok=True)
        else:
            self._files.create_dir(path, recursive=True)

    def _read(self, name: str) -> tuple[DeadLetter, pyarrow.Table]:
        def get() -> pyarrow.Table:
            with self._files.open_input_file(f"{self._root}/{name}") as file:
                return pyarrow.ipc.open_file(file).read_all()

        try:
            table = self._translate_errors(get)
        except pyarrow.ArrowInvalid as problem:
            raise SchemaInvalid(
                f"{self.location}/{name} is no entry of a dead letter: {problem}"
            ) from problem
        description = json.loads((table.schema.metadata or {}).get(_DESCRIPTION_KEY, b"null"))
        if description is None:
            raise SchemaInvalid(f"{self.location}/{name} is no entry of a dead letter")
        instance = table["_metadata"][0].as_py()["instance"] if table.num_rows else ""
        letter = DeadLetter(
            name=name,
            pipeline=description["pipeline"],
            table=TableName(*description["source"]),
            instance=instance,
            step=description["step"],
            error=description["error"],
            message=description["message"],
            position=description["position"],
            rows=description["rows"],
            noted_us=description["noted_us"],
            target=Target.from_json(description["target"]),
            origin=Origin(description["origin"]),
        )
        return letter, table

    def _translate_errors(self, work: Any) -> Any:
        try:
            return work()
        except FileNotFoundError as problem:
            raise SourceMissing(f"the dead letter {self.location} is missing a file: {problem}") from problem
        except pyarrow.ArrowInvalid:
            raise
        except OSError as problem:
            raise DiskFailed(f"the dead letter {self.location}: {problem}") from problem
