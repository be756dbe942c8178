# SPDX-License-Identifier: Apache-2.0
"""The table definitions in force at each position of the log, stored next to its segments.

    <folder>/schemas/<commit version>.schemas     one generation: a snapshot and the changes after it

A generation consists of text lines, each with a CRC32: first the definitions in force at a position, then the
later statements, and definitions that were read elsewhere because a statement was not sufficient. Each line
has its position, so a snapshot and the lines after it yield the definitions at any position. A line torn by a
crash is ignored; its statement is received again with the events. A new generation is started by `seed`, and
when the lines after a snapshot outgrow the snapshot. Old generations are removed when the log no longer
reaches back to them.

Definitions that are read elsewhere arrive after the position from which they apply. `settle` inserts them at
that position and rebuilds the later snapshots. A crash in between may leave tables in doubt, but never with a
wrong definition.

The history that the caller builds from a snapshot (`Definitions`) interprets the statements.
"""

import json
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from penstock.errors import PenstockError, PositionInvalid, SchemaInvalid, SchemaUnknown
from penstock.limits import MIB
from penstock.logstore.disk import AppendFile, Disk, LocalDisk
from penstock.model import Position, StatementSession, TableName

FOLDER = "schemas"
SUFFIX = ".schemas"
FORMAT = 1

# A generation ends when its lines exceed this size, or the size of its snapshot if the snapshot is larger.
LINES_BYTES_MAX = 4 * MIB
# A longer statement is not stored. Instead, a new generation stores the resulting table definitions.
STATEMENT_BYTES_MAX = MIB

_CRC_DIGITS = 8


class Definitions(Protocol):
    """The interface of the table definitions that a generation is loaded into: `SchemaHistory`, or a
    compatible class.
    """

    def defines(self, text: str, database: str, session: StatementSession) -> bool:
        """Return whether a statement can change a table definition."""

    def apply(
        self, text: str, database: str, position: Position, session: StatementSession
    ) -> set[TableName]:
        """Apply a statement; return the tables that it changed or put in doubt."""

    def take(self, definition: dict[str, Any], position: Position) -> None:
        """Store a table definition that was read elsewhere and is valid from a position on."""

    def refuse(self, name: TableName, why: str) -> None:
        """Record that the definition of a table in doubt cannot be determined."""

    def suspect(self, name: TableName, position: Position, reason: str) -> None:
        """Mark the definition of a table as unknown from a position on, until it is read again."""

    def date_doubts(self, position: Position) -> None:
        """Move doubts that begin before a position, or at an unknown position, to that position."""

    def survey(self) -> None:
        """Record that the definition of every table of the server has been stored or refused."""

    def in_force(self, position: Position | None = None, name: TableName | None = None) -> dict[str, Any]:
        """Return the table definitions in force at a position as JSON. Without a position, return the newest
        ones.
        """


class Settling(Protocol):
    """Resolves doubtful table definitions of a log that is being captured, possibly by another process."""

    def wait(self, name: TableName, since: Position, seconds: float, *, again: bool = False) -> None:
        """Wait until a table's doubt is settled or refused, or the timeout expires."""

    def give(self, name: TableName, since: Position, definition: dict[str, Any]) -> None:
        """Store a table definition supplied by an operator, valid from a position on.

        Raises SchemaUnknown, SchemaInvalid, ServerBusy.
        """


class Settler(Settling, Protocol):
    """Resolves doubtful table definitions of a log that this process captures."""

    def retire(self) -> threading.Thread:
        """Stop, so that another settler can take over; return the thread that may still be reading."""

    def listed(self) -> list[dict[str, Any]]:
        """Return the tables in doubt, as shown by the status."""


_Kept = TypeVar("_Kept", bound=Definitions)
_Answer = TypeVar("_Answer")


@dataclass
class _Generation:
    """One generation file: the position of its snapshot, the snapshot, and the valid lines after it.

    If a generation `continues` the previous generation, its snapshot is the result of the previous lines.
    """

    path: Path
    position: Position
    snapshot: dict[str, Any]
    continues: bool
    lines: list[tuple[Position, dict[str, Any]]]
    sound_bytes: int
    snapshot_bytes: int

    def upto(self, position: Position | None) -> list[tuple[Position, dict[str, Any]]]:
        if position is None:
            return self.lines
        return self.lines[: bisect_right(self.lines, position, key=lambda line: line[0])]

    def content(self) -> bytes:
        """Return the content of the file."""
        lines = [{"position": str(position), **line} for position, line in self.lines]
        return b"".join(map(encode_line, [_first(self.position, self.snapshot, self.continues), *lines]))


