# SPDX-License-Identifier: Apache-2.0
"""Changes as lines on standard output."""

import json

import pytest

from penstock.sinks.sink import BatchMark, make_sink, settings_of
from tests.support.pipeline.changes_made import changes_of, insert, target_of, update


@pytest.mark.parametrize(("form", "named"), [("json", "change"), ("debezium", "op"), ("maxwell", "type")])
def test_each_change_is_a_line(capfd: pytest.CaptureFixture[str], form: str, named: str) -> None:
    target = target_of({"id": "int", "name": "varchar(9)"})
    sink = make_sink("stdout", settings_of("stdout")(**{"format": form}))
    writer = sink.open(BatchMark("p", "1", 1), 0)
    writer.write(changes_of(target, insert(1, id=1, name="é\n")))
    writer.write(changes_of(target, update(2, {"id": 1, "name": "é\n"}, {"id": 1, "name": None})))
    receipt = writer.finish()
    lines = capfd.readouterr().out.splitlines()
    assert [json.loads(line)[named][0] for line in lines] == (
        ["c", "u"] if form == "debezium" else ["i", "u"]
    )
    assert receipt.tables == {"shop.orders": 3}
    assert receipt.bytes == len("\n".join([*lines, ""]).encode())
