# SPDX-License-Identifier: Apache-2.0
"""A real database server on loopback, in its own directory, terminated together with its owner.

It listens on 127.0.0.1 and on a socket file. `root` has no password and can connect from this machine only.
`repl` has `REPLICATION_PASSWORD` and the privileges of a replica: REPLICATION SLAVE, REPLICATION CLIENT and
SELECT. The settings are for tests: the server survives a kill of the process, but not a power failure.
"""

import os
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pymysql
from pymysql.constants import CLIENT

from tools.servers import certificate, child
from tools.servers.errors import ServerFailed
from tools.servers.packages import Family, install
from tools.servers.ports import free_port, is_free
from tools.servers.starting import StartTimedOut, start_with_one_retry
from tools.servers.template import (
    REPLICATION_PASSWORD,
    REPLICATION_USER,
    STARTUP_SECONDS_MAX,
    account_name,
    copy,
    log_tail,
    template,
)

STOP_SECONDS_MAX = 120
CLIENT_SECONDS_MAX = 600
PORT_ATTEMPTS_MAX = 5
# sockaddr_un holds 108 bytes including the final zero (unix(7)).
SOCKET_PATH_BYTES_MAX = 107

OptionValue = str | int | bool | None

_DEFAULT_OPTIONS: dict[str, OptionValue] = {
    "log-bin": "mysql-bin",
    "binlog-format": "ROW",
    "binlog-row-image": "FULL",
    "binlog-row-metadata": "FULL",
    "binlog-checksum": "CRC32",
    "sync-binlog": 0,
    "character-set-server": "utf8mb4",
    "innodb-flush-log-at-trx-commit": 2,
    "innodb-doublewrite": False,
    "innodb-buffer-pool-size": "128M",
    "secure-file-priv": "",
    # Do not disconnect a client that stalls during its handshake.
    "connect-timeout": 120,
}
_FAMILY_OPTIONS: dict[Family, dict[str, OptionValue]] = {
    "mysql": {
        "gtid-mode": "ON",
        "enforce-gtid-consistency": "ON",
        "innodb-redo-log-capacity": "128M",
        "mysqlx": False,
    },
    "mariadb": {"innodb-log-file-size": "16M"},
}


