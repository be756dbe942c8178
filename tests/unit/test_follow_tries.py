# SPDX-License-Identifier: Apache-2.0
"""How often an unavailable server is asked for its log before its failure is raised."""

import pytest

from penstock.errors import AnswerTimedOut, ConnectionLost, PenstockError
from penstock.model import Position, ServerAddress
from penstock.mysql import follow as follow_module
from penstock.mysql.follow import follow
from penstock.mysql.start import DumpStart


@pytest.mark.parametrize(
    ("failure", "tries_max", "asked"),
    [(ConnectionLost, 0, 1), (ConnectionLost, 2, 3), (AnswerTimedOut, 2, 1), (AnswerTimedOut, 12, 3)],
)
def test_server_that_hangs_is_asked_less_often_than_one_that_refuses(
    failure: type[PenstockError], tries_max: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []

    def open_stream(*given: object, **named: object) -> None:
        opened.append(given)
        raise failure("away")

    monkeypatch.setattr(follow_module, "open_stream", open_stream)
    pauses: list[float] = []
    address = ServerAddress.parse("mysql://nobody@127.0.0.1:1")
    start = DumpStart(position=Position(0, "binlog.000001", 4))
    with pytest.raises(failure):
        list(follow(address, start, lambda: None, bounded=True, tries_max=tries_max, sleep=pauses.append))
    assert len(opened) == asked == len(pauses) + 1
