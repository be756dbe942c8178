# SPDX-License-Identifier: Apache-2.0
"""Readers that receive rows between a savepoint and a ROLLBACK TO it stop with an error. Rows before the
savepoint stop no reader.
"""

import struct

import pytest

from penstock.errors import TransactionRolledBack
from tests.support.binlog.block_cutting import SMALL_LOGS
from tests.support.binlog.decoding import Decoded, decode
from tests.support.binlog.events import QUERY, TABLE_MAP, WRITE_ROWS, XID, Event, assemble, events, query_body

LOG = next(log for log in SMALL_LOGS if log.stem == "mysql-9.7-2")
SAVEPOINTS_MAX = 1 << 12


def rows_of_two_tables() -> tuple[Event, list[Event], list[Event]]:
    """Return a format description, and a table map with inserted rows of `t` and of `u`."""
    logged = list(events(LOG.read_bytes()))
    inserts = [
        [logged[index - 1], event]
        for index, event in enumerate(logged)
        if event.code == WRITE_ROWS and logged[index - 1].code == TABLE_MAP
    ]
    first = next(insert for insert in inserts if b"\x01t\0" in insert[0].body)
    second = next(insert for insert in inserts if b"\x01u\0" in insert[0].body)
    return logged[0], first, second


FORMAT, ROWS_OF_T, ROWS_OF_U = rows_of_two_tables()


def query(text: str) -> Event:
    return Event(0, QUERY, 1, 0, 0, query_body(text))


def decode_transaction(parts: list[Event], tables: str) -> Decoded:
    end = Event(0, XID, 1, 0, 0, struct.pack("<Q", 1))
    return decode(assemble([FORMAT, query("BEGIN"), *parts, end]), tables=tables)


@pytest.mark.parametrize(
    "parts",
    [
        [*ROWS_OF_T, query("SAVEPOINT `s 1`"), *ROWS_OF_U, query("ROLLBACK TO `s 1`")],
        [query("SAVEPOINT `s`"), *ROWS_OF_T, query("SAVEPOINT `s`"), *ROWS_OF_U, query("ROLLBACK TO `S`")],
        [query("SAVEPOINT a"), *ROWS_OF_T, query("SAVEPOINT b"), *ROWS_OF_U, query("ROLLBACK TO b")],
        [
            *(query(f"SAVEPOINT `{number}`") for number in range(SAVEPOINTS_MAX)),
            *ROWS_OF_T,
            query("SAVEPOINT `7`"),
            *ROWS_OF_U,
            query("ROLLBACK TO `7`"),
        ],
    ],
    ids=["one", "set twice", "nested", "set twice among many"],
)
def test_rollback_to_savepoint_keeps_the_rows_before_it(parts: list[Event]) -> None:
    assert decode_transaction(parts, "fuzzed.t").rows() != []
    with pytest.raises(TransactionRolledBack, match="ROLLBACK TO SAVEPOINT"):
        decode_transaction(parts, "fuzzed.u")


@pytest.mark.parametrize(
    "parts",
    [
        [*ROWS_OF_T, query("ROLLBACK TO `unknown`")],
        [
            *(query(f"SAVEPOINT `{number}`") for number in range(SAVEPOINTS_MAX)),
            *ROWS_OF_T,
            query("SAVEPOINT `last`"),
            query("ROLLBACK TO `last`"),
        ],
    ],
    ids=["unknown", "too many"],
)
def test_rollback_to_an_unknown_savepoint_stops_readers_of_any_row(parts: list[Event]) -> None:
    with pytest.raises(TransactionRolledBack):
        decode_transaction(parts, "fuzzed.t")
    assert decode_transaction(parts, "fuzzed.other").rows() == []
