# SPDX-License-Identifier: Apache-2.0
"""Canal's protocol on a real daemon: subscriptions, batches, waiting, filters, takeover, restarts."""

import functools
import itertools
import json
import random
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock._native import GtidSet
from penstock.coordinate.checkpoint import Checkpoint
from penstock.coordinate.subscription_record import Subscriptions
from tests.support.canal.client import DUMP, CanalClient, Refused, entry_of
from tests.support.canal.following import (
    arrived,
    assert_ended,
    assert_refused,
    checkpoint_of,
    connect,
    drain,
    ids_of,
    settings_of,
    store_of,
    until_gone,
    write,
)
from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import DaemonProcess
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers import Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")

RESIDENT_BYTES_MAX = 400 << 20
# The longest delay of a TCP acknowledgement in the kernel.
CONFIRMATION_SECONDS = 0.04


@pytest.fixture(scope="module")
def server(server_of: Callable[[str], Server]) -> Iterator[Server]:
    """The shared MySQL server, with tables for the whole module."""
    actual = server_of("mysql")
    actual.sql("CREATE DATABASE canal_p; CREATE TABLE canal_p.t (id INT PRIMARY KEY, v LONGTEXT)")
    actual.sql("CREATE TABLE canal_p.u (id INT PRIMARY KEY, v LONGTEXT)")
    yield actual
    actual.sql("DROP DATABASE canal_p")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Iterator[DaemonProcess]:
    """A daemon without credentials, where new clients start at the head."""
    with DaemonProcess(tmp_path_factory.mktemp("canal"), settings_of(server), environment={}) as running:
        # An empty log has no head.
        write(server, running, 1)
        yield running


# --- Batches --------------------------------------------------------------------------------


def test_batches_are_numbered_from_one_acknowledged_in_order_and_redelivered_after_a_rollback(
    daemon: DaemonProcess, server: Server
) -> None:
    with connect(daemon) as client:
        client.rollback(0)
        client.subscribe()
        assert client.get() == (-1, [])
        ids = write(server, daemon, 6, width=1024)
        # A batch holds at least one entry, and otherwise as many entries as fit.
        batches = list(iter(lambda: client.get(size=1), (-1, [])))
        assert [number for number, _ in batches] == list(range(1, len(batches) + 1))
        assert len(batches) >= 2 * len(ids)
        whole = [entry for _, entries in batches for entry in entries]
        assert ids_of(whole) == ids
        client.rollback(0)
        number, again = client.get()
        last = len(batches) + 1
        assert (number, again) == (last, whole)

        client.rollback(last)
        first, second, third = client.get(size=1), client.get(size=1), client.get(size=1)
        assert [first[0], second[0], third[0]] == [last + 1, last + 2, last + 3]
        for refuse in (client.ack, client.rollback):
            refuse(second[0])
            with pytest.raises(Refused) as refused:
                client.expect_ack()
            assert (refused.value.code, refused.value.text) == (
                400,
                f"batchId:{second[0]} is not the firstly:{first[0]}",
            )
        client.ack(first[0])
        client.ack(second[0])
        client.rollback(third[0])
        # No batch follows the rolled-back batch, and the earlier batches were acknowledged.
        client.ack(third[0])
        with pytest.raises(Refused) as refused:
            client.expect_ack()
        name = client.client_id
        assert (
            refused.value.text
            == f"ack error , clientId:{name} batchId:{third[0]} is not exist , please check"
        )
        client.rollback(77)
        with pytest.raises(Refused) as refused:
            client.expect_ack()
        assert refused.value.text == f"rollback error, clientId:{name} batchId:77 is not exist , please check"
        number, rest = client.get()
        assert number == third[0] + 1
        assert first[1] + second[1] + rest == whole
        client.ack(-1)
        client.ack(0)
        with pytest.raises(Refused, match="402"):
            client.expect_ack()
        client.ack(number)
        assert client.get() == (-1, [])


