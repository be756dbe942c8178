# SPDX-License-Identifier: Apache-2.0
"""The oracle of the pipeline tests detects a wrong value, a missing row and a duplicate in a feed."""

import pytest

from tests.support.pipeline.oracle import Row, Source, assert_same, net_rows

TYPES = {"id": "int", "total": "decimal(8,2)"}
FEED: list[Row] = [
    {"id": 1, "total": "1.00", "_change_type": "insert"},
    {"id": 2, "total": "2.00", "_change_type": "insert"},
    {"id": 1, "total": "1.00", "_change_type": "update_preimage"},
    {"id": 1, "total": "1.50", "_change_type": "update_postimage"},
    {"id": 2, "total": "2.00", "_change_type": "delete"},
]


def source(*rows: tuple[int, str]) -> Source:
    values = net_rows(
        [{"id": number, "total": total, "_change_type": "insert"} for number, total in rows],
        Source([], TYPES),
    )
    return Source(values, TYPES)


def test_whole_feed_adds_up_to_the_rows_of_the_source() -> None:
    wanted = source((1, "1.5"))
    assert_same(wanted, net_rows(FEED, wanted))


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ([*FEED[:3], {**FEED[3], "total": "1.51"}, FEED[4]], "1 rows differ"),
        ([*FEED, FEED[0]], "1 rows differ"),
        (FEED[:4], "1 rows differ"),
        ([{**FEED[0], "total": "1.01"}, *FEED[1:]], "1 rows were removed that were never added"),
        (FEED[1:], "1 rows were removed that were never added"),
    ],
    ids=["wrong after image", "duplicate", "missing delete", "wrong insert", "missing insert"],
)
def test_feed_with_a_wrong_change_is_refused(feed: list[Row], message: str) -> None:
    wanted = source((1, "1.50"))
    with pytest.raises(AssertionError, match=message):
        assert_same(wanted, net_rows(feed, wanted), key=("id",))
