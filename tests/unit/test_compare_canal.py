# SPDX-License-Identifier: Apache-2.0
"""`penstock compare`: the comparison of Canal's entries with Penstock's entries of the same log, and the
client that receives Canal's entries.
"""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.compare import run
from penstock.errors import AccessDenied, AuthenticationFailed, ConnectionLost, OptionInvalid, PositionInvalid
from penstock.migrate.compare.canal_client import CanalAddress, CanalClient
from penstock.migrate.compare.comparing import Comparison
from penstock.model import Position, Secret, TablePatterns
from penstock.protobuf import Message
from penstock.serve.canal.frames import ack, handshake
from penstock.source.reading import Selection, read_range
from penstock.source.source import Source, SourceOptions, open_source
from tests.support.canal.client import ROWDATA, TRANSACTIONEND, entry_of, row_change_of
from tests.support.daemon.served_log import INSTANCE, captured_log, serving
from tests.support.suite.patience import WAIT_SECONDS_MAX

SAMPLE = Path(__file__).parents[2] / "src/penstock/sample/mysql-bin.000001"
TABLES = TablePatterns("shop.orders")

Alter = Callable[[Any, Any], None]


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    opened = open_source(SourceOptions.parse(SAMPLE))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def contents(source: Source) -> list[bytes]:
    """Entries of the sample as Canal delivers them: the first 40 transactions after the definitions."""
    entries: list[bytes] = []
    for byte_range in source.split():
        for batch in read_range(source, byte_range, Selection(), emit="messages", dialect="canal"):
            for value in batch.to_arrow().column("value").to_pylist():
                entries += map(bytes, Message(value).views(2))
    ends = [number for number, entry in enumerate(entries, 1) if is_end(entry)]
    begin = next(number for number, entry in enumerate(entries) if entry_of(entry).entryType == 1)
    return entries[begin : ends[39]]


def is_end(content: bytes) -> bool:
    return bool(entry_of(content).entryType == TRANSACTIONEND)


def comparison(source: Source, tables: TablePatterns = TABLES) -> Comparison:
    return Comparison(source, tables, shown=5, lag_seconds=0)


def compared(source: Source, contents: Sequence[bytes]) -> Comparison:
    """Compare entries in batches that end inside transactions."""
    running = comparison(source)
    for first in range(0, len(contents), 7):
        assert running.add([memoryview(content) for content in contents[first : first + 7]])
    return running


def rows_of_orders(contents: Sequence[bytes]) -> list[int]:
    """Return the numbers of the compared entries: those of shop.orders after the first transaction."""
    first = next(number for number, content in enumerate(contents, 1) if is_end(content))
    return [
        number
        for number, content in enumerate(contents)
        if number >= first
        and (entry := entry_of(content)).entryType == ROWDATA
        and entry.header.tableName == "orders"
        and not row_change_of(entry).isDdl
    ]


def altered(content: bytes, alter: Alter) -> bytes:
    """Return an entry with another header or row."""
    entry = entry_of(content)
    change = row_change_of(entry)
    alter(entry.header, change)
    entry.storeValue = change.SerializeToString()
    return bytes(entry.SerializeToString())


def test_entries_of_the_same_log_have_no_difference(source: Source, contents: list[bytes]) -> None:
    outcome = compared(source, contents).outcome
    selected = rows_of_orders(contents)
    assert (outcome.entries, outcome.different, outcome.behind) == (len(selected), 0, None)
    assert outcome.rows == sum(len(row_change_of(entry_of(contents[at])).rowDatas) for at in selected) > 0
    first = next(entry_of(content).header for content in contents if is_end(content))
    assert outcome.start == Position(0, SAMPLE.name, first.logfileOffset + first.eventLength)
    assert outcome.is_whole


def _other_value(_: Any, change: Any) -> None:
    column = change.rowDatas[0].afterColumns[0]
    column.value = "other"


def _null(_: Any, change: Any) -> None:
    column = change.rowDatas[0].afterColumns[0]
    column.isNull = True


def _other_type(_: Any, change: Any) -> None:
    change.rowDatas[0].afterColumns[0].mysqlType = "bigint"


def _without_column(_: Any, change: Any) -> None:
    del change.rowDatas[0].afterColumns[0]


@pytest.mark.parametrize(
    ("alter", "suffix", "shown"),
    [
        (_other_value, "", "'other'"),
        (_null, "", "None"),
        (_other_type, " type", "'bigint'"),
        (_without_column, "", "absent"),
    ],
)
def test_each_value_that_differs_is_reported(
    source: Source, contents: list[bytes], alter: Alter, suffix: str, shown: str
) -> None:
    at = next(
        number for number in rows_of_orders(contents) if entry_of(contents[number]).header.eventType != 3
    )
    header = entry_of(contents[at]).header
    name = row_change_of(entry_of(contents[at])).rowDatas[0].afterColumns[0].name
    outcome = compared(source, [*contents[:at], altered(contents[at], alter), *contents[at + 1 :]]).outcome
    difference = outcome.differences[0]
    assert difference.entry.startswith(f"{SAMPLE.name}:{header.logfileOffset} ")
    assert (difference.path, difference.canal) == (f"row 0 after.{name}{suffix}", shown)
    assert outcome.different == len(outcome.differences) >= 1