class SchemaLog(Generic[_Kept]):
    """The table definitions stored with one log. Thread-safe, but only one process may write.

    `read` builds a history from a snapshot: `SchemaHistory.from_json`, with a `reread` if a server can be
    queried. `earliest` returns where the log currently begins. When a new generation starts, generations that
    are needed only before that position are removed. Opening writes nothing. Raises SchemaInvalid for unknown
    files.
    """

    def __init__(
        self,
        folder: Path,
        read: Callable[[Any], _Kept],
        disk: Disk | None = None,
        *,
        earliest: Callable[[], Position | None] = lambda: None,
    ) -> None:
        self.folder = folder / FOLDER
        self._read = read
        self._disk = disk or LocalDisk()
        self._earliest = earliest
        self._lock = threading.Lock()
        self._loaded: tuple[int, _Generation] | None = None
        self._newest: _Kept | None = None
        self._file: AppendFile | None = None

    # --- Reading ------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        """Whether any definitions are stored."""
        return bool(self._names())

    @property
    def position(self) -> Position | None:
        """The position of the newest snapshot, statement or definition; None if nothing is stored."""
        with self._lock:
            newest = self._generation(None)
        if newest is None:
            return None
        return newest.lines[-1][0] if newest.lines else newest.position

    def at(self, position: Position | None = None) -> _Kept:
        """Return a separate history with the table definitions in force at a position, by default the newest
        position.

        A position before the first snapshot gets the first snapshot. Raises SchemaUnknown if nothing is
        stored.
        """
        with self._lock:
            return self._at(position)

    def in_force(self, position: Position | None = None, name: TableName | None = None) -> dict[str, Any]:
        """Return the table definitions of `at` as JSON that `read` accepts. If a table is named, return only
        its definition.
        """
        return self.at(position).in_force(position, name)

    def _at(self, position: Position | None) -> _Kept:
        generation = self._generation(position)
        if generation is None:
            raise SchemaUnknown(
                f"{self.folder} keeps no definitions",
                position=str(position) if position else None,
                hint="Give the tables' definitions: schemas",
            )
        return self._replay(generation, position)

    def _replay(self, generation: _Generation, position: Position | None) -> _Kept:
        history = self._read(generation.snapshot)
        if not generation.continues or generation.path == self._path(self._names()[0]):
            # A definition that was settled at an earlier position is not in this snapshot, so the doubt about
            # it begins here.
            history.date_doubts(generation.position)
        for line_position, line in generation.upto(position):
            _apply_line(history, line_position, line)
        return history

    def statements(self, since: Position, until: Position) -> list[tuple[Position, dict[str, Any]]] | None:
        """Return the statements that end in (since, until], each with its database and session.

        None if some are missing: the log has a gap there, or a statement was too long.
        """
        with self._lock:
            names, statements = self._names(), []
            first = self._generation(since)
            if first is None or since < first.position:
                return None
            for version in names[names.index(first.position.commit_version) :]:
                generation = self._load(version)
                if generation.position > until:
                    break
                if generation.position > since and not generation.continues:
                    return None
                statements += [line for line in generation.lines if since < line[0] <= until]
            return [(position, line) for position, line in statements if "text" in line]

    def generations(self) -> Iterator[tuple[_Kept, Mapping[Position, str]]]:
        """Yield the history of each stored generation, oldest first, with its statements by end position."""
        for version in self._names():
            with self._lock:
                try:
                    generation = self._load(version)
                except FileNotFoundError:
                    # Retention has removed the file in the meantime.
                    continue
                history = self._replay(generation, None)
                texts = {position: line["text"] for position, line in generation.lines if "text" in line}
            yield history, texts

    def with_newest(self, use: Callable[[_Kept], _Answer]) -> _Answer:
        """Call a function with the newest table definitions and return its result. The function must neither
        keep nor change them.
        """
        with self._lock:
            self._newest = self._newest or self._at(None)
            return use(self._newest)

    # --- Writing ------------------------------------------------------------------------------

    def seed(self, history: _Kept, position: Position) -> None:
        """Start a generation. These table definitions hold from a position on and replace any later ones."""
        with self._lock:
            self._cut(position)
            self._begin(history.in_force(position), position)

    def settle(
        self, position: Position, lines: Sequence[dict[str, Any]], *, received: Position | None = None
    ) -> None:
        """Durably insert table definitions that were not learned from logged statements. They apply from
        `position` on.

        Without lines, only rebuild the later snapshots. Lines are `definition_line`, `refusal_line` and
        SURVEYED. `received` is the end of the log: past that end, statements that have not arrived yet would
        be treated as known. Raises PositionInvalid past the end, and SchemaUnknown before the first stored
        position.
        """
        if received is not None and position > received:
            raise PositionInvalid(f"the log was received up to {received} only", position=str(position))
        with self._lock:
            generation = self._generation(position)
            if generation is None or position < generation.position:
                raise SchemaUnknown(
                    f"{self.folder} keeps no definitions as early as that",
                    position=str(position),
                    hint=f"The first position is {generation.position}" if generation else None,
                )
            self._close()
            self._newest = None
            names = self._names()
            index = len(generation.upto(position))
            if generation.path == self._path(names[-1]) and index == len(generation.lines):
                content = b"".join(encode_line({"position": str(position), **line}) for line in lines)
                self._append(generation, content)
                self._loaded = None
                return
            # Drop the cached generation: a change that fails to be written must not stay in memory.
            self._loaded = None
            generation.lines[index:index] = [(position, dict(line)) for line in lines]
            self._rewrite(generation)
            for version in names[names.index(generation.position.commit_version) + 1 :]:
                later = self._load(version)
                if not later.continues:
                    break
                self._loaded = None
                later.snapshot = self._replay(generation, None).in_force(later.position)
                self._rewrite(later)
                generation = later

    def apply(
        self, text: str, database: str, position: Position, session: StatementSession | None = None
    ) -> set[TableName]:
        """Durably apply a statement that ends at a position; return the tables that it changed.

        A statement at or before the newest position is already known and is skipped. Raises SchemaUnknown
        before the first seed.
        """
        with self._lock:
            newest = self._generation(None)
            if newest is not None and position <= (newest.lines[-1][0] if newest.lines else newest.position):
                return set()
            # Drop the cached history, so that a failure midway does not lead to applying the statement twice.
            history, self._newest = self._newest or self._at(None), None
            assert newest is not None, "there is a generation to have read"
            changed = set()
            session = session or StatementSession()
            if history.defines(text, database, session):
                changed = history.apply(text, database, position, session)
                line = {"database": database, "text": text, **session.to_json()}
                self._keep(newest, history, line, position)
            self._newest = history
            return changed

    def cut(self, position: Position) -> None:
        """Remove the entries for later positions, because the log lost its end or a new epoch begins
        there.
        """
        with self._lock:
            self._cut(position)

    def trim(self, earliest: Position) -> None:
        """Remove the generations that no position from `earliest` on needs."""
        with self._lock:
            self._trim(earliest)

    def close(self) -> None:
        """Close the open file. The log can be used again."""
        with self._lock:
            self._close()

    # --- Files, with the lock held --------------------------------------------------------------

    def _names(self) -> list[int]:
        names = [name.removesuffix(SUFFIX) for name in self._disk.list(self.folder) if name.endswith(SUFFIX)]
        return sorted(int(name) for name in names if name.isdecimal())

    def _path(self, version: int) -> Path:
        return self.folder / f"{version:019d}{SUFFIX}"

    def _generation(self, position: Position | None) -> _Generation | None:
        names = self._names()
        if not names:
            return None
        version = names[-1]
        if position is not None:
            version = names[max(bisect_right(names, position.commit_version) - 1, 0)]
            # Two positions less than 16 bytes apart share a commit version.
            if position < self._load(version).position and version > names[0]:
                version = names[names.index(version) - 1]
        return self._load(version)

    def _load(self, version: int) -> _Generation:
        path = self._path(version)
        size = self._disk.size(path)
        if self._loaded is None or self._loaded[1].path != path or self._loaded[0] != size:
            self._loaded = size, _parse(path, self._disk.read(path))
        return self._loaded[1]

    def _begin(self, snapshot: dict[str, Any], position: Position, *, continues: bool = False) -> None:
        self._close()
        self._disk.make_folder(self.folder)
        first = encode_line(_first(position, snapshot, continues))
        self._disk.write_atomic(self._path(position.commit_version), first)
        self._newest, self._loaded = None, None
        earliest = self._earliest()
        if earliest is not None:
            self._trim(earliest)

    def _keep(self, newest: _Generation, history: _Kept, line: dict[str, Any], position: Position) -> None:
        """Append a line to the newest generation, and start a new one if the lines outgrow the snapshot."""
        content = encode_line({"position": str(position), **line})
        if len(content) > STATEMENT_BYTES_MAX:
            history.date_doubts(position)
            self._begin(history.in_force(position), position)
            return
        self._append(newest, content)
        newest.lines.append((position, line))
        newest.sound_bytes += len(content)
        self._loaded = newest.sound_bytes, newest
        if newest.sound_bytes - newest.snapshot_bytes > max(LINES_BYTES_MAX, newest.snapshot_bytes):
            self._begin(history.in_force(position), position, continues=True)

    def _rewrite(self, generation: _Generation) -> None:
        self._disk.write_atomic(generation.path, generation.content())
        self._loaded = None

    def _append(self, generation: _Generation, content: bytes) -> None:
        file = self._file = self._file or self._disk.append_open(generation.path)
        if file.size != generation.sound_bytes:
            # A crash tore the last line. Cut the line off, so that the new line is not joined to it.
            file.truncate(generation.sound_bytes)
        file.write([content])
        file.sync()

    def _cut(self, position: Position) -> None:
        self._close()
        self._newest, self._loaded = None, None
        removed = False
        for version in reversed(self._names()):
            generation = self._load(version)
            if generation.position <= position:
                kept = generation.upto(position)
                if len(kept) < len(generation.lines):
                    self._loaded = None
                    generation.lines = kept
                    self._rewrite(generation)
                break
            self._disk.remove(generation.path)
            removed = True
        if removed:
            self._disk.sync_folder(self.folder)
        self._loaded = None

    def _trim(self, earliest: Position) -> None:
        names = self._names()
        needed = max(bisect_right(names, earliest.commit_version) - 1, 0)
        for version in names[:needed]:
            self._disk.remove(self._path(version))
        if needed:
            self._loaded = None
            self._disk.sync_folder(self.folder)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