def test_rollback_includes_later_batches(daemon: DaemonProcess, server: Server) -> None:
    with connect(daemon) as client:
        client.subscribe()
        ids = write(server, daemon, 3)
        batches = [client.get(size=1) for _ in range(4)]
        client.rollback(batches[0][0])
        number, entries = client.get()
        assert ids_of(entries) == ids
        # The entries were redelivered under a new batch id, and only that id can be acknowledged.
        client.ack(batches[1][0])
        with pytest.raises(Refused, match="not exist"):
            client.expect_ack()
        client.ack(number)
        assert client.get() == (-1, [])


def test_headers_hold_the_position_in_the_servers_log(daemon: DaemonProcess, server: Server) -> None:
    with connect(daemon) as client:
        client.subscribe("canal_p\\.t")
        before, started = head_of(server), time.time()
        write(server, daemon, 1)
        _, entries = client.get()
        begin, row, end = (entry_of(entry) for entry in entries)
        assert {entry.header.logfileName for entry in (begin, row, end)} == {before.file}
        assert (
            before.offset < begin.header.logfileOffset < row.header.logfileOffset < end.header.logfileOffset
        )
        assert end.header.logfileOffset + end.header.eventLength == head_of(server).offset
        assert (row.header.schemaName, row.header.tableName) == ("canal_p", "t")
        assert row.header.serverId == server.sql("SELECT @@server_id")[0][0]
        # The server logs whole seconds.
        assert int(started) <= row.header.executeTime / 1000 <= time.time()
        assert [(prop.key, prop.value) for prop in row.header.props if prop.key == "rowsCount"] == [
            ("rowsCount", "1")
        ]
        # An error does not end the session.
        client.send(DUMP, "Get")
        with pytest.raises(Refused, match="packet type: DUMP is NOT supported!"):
            client.expect_ack()
        assert client.get() == (-1, [])


def test_transaction_may_span_many_batches_and_is_durable_at_its_end(
    daemon: DaemonProcess, server: Server
) -> None:
    with connect(daemon) as client:
        client.subscribe("canal_p\\.u")
        # These are more rows than the daemon decodes at once.
        ids = list(map(str, range(200_001, 230_001)))
        rows = ", ".join(f"({id_}, REPEAT('y', 1000))" for id_ in ids)
        server.sql(f"INSERT INTO canal_p.u VALUES {rows}")
        arrived(server, daemon)
        actual: list[str] = []
        batches = 0
        while len(actual) < 20_000:
            number, entries = client.get(size=256)
            actual += ids_of(entries)
            batches += 1
            client.ack(number)
        assert batches > 50
        assert daemon.resident_bytes() < RESIDENT_BYTES_MAX
        # The connection is lost inside the transaction; the daemon keeps the cursor in memory.
        client.close()
    with connect(daemon, int(client.client_id)) as client:
        client.subscribe("canal_p\\.u")
        assert actual + drain(client, size=256) == ids
    assert checkpoint_of(daemon, client).position == str(head_of(server))


def test_any_mix_of_acks_rollbacks_and_losses_delivers_every_entry_in_order(
    daemon: DaemonProcess, server: Server
) -> None:
    chance, numbers = random.Random(11), itertools.count(100_000)
    with connect(daemon, 77) as client, connect(daemon) as other:
        client.subscribe("canal_p\\.[tu]")
        other.subscribe("canal_p\\.[tu]")
        for lap in range(12):
            begin = "BEGIN;" if chance.random() < 0.7 or lap == 6 else ""
            # One of the transactions is larger than the part that the daemon decodes at once.
            table, width = chance.choice("tu"), 1_000_000 if lap == 6 else chance.choice((1, 100, 5000))
            statements = [
                f"INSERT INTO canal_p.{table} VALUES ({next(numbers)}, REPEAT('z', {width}))"
                for _ in range(25 if lap == 6 else chance.randrange(1, 40))
            ]
            server.sql(begin + ";".join(statements) + ";COMMIT")
    arrived(server, daemon)
    with connect(daemon, int(other.client_id)) as other:
        whole = [entry for _, entries in iter(other.get, (-1, [])) for entry in entries]
    assert len(whole) > 300

    taken: list[bytes] = []
    unacked: list[tuple[int, list[bytes]]] = []
    client = connect(daemon, 77).subscribe()
    while len(taken) < len(whole):
        step = chance.random()
        if step < 0.6:
            batch = client.get(size=chance.choice((1, 2, 7, 30)))
            unacked += [batch] if batch[0] != -1 else []
        elif step < 0.9 and unacked:
            number, entries = unacked.pop(0)
            client.ack(number)
            assert entries == whole[len(taken) : len(taken) + len(entries)]
            taken += entries
        elif step < 0.95:
            client.rollback(0 if chance.random() < 0.5 or not unacked else unacked[0][0])
            unacked = []
        elif step < 0.98:
            client.close()
            until_gone(daemon, client)
            client, unacked = connect(daemon, 77).subscribe(), []
    client.close()


