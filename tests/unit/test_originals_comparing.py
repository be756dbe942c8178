# SPDX-License-Identifier: Apache-2.0
"""The comparison with the original systems detects differences and enforces its list of known differences."""

from typing import Any

from tests.originals.comparing import ABSENT, Difference, Event, Rule, differences, not_seen, unlisted
from tests.originals.running import statements


def event(name: str, **fields: Any) -> Event:
    return Event((name,), "shop.t", fields)


def compare(original: list[Event], penstock_events: list[Event]) -> list[tuple[str, str, str, str]]:
    return [
        (difference.event, difference.path, difference.original, difference.ours)
        for difference in differences(original, penstock_events)
    ]


def test_differing_fields_are_identified_by_their_path() -> None:
    original = event("a", row={"id": 1, "t": ["x", None]}, kind=1)
    assert compare([original], [event("a", row={"id": 1, "t": ["x", None]}, kind=1)]) == []
    assert compare([original], [event("a", row={"id": 1, "t": ["x", 0]}, kind=True)]) == [
        ("a", "row.t[1]", "null", "0"),
        ("a", "kind", "1", "true"),
    ]
    assert compare([original], [event("a", row={"t": ["x", None], "id": 1}, kind=1)]) == [
        ("a", "row()", "id t", "t id")
    ]
    assert compare([event("a", n=None)], [event("a")]) == [("a", "n", "null", ABSENT)]


def test_event_of_only_one_system_does_not_shift_other_pairs() -> None:
    penstock_events = [event("a", n=1), event("c", n=4)]
    assert compare([event("a", n=1), event("b", n=2), event("c", n=3)], penstock_events) == [
        ("b", "", '{"n": 2}', ABSENT),
        ("c", "n", "3", "4"),
    ]
    assert compare([event("c", n=4)], penstock_events) == [("a", "", ABSENT, '{"n": 1}')]


def test_rules_name_whole_differences_and_must_occur() -> None:
    difference = Difference("shop.t", "c shop.t 1", "after.n", "1", "null")
    listed, other = Rule("nulls", r"after\.n", ours="null"), Rule("others", r"after\.")
    assert unlisted([listed], [difference]) == []
    assert unlisted([other], [difference]) == [difference]
    assert not_seen([listed, other], [difference]) == [other]
    never = Rule("stops", unseen="it stops")
    assert not_seen([never], []) == []
    assert unlisted([never], [difference]) == [difference]


def test_files_hold_whole_statements() -> None:
    for file in ("statements.sql", "without_canal.sql", "without_debezium.sql"):
        texts = statements(file)
        assert len(texts) > 5
        assert not any(text.endswith(";") or "\nCREATE" in text for text in texts)
