# SPDX-License-Identifier: Apache-2.0
"""How long a load waits for commits that a server without GTIDs has logged but not yet made visible."""

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import ServerBusy
from penstock.mysql import committed
from penstock.mysql.committed import wait_until_committed

AFTER_SYNC = {"rpl_semi_sync_source_wait_point": "AFTER_SYNC", "rpl_semi_sync_source_timeout": "10000"}


class ServerWithoutGtids:
    """Reports a different number each time it is queried for the number of sessions that wait for a
    replica.
    """

    address = "db1:3306"

    def __init__(self, waiting: list[int], **variables: str) -> None:
        self.waiting = waiting
        self._variables = variables

    def identity(self) -> Any:
        return SimpleNamespace(flavor="mysql", gtid_mode="OFF")

    def variables(self, *names: str) -> dict[str, str]:
        return {name: value for name, value in self._variables.items() if name in names}

    def query(self, sql: str) -> list[dict[str, str]]:
        return [{"Variable_name": "Rpl_semi_sync_source_wait_sessions", "Value": str(self.waiting.pop(0))}]


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seconds: list[float] = []
    monkeypatch.setattr(committed.time, "sleep", seconds.append)
    return seconds


def wait_at(server: Any) -> None:
    wait_until_committed(server)


def test_commits_that_wait_for_a_replica_are_waited_for(pauses: list[float]) -> None:
    server = ServerWithoutGtids([2, 1, 0], **AFTER_SYNC)
    wait_at(server)
    assert server.waiting == []
    assert [pauses[0], pauses[-1]] == [committed._SETTLE_SECONDS] * 2, "the engine commits after the replica"


@pytest.mark.parametrize("variables", [{}, AFTER_SYNC | {"rpl_semi_sync_source_wait_point": "AFTER_COMMIT"}])
def test_server_that_shows_commits_before_its_replicas_is_not_asked(
    pauses: list[float], variables: dict[str, str]
) -> None:
    wait_at(ServerWithoutGtids([], **variables))
    assert pauses == [committed._SETTLE_SECONDS]


def test_wait_ends_with_the_timeout_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100, 4))
    monkeypatch.setattr(committed.time, "monotonic", lambda: float(next(clock)))
    server = ServerWithoutGtids([1] * 9, **AFTER_SYNC)
    wait_at(server)
    # At 4, 8 and 12 seconds.
    assert len(server.waiting) == 6


def test_server_whose_timeout_is_longer_than_a_load_waits_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(committed, "_COMMIT_SECONDS_MAX", 0.0)
    with pytest.raises(ServerBusy, match="those of 3 sessions"):
        wait_at(ServerWithoutGtids([3], **AFTER_SYNC))
