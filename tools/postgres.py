# SPDX-License-Identifier: Apache-2.0
"""A real PostgreSQL server, private to the process that starts it.

with Postgres() as server:
    server.url          # "postgresql://postgres@127.0.0.1:40213/postgres"
"""

import os
import pwd
import signal
import subprocess
from pathlib import Path

from tools.companion import Companion
from tools.servers.errors import PartMissing, ServerFailed
from tools.servers.packages import program_on_host

# Creating the data folder takes a second or two on an idle machine.
MAKE_SECONDS_MAX = 120.0

# PostgreSQL refuses to run as root. One of these accounts exists.
_ACCOUNTS = ("postgres", "nobody")

_SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
fsync = off
full_page_writes = off
synchronous_commit = off
max_connections = 60
shared_buffers = 64MB
max_wal_size = 512MB
log_min_messages = error
deadlock_timeout = 100ms
"""


class Postgres(Companion):
    """The PostgreSQL server, with settings for tests: it survives a kill of its process, but not a power
    failure.
    """

    NAME = "PostgreSQL"

    @property
    def url(self) -> str:
        """The server's URL, in the form of the sink's setting; `postgres` has no password."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def argv(self, folder: Path) -> list[str]:
        programs = _programs()
        data_folder = folder / "kept"
        prefix: list[str] = []
        if os.geteuid() == 0:
            account = _account()
            # Changing the account clears the signal that ends a child with its parent, so set the signal
            # again.
            prefix = ["setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
            prefix.append("--pdeathsig=KILL")
            folder.chmod(0o711)
            if not data_folder.exists():
                data_folder.mkdir(mode=0o700)
                os.chown(data_folder, account.pw_uid, account.pw_gid)
        if not (data_folder / "PG_VERSION").exists():
            words = [
                "-D",
                str(data_folder),
                "-U",
                "postgres",
                "-A",
                "trust",
                "-E",
                "UTF8",
                "--locale=C",
                "--no-sync",
            ]
            initialized = subprocess.run(
                [*prefix, str(programs / "initdb"), *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                cwd="/",
                timeout=MAKE_SECONDS_MAX,
            )
            if initialized.returncode != 0:
                raise ServerFailed(f"PostgreSQL's folder cannot be made:\n{initialized.stderr[-2000:]}")
            with (data_folder / "postgresql.conf").open("a") as settings:
                settings.write(_SETTINGS)
        return [*prefix, str(programs / "postgres"), "-D", str(data_folder), "-p", str(self.port)]

    def answers(self) -> bool:
        # The port is open before the server accepts sessions.
        words = [str(_programs() / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(words, stdin=subprocess.DEVNULL).returncode == 0

    def close(self) -> None:
        """Stop the server and remove its data."""
        if self._process is not None:
            # By default the server waits for its clients, and would then be killed before its own children
            # end.
            self._process.send_signal(signal.SIGINT)
        super().close()


def _programs() -> Path:
    return program_on_host("/usr/lib/postgresql/*/bin/initdb", "postgresql").parent


def _account() -> pwd.struct_passwd:
    for name in _ACCOUNTS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise PartMissing("PostgreSQL does not run as root, and there is no account postgres")
