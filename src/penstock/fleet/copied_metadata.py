# SPDX-License-Identifier: Apache-2.0
"""The table definitions and the holds of a log copy, as received from the member that captures."""

import time

from penstock.errors import ServerBusy
from penstock.fleet.records import hold_of
from penstock.logstore.generations import Generation, GenerationFiles
from penstock.logstore.holds import Holds
from penstock.logstore.log import Log
from penstock.logstore.prepared import HOLD_NAME
from penstock.model import Position, StatementSession
from penstock.source.daemon_client import DaemonClient

# The interval between refreshes. Refreshes are necessary because the capturing member may read a definition
# from its server only after the statement that the definition concerns.
_REFRESH_SECONDS = 10.0


class CopiedMetadata:
    """Copies another member's table definitions and holds, and keeps them identical; see
    `penstock.capture.receive.Schemas`.

    The definitions that a statement creates are copied before the statement's bytes are stored. So a member
    that continues the log has the table definitions for all of the log's data.
    """

    def __init__(self, log: Log, client: DaemonClient) -> None:
        self._files = GenerationFiles(log.disk, log.layout)
        self._holds = Holds(log.disk, log.layout)
        self._client = client
        # The end of the capturing member's log when its table definitions were listed.
        self._copied_to: Position | None = None
        self._due = 0.0

    def refresh(self) -> None:
        """Copy the changes, if the last copy is old enough. Raises errors from the daemon and the disk."""
        if time.monotonic() >= self._due:
            self.copy()

    def copy(self) -> None:
        """Copy the changes. Raises errors from the daemon and the disk."""
        answer = self._client.ask("copy/metadata")
        wanted = {entry["version"]: Generation(**entry) for entry in answer["definitions"]}
        present = {generation.version: generation for generation in self._files.list()}
        for version, generation in wanted.items():
            if present.get(version) != generation:
                self._files.store(generation, self._client.content("copy/definitions", version=version))
        for version in present.keys() - wanted.keys():
            self._files.remove(version)
        holds = {hold.name: hold for hold in map(hold_of, answer["holds"])}
        kept = {hold.name: hold for hold in self._holds.readable(time.time_ns() // 1000)}
        # Remove holds first, because the number of holds per account is limited.
        for name in kept.keys() - holds.keys() - {HOLD_NAME}:
            self._holds.remove(name)
        for name, hold in holds.items():
            if kept.get(name) != hold:
                self._holds.put(hold, admin=True)
        self._copied_to = None if answer["position"] is None else Position.parse(answer["position"])
        self._due = time.monotonic() + _REFRESH_SECONDS

    def begin(self, position: Position) -> None:
        """Copy the table definitions. Called before the first bytes after a position are stored.

        This is necessary because an epoch's first definitions do not result from any statement in the epoch.
        """
        self._cover(position)

    def apply(self, text: str, database: str, position: Position, session: StatementSession) -> bool:
        """Copy the table definitions. Called before the statement that ends at a position is stored. ||
        Returns True, because the capturing member has already applied the statement.
        """
        self._cover(position)
        return True

    def _cover(self, position: Position) -> None:
        if self._copied_to is None or position > self._copied_to:
            self.copy()
        if self._copied_to is None or position > self._copied_to:
            raise ServerBusy("the member that captures has less of the log than it listed", hint="Ask again")

    def received(self, position: Position) -> None:
        """Do nothing: the log itself records the position."""

    def close(self) -> None:
        """Do nothing: no file is open."""
