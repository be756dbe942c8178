# SPDX-License-Identifier: Apache-2.0
"""Debezium and Canal themselves, beside Penstock: event by event and field by field."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fixture_types import MissingPart, StartServer
from tests.originals.comparing import Difference, differences, rules_of
from tests.originals.events import debezium_events, entry_events, flat_events
from tests.originals.running import OF_DEBEZIUM, write_all
from tools.servers import PartMissing

DIFFERENCES_SHOWN_MAX = 20


def check(system: str, found: Sequence[Difference]) -> None:
    """Assert that every difference is listed, and that every listed one is still there."""
    rules = [rule for rule in rules_of(system) if not rule.unseen]
    unlisted = [one for one in found if not any(rule.covers(one) for rule in rules)]
    assert not unlisted, "\n".join(
        [f"{len(unlisted)} differences are not listed", *map(str, unlisted[:DIFFERENCES_SHOWN_MAX])]
    )
    gone = [rule for rule in rules if not any(rule.covers(one) for one in found)]
    assert not gone, f"listed, and not seen any more: {gone}"


@pytest.mark.deep(
    guard="tests/integration/test_messages_json.py::test_every_value_is_what_its_dialect_makes_of_the_clients_text"
)
def test_messages_are_those_of_the_original_systems_but_for_listed_differences(
    start_server: StartServer, missing_part: MissingPart, tmp_path: Path
) -> None:
    server = start_server(default_time_zone="+00:00")
    try:
        written = write_all(server, tmp_path)
    except PartMissing as problem:
        missing_part("Debezium and Canal", str(problem))

    theirs = debezium_events([value for _, value in written.debezium], OF_DEBEZIUM)
    check("debezium", list(differences(theirs, debezium_events(written.our_debezium, OF_DEBEZIUM))))

    entries = differences(entry_events(written.entries), entry_events(written.our_entries))
    flat = differences(flat_events(written.flat), flat_events(written.our_flat))
    check("canal", [*entries, *flat])
