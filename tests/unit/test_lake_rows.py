# SPDX-License-Identifier: Apache-2.0
import pyarrow

from penstock.changes import Target
from penstock.model import Column, TableName
from penstock.sinks.images import unrepresentable_counts

TARGET = Target(
    TableName("shop", "orders"), (Column("id", "int", None, False), Column("day", "date")), ("id",)
)
TEXTS = pyarrow.map_(pyarrow.string(), pyarrow.string())


def rows_with(texts: list[list[tuple[str, str]] | None]) -> pyarrow.Table:
    """Return rows whose `day` is null. `texts` are the source's texts of values that the column cannot
    hold.
    """
    metadata = pyarrow.StructArray.from_arrays([pyarrow.array(texts, TEXTS)], ["unrepresentable"])
    return pyarrow.table(
        {
            "id": pyarrow.array(range(len(texts)), pyarrow.int32()),
            "day": pyarrow.nulls(len(texts), pyarrow.date32()),
            "_metadata": metadata,
        }
    )


def test_values_out_of_range_are_counted_in_all_rows() -> None:
    rows = rows_with([[("day", "0000-00-00")], None, [("day", "2026-02-31")]])
    assert unrepresentable_counts(TARGET, rows) == {"shop.orders.day": 2}
    assert unrepresentable_counts(TARGET, rows_with([None, None])) == {}


def test_values_out_of_range_are_counted_in_selected_rows() -> None:
    rows = rows_with([[("day", "0000-00-00")], None, [("day", "2026-02-31")]])
    chosen = pyarrow.chunked_array([[True, True, False]])
    assert unrepresentable_counts(TARGET, rows, chosen) == {"shop.orders.day": 1}
