# SPDX-License-Identifier: Apache-2.0
"""Searching the log for a key's bytes finds every transaction that changed the row with that key."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock._native import RowSearch
from penstock.errors import AccessDenied
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.model import TableName
from penstock.serve.own_log import OwnSource
from penstock.source import row_history
from penstock.source.log import LogSource
from penstock.source.reading import read_in_order
from penstock.source.row_history import RowChange, RowHistory, RowKey, Unreadable
from penstock.source.source import SourceOptions
from tests.support.binlog.events import (
    ANONYMOUS_GTID,
    GTID,
    MARIADB_GTID,
    MARIADB_QUERY_COMPRESSED,
    QUERY,
    Event,
    assemble,
    compressed,
    events,
    query_body,
    with_table_metadata,
)
from tests.support.binlog.forged_log import ACCOUNTS, NOTES, insert, keep_forged_log, log_head
from tests.support.daemon.served_log import INSTANCE, captured_log
from tests.support.logstore.source import server_files
from tests.support.suite.nonempty import each

ACCOUNT_COLUMNS = [("id", "int", None, False), ("note", "longblob", None, True)]
DEFINITION = (ACCOUNT_COLUMNS, ["id"])


@pytest.fixture
def log() -> Iterator[Log]:
    with captured_log() as log:
        yield log


def transactions(parts: Sequence[Sequence[Event]]) -> tuple[bytes, list[int]]:
    """Return a file of transactions, and the start of each transaction followed by the end of the last."""
    content, starts = log_head(), []
    for part in parts:
        starts.append(len(content))
        content += assemble(part, offset=len(content))
    return content, [*starts, len(content)]


def spy_on_decoding(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the number of bytes of each decoded range of a history is appended."""
    decoded: list[int] = []

    def counting(source: Any, byte_range: Any, *rest: Any) -> Any:
        decoded.append(byte_range.stop - byte_range.start)
        return read_in_order(source, byte_range, *rest)

    monkeypatch.setattr(row_history, "read_in_order", counting)
    return decoded


def search(
    content: bytes,
    *values: str,
    table: str = ACCOUNTS,
    columns: Sequence[str] = (),
    definition: Any = None,
    pieces: Sequence[int] = (),
) -> list[tuple[int, int]]:
    """Return the candidates of a file that is fed in pieces, cut at offsets after the head."""
    head = log_head()
    database, _, name = table.partition(".")
    row = RowSearch(
        database,
        name,
        head=head,
        offset=len(head),
        columns=columns,
        values=values,
        definition=definition,
    )
    body = content[len(head) :]
    for start, end in zip([0, *pieces], [*pieces, len(body)], strict=True):
        row.feed(body[start:end])
    return row.finish()


def accounts(*numbers: int) -> tuple[bytes, list[int]]:
    """Return a log that alternates between notes and accounts."""
    parts = []
    for gno, number in enumerate(numbers, 1):
        parts += [insert(2 * gno, NOTES, 4711, b"note"), insert(2 * gno + 1, ACCOUNTS, number, b"account")]
    return transactions(parts)


class _Cut(Event):
    """An event without its last byte."""

    def encode(self, checksum: int | None = None) -> bytes:
        return super().encode(checksum)[:-1]


def test_only_transactions_of_the_table_with_the_bytes_of_the_key_are_candidates() -> None:
    content, starts = accounts(4710, 4711, 4712, (1 << 32) - 4711)
    assert search(content, "4711") == [(starts[3], starts[4])]
    assert search(content, "-4711") == [(starts[7], starts[8])]
    assert search(content, "9") == []
    # Adjacent candidates are joined into one range.
    content, starts = transactions([insert(gno, ACCOUNTS, 4711, b"") for gno in (1, 2)])
    assert search(content, "4711") == [(starts[0], starts[2])]


def test_bytes_may_be_cut_anywhere() -> None:
    content, starts = accounts(4710, 4711, 4712)
    expected = [(starts[3], starts[4])]
    random, length = Random(7), len(content) - starts[0]
    assert search(content, "4711", pieces=range(1, length)) == expected
    for _ in range(50):
        pieces = sorted(random.sample(range(1, length), 5))
        assert search(content, "4711", pieces=pieces) == expected, pieces


