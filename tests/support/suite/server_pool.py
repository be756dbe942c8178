# SPDX-License-Identifier: Apache-2.0
"""A pool of servers. Each server is lent to one test at a time, then cleaned and lent to the next test of the
same worker.

A test may do anything to a lent server: set globals, purge and reset the binlog, create accounts, install
plugins, make it a replica, restart it, kill it. Before a server is lent again, its databases, accounts,
plugins and connections are removed, its binlog is reset and its global variables are restored. Then its
databases, accounts, plugins, global variables and the content of its system tables must equal those at its
start. A server that differs, or that refuses a statement, is stopped and replaced by a new one.
"""

import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from typing import Any

import pymysql

from tools.servers import Server

# Each idle server of a worker needs about 300 MB of memory, in addition to the shared servers.
IDLE_SERVERS_MAX = 4
# Undo and temporary tablespaces never shrink. A server that has grown larger than this is not kept.
DATA_BYTES_MAX = 1 << 30
# A killed connection ends when its thread next checks for the kill.
DISCONNECT_SECONDS_MAX = 30.0
CLEANING_SECONDS_MAX = 60

# Statistics and logs that a server writes by itself, and help texts, which take long to read.
_VOLATILE_TABLES = frozenset(
    {"general_log", "slow_log", "innodb_index_stats", "innodb_table_stats"}
    | {"help_category", "help_keyword", "help_relation", "help_topic"}
)
# Variables that are set when the binlog and replication are reset.
_BINLOG_STATE = frozenset(
    {"gtid_binlog_pos", "gtid_binlog_state", "gtid_current_pos", "gtid_slave_pos"}
    | {"gtid_executed", "gtid_owned", "gtid_purged"}
)
# Options that have the same effect on a running server as at its start.
_RUNTIME_OPTIONS = frozenset({"binlog-row-metadata", "sync-binlog"})
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_SYSTEM_DATABASES = frozenset({"information_schema", "mysql", "performance_schema", "sys"})
_SERVER_THREADS = frozenset({"system user", "event_scheduler"})


@dataclass(frozen=True)
class Settings:
    """The settings that must match when a server is lent to a test: its options, except those that can be set
    at run time.
    """

    flavor: str
    tls: bool
    options: tuple[tuple[str, Any], ...]


class NotClean(Exception):
    """A server differs from a newly started server. The message names the difference."""


@dataclass(frozen=True)
class ServerState:
    """Everything that a test can change on a server, each kind of object by name."""

    databases: Mapping[str, None]
    accounts: Mapping[tuple[str, str], None]
    plugins: Mapping[str, str]
    variables: Mapping[str, str]
    system_tables: Mapping[str, int]

    @classmethod
    def read(cls, cursor: Any) -> "ServerState":
        """Return the state of a server."""
        tables = _rows(
            cursor,
            "SELECT table_name FROM information_schema.tables WHERE table_schema = 'mysql'"
            " AND table_type = 'BASE TABLE'",
        )
        names = ", ".join(f"mysql.`{name}`" for (name,) in tables if name not in _VOLATILE_TABLES)
        return cls(
            {name: None for (name,) in _rows(cursor, "SHOW DATABASES")},
            dict.fromkeys(_rows(cursor, "SELECT user, host FROM mysql.user")),
            {row[0]: row[1] for row in _rows(cursor, "SHOW PLUGINS")},
            dict(_rows(cursor, "SHOW GLOBAL VARIABLES")),
            dict(_rows(cursor, f"CHECKSUM TABLE {names}")),
        )

    def differences(self, other: "ServerState") -> list[str]:
        """Return a line for each name that is missing in one state, or has different values in both."""
        lines = []
        for part in fields(self):
            mine, others = getattr(self, part.name), getattr(other, part.name)
            names = {name for name, _ in mine.items() ^ others.items()}
            lines += [f"{part.name}: {name}" for name in sorted(names, key=str)]
        return lines


@dataclass
class _Lent:
    """A server of the pool with its settings, and its options and state right after its start."""

    server: Server
    settings: Settings
    options: Mapping[str, Any]
    initial: ServerState

    def set_options(self, runtime: Mapping[str, Any]) -> None:
        """Set runtime options, and drop those of the previous test. A restart keeps the options."""
        self.options = {**dict(self.settings.options), **runtime}
        self.server.options = dict(self.options)
        for name, value in runtime.items():
            self.server.sql(f"SET GLOBAL {name.replace('-', '_')} = %s", value)


