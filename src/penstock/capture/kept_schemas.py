# SPDX-License-Identifier: Apache-2.0
"""The table definitions stored with a log, updated while the log is captured."""

from dataclasses import dataclass
from typing import Any

from penstock.capture.settling import DefinitionSettler
from penstock.errors import PositionInvalid, ServerBusy
from penstock.limits import DEFINITION_WAIT_SECONDS, SURVEY_WAIT_SECONDS
from penstock.logstore.followed_log import ServedLog
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.logstore.schemas import SchemaLog
from penstock.model import Position, StatementSession, TableName, TableSchema
from penstock.mysql.connection import Connection
from penstock.schema.history import SchemaHistory
from penstock.schema.reader import read_defaults
from penstock.schema.statements.secrets import without_secrets
from penstock.schema.table_definition import TableDefinition


class FollowedSchemas:
    """The table definitions of a log, updated while it is captured. Only the capture calls `apply` and
    `received`.
    """

    def __init__(self, schema_log: SchemaLog[SchemaHistory], settler: DefinitionSettler) -> None:
        self.schema_log = schema_log
        self._settler = settler
        settler.start()

    def apply(self, text: str, database: str, position: Position, session: StatementSession) -> bool:
        """Apply a statement; `position` is the end of its event. Return whether it changed a table
        definition.
        """
        changed = self.schema_log.apply(text, database, position, session)
        if changed:
            self._settler.note_doubts()
        return bool(changed)

    def received(self, position: Position) -> None:
        """Record the position up to which the log has been received and its statements applied."""
        self._settler.received(position)

    def close(self) -> None:
        """Stop settling, and close the file of table definitions."""
        self._settler.close()
        self.schema_log.close()


def follow_schemas(log: Log, connection: Connection, position: Position) -> FollowedSchemas:
    """Return the schemas of a log, updated from the position where capture resumes.

    If that position is not the end of the log (a new log, another server, a gap), another thread reads the
    server's tables as of that position. Raises SchemaInvalid if stored files cannot be read, or an error if
    the connection fails.
    """
    before = log.settler.retire() if log.settler is not None else None
    schema_log = SchemaLog(log.folder, SchemaHistory.from_json, log.disk, earliest=log.earliest)
    newest = schema_log.position
    if newest is not None and position == log.visible and newest.epoch != position.epoch:
        # The definitions come from an epoch of another server that never sent any bytes, so the log has no
        # data of that epoch.
        schema_log.cut(position)
    starts_anew = schema_log.position is None or position != log.visible
    if starts_anew:
        schema_log.seed(SchemaHistory.awaiting_survey(read_defaults(connection), position), position)
    spelling = schema_log.with_newest(lambda history: history.spelling)
    settler = DefinitionSettler(
        schema_log, connection.address, connection.identity().key, spelling, position, before
    )
    followed = FollowedSchemas(schema_log, settler)
    log.settler = settler
    if starts_anew:
        settler.wait_until_read(SURVEY_WAIT_SECONDS)
    return followed


def kept_schemas(log: LogReader) -> SchemaLog[SchemaHistory]:
    """Open the definitions stored with a log for reading."""
    return SchemaLog(log.folder, SchemaHistory.from_json, log.disk)


@dataclass(frozen=True)
class DefinitionVersion:
    """A table definition that is in force from `since` on.

    `since` is None if it was in force before the log began. `schema` is None if the table was dropped.
    `statement` is the statement, without passwords, that created this definition. It is None if the
    definition was read from the server.
    """

    since: Position | None
    schema: TableSchema | None
    statement: str | None


def defined_tables(log: LogReader) -> list[TableName]:
    """Return the tables that have a definition at the end of a log. Raises SchemaInvalid."""
    schema_log = kept_schemas(log)
    return schema_log.with_newest(SchemaHistory.names) if schema_log else []


def definition_versions(log: LogReader, name: TableName) -> list[DefinitionVersion]:
    """Return the definitions of a table that are stored with a log, oldest first. Raises SchemaInvalid."""
    versions: list[DefinitionVersion] = []
    for history, statements in kept_schemas(log).generations():
        for since, schema in history.versions(name):
            newest = versions[-1].since if versions else None
            # A generation begins with the definitions that are in force at its start. An earlier generation
            # may also contain them.
            if versions and (since is None or (newest is not None and since <= newest)):
                continue
            statement = None if since is None else statements.get(since)
            shown = None if statement is None else without_secrets(statement)
            versions.append(DefinitionVersion(since, schema, shown))
    return versions


def give_definition(log: ServedLog, name: TableName, since: Position, definition: dict[str, Any]) -> None:
    """Store a table definition that an operator set. The log is being captured, and the definition applies
    from a position on.

    Raises PositionInvalid for a position that the log has not reached, SchemaUnknown for a position before
    the log's first, SchemaInvalid for an invalid definition, and ServerBusy before the capture's first
    session.
    """
    _prove_reached(log, since)
    if log.settler is None:
        raise ServerBusy("the capture has not reached its server yet", hint="Give the definition again")
    log.settler.give(name, since, definition)


def _prove_reached(log: ServedLog, since: Position) -> None:
    visible = log.visible
    if visible is None or since > visible:
        raise PositionInvalid(
            f"the log has not reached that position, it ends at {visible}",
            position=str(since),
            hint="Give the position that penstock status shows for the table",
        )


def definition_by_sql(
    log: ServedLog, name: TableName, since: Position, create_table: str
) -> tuple[TableSchema | None, TableDefinition]:
    """Return two schemas of a table: the one in force at a position, and the one that its CREATE TABLE
    statement defines.

    Raises PositionInvalid for a position that the log has not reached, SchemaUnknown for a position before
    the log's first, SchemaInvalid for statements that do not define the table.
    """
    _prove_reached(log, since)
    history = kept_schemas(log).at(since)
    definition = history.define_by_sql(name, create_table, "text")
    return history.schema(name.database, name.table, since), definition


def settled_schemas(
    log: ServedLog,
    schema_log: SchemaLog[SchemaHistory],
    position: Position,
    name: TableName | None,
    *,
    again: bool = False,
) -> dict[str, Any]:
    """Return the table definitions in force at a position of a log that is being captured, as JSON.

    If a definition is in doubt, waits up to DEFINITION_WAIT_SECONDS for it to be settled. With `again`, the
    table is read again even if it is not in doubt, provided that the position belongs to the server being
    captured. Raises SchemaUnknown if no definitions are stored.
    """
    if name is not None and log.settler is not None:
        doubt = schema_log.at(position).doubt(name)
        if doubt is not None and doubt.refusal is None and doubt.since is not None:
            log.settler.wait(name, doubt.since, DEFINITION_WAIT_SECONDS)
        elif doubt is None and again and _is_readable(log, position):
            log.settler.wait(name, position, DEFINITION_WAIT_SECONDS, again=True)
    return schema_log.in_force(position, name)


def _is_readable(log: ServedLog, position: Position) -> bool:
    """Return whether a position is in the log and in its newest epoch."""
    visible = log.visible
    return visible is not None and position <= visible and position.epoch == visible.epoch
