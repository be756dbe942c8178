# SPDX-License-Identifier: Apache-2.0
"""The values that the live tail of the console shows."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pyarrow
import pytest

from penstock.client.fetch import BatchFrame
from penstock.console import tail
from penstock.console.changed_cells import changed_cells
from penstock.console.fleet import Fleet
from tests.support.daemon.console import ANYWHERE
from tests.support.daemon.served_log import INSTANCE


def test_tail_shows_values_of_every_type_as_a_history_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail also shows values that Arrow cannot represent, as text, and columns whose names begin with an
    underscore. It does not show columns that were not logged.
    """
    unlogged = {"file": "a.1", "offset": 4, "absent": ["note"], "unrepresentable": [("zero", "0000-00-00")]}
    values = {
        "_id": 7,
        "price": Decimal("12.50"),
        "at": datetime(2026, 11, 26, 8, 30),
        "span": timedelta(hours=-838),
        "raw": b"\x00\xff",
        "ratio": 1.1,
        "zero": None,
        "note": None,
        "_commit_timestamp": datetime(2026, 11, 26, 9, tzinfo=UTC),
        "_metadata": unlogged,
    }
    rows = [
        {**values, "_change_type": "update_preimage"},
        {**values, "_change_type": "update_postimage", "_id": 8},
    ]
    columns = {name: pyarrow.array([row[name] for row in rows]) for name in rows[0] if name != "_metadata"}
    columns["ratio"] = columns["ratio"].cast(pyarrow.float32())
    texts = pyarrow.map_(pyarrow.string(), pyarrow.string())
    kind = pyarrow.struct(
        {
            "file": pyarrow.string(),
            "offset": pyarrow.int64(),
            "absent": pyarrow.list_(pyarrow.string()),
            "unrepresentable": texts,
        }
    )
    columns["_metadata"] = pyarrow.array([unlogged] * 2, kind)
    batch = pyarrow.record_batch(columns)
    out = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    frame = BatchFrame("shop.orders", 2, 1, ("_id",), memoryview(out.getvalue()))
    monkeypatch.setattr(Fleet, "ask_instance", lambda *_: {"position": None})
    monkeypatch.setattr(Fleet, "changes", lambda *_: iter([frame]))
    monkeypatch.setattr(tail, "ROWS_MAX", 1)
    _, row, _ = tail.tail_changes(Fleet([ANYWHERE], None), "", INSTANCE, {})
    assert changed_cells(row) == [
        ("_id", "7", "8", True),
        ("price", "12.50", "12.50", False),
        ("at", "2026-11-26 08:30:00", "2026-11-26 08:30:00", False),
        ("span", "-838:00:00", "-838:00:00", False),
        ("raw", "0x00ff", "0x00ff", False),
        ("ratio", "1.1", "1.1", False),
        ("zero", "0000-00-00", "0000-00-00", False),
    ]


def test_columns_that_an_update_does_not_log_have_not_changed() -> None:
    update = {"before": {"id": 7}, "after": {"status": "paid"}}
    assert changed_cells(update) == [("id", "7", None, False), ("status", None, "paid", True)]
