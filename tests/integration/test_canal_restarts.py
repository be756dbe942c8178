# SPDX-License-Identifier: Apache-2.0
"""Canal clients when daemons are restarted or killed, and when checkpoints are set by somebody else."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.model import Position
from tests.support.canal.client import Refused, describe_entries
from tests.support.canal.following import (
    arrived,
    assert_ended,
    checkpoint_of,
    connect,
    drain,
    followed,
    followed_database,
    ids_of,
    settings_of,
    until_durable,
    without_repeats,
    write,
)
from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import DaemonProcess
from tools.servers import Server


@pytest.fixture(scope="module")
def server(server_of: Callable[[str], Server]) -> Iterator[Server]:
    """The shared MySQL server, with tables for the whole module."""
    actual = server_of("mysql")
    with followed_database(actual, "canal_r"):
        yield actual


def test_killed_daemon_repeats_at_most_undurable_batches(tmp_path: Path, server: Server) -> None:
    with DaemonProcess(tmp_path, settings_of(server, canal_start="earliest")) as daemon:
        ids = write(server, daemon, 400, "canal_r.t")
        received_ids: list[str] = []
        for lap in range(3):
            with connect(daemon, 5) as client:
                client.rollback(0)
                client.subscribe("canal_r\\..*")
                acknowledged: list[bytes] = []
                for _ in range(8):
                    number, entries = client.get(size=4)
                    if number == -1:
                        break
                    received_ids = without_repeats(received_ids, ids_of(entries))
                    client.ack(number)
                    acknowledged += entries
                if lap == 2:
                    until_durable(daemon, client, acknowledged)
                    marked = len(received_ids)
                daemon.kill()
                daemon.start()
                daemon.wait_for(lambda status: status["position"] is not None)
        with connect(daemon, 5) as client:
            client.subscribe()
            rest = drain(client)
            assert ids.index(rest[0]) >= marked - 1
            assert without_repeats(received_ids, rest) == ids
        assert daemon.terminate() == 0
        daemon.start()
        daemon.wait_for(lambda status: status["position"] is not None)
        with connect(daemon, 5) as client:
            # After a clean shutdown, no entry is delivered again.
            assert drain(client) == []
            ids = write(server, daemon, 1, "canal_r.t")
            assert drain(client) == ids


def test_another_daemon_takes_over_a_client(tmp_path: Path, server: Server) -> None:
    settings = settings_of(server) | {"coordination": f"sqlite:///{tmp_path}/shared.db"}
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with DaemonProcess(folders[0], settings) as first, DaemonProcess(folders[1], settings) as two:
        write(server, first, 1, "canal_r.t")
        arrived(server, two)
        with connect(first, 9) as old, connect(two, 9) as new:
            old.subscribe("canal_r\\.t")
            ids = write(server, first, 3, "canal_r.t")
            arrived(server, two)
            received_ids: list[str] = []
            acknowledged: list[bytes] = []
            while not received_ids:
                number, entries = old.get(size=1)
                old.ack(number)
                received_ids += ids_of(entries)
                acknowledged += entries
            until_durable(first, old, acknowledged)
            number, entries = old.get()
            new.subscribe()
            # The previous owner may no longer write. The daemon closes the owner's connection.
            old.ack(number)
            assert_ended(old)
            actual = drain(new)
            assert ids.index(actual[0]) >= len(received_ids) - 1
            assert without_repeats(received_ids, actual) == ids
            assert "taken over from another daemon" in two.said()


def test_client_may_connect_before_the_first_change_and_sees_its_zones_clock(
    tmp_path: Path, server: Server
) -> None:
    server.sql("CREATE TABLE canal_r.clock (id INT, at TIMESTAMP(2), day DATETIME)")
    settings = settings_of(server, canal_zone="-03:30")
    with DaemonProcess(tmp_path, settings) as daemon, connect(daemon, 3) as client:
        client.subscribe("canal_r\\..*")
        assert client.get() == (-1, [])
        # A row completes the batch, so only its arrival can answer the request within the hour.
        client.ask(1, 3600, 3)
        ids = write(server, daemon, 1, "canal_r.t", 2048)
        number, entries = client.receive_batch()
        assert number > 0
        client.ack(number)
        assert ids_of(entries) + drain(client) == ids
        moment = "'2026-03-01 00:00:00'"
        server.sql(f"SET time_zone = '+00:00'; INSERT INTO canal_r.clock VALUES (1, {moment}, {moment})")
        arrived(server, daemon)
        [row] = [entry[3] for entry in describe_entries(client.get()[1]) if entry[0] == "INSERT"]
        assert row == {"id": "1", "at": "2026-02-28 20:30:00.00", "day": "2026-03-01 00:00:00"}


def test_client_whose_new_filter_was_not_stored_still_belongs_to_its_session(
    tmp_path: Path, server: Server
) -> None:
    with DaemonProcess(tmp_path, settings_of(server, canal_start="earliest")) as daemon:
        write(server, daemon, 3, "canal_r.t")
        with connect(daemon, 6) as client, connect(daemon, 6) as other:
            client.subscribe("canal_r\\..*")
            store = tmp_path / "log" / "coordination.db"
            store.rename(tmp_path / "away.db")
            with pytest.raises(Refused):
                client.subscribe("canal_r\\.t")
            (tmp_path / "away.db").rename(store)
            # A connection keeps the client until another connection subscribes.
            number, entries = client.get()
            assert len(ids_of(entries)) == 3
            other.subscribe("canal_r\\..*")
            assert_ended(client)
            assert other.get()[1] == entries
            assert number < 3


def test_unsubscribed_client_stops_following_and_may_start_again(tmp_path: Path, server: Server) -> None:
    with DaemonProcess(tmp_path, settings_of(server, canal_start="earliest")) as daemon:
        ids = write(server, daemon, 3, "canal_r.t")
        with connect(daemon, 7) as client:
            client.subscribe("canal_r\\..*")
            assert followed(daemon) == ["7"]
            client.unsubscribe()
            assert followed(daemon) == []
            client.subscribe("canal_r\\..*")
            store = tmp_path / "log" / "coordination.db"
            store.rename(tmp_path / "away.db")
            with pytest.raises(Refused):
                client.unsubscribe()
            (tmp_path / "away.db").rename(store)
            client.subscribe("canal_r\\..*")
            assert drain(client) == ids
        assert Position.parse(checkpoint_of(daemon, client).position) == head_of(server)