def test_events_that_are_too_long_to_buffer_are_candidates_by_their_table() -> None:
    long = bytes(17 << 20)
    parts = [
        insert(1, NOTES, 4711, long),
        insert(2, ACCOUNTS, 4711, b""),
        insert(3, ACCOUNTS, 9, long),
        insert(4, ACCOUNTS, 9, b""),
    ]
    content, starts = transactions(parts)
    # A complete event is searched, whatever its length.
    assert search(content, "4711") == [(starts[1], starts[2])]
    # The start of an event of the table may also be missing.
    row = content.index(bytes(100), starts[2]) - starts[0]
    for first in (range(row - 80, row, 7), [row + 99]):
        pieces = [*first, *range(row + 100, len(content) - starts[0], 4 << 20)]
        assert search(content, "4711", pieces=pieces) == [(starts[1], starts[3])]
    assert search(content[: starts[1] - 1], "4711", pieces=[1 << 20]) == [(starts[0], (1 << 64) - 1)]


@pytest.mark.parametrize(
    ("values", "columns"),
    [
        (("seven",), ()),
        (("99999999999",), ()),
        (("1", "2"), ()),
        (("1",), ("no_such_column",)),
        ((), ()),
    ],
)
def test_keys_that_do_not_fit_the_table_are_left_to_the_reader(
    values: tuple[str, ...], columns: tuple[str, ...]
) -> None:
    content, starts = accounts(4711)
    assert search(content, *values, columns=columns) == [(starts[1], starts[2])]


def test_columns_that_the_log_does_not_name_come_from_the_definition() -> None:
    full, _ = accounts(4710, 4711)
    content = with_table_metadata(full, (1, 2, 3))
    starts = [event.offset for event in events(content) if event.code == GTID]
    pairs = list(zip(starts, [*starts[1:], len(content)], strict=True))
    assert search(content, "4711", definition=DEFINITION) == [pairs[3]]
    assert search(content, "9", definition=DEFINITION) == []
    # Without a valid definition, each change of the table is a candidate.
    wrong = ([("id", "varchar(9)", "utf8mb4", False), ACCOUNT_COLUMNS[1]], ["id"])
    for definition in (None, (ACCOUNT_COLUMNS[:1], ["id"]), wrong):
        assert search(content, "9", definition=definition) == [pairs[1], pairs[3]]


def test_history_of_a_log_without_names_of_columns_decodes_only_transactions_with_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gtid, *_ = insert(1, NOTES, 1, b"")
    text = f"CREATE TABLE {ACCOUNTS} (id INT PRIMARY KEY, note LONGBLOB)"
    created = [gtid, replace(gtid, code=QUERY, body=query_body(text, "shop"))]
    full, _ = transactions(
        [created, *(insert(gno, ACCOUNTS, 4700 + gno, b"account") for gno in range(2, 12))]
    )
    keep_forged_log(tmp_path, with_table_metadata(full, (1, 2, 3)))
    monkeypatch.setattr(row_history, "_GAP_BYTES_MAX", 0)
    decoded = spy_on_decoding(monkeypatch)
    key = RowKey(TableName.parse(ACCOUNTS), ("4705",))
    location = SourceOptions.parse(str(tmp_path))
    parts = list(RowHistory(LogReader.open(tmp_path), lambda: LogSource(location), key).parts())
    assert [part.after for part in parts if isinstance(part, RowChange)] == [{"id": 4705, "note": b"account"}]
    assert not [part for part in parts if isinstance(part, Unreadable)]
    # The statement and the transaction are decoded twice: for the key, then for all columns.
    assert len(decoded) <= 4


