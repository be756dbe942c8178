# SPDX-License-Identifier: Apache-2.0
"""Run Debezium and Canal themselves beside Penstock, and compare event by event and field by field."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.originals.comparing import Difference, differences, not_seen, rules_of, unlisted
from tests.originals.events import (
    debezium_events,
    entry_events,
    flat_events,
    keyed_events,
    rows_by_table,
    steady_tables,
)
from tests.originals.running import OF_DEBEZIUM, write_all
from tests.support.suite.fixture_types import MissingPart, StartServer
from tools.servers import PartMissing

DIFFERENCES_SHOWN_MAX = 20


def check(system: str, differences_read: Sequence[Difference]) -> None:
    """Assert that every difference is listed, and that every listed difference still occurs."""
    rules = rules_of(system)
    new = unlisted(rules, differences_read)
    assert not new, "\n".join(
        [f"{len(new)} differences are not listed", *map(str, new[:DIFFERENCES_SHOWN_MAX])]
    )
    assert not (gone := not_seen(rules, differences_read)), f"listed, and not seen any more: {gone}"


@pytest.mark.deep(
    guard="tests/unit/test_originals_comparing.py::test_rules_name_whole_differences_and_must_occur"
)
def test_messages_equal_those_of_the_original_systems_except_for_listed_differences(
    start_server: StartServer, missing_part: MissingPart, tmp_path: Path
) -> None:
    server = start_server(default_time_zone="+00:00")
    try:
        written = write_all(server, tmp_path)
    except PartMissing as problem:
        missing_part("Debezium and Canal", str(problem))

    original_events = debezium_events([value for _, value in written.debezium], OF_DEBEZIUM)
    messages = differences(original_events, debezium_events(written.our_debezium, OF_DEBEZIUM))
    keyed = rows_by_table(written.debezium)
    tables = steady_tables(keyed) & {table for table, _, _ in written.our_keyed}
    assert len(tables) > 70
    of_sinks = differences(
        keyed_events([record for record in keyed if record[0] in tables]),
        keyed_events([record for record in written.our_keyed if record[0] in tables]),
    )
    check("debezium", [*messages, *of_sinks])

    entries = differences(entry_events(written.entries), entry_events(written.our_entries))
    flat = differences(flat_events(written.flat), flat_events(written.our_flat))
    check("canal", [*entries, *flat])