@dataclass
class PoolCounts:
    """Counts of a pool: servers started, servers lent again, and the reasons for replacing servers."""

    started: int = 0
    started_seconds: float = 0.0
    reused: int = 0
    cleaning_seconds: float = 0.0
    replaced: list[str] = field(default_factory=list)


def summarize(pools: Sequence[PoolCounts]) -> Iterator[str]:
    """Yield lines about the pools of all workers: the servers and why some were replaced."""
    started, reused = (sum(getattr(pool, name) for pool in pools) for name in ("started", "reused"))
    if started:
        seconds = sum(pool.started_seconds for pool in pools), sum(pool.cleaning_seconds for pool in pools)
        yield f"lent servers: {started} started in {seconds[0]:.1f} s, {reused} reused in {seconds[1]:.1f} s"
    for reason, count in sorted(Counter(reason for pool in pools for reason in pool.replaced).items()):
        yield f"    replaced {count} times: {reason}"


class ServerPool:
    """The servers of one worker, each lent to one test at a time.

    At most `idle_max` servers run without being lent. When there are more, the pool stops the server whose
    settings were requested least often. If there are several such servers, it stops the one that has been
    idle longest.
    """

    def __init__(self, idle_max: int = IDLE_SERVERS_MAX) -> None:
        self.counts = PoolCounts()
        self._idle_max = idle_max
        self._idle: list[_Lent] = []
        self._requests: Counter[Settings] = Counter()

    @contextmanager
    def lend(self, flavor: str, options: Mapping[str, Any], *, tls: bool = False) -> Iterator[Server]:
        """Lend a clean server with these options for the block.

        Raises `PartMissing` and `ServerFailed` as `Server` does.
        """
        words = {name.replace("_", "-"): value for name, value in options.items()}
        runtime = {name: words.pop(name) for name in _RUNTIME_OPTIONS & words.keys()}
        settings = Settings(flavor, tls, tuple(sorted(words.items())))
        self._requests[settings] += 1
        lent = self._take(settings) or self._start(settings)
        try:
            lent.set_options(runtime)
            yield lent.server
        finally:
            self._give_back(lent)

    def close(self) -> None:
        """Stop all servers that are not lent."""
        for lent in self._idle:
            lent.server.close()
        self._idle.clear()

    def _take(self, settings: Settings) -> _Lent | None:
        """Clean an idle server with these settings and return it, or return None."""
        for lent in [lent for lent in self._idle if lent.settings == settings]:
            self._idle.remove(lent)
            begun = time.monotonic()
            try:
                clean(lent.server, lent.initial)
            except (NotClean, pymysql.MySQLError, OSError) as error:
                self._replace(lent, str(error))
            else:
                self.counts.reused += 1
                self.counts.cleaning_seconds += time.monotonic() - begun
                return lent
        return None

    def _start(self, settings: Settings) -> _Lent:
        begun = time.monotonic()
        server = Server(settings.flavor, dict(settings.options), tls=settings.tls)
        try:
            server.start()
            with server.connect() as connection, connection.cursor() as cursor:
                initial = ServerState.read(cursor)
        except BaseException:
            server.close()
            raise
        self.counts.started += 1
        self.counts.started_seconds += time.monotonic() - begun
        return _Lent(server, settings, dict(server.options), initial)

    def _give_back(self, lent: _Lent) -> None:
        """Keep a server if it can be cleaned. It is cleaned only when it is lent again."""
        if not lent.server.running:
            self._replace(lent, "the test stopped it")
        elif lent.server.options != lent.options:
            self._replace(lent, "the test started it again with other options")
        elif _disk_bytes(lent.server) > DATA_BYTES_MAX:
            self._replace(lent, "its data directory is too large to keep")
        else:
            self._idle.append(lent)
        if len(self._idle) > self._idle_max:
            # `min` returns the first of several equal elements, which is the server that has been idle
            # longest.
            surplus = min(self._idle, key=lambda lent: self._requests[lent.settings])
            self._idle.remove(surplus)
            surplus.server.close()

    def _replace(self, lent: _Lent, reason: str) -> None:
        self.counts.replaced.append(f"{lent.settings.flavor}: {reason}")
        lent.server.close()