SURVEYED: dict[str, Any] = {"surveyed": True}


def definition_line(definition: dict[str, Any]) -> dict[str, Any]:
    """Return the line that stores a table definition, in the JSON form of the schema history."""
    return {"definition": definition}


def doubt_line(name: TableName, reason: str) -> dict[str, Any]:
    """Return the line that puts a table in doubt."""
    return {"doubt": reason, "table": str(name)}


def refusal_line(name: TableName, why: str) -> dict[str, Any]:
    """Return the line of a table whose definition cannot be determined."""
    return {"refusal": why, "table": str(name)}


def _apply_line(history: Definitions, position: Position, line: dict[str, Any]) -> None:
    """Apply one line."""
    if "text" in line:
        history.apply(line["text"], line["database"], position, StatementSession.from_json(line))
    elif "definition" in line:
        history.take(line["definition"], position)
    elif "doubt" in line:
        history.suspect(TableName.parse(line["table"]), position, line["doubt"])
    elif "refusal" in line:
        history.refuse(TableName.parse(line["table"]), line["refusal"])
    else:
        history.survey()


def _first(position: Position, snapshot: dict[str, Any], continues: bool) -> dict[str, Any]:
    first = {"format": FORMAT, "position": str(position), "history": snapshot}
    return {**first, "continues": True} if continues else first


