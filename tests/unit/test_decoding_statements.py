# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from tests.support.binlog.block_cutting import SMALL_LOGS
from tests.support.binlog.decoding import decode
from tests.support.binlog.events import MARIADB_QUERY_COMPRESSED, QUERY, events
from tests.support.suite.nonempty import each

FILE = "binlog.000001"


@pytest.mark.parametrize("log", SMALL_LOGS, ids=lambda path: path.stem)
def test_statement_time_is_that_of_its_event(log: Path) -> None:
    content = log.read_bytes()
    times = {
        f"{FILE}:{event.offset}": event.timestamp * 1_000_000
        for event in events(content)
        if event.code in (QUERY, MARIADB_QUERY_COMPRESSED)
    }
    for statement in each(decode(content, file=FILE, drop_open=True).statements):
        assert statement.timestamp_us == times[str(statement.position)]


@pytest.mark.parametrize("log", SMALL_LOGS, ids=lambda path: path.stem)
def test_statement_in_an_event_listing_has_its_database(log: Path) -> None:
    decoded = decode(log.read_bytes(), FILE, emit="events")
    batches = [batch for batches in decoded.batches.values() for batch in batches]
    listed = [event for batch in batches for event in batch.to_pylist() if event["type"].startswith("Query")]
    for event in each(listed):
        assert event["database"] == "fuzzed"