# --- Waiting --------------------------------------------------------------------------------


def test_waiting_get_times_out_and_blocks_no_other_client(daemon: DaemonProcess, server: Server) -> None:
    with connect(daemon) as waiting, connect(daemon) as forever, connect(daemon) as other:
        for client in (waiting, forever, other):
            client.subscribe("canal_p\\..*")
        for timeout, unit, seconds in (
            (-1, 2, 0.0),
            (300_000, 1, 0.3),
            (300, 2, 0.3),
            (300, -1, 0.3),
            (1, 3, 1.0),
        ):
            started = time.monotonic()
            assert waiting.get(1000, timeout, unit) == (-1, [])
            # If the daemon used the next larger unit, the timeout would be at least a minute.
            assert seconds <= time.monotonic() - started < seconds + 45
        waiting.ask(1000, 1500, 2)
        # Without a timeout, or with 0, the daemon waits until the batch is full.
        forever.ask(20, None, None)
        ids = write(server, daemon, 1)
        assert drain(other) == ids
        number, entries = waiting.receive_batch()
        if number == -1:
            # The rows arrived after the timeout of the first request.
            number, entries = waiting.get(1000, 1500, 2)
        assert ids_of(entries) == ids
        waiting.ack(number)
        forever.socket.settimeout(0.3)
        with pytest.raises(TimeoutError):
            forever.receive_bytes()
        forever.close()
        until_gone(daemon, forever)
        # The batch of the lost client was never delivered.
        with connect(daemon, int(forever.client_id)) as again:
            again.subscribe()
            again.ask(20, 0, 2)
            ids += write(server, daemon, 3, width=10_000)
            number, entries = again.receive_batch()
            assert ids_of(entries) == ids[:2]
            again.rollback(0)
            assert drain(again) == ids


def test_client_that_does_not_read_its_response_blocks_no_other_client(
    daemon: DaemonProcess, server: Server
) -> None:
    with connect(daemon) as stalled, connect(daemon) as other:
        stalled.subscribe()
        other.subscribe()
        ids = write(server, daemon, 4, width=1 << 20)
        # These are more bytes than the system buffers for a client that does not read.
        for _ in range(12):
            stalled.ask(8000)
            stalled.rollback(0)
        for _ in range(5):
            ids += write(server, daemon, 1)
            assert drain(other)[-1] == ids[-1]
        for _ in range(12):
            received_ids = ids_of(stalled.receive_batch()[1])
            assert received_ids
            assert received_ids == ids[: len(received_ids)]


def test_waiting_get_is_answered_when_a_row_arrives(daemon: DaemonProcess, server: Server) -> None:
    hour_seconds = 3600
    with connect(daemon) as client:
        client.subscribe()
        for _ in range(5):
            # The request's timeout exceeds the client's own timeout, so only the arrival of a row can answer
            # the request.
            client.ask(1, hour_seconds, 3)
            rows = threading.Thread(target=write, args=(server, daemon, 1, "canal_p.t", 2048))
            rows.start()
            number, entries = client.receive_batch()
            assert number > 0
            assert entries
            client.ack(number)
            rows.join()
            # Drain the rest of the interrupted transaction.
            drain(client)


