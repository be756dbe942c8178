# SPDX-License-Identifier: Apache-2.0
"""The servers that a fleet captures: a primary with semi-synchronous commits, and its replica.

A commit is acknowledged once the replica or the fleet has it (AFTER_SYNC). The replica takes the place of a
primary that dies.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

import pymysql

from tests.support.capture.replicas import gtids_executed, replica_of
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import REPLICATION_PASSWORD, REPLICATION_USER, Server

# Options that remain in effect after restarts. The servers are started without the file that SET PERSIST
# writes. The timeout is longer than any run, so that a commit waits until it is acknowledged.
_OPTIONS: Mapping[str, str | int] = {
    "plugin_load_add": "rpl_semi_sync_source=semisync_source.so;rpl_semi_sync_replica=semisync_replica.so",
    "rpl_semi_sync_source_timeout": 3_600_000,
    "rpl_semi_sync_source_wait_point": "AFTER_SYNC",
}
_PRIMARY = {
    "rpl_semi_sync_replica_enabled": False,
    "rpl_semi_sync_source_enabled": True,
    "super_read_only": False,
    "read_only": False,
}
_REPLICA = {
    "read_only": True,
    "super_read_only": True,
    "rpl_semi_sync_source_enabled": False,
    "rpl_semi_sync_replica_enabled": True,
}


class Servers:
    """Both database servers. As a context manager, it starts them and runs them inside the block."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        # The event is cleared while no server is the primary.
        self._settled = threading.Event()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._primary = stack.enter_context(Server("mysql", _OPTIONS))
            self.replica = replica_of(
                self._primary,
                lambda flavor="mysql", **options: stack.enter_context(
                    Server(flavor, {**_OPTIONS, **options})
                ),
            )
            self._follow(self.replica)
            wait_until(lambda: gtids_executed(self.replica) == gtids_executed(self._primary))
            self._lead(self._primary)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._settled.set()
        self._stack.close()

    @property
    def all(self) -> tuple[Server, Server]:
        """The primary and the replica."""
        return self._primary, self.replica

    @property
    def primary(self) -> Server:
        """The server that accepts writes. Waits if there is none."""
        assert self._settled.wait(WAIT_SECONDS_MAX), "no server is promoted"
        return self._primary

    def by_key(self) -> Mapping[str, Server]:
        """Return the servers by the key that an epoch records for its server."""
        return {f"mysql:{server.sql('SELECT @@server_uuid')[0][0]}": server for server in self.all}

    def promote(self, prove_acknowledged: Callable[[Server], None]) -> None:
        """Kill the primary during writes, and promote the replica.

        `prove_acknowledged` checks that the replica has the acknowledged commits, once the replica has
        applied all received transactions. Transactions that the dead server had logged but not sent to the
        replica are copied from its disk before the promotion, because readers of its log may already have
        them.
        """
        self.prove_acknowledgements()
        self._settled.clear()
        dead, promoted = self.all
        dead.kill()
        wait_until(lambda: _has_applied(promoted))
        prove_acknowledged(promoted)
        # A writer may still have the address of the dead server.
        _set(dead, **_REPLICA)
        dead.start()
        wait_until(lambda: gtids_executed(promoted) == gtids_executed(dead))
        dead.kill()
        promoted.sql("STOP REPLICA; RESET REPLICA ALL")
        self._primary, self.replica = promoted, dead
        self._lead(promoted)

    def rejoin(self) -> None:
        """Let the dead server return as the replica of the promoted server."""
        self.replica.start()
        self._follow(self.replica)

    def kill(self, server: Server) -> None:
        """Kill one of the servers. This resets its counters of acknowledgements."""
        if server is self._primary:
            self.prove_acknowledgements()
        server.kill()

    def prove_acknowledgements(self) -> None:
        """Assert that every commit since the primary started waited for an acknowledgement."""
        status = dict(self.primary.sql("SHOW GLOBAL STATUS LIKE 'rpl_semi_sync_source_%'"))
        assert status["Rpl_semi_sync_source_status"] == "ON", "commits wait for nobody"
        lapses = int(status["Rpl_semi_sync_source_no_tx"])
        assert lapses == 0, f"{lapses} commits waited for nobody"

    def _lead(self, server: Server) -> None:
        _set(server, **_PRIMARY)
        self._settled.set()

    def _follow(self, server: Server) -> None:
        _set(server, **_REPLICA)
        server.sql(
            "STOP REPLICA; CHANGE REPLICATION SOURCE TO SOURCE_HOST='127.0.0.1',"
            f" SOURCE_PORT={self._primary.port}, SOURCE_USER='{REPLICATION_USER}',"
            f" SOURCE_PASSWORD='{REPLICATION_PASSWORD}',"
            " SOURCE_AUTO_POSITION=1, SOURCE_SSL=1, SOURCE_CONNECT_RETRY = 1, SOURCE_RETRY_COUNT = 1000000;"
            " START REPLICA"
        )


def _set(server: Server, **values: bool) -> None:
    """Set global variables of a server now and for its next starts."""
    if server.running:
        server.sql("; ".join(f"SET GLOBAL {name} = {value}" for name, value in values.items()))
    server.options |= {name.replace("_", "-"): value for name, value in values.items()}


def _has_applied(replica: Server) -> bool:
    """Return whether a replica has applied everything that it has received."""
    with suppress(pymysql.err.OperationalError):
        rows = replica.sql(
            "SELECT GTID_SUBSET(RECEIVED_TRANSACTION_SET, @@GLOBAL.gtid_executed)"
            " FROM performance_schema.replication_connection_status"
        )
        return bool(rows and rows[0][0])
    return False
