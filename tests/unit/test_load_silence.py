# SPDX-License-Identifier: Apache-2.0
"""A server that goes silent while rows are read."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from penstock._native import ResultSet
from penstock.errors import AnswerTimedOut, ConnectionLost, PenstockError, ServerBusy
from penstock.model import ServerAddress
from penstock.pipeline.load import session as session_module
from penstock.pipeline.load.session import LoadSession


class Silent:
    """A session that accepts its query but never answers."""

    address = ServerAddress()

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def send_query(self, sql: str) -> socket.socket:
        return self._stream


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[socket.socket, socket.socket]]:
    monkeypatch.setattr(session_module, "SILENCE_SECONDS_MAX", 0.01)
    client, servers = socket.socketpair()
    with client, servers:
        yield client, servers


def read(stream: socket.socket) -> None:
    connection: Any = Silent(stream)
    result = ResultSet(
        [("id", "int", None, False)],
        mariadb=False,
        instance="shop",
        database="d",
        table="t",
        file="mysql-bin.000001",
        offset=4,
        commit_version=1,
        timestamp_us=1,
        server_id=1,
        row_first=0,
        key=["id"],
        batch_rows_max=10,
        batch_bytes_max=1000,
    )
    list(LoadSession(connection).batches("SELECT id FROM d.t", result))


def test_unresponsive_server_is_lost(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(address: ServerAddress) -> Any:
        raise AnswerTimedOut("it does not answer")

    monkeypatch.setattr(session_module, "connect", hang)
    with pytest.raises(AnswerTimedOut, match="while rows are read"):
        read(ends[0])


@pytest.mark.parametrize("refusal", [None, ServerBusy("too many connections")])
def test_server_that_answers_other_connections_is_waited_for(
    ends: tuple[socket.socket, socket.socket],
    monkeypatch: pytest.MonkeyPatch,
    refusal: PenstockError | None,
) -> None:
    asked = []

    class Other:
        def close(self) -> None:
            """Close the session; there is nothing to release."""

    def answer(address: ServerAddress) -> Any:
        asked.append(address)
        if len(asked) == 3:
            ends[1].close()
        if refusal is not None:
            raise refusal
        return Other()

    monkeypatch.setattr(session_module, "connect", answer)
    with pytest.raises(ConnectionLost, match="closed the connection"):
        read(ends[0])
    assert len(asked) == 3