def test_entry_that_only_one_system_has_is_reported(source: Source, contents: list[bytes]) -> None:
    at = rows_of_orders(contents)[1]
    outcome = compared(source, [*contents[:at], *contents[at + 1 :]]).outcome
    assert [(one.canal, one.penstock) for one in outcome.differences] == [("absent", "present")]

    def move(header: Any, _: Any) -> None:
        header.logfileOffset += 1

    outcome = compared(source, [*contents[:at], altered(contents[at], move), *contents[at + 1 :]]).outcome
    assert [(one.canal, one.penstock) for one in outcome.differences] == [
        ("absent", "present"),
        ("present", "absent"),
    ]


def test_further_differences_are_counted_and_not_kept(source: Source, contents: list[bytes]) -> None:
    selected = set(rows_of_orders(contents))
    left = [content for number, content in enumerate(contents) if number not in selected]
    outcome = compared(source, left).outcome
    assert (outcome.different, len(outcome.differences), outcome.entries) == (len(selected), 5, 0)
    assert not outcome.is_whole


def test_place_that_the_log_has_not_reached_ends_the_comparison(
    source: Source, contents: list[bytes]
) -> None:
    running = compared(source, contents)
    end = entry_of(contents[-1])
    end.header.logfileOffset = SAMPLE.stat().st_size
    assert not running.add([memoryview(end.SerializeToString())])
    assert running.outcome.behind is not None
    assert not running.outcome.is_whole


def test_file_of_another_server_is_refused(source: Source, contents: list[bytes]) -> None:
    end = entry_of(next(filter(is_end, contents)))
    end.header.logfileName = "other-bin.000001"
    with pytest.raises(PositionInvalid, match=r"other-bin\.000001"):
        comparison(source).add([memoryview(end.SerializeToString())])


# --- The client -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    accounts = [{"name": "canal", "user": "canal", "password": "s3cret", "instances": [INSTANCE]}]
    with captured_log() as log, serving(log, {"canal": "127.0.0.1:0"}, accounts) as daemon:
        yield daemon.port("canal")


def address(port: int, *, destination: str = INSTANCE, password: str = "s3cret") -> CanalAddress:
    return CanalAddress("127.0.0.1", port, destination, "canal", Secret(password))


def test_batches_are_received_once_and_acknowledged(port: int) -> None:
    received: list[bytes] = []
    client = CanalClient(address(port), "2001")
    while batch := client.fetch(0.01):
        received += map(bytes, batch)
    client.close()
    assert len(received) == len(set(received)) > 0
    assert any(map(is_end, received))
    again = CanalClient(address(port), "2001")
    assert again.fetch(0.01) == []
    again.close()


def test_refusals_are_raised_by_name(port: int) -> None:
    with pytest.raises(AuthenticationFailed, match="auth failed"):
        CanalClient(address(port, password="other"))
    with pytest.raises(AccessDenied, match="destination"):
        CanalClient(address(port, destination="elsewhere"))


def test_closed_connection_is_lost(port: int) -> None:
    with pytest.raises(ConnectionLost):
        CanalClient(address(1))


def test_connection_lost_while_comparing_is_raised_after_what_was_compared(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(handshake(b"12345678") + ack() + ack())
            # The authentication, the subscription and the first request, each with its length.
            for _ in range(3):
                length = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
                connection.recv(length, socket.MSG_WAITALL)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        with pytest.raises(ConnectionLost):
            run(f"canal://127.0.0.1:{listening.getsockname()[1]}/shop", "penstock://127.0.0.1:1/shop")
        thread.join(WAIT_SECONDS_MAX)
    assert "nothing was compared" in capsys.readouterr().out


@pytest.mark.parametrize(
    "url", ["mysql://h/x", "canal://h", "canal://h/a/b", "canal://h:port/x", "canal:///x"]
)
def test_url_without_a_destination_is_refused(url: str) -> None:
    with pytest.raises(OptionInvalid, match="no destination"):
        CanalAddress.parse(url, Secret(""))


def test_address_shows_no_password() -> None:
    parsed = CanalAddress.parse("canal://u:s3cret@h/shop", Secret("other"))
    assert parsed.password == Secret("s3cret")
    assert "s3cret" not in f"{parsed} {parsed!r}"