def test_client_with_small_writes_is_not_delayed_by_nagle(
    daemon: DaemonProcess,
) -> None:
    with connect(daemon) as client:
        client.subscribe()
        # As with the official client, a frame is written in two parts, and the system may delay small writes.
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)
        client.send_bytes = functools.partial(send_in_two, client.socket)  # type: ignore[method-assign]
        laps = []
        for _ in range(50):
            started = time.monotonic()
            client.rollback(0)
            assert client.get() == (-1, [])
            laps.append(time.monotonic() - started)
        # With the delay, every frame except the first few would take that long. Pauses of the machine affect
        # only a few frames.
        assert sorted(laps)[25] < CONFIRMATION_SECONDS


def send_in_two(over: socket.socket, frame: bytes) -> None:
    over.sendall(struct.pack(">I", len(frame)))
    over.sendall(frame)


# --- Who sees what --------------------------------------------------------------------------


def test_each_client_has_its_own_cursor_and_filter(daemon: DaemonProcess, server: Server) -> None:
    with connect(daemon) as first, connect(daemon) as other, connect(daemon) as none:
        first.subscribe("canal_p\\.T")
        other.subscribe("canal_p\\.u,canal_p\\.nothing.*")
        none.subscribe("nowhere\\..*")
        server.sql("DELETE FROM canal_p.u")
        in_t, in_u = write(server, daemon, 3), write(server, daemon, 2, "canal_p.u")
        assert drain(first) == in_t
        assert drain(other) == in_u
        assert drain(none) == []
        # An empty filter keeps the current filter, even over another connection; a new filter replaces it.
        other.subscribe("")
        in_t, in_u = write(server, daemon, 1), write(server, daemon, 1, "canal_p.u")
        assert drain(other) == in_u
        other.close()
        with connect(daemon, int(other.client_id)) as other:
            in_t += write(server, daemon, 1)
            in_u = write(server, daemon, 1, "canal_p.u")
            assert drain(other) == in_u
            other.subscribe(".*\\..*")
            in_u = [*write(server, daemon, 1), *write(server, daemon, 1, "canal_p.u")]
            assert drain(other) == in_u
            with pytest.raises(Refused, match="not a regular expression"):
                other.subscribe("canal_p\\.(")
            assert drain(first) == [*in_t, in_u[0]]


def test_client_is_served_only_while_it_is_subscribed(daemon: DaemonProcess, server: Server) -> None:
    with connect(daemon) as client:
        for ask in (client.get, lambda: client.ack(1) or client.expect_ack()):
            with pytest.raises(Refused, match=r"ClientIdentity:.*should subscribe first"):
                ask()
        client.subscribe()
        ids = write(server, daemon, 1)
        number, entries = client.get()
        assert ids_of(entries) == ids
        client.ack(number)
        client.unsubscribe()
        with pytest.raises(Refused, match="should subscribe first"):
            client.get()
        write(server, daemon, 1)
        # The client is new again: batch numbers start over, at the head.
        client.subscribe()
        assert client.get() == (-1, [])
        write(server, daemon, 1)
        assert client.get()[0] == 1


@pytest.mark.parametrize(
    ("destination", "client_id", "code", "text"),
    [
        ("shoe", "1", 400, "destination:shoe should start first"),
        ("shop", "x", 400, "clientId:x is no number"),
        ("shop", "40000", 400, "clientId:40000 is no number"),
        ("", "1", 401, "null"),
        ("shop", "", 401, "null"),
    ],
)
def test_unknown_destination_is_refused_in_canals_words(
    daemon: DaemonProcess, destination: str, client_id: str, code: int, text: str
) -> None:
    with CanalClient(daemon.ports["canal"], destination, client_id).log_in() as client:
        for ask in (client.subscribe, client.unsubscribe, client.get):
            with pytest.raises(Refused) as refused:
                ask()
            assert refused.value.code == code
            assert text in refused.value.text


def test_newest_connection_owns_the_client(daemon: DaemonProcess, server: Server) -> None:
    with connect(daemon) as old, connect(daemon, int(old.client_id)) as new:
        old.subscribe()
        ids = write(server, daemon, 4)
        number, entries = old.get(size=1)
        old.ack(number)
        received_ids = ids_of(entries)
        number, entries = old.get(size=1)
        # Clients send a rollback before they subscribe; it affects no other client.
        new.rollback(0)
        new.subscribe()
        assert_ended(old)
        assert received_ids + drain(new) == ids
    assert f"client=canal-{old.client_id} destination=shop now=" in daemon.said()


