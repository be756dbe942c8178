# SPDX-License-Identifier: Apache-2.0
"""A daemon with a Ptubes port, and databases that belong to one test each."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import DaemonProcess
from tests.support.ptubes.client import PtubesClient
from tests.support.ptubes.packet import EVENT_TYPES
from tools.servers import Server

INSERT, UPDATE, DELETE, QUERY, END, HEARTBEAT = (
    EVENT_TYPES.index(name) for name in ("INSERT", "UPDATE", "DELETE", "QUERY", "TRANSACTIONEND", "HEARTBEAT")
)
ROWS = (INSERT, UPDATE, DELETE)


class Shop:
    """A daemon that captures a server, and a database on it that belongs to one test."""

    def __init__(self, daemon: DaemonProcess, server: Server, port: int, monitor: int, database: str) -> None:
        self.daemon = daemon
        self.server = server
        self.port = port
        self.monitor = monitor
        self.database = database
        self.table = f"{database}.orders"

    def client(self, *tables: str, **more: Any) -> PtubesClient:
        return PtubesClient(self.port, tables or (self.table,), **more)

    def sql(self, text: str) -> None:
        self.server.sql(text, database=self.database)

    def caught_up(self) -> None:
        """Wait until the daemon has captured the server's whole log."""
        head = head_of(self.server)
        self.daemon.wait_for_head(head.file, head.offset)

    def read_all(self, client: PtubesClient, batch: int = 1000) -> None:
        """Fetch until a client has reached the end of the server's log."""
        head = head_of(self.server)
        end = head.file_number, head.offset

        def is_there(client: PtubesClient) -> bool:
            at = client.latest
            return at is not None and (at.binlogFile, at.binlogOffset) >= end

        client.fetch_until(is_there, batch)


def start_daemon(server: Server, folder: Path, **more: Any) -> DaemonProcess:
    """Start a daemon that captures a server from now on, with both Ptubes ports and more settings."""
    settings = {
        "instances": {
            "shop": {
                "source": server.url(),
                "start": str(head_of(server)),
                "shard_columns": {"*.by_customer": ["customer"]},
            }
        },
        "listen": {"ptubes": "127.0.0.1:0", "ptubes_monitor": "127.0.0.1:0", "ptubes_zone": "+08:00"},
        **more,
    }
    return DaemonProcess(folder, settings).start()


def make_shop(server: Server, daemon: DaemonProcess, database: str) -> Shop:
    """Return a database with a table `orders`, and the daemon that has captured it."""
    listeners = daemon.get("/v1/listeners")["listeners"]
    ports = [int(listeners[name].rpartition(":")[2]) for name in ("ptubes", "ptubes_monitor")]
    shop = Shop(daemon, server, *ports, database)
    shop.sql("CREATE TABLE orders (id BIGINT PRIMARY KEY, customer VARCHAR(20), amount INT)")
    shop.caught_up()
    return shop


def of_kind(events: Iterable[Any], *kinds: int) -> list[Any]:
    """Return the events of some types."""
    return [event for event in events if event.eventType in kinds]