class Server:
    """A server of one flavor. As a context manager, it runs inside the block and is removed after it.

    `options` are the server's own options, without leading dashes and spelled with `_` or `-`. An option's
    value is a text or number, True or False for ON or OFF, or None for an option without a value. Options
    override the defaults of this module. `tls=True` gives the server a certificate signed by `tls_authority`.
    Without `directory`, the server gets a temporary directory, which `close` removes. A directory that is
    passed in is kept, and a second server can start with its data. Raises `PartMissing` if the flavor is
    unavailable on this machine, and `ServerFailed` if the server does not start.
    """

    def __init__(
        self,
        flavor: str = "mysql",
        options: Mapping[str, OptionValue] | None = None,
        *,
        port: int | None = None,
        directory: Path | None = None,
        tls: bool = False,
    ) -> None:
        self.flavor = flavor
        self.installation = install(flavor)
        self.family: Family = self.installation.family
        self.options = {_option_name(name): value for name, value in (options or {}).items()}
        self.tls = tls
        self._port = port or 0
        self._port_settled = port is not None
        self._keep = directory is not None
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[bytes]] = []
        self._discard: Callable[[], object] | None = None

    def __repr__(self) -> str:
        state = f"port {self._port}, pid {self.pid}" if self.running else "stopped"
        return f"Server({self.flavor!r}, {state})"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def directory(self) -> Path:
        """The server's own directory; `data` in it is the data directory."""
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix=f"penstock-{self.flavor}-"))
            # An owner that ends without `close` leaves no directory behind, unless it is killed.
            self._discard = weakref.finalize(self, _remove, self._directory, self._started, os.getpid())
        return self._directory

    @property
    def data_directory(self) -> Path:
        """The data directory, which also holds the binlog files."""
        return self.directory / "data"

    @property
    def socket(self) -> Path:
        """The socket file."""
        return self.directory / "s"

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1; it stays the same over `restart`, and over `stop` and `start`."""
        return self._port

    @property
    def pid(self) -> int | None:
        """The process id of the running server, else None."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def tls_authority(self) -> Path:
        """The PEM certificate that signs the server's own certificate for TLS."""
        return self.directory / "tls" / "authority.pem"

    @property
    def version(self) -> str:
        """The server's version, such as "9.7.4" or "10.11.19-MariaDB"."""
        return self.installation.version

    def start(self) -> Self:
        """Start the server, and return once the port is answered by the child process that was started.

        If the server does not answer in time, it is started once more.
        """
        if self.running:
            raise ServerFailed(f"{self!r} is running already")
        self._prepare()
        return start_with_one_retry(f"the {self.flavor} server", self._start)

    def _start(self) -> Self:
        for _ in range(PORT_ATTEMPTS_MAX):
            if not self._port_settled:
                self._port = free_port()
            if self._start_once():
                self._port_settled = True
                return self
            # Another process can take a free port before the server binds it.
            if self._port_settled or is_free(self._port):
                break
        failure = StartTimedOut if self.running else ServerFailed
        self.kill()
        raise failure(
            f"the {self.flavor} server does not start in {self.directory}:\n{log_tail(self.directory)}"
        )

    def stop(self) -> None:
        """Stop the server: SIGTERM, and SIGKILL when it does not end within `STOP_SECONDS_MAX`."""
        if self._process is not None:
            child.end(self._process, STOP_SECONDS_MAX)
            self._process = None

    def kill(self) -> None:
        """End the server by SIGKILL, as a crash does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self, **options: OptionValue) -> Self:
        """Stop the server and start it on the same port and data, with further options."""
        self.stop()
        self.options |= {_option_name(name): value for name, value in options.items()}
        return self.start()

    def wait(self) -> int | None:
        """Wait until the server ends by itself or by an external signal; return its exit status."""
        return None if self._process is None else self._process.wait()

    def close(self) -> None:
        """End the server and remove its temporary directory; a directory that was given is kept."""
        if self._keep:
            self.stop()
            return
        self.kill()
        if self._discard is not None:
            self._discard()
            self._directory = self._discard = None

    def connect(self, **arguments: Any) -> Any:
        """Return an autocommitting PyMySQL connection as root. The arguments are PyMySQL's.

        The connection is encrypted only with `tls`. With encryption, PyMySQL reads the machine's certificate
        authorities for every connection, which takes a hundred times as long as the rest of connecting.
        """
        return pymysql.connect(
            **{
                "host": "127.0.0.1",
                "port": self._port,
                "user": "root",
                "charset": "utf8mb4",
                "autocommit": True,
                "ssl_disabled": not self.tls,
            }
            | arguments
        )

    def sql(self, statement: str, *arguments: Any, database: str | None = None) -> list[tuple[Any, ...]]:
        """Run one statement, or several separated by `;`, in a connection of its own.

        Returns the rows of the last result. The arguments replace `%s` in the text.
        """
        with (
            self.connect(database=database, client_flag=CLIENT.MULTI_STATEMENTS) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(statement, arguments or None)
            rows = list(cursor.fetchall())
            while cursor.nextset():
                rows = list(cursor.fetchall())
            return rows

    def client(self, sql: str | bytes, *arguments: str) -> str:
        """Run SQL in the flavor's own command line client and return its output.

        The client runs in batch mode with raw values and UTF-8. Bytes that are not UTF-8 become surrogate
        escapes. Raises `ServerFailed` with the client's message if the client reports an error.
        """
        argv = [
            *self.program("mysql"),
            "--no-defaults",
            f"--socket={self.socket}",
            "--user=root",
            "--batch",
            "--raw",
        ]
        argv += ["--default-character-set=utf8mb4", *arguments]
        text = sql.encode("utf-8", "surrogateescape") if isinstance(sql, str) else sql
        done = subprocess.run(argv, input=text, capture_output=True, timeout=CLIENT_SECONDS_MAX, check=False)
        if done.returncode != 0:
            raise ServerFailed(f"the {self.flavor} client: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout.decode("utf-8", "surrogateescape")

    def program(self, name: str) -> list[str]:
        """Return the words that start one of the flavor's programs, by its MySQL or its MariaDB name."""
        return self.installation.argv(name)

    def binlog_files(self) -> list[Path]:
        """Return the binlog files that the server's index names, oldest first."""
        indexes = sorted(self.data_directory.glob("*-bin.index"))
        if not indexes:
            return []
        names = indexes[0].read_text().split("\n")
        return [self.data_directory / name for name in names if name]

    def url(self, user: str = REPLICATION_USER) -> str:
        """Return the server's address for an account: with a password for the replica's account, without one
        for others.
        """
        secret = f":{REPLICATION_PASSWORD}" if user == REPLICATION_USER else ""
        return f"mysql://{user}{secret}@127.0.0.1:{self._port}"

    def _prepare(self) -> None:
        if len(str(self.socket).encode()) > SOCKET_PATH_BYTES_MAX:
            raise ServerFailed(
                f"the path of the socket file is too long: {self.socket}; choose a shorter directory"
            )
        (self.directory / "tmp").mkdir(parents=True, exist_ok=True)
        if not self.data_directory.exists():
            copy(template(self.installation), self.data_directory)
        if self.tls and not self.tls_authority.exists():
            certificate.make(self.directory / "tls")

    def _argv(self) -> list[str]:
        options: dict[str, OptionValue] = {
            **self.installation.server_options(),
            "user": account_name(),
            "datadir": str(self.data_directory),
            "tmpdir": str(self.directory / "tmp"),
            "socket": str(self.socket),
            "pid-file": str(self.directory / "pid"),
            "log-error": str(self.directory / "error.log"),
            "bind-address": "127.0.0.1",
            "port": self._port,
            # Servers on one machine have different ports, and therefore different ids.
            "server-id": self._port,
            **_DEFAULT_OPTIONS,
            **_FAMILY_OPTIONS[self.family],
        }
        if self.tls:
            options |= certificate.server_options(self.directory / "tls")
        options |= self.options
        if "skip-log-bin" in options:
            del options["log-bin"]
        return [
            *self.program("mysqld"),
            "--no-defaults",
            *(_option_word(*option) for option in options.items()),
        ]

    def _start_once(self) -> bool:
        self.socket.unlink(missing_ok=True)
        (self.directory / "error.log").unlink(missing_ok=True)
        self._process = child.spawn(self._argv(), self.directory / "output.log")
        self._started[:] = [self._process]
        deadline = time.monotonic() + STARTUP_SECONDS_MAX
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return False
            if self.socket.exists() and self._answers():
                return True
            time.sleep(0.02)
        return False

    def _answers(self) -> bool:
        """Return whether this server, and no other server that took the port, answers on the port."""
        try:
            rows = self.sql("SELECT @@pid_file")
        except pymysql.err.OperationalError:
            return False
        return rows == [(str(self.directory / "pid"),)]


def _remove(directory: Path, started: list[subprocess.Popen[bytes]], owner: int) -> None:
    """End a server and remove its directory, but only in the process that created them, not in a fork."""
    if os.getpid() == owner:
        for process in started:
            process.kill()
            process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def _option_name(name: str) -> str:
    return name.replace("_", "-")


def _option_word(name: str, value: OptionValue) -> str:
    if value is None:
        return f"--{name}"
    if isinstance(value, bool):
        return f"--{name}={'ON' if value else 'OFF'}"
    return f"--{name}={value}"
