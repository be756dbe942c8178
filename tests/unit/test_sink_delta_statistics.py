# SPDX-License-Identifier: Apache-2.0
"""File statistics in Delta's log: readers use them to skip files, so a wrong bound loses rows."""

import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from penstock.sinks.delta.table import create_delta, open_delta
from penstock.sinks.lake.parquet_files import Bounds, DataFile

TIMESTAMP = pyarrow.timestamp("us", tz="UTC")


def stored_statistics(folder: Path, kind: pyarrow.DataType, bounds: Bounds) -> dict[str, Any]:
    """Commit a file whose only column has these bounds; return the statistics in the table's log."""
    create_delta(str(folder), {}, "t", pyarrow.schema([pyarrow.field("value", kind)]), {})
    table = open_delta(str(folder), {})
    assert table is not None
    table.commit([DataFile("a.parquet", 3, 100, {"value": bounds})], [], {})
    lines = (folder / "_delta_log/00000000000000000001.json").read_text().splitlines()
    [added] = [json.loads(line)["add"] for line in lines if "add" in json.loads(line)]
    statistics: dict[str, Any] = json.loads(added["stats"])
    return statistics


def moment(second: int, microsecond: int) -> datetime:
    return datetime(2026, 1, 2, 3, 4, second, microsecond, tzinfo=UTC)


@pytest.mark.parametrize(
    ("kind", "low", "high", "stored"),
    [
        (pyarrow.int64(), -5, 7, (-5, 7)),
        (pyarrow.string(), "a", "b", ("a", "b")),
        (pyarrow.date32(), date(2026, 1, 2), date(2026, 1, 3), ("2026-01-02", "2026-01-03")),
        (pyarrow.float64(), -0.5, 1.5, (-0.5, 1.5)),
        (pyarrow.decimal128(15, 0), Decimal(-12), Decimal(999999999999999), (-12, 999999999999999)),
    ],
    ids=lambda value: str(value) if isinstance(value, pyarrow.DataType) else "",
)
def test_bounds_are_stored_exactly(
    tmp_path: Path, kind: pyarrow.DataType, low: object, high: object, stored: tuple[object, object]
) -> None:
    statistics = stored_statistics(tmp_path, kind, Bounds(low, high, 1))
    assert (statistics["minValues"], statistics["maxValues"]) == ({"value": stored[0]}, {"value": stored[1]})
    assert (statistics["numRecords"], statistics["nullCount"]) == (3, {"value": 1})


def test_bounds_of_times_are_rounded_away_from_the_values(tmp_path: Path) -> None:
    statistics = stored_statistics(tmp_path, TIMESTAMP, Bounds(moment(5, 1999), moment(6, 1001), 0))
    assert statistics["minValues"] == {"value": "2026-01-02T03:04:05.001Z"}
    assert statistics["maxValues"] == {"value": "2026-01-02T03:04:06.002Z"}


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        # Rounding up would reach the next second.
        (TIMESTAMP, moment(5, 0), moment(5, 999_001)),
        (pyarrow.float64(), -math.inf, 1.0),
        (pyarrow.float64(), 1.0, math.inf),
        (pyarrow.float64(), math.nan, math.nan),
        (pyarrow.decimal128(9, 2), Decimal("0.10"), Decimal("0.20")),
        (pyarrow.decimal128(38, 0), Decimal(1), Decimal(10**20)),
        (pyarrow.decimal128(38, 0), Decimal(-(10**20)), Decimal(1)),
    ],
    ids=str,
)
def test_bounds_without_an_exact_form_are_omitted(
    tmp_path: Path, kind: pyarrow.DataType, low: object, high: object
) -> None:
    statistics = stored_statistics(tmp_path, kind, Bounds(low, high, 2))
    assert (statistics["minValues"], statistics["maxValues"]) == ({}, {})
    assert statistics["nullCount"] == {"value": 2}
