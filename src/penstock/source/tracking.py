# SPDX-License-Identifier: Apache-2.0
"""Advances schema histories on the driver, so that executors can decode rows with them.

Schema histories are needed only for logs without column names (binlog_row_metadata=MINIMAL). An executor
begins a range with the table definitions in force at its start, and applies the DDL statements within the
range.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import SchemaInvalid
from penstock.model import Position, ServerAddress, StatementSession
from penstock.schema.history import SchemaHistory
from penstock.source.decoding import RangeDecoding
from penstock.source.logged_tables import LoggedTables
from penstock.source.read_settings import ReadSettings
from penstock.source.reading import Schemas
from penstock.source.source import ByteRange, Source, SourceOptions, open_source, place_of
from penstock.source.spelling import spelling_of

if TYPE_CHECKING:
    from penstock.schema.server_tables import ServerTables

_METADATA = "binlog_row_metadata"


def known_schemas(
    options: SourceOptions, history: dict[str, Any] | None, source: Source | None = None
) -> Schemas | None:
    """Return what supplies the table definitions for a range: the driver's history, the log, the server, or
    None.

    `source` is the source of the range, if it is open.
    """
    if history is None and options.is_kept:
        return LoggedTables(source or open_source(options))
    reread = _server_tables(options.address) if options.address is not None else None
    if history is not None:
        return SchemaHistory.from_json(history, reread)
    return SchemaHistory(reread=reread) if reread is not None else None


def _server_tables(address: ServerAddress) -> "ServerTables":
    # Imported on demand, because executors that decode files do not need the MySQL client.
    from penstock.schema.server_tables import ServerTables

    return ServerTables(address)


class TrackedSchemas:
    """The driver's schema history of one read, known up to `position`.

    It is loaded from the tracking file if there is one, otherwise from the schema file. If there is neither,
    it begins with the server's current definitions, converted back to the definitions at the start of the
    read.
    """

    def __init__(self, history: SchemaHistory, position: Position | None, tracking: Path | None) -> None:
        self.history = history
        self._position = position
        self._tracking = tracking

    @classmethod
    def open(cls, settings: ReadSettings, start: Position | None = None) -> "TrackedSchemas | None":
        """Return the schema history to use when reading from `start` on; None if the log itself contains the
        column definitions.

        A server that writes full row metadata now may have written earlier rows without it. For those rows,
        executors query the server for the columns. Raises SchemaInvalid.
        """
        address = settings.source.address
        reread = _server_tables(address) if address is not None else None
        tracking = None
        if settings.schema_tracking is not None:
            tracking = Path(settings.schema_tracking.removeprefix("file://")) / "schemas.json"
        if tracking is not None and tracking.exists():
            value = _saved(tracking)
            position = Position.parse(value["position"]) if value["position"] else None
            return cls(SchemaHistory.from_json(value["history"], reread), position, tracking)
        if settings.source.is_kept and settings.schemas is None:
            return None
        if settings.schemas is not None:
            spelling = spelling_of(open_source(settings.source)) if reread is None else None
            history = SchemaHistory.from_file(settings.schemas, reread=reread, spelling=spelling)
            return cls(history, None, tracking)
        if address is None or start is None:
            return None
        from penstock.mysql.connection import READING_SECONDS_MAX, connect
        from penstock.schema.survey import survey

        with connect(address, READING_SECONDS_MAX) as connection:
            if tracking is None and connection.variables(_METADATA).get(_METADATA) == "FULL":
                return None
            history = survey(connection, settings.tables, position=start, reread=reread)
        return cls(history, start, tracking)

    def advance(self, source: Source, ranges: Sequence[ByteRange]) -> None:
        """Apply the statements of consecutive ranges that were not applied yet, and save the result.

        Reads only event headers, not row values.
        """
        for byte_range in whole_files(ranges):
            done = self._position
            if done is not None and place_of(byte_range.position) < place_of(done):
                continue
            decoding = RangeDecoding(source, byte_range, emit="transactions", statements=True)
            for state in decoding.states(drop_open=True):
                if state == "batch":
                    decoding.take_batch()
                    continue
                statement = decoding.decoder.take_statement()
                file, _, offset = statement.end_position.rpartition(":")
                end = Position(byte_range.epoch, file, int(offset))
                session = StatementSession.of_event(*statement.session)
                self.history.apply(statement.text, statement.database, end, session)
            self._position = Position(byte_range.epoch, *decoding.decoder.position)
        if self._tracking is not None:
            self._save(self._tracking)

    def at(self, position: Position) -> dict[str, Any]:
        """Return the history in JSON form, without the table definitions after a position."""
        value = self.history.to_json()
        for table in value["tables"]:
            table["definitions"] = [
                entry
                for entry in table["definitions"]
                if entry[0] is None or place_of(Position.parse(entry[0])) <= place_of(position)
            ]
        return value

    def _save(self, path: Path) -> None:
        """Write the file atomically: a new file replaces the old one by a rename."""
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_suffix(".new")
        text = json.dumps(
            {"position": str(self._position) if self._position else None, "history": self.history.to_json()}
        )
        with written.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)


def _saved(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise SchemaInvalid(f"schema tracking file {path} cannot be read: {problem}") from problem
    if not isinstance(value, dict) or value.keys() != {"position", "history"}:
        raise SchemaInvalid(
            f"{path} is no schema tracking file", hint="Name another folder with schemaTrackingLocation"
        )
    return value


def whole_files(ranges: Sequence[ByteRange]) -> list[ByteRange]:
    """Join the ranges of each file into one range, so that every statement is read once."""
    joined: list[ByteRange] = []
    for one in ranges:
        if joined and joined[-1].file == one.file:
            joined[-1] = replace(joined[-1], stop=one.stop, is_cut=one.is_cut)
        else:
            joined.append(one)
    return joined