def test_disconnected_client_is_not_waited_for(daemon: DaemonProcess) -> None:
    client = connect(daemon)
    client.subscribe()
    client.ask(1000, 0, 2)
    client.socket.shutdown(socket.SHUT_RDWR)
    client.close()
    until_gone(daemon, client)


def test_checkpoint_set_by_hand_moves_a_client(daemon: DaemonProcess, server: Server) -> None:
    with connect(daemon) as client:
        client.subscribe("canal_p\\.t")
        position = head_of(server)
        ids = write(server, daemon, 3)
        assert drain(client) == ids
        with store_of(daemon) as store:
            Subscriptions(store).reset("shop", f"canal-{client.client_id}", Checkpoint.now(str(position)))
        ids += write(server, daemon, 1)
        assert_refused(client)
    with connect(daemon, int(client.client_id)) as client:
        client.subscribe()
        assert drain(client)[:4] == ids


def flat_messages(daemon: DaemonProcess, table: str) -> list[dict[str, Any]]:
    """Return all of a table's changes as flat messages, over HTTP."""
    asked = {"tables": [table], "format": "canal_flat", "start": "earliest", "wait_seconds": 0}
    url = f"http://127.0.0.1:{daemon.port}/v1/instances/shop/changes"
    messages = []
    with urllib.request.urlopen(url, json.dumps(asked).encode(), timeout=WAIT_SECONDS_MAX) as answer:
        while length := answer.read(4):
            head = json.loads(answer.read(struct.unpack(">I", length)[0]))
            content = answer.read(head["bytes"]) if head["bytes"] else b""
            messages += [json.loads(line) for line in content.splitlines()]
    return messages


@pytest.mark.parametrize("is_told", [False, True])
def test_header_has_the_executed_transactions_if_configured(
    server: Server, tmp_path: Path, is_told: bool
) -> None:
    settings = settings_of(server, canal_start="earliest")
    settings["instances"]["shop"] |= {"canal_gtid": True} if is_told else {}
    with DaemonProcess(tmp_path, settings) as daemon:
        before = server.sql("SELECT @@gtid_executed")[0][0]
        seen: list[Any] = []
        for _ in range(2):
            # The second request reuses the decoder of the first one, and skips changes that are not reported.
            write(server, daemon, 1, "canal_p.u")
            write(server, daemon, 1)
            with connect(daemon, 9) as client:
                client.subscribe("canal_p\\.t")
                number, entries = client.get()
                client.ack(number)
                seen += map(entry_of, entries)
        lines = flat_messages(daemon, "canal_p.t")
    assert (len(seen), len(lines)) == (6, 2)
    if not is_told:
        assert {entry.header.gtid for entry in seen} | {line["gtid"] for line in lines} == {""}
        return
    known = GtidSet.parse(before)
    for at, entry in enumerate(seen):
        own = {prop.key: prop.value for prop in entry.header.props}["curtGtid"]
        executed = GtidSet.parse(entry.header.gtid)
        assert executed.contains(known)
        assert executed.contains(GtidSet.parse(own))
        assert not known.contains(GtidSet.parse(own)) or at % 3
        known = executed
    assert str(known) == server.sql("SELECT @@gtid_executed")[0][0].replace("\n", "")
    assert [line["gtid"] for line in lines] == [seen[1].header.gtid, seen[4].header.gtid]


def test_disconnect_while_waiting_releases_the_client(daemon: DaemonProcess) -> None:
    with connect(daemon) as client:
        client.subscribe("canal_p\\.nothing")
        client.ask(size=1000, timeout=0)
        client.rollback(0)
        client.ask(size=1000, timeout=0)
        # The daemon has a single event loop, so once it answers another client, it has read this client's
        # bytes.
        for _ in range(20):
            daemon.status()
    until_gone(daemon, client)
