# SPDX-License-Identifier: Apache-2.0
"""What `penstock verify` prints about a table."""

from pathlib import Path
from typing import Any

from penstock.pipeline.settings import pipeline_of_values
from penstock.pipeline.verify.comparison import TableResult
from penstock.pipeline.verify.report import lines
from penstock.pipeline.verify.selection import no_such_table
from penstock.pipeline.verify.shares import ComparedTable
from penstock.pipeline.verify.source_rows import SourceTable
from tests.support.pipeline.changes_made import target_of

ORDERS = target_of({"id": "int", "note": "varchar(20)"}, name="shop.orders")


def test_unknown_table_is_named() -> None:
    assert str(no_such_table("orders", ["shop.ordrs"])).startswith(
        "no table of the pipeline orders matches shop.ordrs"
    )
    assert str(no_such_table("orders", ())).startswith("the pipeline orders has no tables yet")


def test_report_counts_rows_and_says_why_rows_were_left_out(tmp_path: Path) -> None:
    source = {"url": "mysql://root@127.0.0.1:1", "name": "here", "tables": "shop.*"}
    values = {"name": "orders", "source": source, "sink": {"delta": {"path": str(tmp_path)}}}
    settings = pipeline_of_values(values, tmp_path)
    table = ComparedTable(ORDERS, (SourceTable(settings.source("here"), ORDERS),), (), settings.sink, ("id",))

    def report(**counts: Any) -> list[str]:
        return list(lines(TableResult(table, **counts), 10))

    assert report(source_rows=1, target_rows=1) == ["shop.orders: equal, 1 row"]
    assert report(source_rows=2000, target_rows=2000) == ["shop.orders: equal, 2,000 rows"]
    assert report(source_rows=1, rejected=3)[1:] == [
        "  3 source rows were left out, because a step failed on them"
    ]
