# SPDX-License-Identifier: Apache-2.0
"""The definitions that are kept with a log, made to follow its capture."""

from typing import Any

from penstock.capture.settling import DefinitionSettler
from penstock.errors import PositionInvalid, ServerBusy
from penstock.limits import DEFINITION_WAIT_SECONDS, SURVEY_WAIT_SECONDS
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.logstore.schemas import SchemaLog
from penstock.model import Position, StatementSession, TableName
from penstock.mysql.connection import Connection
from penstock.schema.history import SchemaHistory
from penstock.schema.reader import read_defaults


class FollowedSchemas:
    """The definitions of a log while it is captured. `apply` and `received` belong to the capture."""

    def __init__(self, kept: SchemaLog[SchemaHistory], settler: DefinitionSettler) -> None:
        self.kept = kept
        self._settler = settler
        settler.start()

    def apply(self, text: str, database: str, position: Position, session: StatementSession) -> None:
        """Take a statement into account; `position` is where its event ends."""
        if self.kept.apply(text, database, position, session):
            self._settler.note_doubts()

    def received(self, position: Position) -> None:
        """Note up to where the log was received, and its statements applied."""
        self._settler.received(position)

    def close(self) -> None:
        """Stop settling, and let go of the file that is written to."""
        self._settler.close()
        self.kept.close()


def follow_schemas(log: Log, connection: Connection, position: Position) -> FollowedSchemas:
    """Return what follows the statements of a log from the position on where capture goes on.

    Where that is not where the log ends (a new log, another server, a gap), the server's tables are read as
    of there, in another thread. Raises SchemaInvalid for kept files that cannot be read, and what the
    connection raises.
    """
    before = log.settler.retire() if log.settler is not None else None
    kept = SchemaLog(log.folder, SchemaHistory.from_json, log.disk, earliest=log.earliest)
    newest = kept.position
    if newest is not None and position == log.visible and newest.epoch != position.epoch:
        # Those of another server that never sent a byte, so that the log has nothing of its epoch.
        kept.cut(position)
    begins = kept.position is None or position != log.visible
    if begins:
        kept.seed(SchemaHistory.awaiting_survey(read_defaults(connection), position), position)
    spelling = kept.with_newest(lambda history: history.spelling)
    settler = DefinitionSettler(
        kept, connection.address, connection.identity().key, spelling, position, before
    )
    followed = FollowedSchemas(kept, settler)
    log.settler = settler
    if begins:
        settler.wait_until_read(SURVEY_WAIT_SECONDS)
    return followed


def kept_schemas(log: LogReader) -> SchemaLog[SchemaHistory]:
    """Return the definitions kept with a log, to be read."""
    return SchemaLog(log.folder, SchemaHistory.from_json, log.disk)


def give_definition(log: Log, name: TableName, since: Position, definition: dict[str, Any]) -> None:
    """Keep a definition that an operator gives, from a position of a log that is captured on.

    Raises PositionInvalid for a position that the log has not reached, SchemaUnknown for one before its
    first, SchemaInvalid for what is no definition, ServerBusy before the capture's first session.
    """
    visible = log.visible
    if visible is None or since > visible:
        raise PositionInvalid(
            f"the log has not reached that position, it ends at {visible}",
            position=str(since),
            hint="Give the position that penstock status shows for the table",
        )
    if log.settler is None:
        raise ServerBusy("the capture has not reached its server yet", hint="Give the definition again")
    log.settler.give(name, since, definition)


def settled_schemas(
    log: Log,
    kept: SchemaLog[SchemaHistory],
    position: Position,
    name: TableName | None,
    *,
    again: bool = False,
) -> dict[str, Any]:
    """Return the definitions in force at a position of a log that is captured, as JSON.

    A table in doubt is waited for, for up to DEFINITION_WAIT_SECONDS; with `again` it is read again though it
    is not in doubt, where the log has the position from the server that is captured now. Raises SchemaUnknown
    where nothing is kept.
    """
    if name is not None and log.settler is not None:
        doubt = kept.at(position).doubt(name)
        if doubt is not None and doubt.refusal is None and doubt.since is not None:
            log.settler.wait(name, doubt.since, DEFINITION_WAIT_SECONDS)
        elif doubt is None and again and _is_readable(log, position):
            log.settler.wait(name, position, DEFINITION_WAIT_SECONDS, again=True)
    return kept.in_force(position, name)


def _is_readable(log: Log, position: Position) -> bool:
    """Tell whether a position lies in the newest epoch of what a log has."""
    visible = log.visible
    return visible is not None and position <= visible and position.epoch == visible.epoch
