# SPDX-License-Identifier: Apache-2.0
"""Logs of simulated MySQL servers, for tests of merges, with transactions at any time."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from penstock._native import BlockCutter
from penstock.capture.run import Capture
from penstock.logstore.disk import Disk
from penstock.logstore.log import Log
from penstock.merge.member import Member
from penstock.model import Position
from tests.support.binlog.events import MAGIC, Event, assemble
from tests.support.binlog.forged_log import insert, log_head
from tests.support.logstore.source import FOLDER, SETTINGS

_FILE = "binlog.000001"
_UUID, _TIME = slice(1, 17), slice(42, 49)
# A clock that is later than every forged transaction.
_now_us = itertools.count(1 << 60)


class ForgedServer:
    """A server whose log is captured while it is being written."""

    def __init__(self, name: str, number: int, disk: Disk) -> None:
        self.name = name
        self.table = f"{name}.notes"
        self.identity = SimpleNamespace(key=f"mysql:{number}")
        self.log = Log.open(FOLDER / name, SETTINGS, disk)
        self._uuid = bytes([number]) * 16
        self._gno = 0
        head = log_head(number)
        self._offset = len(head)
        self._cutter = BlockCutter(
            epoch=0, file=_FILE, offset=len(head), flavor="mysql", live=False, block_bytes=400, head=head
        )
        common = {"epoch": 0, "server_id": number, "flavor": "mysql"}
        self.log.begin_epoch(
            **cast(Any, common),
            server_key=self.identity.key,
            version="9.7.4",
            file=_FILE,
            offset=len(head),
            gtid_set="",
        )
        self.session_start = Position(0, _FILE, len(head))
        self.log.begin_file(_FILE, len(head), head[len(MAGIC) :], cast(Any, ""), **cast(Any, common))

    def commit(self, time_us: int, number: int, note: bytes = b"note") -> None:
        """Log the insert of one row."""
        self._gno += 1
        gtid, *rest = insert(self._gno, self.table, number, note)
        body = bytearray(gtid.body)
        body[_UUID] = self._uuid
        body[_TIME] = time_us.to_bytes(7, "little")
        self.append([replace(gtid, body=bytes(body)), *rest])

    def append(self, transaction: Sequence[Event]) -> None:
        """Log a transaction."""
        content = assemble(transaction, offset=self._offset)
        assert self._cutter.feed(content) == len(content)
        self._offset += len(content)
        self.log.append(
            self._cutter.take_data(),
            self._offset - len(content),
            self._offset,
            self._cutter.boundary,
            self._cutter.take_records(),
            time_max_us=self._cutter.time_max_us,
        )


class IdleMember(Member):
    """A member whose log contains everything in its server's log, unless the server is unreachable."""

    def __init__(self, server: ForgedServer, position: Position) -> None:
        super().__init__(cast(Capture, _Captured(server)), position)
        self.is_away = False
        self._server = server

    def watermark_us(self) -> int | None:
        """Once the whole log was read, return a time later than all its transactions."""
        if self.is_away or self.position != (self._server.log.visible or self.position):
            return None
        return next(_now_us)


class BusyConnection:
    """A connection to a server that commits another transaction whenever it is asked for the end of its
    log.
    """

    address = None

    def __init__(self, server: ForgedServer, time_us: int) -> None:
        """`time_us` is the time of every commit."""
        self._server = server
        self._time_us = time_us
        self.commits = 0

    def head(self) -> Position:
        """Return the end of the log, after another transaction."""
        self.commits += 1
        self._server.commit(self._time_us, self.commits)
        assert self._server.log.visible is not None, "a transaction was committed"
        return self._server.log.visible

    def identity(self) -> Any:
        """Return the server's identity."""
        return self._server.identity

    def close(self) -> None:
        """Do nothing."""


class IdleConnection:
    """A connection to a server whose log ends at a position."""

    address = None

    def __init__(self, identity: Any, end: Position) -> None:
        self._identity = identity
        self._end = end

    def head(self) -> Position:
        """Return the end of the log."""
        return self._end

    def identity(self) -> Any:
        """Return the server's identity."""
        return self._identity

    def close(self) -> None:
        """Do nothing."""


def asking_member(server: ForgedServer, position: Position) -> Member:
    """Return a member that asks its server for the end of its log."""
    return Member(cast(Capture, _Captured(server)), position)


class _Captured:
    """The part of a capture that a member uses."""

    def __init__(self, server: ForgedServer) -> None:
        self.name = server.name
        self._forged = server

    @property
    def server(self) -> tuple[None, Any]:
        """The server's address and description."""
        return None, self._forged.identity

    @property
    def session_start(self) -> Position:
        """Where the session began."""
        return self._forged.session_start

    def log(self) -> Log:
        """Return the log."""
        return self._forged.log