def clean(server: Server, initial: ServerState) -> None:
    """Bring a server back to its initial state.

    Raises `NotClean`, or the server's own error, if that fails. The server must then not be used again.
    """
    timeouts = {"read_timeout": CLEANING_SECONDS_MAX, "write_timeout": CLEANING_SECONDS_MAX}
    with server.connect(**timeouts) as connection, connection.cursor() as cursor:
        _stop_replication(cursor, server.family)
        _end_connections(cursor, connection.thread_id())
        if _rows(cursor, "XA RECOVER"):
            raise NotClean("the test left a prepared transaction")
        _restore(cursor, initial)
        _remove_additions(cursor, initial)
        if initial.variables["log_bin"] == "ON":
            _reset_binlog(cursor, server.family)
        if differences := initial.differences(ServerState.read(cursor)):
            raise NotClean("; ".join(differences))


def _stop_replication(cursor: Any, family: str) -> None:
    if family == "mysql":
        if _rows(cursor, "SHOW REPLICA STATUS"):
            cursor.execute("STOP REPLICA")
            cursor.execute("RESET REPLICA ALL")
    elif _rows(cursor, "SHOW ALL SLAVES STATUS"):
        cursor.execute("STOP ALL SLAVES")
        for name, *_ in _rows(cursor, "SHOW ALL SLAVES STATUS"):
            cursor.execute("RESET SLAVE %s ALL", name)


def _end_connections(cursor: Any, own_id: int) -> None:
    """End all connections of clients, and with them their transactions and locks."""
    deadline = time.monotonic() + DISCONNECT_SECONDS_MAX
    while clients := [
        row[0]
        for row in _rows(cursor, "SHOW PROCESSLIST")
        if row[0] != own_id and row[1] not in _SERVER_THREADS
    ]:
        if time.monotonic() > deadline:
            raise NotClean(f"connections that do not end: {clients}")
        for client in clients:
            try:
                cursor.execute(f"KILL {client}")
            except pymysql.err.OperationalError:
                # The connection has ended by itself. If not, the next iteration kills it.
                continue


def _restore(cursor: Any, initial: ServerState) -> None:
    """Reset the global variables whose values have changed since the server's start."""
    now = dict(_rows(cursor, "SHOW GLOBAL VARIABLES"))
    for name in sorted(initial.variables.keys() & now.keys()):
        value = initial.variables[name]
        if now[name] != value and name not in _BINLOG_STATE:
            cursor.execute(f"SET GLOBAL {name} = {value if _NUMBER.fullmatch(value) else _quoted(value)}")


def _remove_additions(cursor: Any, initial: ServerState) -> None:
    """Remove plugins, accounts and databases that the server did not have at its start."""
    for plugin, *_ in _rows(cursor, "SHOW PLUGINS"):
        if plugin not in initial.plugins:
            cursor.execute(f"UNINSTALL PLUGIN {plugin}")
    for name, host in _rows(cursor, "SELECT user, host FROM mysql.user"):
        if (name, host) not in initial.accounts:
            # Roles of MariaDB have no host. Roles of MySQL are accounts.
            cursor.execute("DROP USER %s@%s" if host else "DROP ROLE %s", (name, host) if host else (name,))
    cursor.execute("SET SESSION foreign_key_checks = 0")
    for (database,) in _rows(cursor, "SHOW DATABASES"):
        if database not in _SYSTEM_DATABASES:
            cursor.execute(f"DROP DATABASE `{database.replace('`', '``')}`")


def _reset_binlog(cursor: Any, family: str) -> None:
    if family == "mysql":
        cursor.execute("RESET BINARY LOGS AND GTIDS")
    else:
        cursor.execute("RESET MASTER")
        cursor.execute("SET GLOBAL gtid_slave_pos = ''")


def global_variables(server: Server) -> dict[str, str]:
    """Return the global variables of a server, except those that describe the content of its binlog."""
    variables = dict(server.sql("SHOW GLOBAL VARIABLES"))
    return {name: value for name, value in variables.items() if name not in _BINLOG_STATE}


def _disk_bytes(server: Server) -> int:
    total = 0
    for folder, _, names in os.walk(server.data_directory):
        for name in names:
            # The server may remove temporary files at any time.
            with suppress(FileNotFoundError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def _quoted(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def _rows(cursor: Any, statement: str) -> list[tuple[Any, ...]]:
    cursor.execute(statement)
    return list(cursor.fetchall())
