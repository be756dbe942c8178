# SPDX-License-Identifier: Apache-2.0
"""A range returns the same rows after any number of lost connections."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from penstock.errors import ConnectionLost, TransactionRolledBack
from penstock.model import Position
from penstock.source.files import FileSource
from penstock.source.reading import read_range
from penstock.source.source import ByteRange, SourceOptions
from tests.support.binlog.cut_source import CutSource, LiveSource
from tests.support.binlog.events import (
    FORMAT_DESCRIPTION,
    GTID,
    MARIADB_GTID,
    QUERY,
    TAGGED_GTID,
    TRANSACTION_PAYLOAD,
    XA_PREPARE,
    XID,
    Event,
    assemble,
    events,
    first_event_end,
)
from tests.support.suite.nonempty import each

LOGS = Path(__file__).parents[2] / "native/kernel/tests/logs"
SAMPLES = ("mysql-9.7-2", "mysql-9.7-4", "mariadb-10.11-2", "mariadb-10.11-4")
DIALECTS = ("canal", "canal_flat", "debezium", "debezium_schema", "maxwell", "ptubes")
SHAPES: dict[str, dict[str, Any]] = {
    "typed": {"emit": "typed"},
    "envelope": {"emit": "envelope"},
    "transactions": {"emit": "transactions"},
    "events": {"emit": "events"},
    **{dialect: {"emit": "messages", "dialect": dialect} for dialect in DIALECTS},
}
# Every rows event is its own batch, so each cut falls into a partly returned transaction.
EAGER = {"batch_rows_max": 3, "batch_bytes_max": 64, "held_bytes_max": 1}
REPEATS = 6
BOUNDARIES = (FORMAT_DESCRIPTION, GTID, TAGGED_GTID, MARIADB_GTID, QUERY, XA_PREPARE, XID)


@pytest.fixture(params=SAMPLES)
def large(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A server's log in which the row changes of each transaction are logged six times."""
    logged: list[Event] = []
    rows: list[Event] = []
    for event in events((LOGS / f"{request.param}.binlog").read_bytes()):
        if event.code in BOUNDARIES:
            logged += rows * REPEATS
            rows = []
            logged.append(event)
        else:
            rows.append(event)
    path = tmp_path / "mysql-bin.000001"
    path.write_bytes(assemble(logged + rows))
    return path


def rows_of(source: FileSource, path: Path, **options: Any) -> list[Any]:
    """Return all rows or messages of a file in the order in which they are returned."""
    start = first_event_end(path.read_bytes())
    whole = ByteRange(0, path.name, start, None, True)
    return [
        row
        for batch in read_range(source, whole, **EAGER, **options)
        for row in pyarrow.record_batch(batch).to_pylist()
    ]


