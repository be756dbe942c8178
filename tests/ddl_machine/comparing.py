# SPDX-License-Identifier: Apache-2.0
"""Reads the log of a recorded run and compares every table definition and every value with those of the
server.
"""

import math
import struct
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from penstock.errors import SchemaUnknown, StreamError
from penstock.model import Column, Position, TableName, TablePatterns, TableSchema, quote_name
from penstock.schema.history import SchemaHistory
from penstock.schema.table_definition import TableDefinition
from penstock.source.bounds import Bounds
from penstock.source.reading import Selection, read_range
from penstock.source.source import SourceOptions, open_source
from tests.ddl_machine.recording import Recording, RowChange

_SYSTEM_COLUMNS = ("_change_type", "_commit_version", "_commit_timestamp", "_metadata")


@dataclass
class Outcome:
    """The outcome of a comparison: the differences, and the statements that left table definitions in
    doubt.
    """

    differences: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class WatchedHistory(SchemaHistory):
    """A schema history that counts its questions to the server, and answers them from the recording.

    Every definition that is not in doubt must equal the server's own definition.
    """

    def __init__(self, recording: Recording, outcome: Outcome) -> None:
        super().__init__(recording.defaults)
        self._recording = recording
        self._outcome = outcome
        self._in_doubt: set[TableName] = set()

    def reread(self, name: TableName, position: Position) -> TableSchema:
        """Return the definition from the recording, as a server would report it."""
        definition = self._recording.definitions_at(position).get(name)
        if definition is None:
            raise SchemaUnknown(f"the server has no table {name}", position=str(position))
        self._outcome.counts["questions"] += 1
        self.take(definition.to_json(), position)
        self._in_doubt.discard(name)
        return definition.schema

    def apply(self, text: str, database: str, position: Position, *more: Any) -> set[TableName]:
        """Apply a statement, and compare the resulting definitions with the recording."""
        self._outcome.counts["statements"] += 1
        moved = super().apply(text, database, position, *more)
        definitions = self._recording.definitions_after(position)
        in_doubt = {name for name in definitions if self.needs_reread(name)}
        if in_doubt - self._in_doubt:
            self._outcome.doubts.append(f"{sorted(map(str, in_doubt - self._in_doubt))}: {text}")
        self._in_doubt = in_doubt
        for name, definition in definitions.items():
            self._compare(name, definition, text, position)
        return moved

    def _compare(self, name: TableName, definition: TableDefinition, text: str, position: Position) -> None:
        if self.needs_reread(name):
            return
        known = self.schema(name.database, name.table)
        expected = definition.schema
        if known is None:
            # The definition is queried from the server when the table's next row arrives.
            self._outcome.doubts.append(f"{name} is not known after {text}")
        elif any(_is_garbled(column.type_text) for column in known.columns):
            self._outcome.counts["definitions that the server cannot show"] += 1
        elif (_shown(known), known.primary_key) != (_shown(expected), expected.primary_key):
            extra = [column for column in known.columns if column not in expected.columns]
            missing = [column for column in expected.columns if column not in known.columns]
            keys = (
                (known.primary_key, expected.primary_key) if known.primary_key != expected.primary_key else ""
            )
            self._outcome.differences.append(
                f"{position}: {name} is {extra or [column.name for column in known.columns]}, on the server"
                f" {missing or [column.name for column in expected.columns]} {keys} after {text}"
            )
        else:
            self._outcome.counts["definitions compared"] += 1
            return
        # Continue with the server's definition, so that a difference is reported once, without its
        # consequences.
        self.take(definition.to_json(), position)


