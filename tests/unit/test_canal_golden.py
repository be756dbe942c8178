# SPDX-License-Identifier: Apache-2.0
"""Complete Canal entries are compared byte for byte, from a log assembled by hand."""

import struct
from pathlib import Path

import pyarrow

from penstock._native import Decoder
from tests.support.binlog.events import QUERY, TABLE_MAP, WRITE_ROWS, XID, Event, assemble, events

# The log's first event is a format description of 123 bytes, so the next event is at offset 127.
LOG = Path(__file__).parents[2] / "native/kernel/tests/logs/mysql-9.7-1.binlog"
TABLE_ID = (18).to_bytes(6, "little")

# The start of every header: version 1 and the file's name.
FILE = "08 01 12 10 6d 79 73 71 6c 2d 62 69 6e 2e 30 30 30 30 30 31"
# Server 7, UTF-8, 1 700 000 000 000 milliseconds, MySQL.
ORIGIN = "20 07 2a 05 55 54 46 2d 38 30 80 d0 95 ff bc 31 38 02"

# Each text is field 2 of Messages: an entry with header, type and body. The thread of the BEGIN is 9.
BEGIN = f"12 32 0a 2a {FILE} 18 7f {ORIGIN} 50 2e 10 01 1a 02 20 09"
ROWS = (
    # 192 bytes; the header has schema, table, 47 bytes of event, INSERT, and the count of rows.
    f"12 c0 01 0a 46 {FILE} 18 dc 01 {ORIGIN} 42 04 73 68 6f 70 4a 01 74 50 2f 58 01"
    "  62 0e 0a 09 72 6f 77 73 43 6f 75 6e 74 12 01 32"
    # ROWDATA: table 18, INSERT, no definition.
    "  10 02 1a 74 08 12 10 01 50 00"
    # id = 1, a key of type 4 (index 0 is left out); name = 'a' of type 12.
    "  62 36 12 14 10 04 1a 02 69 64 20 01 28 01 30 00 42 01 31 52 03 69 6e 74"
    "  12 1e 08 01 10 0c 1a 04 6e 61 6d 65 28 01 30 00 42 01 61 52 0b 76 61 72 63 68 61 72 28 31 30 29"
    # id = -2; name is NULL and has no value.
    "  62 34 12 15 10 04 1a 02 69 64 20 01 28 01 30 00 42 02 2d 32 52 03 69 6e 74"
    "  12 1b 08 01 10 0c 1a 04 6e 61 6d 65 28 01 30 01 52 0b 76 61 72 63 68 61 72 28 31 30 29"
)
# The transaction's number is 300.
END = f"12 36 0a 2b {FILE} 18 8b 02 {ORIGIN} 50 1f 10 03 1a 05 12 03 33 30 30"


def written() -> bytes:
    """Return a log of one transaction that inserts (1, 'a') and (-2, NULL) into shop.t."""
    bodies = [
        (QUERY, struct.pack("<IIBHH", 9, 0, 4, 0, 0) + b"shop\0BEGIN"),
        (TABLE_MAP, TABLE_ID + b"\1\0\4shop\0\1t\0\2\3\x0f\2\x28\0\2"),
        (WRITE_ROWS, TABLE_ID + b"\1\0\2\0\2\xff\0\1\0\0\0\1a\2\xfe\xff\xff\xff"),
        (XID, (300).to_bytes(8, "little")),
    ]
    log_events = [Event(1_700_000_000, code, 7, 0, 0, body) for code, body in bodies]
    return assemble([next(events(LOG.read_bytes())), *log_events])


def test_insert_equals_the_recorded_bytes() -> None:
    view = memoryview(written())
    decoder = Decoder(instance="shop", file="mysql-bin.000001", emit="messages", dialect="canal")
    view = view[decoder.feed(view) :]
    assert decoder.state == "table"
    columns = [("id", "int", None, False), ("name", "varchar(10)", "utf8mb4", True)]
    decoder.answer_table(columns, primary_key=["id"])
    view = view[decoder.feed(view) :]
    decoder.close_batches()
    batch = pyarrow.record_batch(decoder.take_batch())
    assert batch.column("value").to_pylist() == [bytes.fromhex(text) for text in (BEGIN, ROWS, END)]
    assert batch.column("kind").to_pylist() == [4, 0, 5]
    assert batch.column("rows").to_pylist() == [0, 2, 0]
    # -2 folds to the same slot as 1, so the whole message has this slot.
    assert batch.column("slot").to_pylist() == [-1, 962, -1]
    assert batch.column("table").to_pylist() == ["", "shop.t", ""]
    assert batch.column("end_offset").to_pylist() == [None, None, 298]
    assert not view
