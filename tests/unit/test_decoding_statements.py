# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tests.binlog_bytes import MARIADB_QUERY_COMPRESSED, QUERY, events
from tests.block_cutting import SMALL_LOGS
from tests.decoding import decode
from tests.nonempty import each

FILE = "binlog.000001"


@pytest.mark.parametrize("log", SMALL_LOGS, ids=lambda path: path.stem)
def test_statement_has_the_time_of_its_event(log: Path) -> None:
    content = log.read_bytes()
    times = {
        f"{FILE}:{event.offset}": event.timestamp * 1_000_000
        for event in events(content)
        if event.code in (QUERY, MARIADB_QUERY_COMPRESSED)
    }
    for statement in each(decode(content, file=FILE, drop_open=True).statements):
        assert statement.timestamp_us == times[str(statement.position)]
