# SPDX-License-Identifier: Apache-2.0
"""Messages of a batch's tasks mean the same in a process, between processes and on disk."""

from collections import Counter

import pytest

from penstock.engine.joints import Ends
from penstock.engine.task_plan import COUNTS, RECEIPT, Counts
from penstock.engine.task_rows import Row, receipt_body, rows_in
from penstock.sinks.sink import Receipt

COUNTED = Counts(3, 40, 5, by_stage={"read": Counter(insert=3)}, floors={"s/d.t": 7}, ends={0: Ends(4, None)})
RECEIPTS = [
    Receipt(2, 30, Counter({"d.t": 2}), unrepresentable=Counter({"d.t.c": 1}), operations={"insert": 2}),
    Receipt(1, 10, {"d.t": 1}, ({"file": "a"},), columns_missing={"d.t": ["c"]}, seconds=0.5),
]


@pytest.mark.parametrize("receipt", RECEIPTS)
def test_receipt_is_the_same_in_a_process_and_between_processes(receipt: Receipt) -> None:
    row = Row(1, 2, 3, RECEIPT, receipt_body(receipt))
    (passed,) = rows_in([row.to_arrow()])
    assert passed[:4] == row[:4]
    assert passed.receipt() == row.receipt() == receipt


def test_counts_are_the_same_in_a_process_and_between_processes() -> None:
    row = Row(0, -1, 3, COUNTS, COUNTED)
    (passed,) = rows_in([row.to_arrow()])
    assert passed.counts() == row.counts() == COUNTED
