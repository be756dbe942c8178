# SPDX-License-Identifier: Apache-2.0
"""Searches for the position of a hold when the index of its segment may be in a store that does not
answer.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.errors import PositionPurged
from penstock.logstore.holds import Hold, Holds
from penstock.logstore.log import Log
from penstock.logstore.retention import Retention, RetentionPolicy
from penstock.model import Position
from tests.support.daemon.served_log import captured_log
from tests.support.suite.patience import WAIT_SECONDS_MAX


def test_slow_search_keeps_no_segment_from_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    locate = Log.locate_position
    passes: list[Any] = []

    def locate_late(log: Log, position: Position) -> object:
        located = locate(log, position)
        if not passes:
            # The executor is not used in a `with` block, whose end would wait for the lock for ever.
            due = ThreadPoolExecutor(1).submit(retention.run, log)
            passes.append(due.result(WAIT_SECONDS_MAX))
        return located

    monkeypatch.setattr(Log, "locate_position", locate_late)
    with captured_log() as log:
        retention = Retention(log.disk, log.layout, RetentionPolicy(age_seconds=0))
        first = log.earliest()
        assert first is not None
        with pytest.raises(PositionPurged):
            Holds(log.disk, log.layout).put(Hold("late", first), log=log)
        assert passes[0].departures
        assert Holds(log.disk, log.layout).all() == []
