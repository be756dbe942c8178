# SPDX-License-Identifier: Apache-2.0
"""The dead letter: rows that a step could not work on, exactly as they came, with position and reason.

It is a folder, or a URL of an object store. Each entry is one Arrow file: the rows of one table as the source
gave them, before every step, and in its schema what happened. The name of a file tells batch and part, so
that a batch that comes again writes the same files again.

An entry is replayed from its beginning, through the steps as they are by then. Into a sink that keeps a feed
its rows are written. Into one that keeps state they would be older than what is there by now: the pipeline is
asked to read their keys again instead.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute as compute
from pyarrow import fs

from penstock import _native
from penstock.changes import Changes, Origin, Target
from penstock.errors import DiskFailed, OptionInvalid, SchemaInvalid, SourceMissing
from penstock.model import TableName, quote_name
from penstock.pipeline.settings import PipelineSettings, StepSettings
from penstock.pipeline.state import PipelineState
from penstock.pipeline.step import Rejected, Step, through
from penstock.sinks.sink import BatchMark, Delivery, Receipt, Sink, Spread

_TOLD = b"penstock"
_SUFFIX = ".arrow"
_REPLAYED = "replayed"
_FOLDER_MODE, _FILE_MODE = 0o700, 0o600
# Rows that are put aside are held so far, then written.
_HELD_BYTES_MAX = 64 << 20
# A condition on keys is kept in the state, whose records are small.
_CONDITION_BYTES_MAX = 64 << 10


@dataclass(frozen=True)
class DeadLetter:
    """One entry: `rows` changes of a table that a step could not work on, and why.

    `position` is that of the first row, `error` the class of what was raised; `noted_us` when it was written,
    microseconds UTC since 1970.
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
        """Return what is shown of it, plain JSON values."""
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
    """What one task of one batch puts aside. Nothing is there before `finish`, unless it is a lot.

    `part` is the task's number, the same when the batch comes again; without `comes_again` nobody looks for
    what an earlier attempt left.
    """

    def __init__(self, folder: str, mark: BatchMark, part: int, *, comes_again: bool = True) -> None:
        self._comes_again = comes_again
        self._folder = _Folder(folder)
        self._mark = mark
        self._stem = f"{mark.generation}-{mark.number:012}-{part:06}-"
        self._held: list[tuple[Rejected, Changes]] = []
        self._bytes = 0
        self._files = 0
        self.rows = 0

    def add(self, rejected: Rejected, source: Changes) -> None:
        """Take rows that a step rejected, and the changes of the source that they came from."""
        if not rejected.kept:
            return
        exact = _rows_behind(rejected, source)
        self._held.append((rejected, exact))
        self._bytes += exact.rows.nbytes
        self.rows += len(exact)
        if self._bytes >= _HELD_BYTES_MAX:
            self._write()

    def finish(self) -> None:
        """Make what was taken durable, in place of what an earlier attempt at the batch left. Raises
        DiskFailed."""
        self._write()
        if self._comes_again:
            stale = [name for name in self._folder.names(self._stem) if name >= self._name(self._files)]
            self._folder.delete(stale)

    def _name(self, number: int) -> str:
        return f"{self._stem}{number:04}{_SUFFIX}"

    def _write(self) -> None:
        for rejected, exact in self._held:
            told = {
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
            self._folder.write(self._name(self._files), exact.rows, told)
            self._files += 1
        self._held, self._bytes = [], 0


def aside_of(
    steps: Sequence[StepSettings], folder: str, mark: BatchMark, part: int, *, comes_again: bool = True
) -> DeadLetterPart | None:
    """Return where a task puts rows aside, None where no step is told to."""
    wanted = any(getattr(one.settings, "on_error", None) == "dead_letter" for one in steps)
    return DeadLetterPart(folder, mark, part, comes_again=comes_again) if wanted else None


def _rows_behind(rejected: Rejected, source: Changes) -> Changes:
    """Return the source's own rows of the changes that were rejected, both images of updates."""
    wanted = _identities(rejected.changes.rows)
    mask = compute.is_in(_identities(source.rows), value_set=wanted.unique())
    return source.with_rows(source.rows.filter(mask))


def _identities(rows: pyarrow.RecordBatch) -> pyarrow.Array:
    """Return what tells the changes of a table apart: commit version and number within the commit. Rows of a
    load have one version, and are told apart by their number."""
    numbers = compute.struct_field(rows.column("_metadata"), "row").cast(pyarrow.string())
    versions = rows.column("_commit_version").cast(pyarrow.string())
    return compute.binary_join_element_wise(versions, numbers, "/")


# --- Looking, and sending again -------------------------------------------------------------


def dead_letters(settings: PipelineSettings) -> list[DeadLetter]:
    """Return what a pipeline has put aside and nobody replayed, the oldest first. Raises DiskFailed."""
    folder = _Folder(settings.dead_letter)
    return [folder.entry(name) for name in folder.names("")]


def rows_of_letter(settings: PipelineSettings, name: str) -> Changes:
    """Return the rows of an entry, as the source gave them. Raises SourceMissing, DiskFailed."""
    return _Folder(settings.dead_letter).changes(name)


@dataclass(frozen=True)
class Replayed:
    """What became of one entry: rows that were `written`, rows whose keys the pipeline is to `read_again`,
    and rows that were `rejected` and put aside once more."""

    name: str
    written: int = 0
    read_again: int = 0
    rejected: int = 0


def replay(settings: PipelineSettings, names: Sequence[str] = ()) -> Iterator[Replayed]:
    """Send entries again, all or those that are named, and yield what became of each.

    An entry that was sent goes to the folder `replayed` in the dead letter. One that dies in between is sent
    again under the same number, which sinks that are exactly once recognise. Raises SourceMissing for a name
    that is not there, OptionInvalid where rows of a sink that keeps state have no key to read them by.
    """
    folder = _Folder(settings.dead_letter)
    known = folder.names("")
    for name in names:
        if name not in known:
            raise SourceMissing(
                f"the dead letter has no entry {name!r}", hint="penstock pipelines dead-letters lists them"
            )
    sink, steps = settings.make_sink(), settings.make_steps()
    for name in names or known:
        changes = folder.changes(name)
        if _overwrites(sink):
            done = Replayed(name, read_again=_ask_for(settings, folder.entry(name), changes))
        else:
            done = _sent(settings, sink, steps, name, changes)
        folder.move(name, _REPLAYED)
        yield done


def _overwrites(sink: Sink) -> bool:
    """Tell whether what is written takes the place of what is there, so that old rows must not come late."""
    in_order = sink.spread is not Spread.RANGES
    return sink.keeps_state or (sink.delivery is Delivery.IDEMPOTENT and in_order)


def _ask_for(settings: PipelineSettings, letter: DeadLetter, changes: Changes) -> int:
    """Ask the pipeline to read the keys of some rows again; return how many rows had keys."""
    key = changes.target.primary_key
    if not key:
        raise OptionInvalid(
            f"{letter.table} has no primary key to read its rows again by",
            hint=f"penstock resnapshot reads the whole table: penstock resnapshot FILE {letter.table}",
        )
    before = [f"{' AND ' if place else '('}{quote_name(name)}=" for place, name in enumerate(key)]
    pieces = _native.sql_values(
        changes.rows.select(list(dict.fromkeys([*key, "_metadata"]))),
        list(key),
        before=before,
        between=" OR ",
        bytes_max=_CONDITION_BYTES_MAX,
    )
    state = PipelineState.open(settings.state, settings.name)
    try:
        for number, (_, condition) in enumerate(pieces):
            state.request_resnapshot(
                letter.instance,
                letter.table,
                condition.decode(),
                number=f"{letter.name.removesuffix(_SUFFIX)}-{number}",
            )
    finally:
        state.close()
    return len(changes)


def _sent(
    settings: PipelineSettings, sink: Sink, steps: Sequence[Step], name: str, changes: Changes
) -> Replayed:
    """Write the rows of an entry through the steps, as a batch of its own."""
    mark = BatchMark(settings.name, f"dead-letter/{name.removesuffix(_SUFFIX)}", 1)
    aside = DeadLetterPart(settings.dead_letter, mark_of_rest(mark), 0)
    written = rejected = 0
    receipt: Receipt | None = None
    writer = sink.open(mark, 0)
    try:
        for made in through(steps, changes):
            if isinstance(made, Rejected):
                aside.add(made, changes)
                rejected += len(made.changes)
                continue
            sink.prepare(made.target, settings.schema_changes)
            writer.write(made)
            written += len(made)
        aside.finish()
        receipt = writer.finish()
    finally:
        if receipt is None:
            writer.abort()
    sink.commit(mark, [receipt])
    return Replayed(name, written=written, rejected=rejected)


def mark_of_rest(mark: BatchMark) -> BatchMark:
    """Return the mark under which rows of a replay are put aside once more."""
    return BatchMark(mark.pipeline, f"again-{time.time_ns() // 1000:x}", mark.number)


# --- Files ----------------------------------------------------------------------------------


def _open_private(path: str, flags: int) -> int:
    entry = os.open(path, flags, _FILE_MODE)
    # A file that an attempt before this one left keeps the mode it was made with.
    os.fchmod(entry, _FILE_MODE)
    return entry


class _Folder:
    """The folder of a dead letter, on a disk or in an object store."""

    def __init__(self, place: str) -> None:
        self.place = place
        self._is_disk = "://" not in place
        self._root: str = os.path.abspath(place)
        self._files = fs.LocalFileSystem()
        try:
            if not self._is_disk:
                self._files, self._root = fs.FileSystem.from_uri(place)
        except (pyarrow.ArrowInvalid, OSError) as problem:
            raise OptionInvalid(
                f"dead_letter: {problem}", hint="Write a folder, or a URL such as s3://bucket/folder"
            ) from problem

    def names(self, stem: str) -> list[str]:
        """Return the entries whose names begin so, sorted. Raises DiskFailed."""
        selector = fs.FileSelector(self._root, allow_not_found=True)
        found = self._told(lambda: self._files.get_file_info(selector))
        return sorted(
            one.base_name
            for one in found
            if one.is_file and one.base_name.startswith(stem) and one.base_name.endswith(_SUFFIX)
        )

    def write(self, name: str, rows: pyarrow.RecordBatch, told: Mapping[str, Any]) -> None:
        """Write an entry, whole or not at all. On a disk nobody but the owner can read it: it has what `mask`
        hides from the target."""
        schema = rows.schema.with_metadata({_TOLD: json.dumps(dict(told)).encode()})
        options = pyarrow.ipc.IpcWriteOptions(compression="zstd")

        def put() -> None:
            self._make_folder(self._root)
            place = f"{self._root}/{name}"
            # An object appears when it is closed; a file is renamed then.
            half = f"{place}.part" if self._is_disk else place
            with (
                open(half, "wb", opener=_open_private)
                if self._is_disk
                else self._files.open_output_stream(half) as out,
                pyarrow.ipc.new_file(out, schema, options=options) as writer,
            ):
                writer.write_batch(rows.replace_schema_metadata(schema.metadata))
            if half != place:
                self._files.move(half, place)

        self._told(put)

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
            self._told(lambda name=name: self._files.delete_file(f"{self._root}/{name}"))

    def move(self, name: str, below: str) -> None:
        """Move an entry to a folder inside."""

        def put() -> None:
            self._make_folder(f"{self._root}/{below}")
            self._files.move(f"{self._root}/{name}", f"{self._root}/{below}/{name}")

        self._told(put)

    def _make_folder(self, place: str) -> None:
        if self._is_disk:
            os.makedirs(os.path.dirname(place), exist_ok=True)
            Path(place).mkdir(_FOLDER_MODE, exist_ok=True)
        else:
            self._files.create_dir(place, recursive=True)

    def _read(self, name: str) -> tuple[DeadLetter, pyarrow.Table]:
        def get() -> pyarrow.Table:
            with self._files.open_input_file(f"{self._root}/{name}") as file:
                return pyarrow.ipc.open_file(file).read_all()

        try:
            table = self._told(get)
        except pyarrow.ArrowInvalid as problem:
            raise SchemaInvalid(f"{self.place}/{name} is no entry of a dead letter: {problem}") from problem
        told = json.loads((table.schema.metadata or {}).get(_TOLD, b"null"))
        if told is None:
            raise SchemaInvalid(f"{self.place}/{name} is no entry of a dead letter")
        instance = table["_metadata"][0].as_py()["instance"] if table.num_rows else ""
        letter = DeadLetter(
            name=name,
            pipeline=told["pipeline"],
            table=TableName(*told["source"]),
            instance=instance,
            step=told["step"],
            error=told["error"],
            message=told["message"],
            position=told["position"],
            rows=told["rows"],
            noted_us=told["noted_us"],
            target=Target.from_json(told["target"]),
            origin=Origin(told["origin"]),
        )
        return letter, table

    def _told(self, work: Any) -> Any:
        try:
            return work()
        except FileNotFoundError as problem:
            raise SourceMissing(f"the dead letter {self.place} is missing a file: {problem}") from problem
        except pyarrow.ArrowInvalid:
            raise
        except OSError as problem:
            raise DiskFailed(f"the dead letter {self.place}: {problem}") from problem
