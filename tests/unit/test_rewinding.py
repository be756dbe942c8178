# SPDX-License-Identifier: Apache-2.0
"""Earlier positions of a log, to which a pipeline rewinds."""

from pathlib import Path
from typing import Any

import pytest

from penstock import read_binlog
from penstock.errors import OptionInvalid, PositionInvalid
from penstock.model import TablePatterns
from penstock.pipeline.rewinding import earlier_offset
from penstock.pipeline.settings import PipelineSource
from penstock.source.bounds import Bound, parse_bound
from penstock.source.offsets import Offset
from penstock.source.source import SourceOptions

LOG = Path(__file__).parents[2] / "native/kernel/tests/logs/mysql-9.7-2.binlog"


@pytest.fixture(scope="module")
def transactions() -> list[dict[str, Any]]:
    actual_rows = [
        row for batch in read_binlog(LOG, emit="transactions") for row in batch.to_arrow().to_pylist()
    ]
    assert len(actual_rows) > 4
    return actual_rows


@pytest.fixture
def source() -> PipelineSource:
    return PipelineSource("shop", SourceOptions(paths=(str(LOG),), instance="shop"), TablePatterns())


def reached(row: dict[str, Any], gtid_set: str = "") -> dict[str, Any]:
    return {"epoch": 0, "file": row["file"], "offset": row["end_offset"], "gtid_set": gtid_set}


def test_pipeline_rewinds_to_the_start_or_end_of_a_transaction(
    source: PipelineSource, transactions: list[dict[str, Any]]
) -> None:
    stands = reached(transactions[-1])
    for row in transactions:
        for position in (row["offset"], row["end_offset"]):
            actual = earlier_offset(source, stands, parse_bound(f"{row['file']}:{position}"))
            offset = Offset.from_json(actual.offset)
            assert offset.position.offset == position
            assert offset.fingerprint
            assert actual.bytes == stands["offset"] - position
    with pytest.raises(PositionInvalid, match="no transaction begins at"):
        earlier_offset(source, stands, parse_bound(f"{stands['file']}:{transactions[1]['offset'] + 1}"))


def test_position_that_the_pipeline_has_not_reached_is_refused(
    source: PipelineSource, transactions: list[dict[str, Any]]
) -> None:
    stands = reached(transactions[1])
    last = transactions[-1]
    for wanted in (parse_bound(f"{last['file']}:{last['offset']}"), Bound(gtid_set=last["gtid"])):
        with pytest.raises(OptionInvalid, match="has not reached"):
            earlier_offset(source, stands, wanted)
    # A time in the future stands for the current position.
    offset = earlier_offset(source, stands, parse_bound("2999-01-01"))
    assert offset.position.offset == stands["offset"]


def test_pipeline_rewinds_by_gtid_set_and_by_time(
    source: PipelineSource, transactions: list[dict[str, Any]]
) -> None:
    first, last = (row["gtid"].rpartition(":") for row in (transactions[0], transactions[-1]))
    stands = reached(transactions[-1], f"{last[0]}:1-{last[2]}")
    wanted = f"{first[0]}:1-{first[2]}"
    offset = Offset.from_json(earlier_offset(source, stands, Bound(gtid_set=wanted)).offset)
    assert (offset.by_set, offset.gtid_set) == (True, wanted)
    assert offset.position.offset <= transactions[0]["end_offset"]
    begin = earlier_offset(source, stands, parse_bound("2001-01-01"))
    assert begin.position.offset == transactions[0]["offset"]