def compare(recording: Recording, files: Iterable[str]) -> Outcome:
    """Read the log of a run and return every difference from the server's answers."""
    outcome = Outcome()
    history = WatchedHistory(recording, outcome)
    source = open_source(SourceOptions.parse(list(files)))
    patterns = TablePatterns([f"{quote_name(database)}.*" for database in recording.databases])
    selection = Selection(patterns, bounds=Bounds())
    changes = recording.changes
    transactions: dict[int, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    try:
        for byte_range in source.split(recording.start, recording.end, range_bytes=1 << 40):
            for batch in read_range(source, byte_range, selection, history):
                for row in batch.to_arrow().to_pylist():
                    transactions[row["_commit_version"]].append((batch.table, row))
    except StreamError as problem:
        outcome.differences.append(f"stopped: {problem}")
        stop = Position.parse(problem.position or "")
        changes = [change for change in changes if change.end <= stop]
    finally:
        source.close()
    _compare_rows(changes, transactions, outcome)
    return outcome


def _compare_rows(
    changes: Iterable[RowChange], transactions: dict[int, list[tuple[str, dict[str, Any]]]], outcome: Outcome
) -> None:
    versions = sorted(transactions)
    for change in changes:
        inside = [
            version
            for version in versions
            if change.start.commit_version <= version < change.end.commit_version
        ]
        rows = [row for version in inside for table, row in transactions.pop(version)
                if table == str(change.table)]  # fmt: skip
        rows.sort(key=lambda row: (row["_commit_version"], row["_metadata"]["row"]))
        problem = _difference(change, rows, outcome)
        if problem:
            outcome.differences.append(f"{change.start}: {change.table}: {problem}; {change.statement}")
    for version, rest in transactions.items():
        outcome.differences.append(f"rows that no statement changed at {version:x}: {rest[:2]}")


def _shown(schema: TableSchema) -> tuple[tuple[Column, bool | None], ...]:
    """Return the columns, and whether they are visible, without MariaDB's hidden hashes.

    Any rebuild of the table (ENGINE, FORCE, a key over a prefix) may add or remove a key's hash. Readers
    recognize the hash by the number of columns in the table map.
    """
    return tuple(
        (column, column.visible) for column in schema.columns if not column.name.startswith("DB_ROW_HASH_")
    )


def _is_garbled(value: Any) -> bool:
    """Return whether a text contains a replacement character or a question mark.

    When servers convert an ENUM or SET, they put such characters into its members, and may then show two
    different texts for one member. The machine itself never writes question marks.
    """
    return isinstance(value, str) and ("\ufffd" in value or "?" in value)


def _difference(change: RowChange, rows: list[dict[str, Any]], outcome: Outcome) -> str | None:
    if change.facts.is_versioned:
        return _versioned_difference(change, rows)
    if [row["_change_type"] for row in rows] != [kind for kind, _ in change.images]:
        return f"{[row['_change_type'] for row in rows]} for {[kind for kind, _ in change.images]}"
    # MariaDB 11.8.9 logs generated columns of inserted rows only.
    unlogged = {column.name for column in change.facts.columns if not column.is_writable}
    for (kind, image), row in zip(change.images, rows, strict=True):
        absent = {name for name in row["_metadata"]["absent"] or () if not name.startswith("DB_ROW_HASH_")}
        if absent - unlogged or (absent and kind == "insert"):
            return f"{kind} without {absent}"
        for name, value in image.items():
            if name not in row:
                return f"column {name} is missing"
            if name in absent:
                outcome.counts["values named as absent"] += 1
                continue
            if name in dict(row["_metadata"]["unrepresentable"] or ()):
                outcome.counts["values named as unrepresentable"] += 1
            elif _is_garbled(value) or _is_garbled(row[name]):
                outcome.counts["values that the server cannot show"] += 1
            elif not is_equal(row[name], value):
                return f"{name} is {row[name]!r}, on the server {value!r}"
            outcome.counts["values compared"] += 1
    return None


def _versioned_difference(change: RowChange, rows: list[dict[str, Any]]) -> str | None:
    """Rows of a system-versioned table include their history, so each must be one of the images."""
    images = [image for _, image in change.images]
    for row in rows:
        if not any(_agrees(row, image) for image in images):
            return f"{row} is none of {images}"
    return None if rows else "no row"


def _agrees(row: dict[str, Any], image: dict[str, Any]) -> bool:
    named = {
        **dict(row["_metadata"]["unrepresentable"] or ()),
        **dict.fromkeys(row["_metadata"]["absent"] or ()),
    }
    return all(
        name in row and (name in named or is_equal(row[name], value) or isinstance(value, datetime))
        for name, value in image.items()
    )


def is_equal(value: Any, expected: Any) -> bool:
    """Return whether a decoded value equals the server's value.

    The client library shows some values differently: BIT and members of a binary ENUM or SET as bytes, FLOAT
    with six digits.
    """
    match value, expected:
        case int(), bytes():
            return value == int.from_bytes(expected)
        case str(), bytes():
            return value.encode() == expected
        case list(), bytes():
            return struct.pack(f"<{len(value)}f", *value) == expected
        case float(), float():
            return math.isclose(value, expected, rel_tol=1e-5)
        case datetime(), datetime():
            return value.replace(tzinfo=None) == expected
    return bool(value == expected)
