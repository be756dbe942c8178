# SPDX-License-Identifier: Apache-2.0
"""The shard of a row with partial images is computed from the row's own values. If this is impossible, the
row is rejected with a named error.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from penstock.binlog import load_schemas
from penstock.errors import EventUnsupported, ServerUnsupported
from penstock.model import TablePatterns
from penstock.sinks.messages import messages_of
from penstock.source.reading import Selection, read_range
from penstock.source.sharding import preimages_of, slots_of
from penstock.source.source import ByteRange, SourceOptions, open_source
from tests.support.binlog.events import UPDATE_ROWS, WRITE_ROWS, assemble, events
from tests.support.binlog.forged_log import NOTES, forged_log, insert
from tests.support.pipeline.changes_made import Made, changes_of, target_of

# NULL has the same slot as the number 0.
NULL_SLOT = 961
ID_ALONE, NOTE_ALONE, BOTH = b"\x01", b"\x02", b"\x03"


def note(text: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + text


def messages(folder: Path, code: int, body: bytes, **selected: Any) -> list[dict[str, Any]]:
    """Return the messages of one rows event of a table (id INT PRIMARY KEY, note LONGBLOB)."""
    head = list(events(forged_log(0)))[:2]
    rows = (70).to_bytes(6, "little") + b"\x01\x00\x02\x00\x02" + body
    change = [
        replace(event, code=code, body=rows) if event.code == WRITE_ROWS else event
        for event in insert(1, NOTES, 1, b"")
    ]
    file = folder / "binlog.000001"
    file.write_bytes(assemble([*head, *change]))
    source = open_source(SourceOptions.parse(str(file), instance="shop"))
    whole = ByteRange(0, file.name, 4, None, aligned=True)
    selection = Selection(TablePatterns(NOTES, None), **selected)
    batches = read_range(source, whole, selection, load_schemas(None), emit="messages", dialect="debezium")
    actual_rows = [row for batch in batches for row in batch.to_arrow().to_pylist()]
    return [row for row in actual_rows if row["kind"] <= 2]


def test_row_without_its_shard_column_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(EventUnsupported, match="shard column `id`"):
        messages(tmp_path, WRITE_ROWS, NOTE_ALONE + b"\x00" + note(b"a"))


def test_null_in_the_shard_column_is_a_value(tmp_path: Path) -> None:
    by_note = {"shard_columns": (("*.*", ("note",)),)}
    (row,) = messages(tmp_path, WRITE_ROWS, BOTH + b"\x02" + b"\x01\0\0\0", **by_note)
    assert row["slot"] == NULL_SLOT


def test_delete_half_of_a_move_has_the_slot_of_an_absent_shard_column(tmp_path: Path) -> None:
    by_note: dict[str, Any] = {"shard_columns": (("*.*", ("note",)),), "columns": ("id",)}
    first, two = (b"\x00" + bytes([number, 0, 0, 0]) + note(text) for number, text in ((1, b"a"), (2, b"b")))
    inserts = [messages(tmp_path, WRITE_ROWS, BOTH + image, **by_note)[0] for image in (first, two)]
    update = messages(tmp_path, UPDATE_ROWS, BOTH + BOTH + first + two, **by_note)
    assert [row["slot"] for row in update] == [row["slot"] for row in inserts]
    assert len({row["slot"] for row in update}) == 2


def test_delete_half_of_a_move_without_its_shard_column_is_refused(tmp_path: Path) -> None:
    images = b"\x00" + b"\x01\0\0\0" + b"\x00" + b"\x02\0\0\0" + note(b"b")
    with pytest.raises(EventUnsupported, match="shard column `note`"):
        messages(tmp_path, UPDATE_ROWS, ID_ALONE + BOTH + images, shard_columns=(("*.*", ("note",)),))


def images_in_part(*absent: Sequence[str]) -> pyarrow.RecordBatch:
    """Return the two images (id, region) of an update without these columns."""
    metadata = pyarrow.array([{"absent": list(names) or None} for names in absent])
    values = {"id": [1, 1], "region": ["eu", "us"], "_change_type": ["update_preimage", "update_postimage"]}
    shown = {
        name: [None if name in names else value for value, names in zip(column, absent, strict=True)]
        for name, column in values.items()
    }
    return pyarrow.record_batch({**shown, "_metadata": metadata})


def test_before_image_does_not_borrow_its_shard_from_the_after_image() -> None:
    rows = images_in_part(["region"], ["id"])
    with pytest.raises(ServerUnsupported, match="lacks the shard column region"):
        slots_of(rows, ["region"], NOTES, preimages_of(rows))
    # The key is unchanged if only the before image holds it.
    first, second = slots_of(rows, ["id"], NOTES, preimages_of(rows)).tolist()
    assert first == second


def test_delete_half_of_a_move_does_not_borrow_its_key_from_the_after_image() -> None:
    orders = changes_of(
        target_of({"id": "int", "region": "varchar(20)"}),
        [
            Made("update_preimage", 1, {"id": 5}, absent=("region",)),
            Made("update_postimage", 1, {"id": 6, "region": "us"}),
        ],
    )
    with pytest.raises(EventUnsupported, match="`region`"):
        messages_of(orders, "debezium", ("region",))