@pytest.mark.parametrize("code", [QUERY, MARIADB_QUERY_COMPRESSED])
def test_definition_does_not_count_after_a_statement(code: int) -> None:
    before, after = insert(1, ACCOUNTS, 4710, b""), insert(3, ACCOUNTS, 4711, b"")
    statement = Event(0, code, 1, 0, 0, query_body("ALTER TABLE accounts RENAME COLUMN id TO number"))
    full, _ = transactions([before, [insert(2, ACCOUNTS, 0, b"")[0], statement], after])
    content = with_table_metadata(full, (1, 2, 3))
    starts = [event.offset for event in events(content) if event.code == GTID]
    assert search(content, "9", definition=DEFINITION) == [(starts[1], len(content))]


@pytest.mark.parametrize("length", [1, 64, 250, 251, 255, 256])
def test_names_of_every_length_are_found(length: int) -> None:
    long = "n" * length
    gtid, begin, table_map, rows, commit = insert(1, NOTES, 4711, b"note")
    encoded = bytes([length]) if length < 251 else b"\xfc" + length.to_bytes(2, "little")
    name = encoded + long.encode() + b"\0"
    body = table_map.body.replace(b"\x05notes\0", name).replace(b"\x04shop\0", name)
    content, starts = transactions([[gtid, begin, replace(table_map, body=body), rows, commit]])
    assert search(content, "4711", table=f"{long}.{long}") == [(starts[0], starts[1])]
    assert search(content, "4712", table=f"{long}.{long}") == []


def test_payload_that_ends_inside_an_event_is_a_candidate() -> None:
    gtid, *rest = insert(1, ACCOUNTS, 4711, b"account")
    # The payload's last event lacks its end.
    cut = compressed([*rest[:-1], _Cut(**vars(rest[-1]))])
    content, starts = transactions([[gtid, cut], insert(2, NOTES, 1, b"")])
    assert search(content, "9") == [(starts[0], starts[1])]


def test_compressed_transactions_are_searched() -> None:
    parts = []
    for gno, number in enumerate((4710, 4711, 4712), 1):
        gtid, *rest = insert(gno, ACCOUNTS, number, b"account")
        parts.append([gtid, compressed(rest)])
    content, starts = transactions(parts)
    assert search(content, "4711") == [(starts[1], starts[2])]


def test_everything_after_a_damaged_event_is_a_candidate() -> None:
    content, starts = accounts(4710, 4711, 4712)
    for at in each(range(starts[2], starts[3], 7)):
        damaged = bytearray(content)
        damaged[at] ^= 0x10
        ((start, end),) = search(bytes(damaged), "9")
        assert start <= starts[2] <= starts[6] < end
    assert search(content[:-3], "9") == [(starts[5], (1 << 64) - 1)]


def test_candidates_of_real_logs_are_whole_transactions() -> None:
    for file in each(server_files()):
        head = 4 + int.from_bytes(file.content[13:17], "little")
        row = RowSearch("fuzzed", "t", head=file.content[:head], offset=head, columns=(), values=("1",))
        row.feed(file.content[head:])
        codes = (GTID, ANONYMOUS_GTID, MARIADB_GTID)
        starts = {event.offset for event in events(file.content) if event.code in codes}
        for start, end in each(row.finish()):
            assert start in starts | {head}
            assert end in starts | {len(file.content)}


def test_transactions_without_the_key_are_not_decoded(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_history, "_GAP_BYTES_MAX", 0)
    decoded = spy_on_decoding(monkeypatch)
    list(RowHistory(log, lambda: OwnSource(INSTANCE, log), RowKey(TableName("fuzzed", "t"), ("1",))).parts())
    of_row = sum(decoded)
    decoded.clear()
    list(RowHistory(log, lambda: OwnSource(INSTANCE, log), RowKey(TableName("fuzzed", "t"), ("77",))).parts())
    assert sum(decoded) < of_row


def test_a_masked_key_is_refused_also_if_no_row_has_it(log: Log) -> None:
    key = RowKey(TableName("fuzzed", "t"), ("123456",), masked=frozenset({"id"}))
    with pytest.raises(AccessDenied):
        list(RowHistory(log, lambda: OwnSource(INSTANCE, log), key).parts())