def encode_line(value: dict[str, Any]) -> bytes:
    """Return a JSON object as a line with its CRC32."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return b"%08x %b\n" % (zlib.crc32(text), text)


def _parse(path: Path, content: bytes) -> _Generation:
    """Parse a generation. Raises SchemaInvalid if it has no snapshot or an unknown format."""
    try:
        lines = list(sound_lines(content))
        first, snapshot_bytes = lines[0]
        if first["format"] != FORMAT:
            raise SchemaInvalid(
                f"{path} has format {first['format']}, this program reads {FORMAT}",
                hint="Read it with the version of penstock that wrote it, or a newer one",
            )
        changes = [(Position.parse(line.pop("position")), line) for line, _ in lines[1:]]
        return _Generation(
            path,
            Position.parse(first["position"]),
            first["history"],
            first.get("continues", False),
            changes,
            lines[-1][1],
            snapshot_bytes,
        )
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, PenstockError) as problem:
        if isinstance(problem, SchemaInvalid):
            raise
        raise SchemaInvalid(
            f"{path} is damaged: its snapshot cannot be read ({problem!r})",
            hint=f"Move {path} away: the definitions are read from the server at the next start",
        ) from problem


def sound_lines(content: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each line before the first torn or damaged line, with the offset of its end."""
    start = 0
    while (end := content.find(b"\n", start)) >= 0:
        line = content[start:end]
        text = line[_CRC_DIGITS + 1 :]
        if line[:_CRC_DIGITS] != b"%08x" % zlib.crc32(text):
            return
        start = end + 1
        yield json.loads(text), start
