# SPDX-License-Identifier: Apache-2.0
"""Initialised data directories, created once per flavor and version, then copied for every server.

A template has the system tables, the account `repl`, and for MySQL its generated TLS keys. It has no binlog
and no server identity.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pymysql

from tools.servers import child
from tools.servers.errors import ServerFailed
from tools.servers.packages import Installation, cache_directory, locked

# This number is incremented when the content of templates changes, so that older templates are not used.
TEMPLATE_FORMAT = 1
# Initialisation writes a whole data directory, on a machine that may stall at every fsync.
STARTUP_SECONDS_MAX = 300

REPLICATION_USER = "repl"
REPLICATION_PASSWORD = "replicate-on-loopback"

_ACCOUNT = (
    f"CREATE USER '{REPLICATION_USER}'@'%' IDENTIFIED BY '{REPLICATION_PASSWORD}'",
    f"GRANT REPLICATION SLAVE, REPLICATION CLIENT, SELECT ON *.* TO '{REPLICATION_USER}'@'%'",
)

# Scripts of MariaDB's mariadb-install-db, in its order. Their names differ between versions.
_SYSTEM_SCRIPTS = (
    ("mariadb_system_tables.sql", "mysql_system_tables.sql"),
    ("mariadb_performance_tables.sql", "mysql_performance_tables.sql"),
    ("mariadb_system_tables_data.sql", "mysql_system_tables_data.sql"),
    ("fill_help_tables.sql",),
    ("maria_add_gis_sp_bootstrap.sql",),
    ("mariadb_sys_schema.sql", "mysql_sys_schema.sql"),
)
_SYSTEM_HEAD = """\
CREATE DATABASE IF NOT EXISTS mysql;
USE mysql;
SET @skip_auth_anonymous=1;
SET @auth_root_socket=NULL;
"""


def account_name() -> str:
    """Return the name of the account that this process runs as."""
    return pwd.getpwuid(os.geteuid()).pw_name


def template(installation: Installation) -> Path:
    """Return the data directory template of an installation. It is created if it is not in the cache.

    Raises `ServerFailed` if the server cannot initialize a data directory on this machine.
    """
    name = f"{installation.flavor}-{installation.version}-{TEMPLATE_FORMAT}"
    folder = cache_directory() / "templates" / name
    with locked(f"template-{installation.flavor}"):
        if folder.is_dir():
            return folder
        part = folder.with_name(f"{name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        # Use a short path: the length of a socket file's path is limited, and the cache's path may be long.
        with tempfile.TemporaryDirectory(prefix="penstock-") as work:
            options = _options(installation, part, Path(work))
            _initialise(installation, options, Path(work))
            _add_account(installation, options, Path(work))
        # Each copy gets a new server identity at its start.
        (part / "auto.cnf").unlink(missing_ok=True)
        part.rename(folder)
    return folder


def copy(source: Path, target: Path) -> None:
    """Copy a template to a new data directory, sharing blocks if the disk supports it."""
    subprocess.run(["cp", "-a", "--reflink=auto", "--sparse=always", source, target], check=True)


def _options(installation: Installation, directory: Path, work: Path) -> list[str]:
    options = {
        **installation.server_options(),
        "user": account_name(),
        "datadir": str(directory),
        "tmpdir": str(work),
        "socket": str(work / "s"),
        "pid-file": str(work / "pid"),
        "log-error": str(work / "error.log"),
        "secure-file-priv": "",
    }
    small = (
        ["--innodb-redo-log-capacity=8M", "--mysqlx=OFF"]
        if installation.family == "mysql"
        else ["--innodb-log-file-size=16M"]
    )
    return [
        "--no-defaults",
        *(f"--{name}={value}" for name, value in options.items()),
        "--skip-log-bin",
        *small,
    ]


def _initialise(installation: Installation, options: list[str], work: Path) -> None:
    argv = [*installation.argv("mysqld"), *options]
    output = work / "initialise.log"
    if installation.family == "mysql":
        process = child.spawn([*argv, "--initialize-insecure"], output)
    else:
        script = work / "system.sql"
        script.write_text(_system_script(installation))
        with open(script, "rb") as file:
            process = child.spawn([*argv, "--bootstrap"], output, file.fileno())
    try:
        status = process.wait(STARTUP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        child.end(process, 0)
        status = -1
    if status != 0:
        raise ServerFailed(
            f"the {installation.flavor} server cannot initialise a data directory:\n{log_tail(work)}"
        )


def _system_script(installation: Installation) -> str:
    share = installation.share()
    folders = {share, share.parent / "mysql", share.parent / "mariadb"}
    texts = [_SYSTEM_HEAD]
    for names in _SYSTEM_SCRIPTS:
        scripts = [folder / name for name in names for folder in sorted(folders) if (folder / name).is_file()]
        texts.extend(path.read_text() for path in scripts[:1])
    return "\n".join(texts)


def _add_account(installation: Installation, options: list[str], work: Path) -> None:
    process = child.spawn([*installation.argv("mysqld"), *options, "--skip-networking"], work / "start.log")
    try:
        deadline = time.monotonic() + STARTUP_SECONDS_MAX
        while not (work / "s").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed(f"the new {installation.flavor} server does not start:\n{log_tail(work)}")
            time.sleep(0.02)
        with (
            pymysql.connect(unix_socket=str(work / "s"), user="root") as connection,
            connection.cursor() as cursor,
        ):
            for statement in _ACCOUNT:
                cursor.execute(statement)
    finally:
        stopped = child.end(process, STARTUP_SECONDS_MAX)
    if not stopped:
        raise ServerFailed(f"the new {installation.flavor} server does not stop:\n{log_tail(work)}")


def log_tail(directory: Path, lines_max: int = 15) -> str:
    """Return the last lines of the logs in a server's directory."""
    texts = [path.read_text(errors="replace") for path in sorted(directory.glob("*.log"))]
    return "\n".join("\n".join(texts).splitlines()[-lines_max:])