def cut_sequences(length: int) -> Iterator[list[int]]:
    """Yield sequences of cuts: decreasing, repeated, increasing and random."""
    yield [length * 3 // 4, length // 2, length // 4, 0, length * 2 // 3]
    yield [length // 2] * 4
    yield [length // 4, length // 2, length * 3 // 4]
    for seed in range(12):
        chance = random.Random(seed)
        yield [chance.randrange(1, length) for _ in range(chance.randrange(2, 9))]


@pytest.mark.parametrize("shape", SHAPES)
def test_repeated_connection_losses_lose_and_duplicate_no_row(large: Path, shape: str) -> None:
    expected = rows_of(CutSource(large, ()), large, **SHAPES[shape])
    assert len(expected) > 5
    for cuts in cut_sequences(large.stat().st_size):
        source = CutSource(large, cuts)
        assert rows_of(source, large, **SHAPES[shape]) == expected, cuts
        assert source.losses == len(cuts)


def test_loss_before_the_first_transaction_of_a_cut_range_locates_it_again(large: Path) -> None:
    data = large.read_bytes()
    expected = rows_of(CutSource(large, ()), large)
    transactions = rows_of(CutSource(large, ()), large, emit="transactions")
    middle = next(transaction["offset"] for transaction in transactions if transaction["rows"] > 1) + 70
    later = {transaction["commit_version"] for transaction in transactions if transaction["offset"] > middle}
    byte_range = ByteRange(0, large.name, middle, None, False)
    for cut in each(range(middle, min(middle + 900, len(data)), 37), least=10):
        actual_rows = [
            row
            for batch in read_range(CutSource(large, (cut,)), byte_range, **EAGER)
            for row in pyarrow.record_batch(batch).to_pylist()
        ]
        assert actual_rows == [row for row in expected if row["_commit_version"] in later], cut


@pytest.mark.parametrize("large", ["mysql-9.7-4"], indirect=True)
def test_live_range_ends_after_a_payload(
    large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.source.decoding._SYNC_SECONDS_MAX", 0)
    parts = list(events(large.read_bytes()))
    last = next(at for at, event in enumerate(parts) if event.code == TRANSACTION_PAYLOAD)
    path = tmp_path / "mysql-bin.000002"
    path.write_bytes(assemble(parts[: last + 1]))
    byte_range = ByteRange(0, path.name, 4, path.stat().st_size, True)
    actual_rows, expected = (
        [pyarrow.record_batch(batch).to_pylist() for batch in read_range(source, byte_range, emit="envelope")]
        for source in (LiveSource(path), FileSource(SourceOptions.parse(str(path))))
    )
    assert [len(rows) for rows in actual_rows] == [len(rows) for rows in expected] != []


class DeadSource(CutSource):
    """A source whose connection is lost once at an offset, and which then fails permanently at that
    offset.
    """

    def open(
        self, byte_range: ByteRange, resume_at: Callable[[], Position] | None = None
    ) -> Iterator[memoryview]:
        assert resume_at is not None
        yield from self._buffers(byte_range.start, self._cuts[0])
        if self._cuts[1:]:
            yield from self._buffers(resume_at().offset, self._cuts[1])
        raise ConnectionLost("the server is away")


@pytest.mark.parametrize("again", [False, True], ids=["at once", "after another loss"])
def test_whole_transactions_precede_the_error_of_their_source(large: Path, again: bool) -> None:
    whole = rows_of(CutSource(large, ()), large)
    transactions = rows_of(CutSource(large, ()), large, emit="transactions")
    for number in each(range(1, len(transactions)), least=3):
        end = transactions[number]["offset"] + 40
        cuts = (transactions[number - 1]["end_offset"], end) if again else (end,)
        read: list[dict[str, Any]] = []
        byte_range = ByteRange(0, large.name, 4, None, True)
        batches = read_range(DeadSource(large, cuts), byte_range)
        with pytest.raises(ConnectionLost):
            read.extend(row for batch in batches for row in pyarrow.record_batch(batch).to_pylist())
        before = {transaction["commit_version"] for transaction in transactions[:number]}
        wanted = [row["_commit_version"] for row in whole if row["_commit_version"] in before]
        assert sorted(row["_commit_version"] for row in read) == sorted(wanted), number


class RewrittenSource(CutSource):
    """A server that loses a transaction in a crash. `rest` is what follows in its log instead."""

    def __init__(self, path: Path, cut: int, rest: Sequence[Event]) -> None:
        super().__init__(path, (cut,))
        self._rest = rest

    def open(
        self, byte_range: ByteRange, resume_at: Callable[[], Position] | None = None
    ) -> Iterator[memoryview]:
        assert resume_at is not None
        yield from self._buffers(byte_range.start, self._cuts[0])
        yield memoryview(assemble(self._rest, offset=resume_at().offset))


@pytest.mark.parametrize("large", ["mysql-9.7-2", "mariadb-10.11-2"], indirect=True)
def test_partly_read_transaction_lost_by_its_server_is_reported(large: Path) -> None:
    transactions = rows_of(CutSource(large, ()), large, emit="transactions")
    number, lost = next(
        (at, transaction) for at, transaction in enumerate(transactions) if transaction["rows"] > 10
    )
    later = transactions[number + 1 :]
    ignorable = Event(0, 28, 1, 0, 0x80, b"padding")
    rest = [ignorable, *(event for event in events(large.read_bytes()) if event.offset >= later[0]["offset"])]
    with pytest.raises(TransactionRolledBack, match="no longer in the log") as caught:
        rows_of(RewrittenSource(large, lost["end_offset"] - 40, rest), large)
    assert caught.value.position == f"{large.name}:{lost['offset'] + ignorable.size}"
    # A lost transaction does not matter if none of its rows was returned.
    rows = rows_of(RewrittenSource(large, lost["offset"], rest), large, emit="transactions")
    assert [row["gtid"] for row in rows] == [
        transaction["gtid"] for transaction in (*transactions[:number], *later)
    ]
