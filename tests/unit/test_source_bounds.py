# SPDX-License-Identifier: Apache-2.0
"""Parse start and end bounds."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from penstock.errors import OptionInvalid
from penstock.model import Position
from penstock.source.bounds import Bound, parse_bound

UUID = "3e11fa47-71ca-11e1-9e33-c80aa9429562"
SECOND = 1_000_000


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("mysql-bin.000003:1542", Bound(position=Position(0, "mysql-bin.000003", 1542))),
        ("2/mysql-bin.000003:4", Bound(position=Position(2, "mysql-bin.000003", 4))),
        ("orders.binlog:4", Bound(position=Position(0, "orders.binlog", 4))),
        (f"{UUID}:1-5", Bound(gtid_set=f"{UUID}:1-5")),
        (f"{UUID}:1-5:8,\n{UUID[:-1]}3:backup:9", Bound(gtid_set=f"{UUID}:1-5:8,\n{UUID[:-1]}3:backup:9")),
        ("0-1-100", Bound(gtid_set="0-1-100")),
        ("0-1-100,1-2-3", Bound(gtid_set="0-1-100,1-2-3")),
        ("gtid:2026-11-21", Bound(gtid_set="2026-11-21")),
        ("1970-01-02", Bound(time_us=86_400 * SECOND)),
        ("1970-01-01T00:00:01.000005Z", Bound(time_us=SECOND + 5)),
        ("1970-01-01 02:00:00+02:00", Bound(time_us=0)),
    ],
)
def test_text_is_parsed_as_a_position_a_gtid_set_or_a_time(text: str, bound: Bound) -> None:
    assert parse_bound(text) == bound


def test_time_without_a_zone_is_utc() -> None:
    naive = datetime(2026, 11, 21, 8, 30)
    assert parse_bound(naive) == parse_bound(naive.replace(tzinfo=UTC)) == parse_bound("2026-11-21T08:30:00Z")
    elsewhere = naive.replace(tzinfo=timezone(timedelta(hours=5, minutes=30)))
    assert parse_bound(elsewhere) == parse_bound("2026-11-21T03:00:00Z")


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01", "mysql-bin.000003", f"{UUID}", "1-2"])
def test_invalid_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(OptionInvalid) as caught:
        parse_bound(text)
    assert "mysql-bin.000003:1542" in str(caught.value.hint)


def test_bound_round_trips_through_text() -> None:
    for text in ("mysql-bin.000003:1542", "2026-11-21T08:30:00.000005+00:00", f"gtid:{UUID}:1-5"):
        assert parse_bound(str(parse_bound(text))) == parse_bound(text)
