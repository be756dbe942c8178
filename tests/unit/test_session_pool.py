# SPDX-License-Identifier: Apache-2.0
"""Sessions that chunks use one after another; a session that may be broken is not reused."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import ConnectionLost, SchemaChanged
from penstock.model import ServerAddress
from penstock.pipeline.load import session_pool
from penstock.pipeline.load.session_pool import SessionPool

ADDRESS, OTHER = (ServerAddress.parse(f"mysql://reader@{host}:3306") for host in ("one", "two"))


class Session:
    """A session without a server."""

    tidb = False

    def __init__(self, address: ServerAddress) -> None:
        self.connection = SimpleNamespace(address=address)
        self.is_closed = False

    def roll_back(self) -> None:
        """End nothing: no test opens a transaction."""

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> SessionPool:
    monkeypatch.setattr(session_pool, "open_session", Session)
    return SessionPool()


def give_back(pool: SessionPool, *addresses: ServerAddress) -> list[Any]:
    """Use sessions at the same time, so that all of them are idle afterwards."""
    if not addresses:
        return []
    with pool.session(addresses[0]) as session:
        return [session, *give_back(pool, *addresses[1:])]


def test_lost_session_ends_the_idle_ones_of_its_server(pool: SessionPool) -> None:
    first, second, third, other = give_back(pool, ADDRESS, ADDRESS, ADDRESS, OTHER)
    with pytest.raises(ConnectionLost), pool.session(ADDRESS):
        raise ConnectionLost("the server was restarted")
    assert all(session.is_closed for session in (first, second, third))
    with pool.session(ADDRESS) as session, pool.session(OTHER) as reused:
        assert not session.is_closed
        assert reused is other


def test_error_of_a_table_ends_only_its_session(pool: SessionPool) -> None:
    sessions = give_back(pool, ADDRESS, ADDRESS)
    with pytest.raises(SchemaChanged), pool.session(ADDRESS):
        raise SchemaChanged("altered")
    assert sorted(session.is_closed for session in sessions) == [False, True]


def test_session_that_was_idle_for_long_is_not_handed_out(
    pool: SessionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    [before] = give_back(pool, ADDRESS)
    monkeypatch.setattr(session_pool, "_IDLE_SECONDS_MAX", 0.0)
    with pool.session(ADDRESS) as session:
        assert session is not before
    assert before.is_closed
