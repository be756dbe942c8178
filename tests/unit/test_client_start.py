# SPDX-License-Identifier: Apache-2.0
"""How a subscriber starts while its daemons, or its coordination store, are away."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.client import Subscriber, following
from penstock.client.daemons import Daemons
from penstock.client.flow import Place
from penstock.client.intake import Intake
from penstock.coordinate.store import open_store
from penstock.errors import ConnectionLost, CoordinationLost, PositionPurged
from penstock.model import Position
from tests.support.suite.patience import WAIT_SECONDS_MAX

BEGIN = Place(Position(0, "mysql-bin.000001", 4))


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: 0.001)
    # The test ignores changes after the start.
    monkeypatch.setattr(Intake, "_run", lambda self: None)


def late(answer: Any, problem: Exception, tries: list[str], name: str) -> Callable[..., Any]:
    """Return a function that fails twice, then answers."""

    def ask(*_: Any) -> Any:
        tries.append(name)
        if tries.count(name) < 3:
            raise problem
        return answer() if callable(answer) else answer

    return ask


def subscriber_in(folder: Path) -> Subscriber:
    return Subscriber("penstock://127.0.0.1:1/shop", name="cache", coordination=f"sqlite://{folder}/store.db")


def test_start_waits_for_unavailable_daemons_and_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []
    away = ConnectionLost("the daemon is away")
    store = open_store(f"sqlite://{tmp_path}/store.db")
    monkeypatch.setattr(
        following, "open_store", late(lambda: store, CoordinationLost("locked"), tries, "store")
    )
    monkeypatch.setattr(Daemons, "have_something", late(True, away, tries, "log"))
    monkeypatch.setattr(Daemons, "locate_start", late(BEGIN, away, tries, "start"))
    with subscriber_in(tmp_path) as subscriber:
        thread = threading.Thread(target=subscriber.run, args=(lambda batch: None,))
        thread.start()
        waiting = threading.Event()
        while not subscriber.positions and thread.is_alive():
            waiting.wait(0.01)
        assert list(subscriber.positions.values()) == [str(BEGIN.position)]
        subscriber.stop()
        thread.join(WAIT_SECONDS_MAX)
    assert sorted(tries) == ["log"] * 3 + ["start"] * 3 + ["store"] * 3


def test_stop_ends_a_waiting_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: 60.0)
    asked = threading.Event()

    def have_nothing(self: Daemons) -> bool:
        asked.set()
        raise ConnectionLost("the daemon is away")

    monkeypatch.setattr(Daemons, "have_something", have_nothing)
    subscriber = subscriber_in(tmp_path)
    thread = threading.Thread(target=subscriber.run, args=(lambda batch: None,))
    thread.start()
    assert asked.wait(WAIT_SECONDS_MAX)
    subscriber.stop()
    thread.join(WAIT_SECONDS_MAX)
    assert not thread.is_alive()


def test_start_before_the_retained_log_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Daemons, "have_something", lambda self: True)

    def purged(self: Daemons, start: Any) -> Place:
        raise PositionPurged("the log begins later")

    monkeypatch.setattr(Daemons, "locate_start", purged)
    with pytest.raises(PositionPurged):
        subscriber_in(tmp_path).run(lambda batch: None)
