# SPDX-License-Identifier: Apache-2.0
"""The servers that other tests use: each is private, listens only on loopback, and is stopped when its owner
ends.
"""

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pymysql
import pytest

from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import (
    FLAVORS,
    REPLICATION_PASSWORD,
    REPLICATION_USER,
    PartMissing,
    Server,
    ServerFailed,
    packages,
)
from tools.servers.__main__ import main
from tools.servers.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
# Three processes that start at once build one template, one after the other.
TEMPLATE_SECONDS_MAX = 3 * WAIT_SECONDS_MAX


def _is_gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        # The process may end between opening and reading the file.
        return True


def _python(text: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", text],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_server_logs_whole_rows_with_names_and_listens_on_loopback_only(server: Server) -> None:
    settings = server.sql("SELECT @@binlog_format, @@binlog_row_image, @@binlog_row_metadata, @@bind_address")

    assert settings == [("ROW", "FULL", "FULL", "127.0.0.1")]
    listening = subprocess.run(
        ["cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True, check=True
    )
    port = f":{server.port:04X} "
    addresses = {line.split()[1] for line in listening.stdout.splitlines() if port in line and " 0A " in line}
    assert addresses == {f"0100007F{port.strip()}"}


def test_replication_account_can_read_and_replicate_and_cannot_write(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    server.sql("CREATE TABLE t (a INT)", database=database)
    account = {"user": REPLICATION_USER, "password": REPLICATION_PASSWORD, "database": database}

    with server.connect(**account) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT * FROM t")
        cursor.execute("SHOW BINARY LOGS")
        assert [row[0] for row in cursor.fetchall()] == [path.name for path in server.binlog_files()]
        with pytest.raises(pymysql.err.OperationalError):
            cursor.execute("INSERT INTO t VALUES (1)")
    assert server.url() == f"mysql://{REPLICATION_USER}:{REPLICATION_PASSWORD}@127.0.0.1:{server.port}"


def test_client_prints_raw_tab_separated_values(server: Server) -> None:
    assert server.client("SELECT 'é\\t1' AS a, NULL AS b", "--skip-column-names") == "é\t1\tNULL\n"
    with pytest.raises(ServerFailed, match="1064"):
        server.client("SELEKT")


def test_binlog_program_of_the_flavor_reads_the_binlog_files(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    # Excludes the rows of other tests from the program's output.
    server.sql("FLUSH BINARY LOGS")
    files = server.binlog_files()
    server.sql("CREATE TABLE t (a INT); INSERT INTO t VALUES (1), (2); FLUSH BINARY LOGS", database=database)

    assert len(server.binlog_files()) == len(files) + 1
    argv = [
        *server.program("mysqlbinlog"),
        "--no-defaults",
        "-vv",
        "--base64-output=decode-rows",
        str(files[-1]),
    ]
    text = subprocess.run(argv, capture_output=True, check=True, text=True, errors="replace").stdout
    assert text.count(f"### INSERT INTO `{database}`.`t`") == 2


@pytest.mark.parametrize("flavor", ["mysql", "mariadb", "mariadb11"])
def test_new_server_has_one_binlog_file_without_transactions(
    require_flavor: Callable[[str], None], flavor: str
) -> None:
    require_flavor(flavor)
    with Server(flavor) as server:
        events = server.sql("SHOW BINLOG EVENTS")
        assert [path.name for path in server.binlog_files()] == ["mysql-bin.000001"]
    assert {row[2] for row in events} <= {"Format_desc", "Previous_gtids", "Gtid_list", "Binlog_checkpoint"}


@pytest.mark.deep(keep=("mysql",))
@pytest.mark.parametrize("flavor", ["mysql", "mariadb", "mariadb11"])
def test_restart_and_a_kill_keep_port_and_rows(start_server: StartServer, flavor: str) -> None:
    server = start_server(flavor)
    port = server.port
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (a INT); INSERT INTO d.t VALUES (1)")

    server.restart(binlog_row_metadata="MINIMAL")
    server.sql("INSERT INTO d.t VALUES (2)")
    server.kill()
    assert not server.running
    server.start()

    assert server.sql("SELECT a, @@port, @@binlog_row_metadata FROM d.t ORDER BY a") == [
        (1, port, "MINIMAL"),
        (2, port, "MINIMAL"),
    ]
    assert len(server.binlog_files()) == 3


def test_options_accept_values_flags_and_booleans(start_server: StartServer) -> None:
    server = start_server("mariadb", skip_log_bin=None, innodb_file_per_table=False, server_id=77)

    assert server.sql("SELECT @@log_bin, @@innodb_file_per_table, @@server_id") == [(0, 0, 77)]
    assert server.binlog_files() == []


def test_two_servers_have_their_own_port_identity_and_directory(start_server: StartServer) -> None:
    first, two = start_server("mariadb"), start_server("mariadb")

    assert first.port != two.port
    assert first.directory != two.directory
    assert first.sql("SELECT @@server_id") != two.sql("SELECT @@server_id")


def test_mysql_server_copied_from_the_template_has_its_own_uuid(
    mysql_server: Server, start_server: StartServer
) -> None:
    assert start_server("mysql").sql("SELECT @@server_uuid") != mysql_server.sql("SELECT @@server_uuid")


def test_server_is_never_mistaken_for_another_on_its_port(mariadb_server: Server) -> None:
    second = Server("mariadb", port=mariadb_server.port)

    with pytest.raises(ServerFailed, match="does not start"):
        second.start()
    assert not second.running
    assert mariadb_server.sql("SELECT 1") == [(1,)]


def test_unknown_option_fails_with_the_servers_message(start_server: StartServer) -> None:
    with pytest.raises(ServerFailed, match="no-such-option"):
        start_server("mariadb", no_such_option=1)


def test_unknown_flavor_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="oracle"):
        Server("oracle")


def test_close_removes_a_temporary_directory_and_keeps_a_supplied_one(
    tmp_path: Path, mariadb_server: Server
) -> None:
    with Server("mariadb") as server:
        temporary = server.directory
    assert not temporary.exists()

    kept = tmp_path / "kept"
    with Server("mariadb", directory=kept) as server:
        server.sql("CREATE DATABASE remembered")
    with Server("mariadb", directory=kept) as server:
        assert ("remembered",) in server.sql("SHOW DATABASES")


def test_tls_certificate_is_signed_by_an_authority_that_clients_can_verify(start_server: StartServer) -> None:
    for flavor in ("mysql", "mariadb"):
        server = start_server(flavor, tls=True)
        context = ssl.create_default_context(cafile=str(server.tls_authority))
        with server.connect(ssl=context) as connection, connection.cursor() as cursor:
            cursor.execute("SHOW STATUS LIKE 'Ssl_cipher'")
            assert cursor.fetchall()[0][1]


def test_connections_of_tests_are_not_encrypted_by_default(server: Server) -> None:
    assert server.sql("SHOW STATUS LIKE 'Ssl_cipher'") == [("Ssl_cipher", "")]


@pytest.mark.deep(keep=("kill",))
@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "sys.exit()", "raise RuntimeError"])
def test_server_ends_when_its_owner_ends_in_any_way(mariadb_server: Server, ending: str) -> None:
    # The thread that starts the server ends before the owning process. That must not stop the server.
    owner = _python(
        "import os, sys, threading, time\n"
        "from tools.servers import Server\n"
        "server = Server('mariadb')\n"
        "thread = threading.Thread(target=server.start)\n"
        "thread.start(); thread.join(); time.sleep(0.5)\n"
        "print(server.pid, server.directory, server.sql('SELECT 1')[0][0], flush=True)\n"
        f"{ending}\n"
    )
    words = owner.communicate(timeout=WAIT_SECONDS_MAX)[0].split()

    assert words[2:] == ["1"]
    wait_until(lambda: _is_gone(int(words[0])))
    if "kill" in ending:
        shutil.rmtree(words[1])
    assert not Path(words[1]).exists()


@pytest.mark.deep(
    guard="tests/integration/test_servers.py::test_mysql_server_copied_from_the_template_has_its_own_uuid"
)
def test_processes_started_at_once_share_one_new_template(tmp_path: Path, mariadb_server: Server) -> None:
    text = "from tools.servers import Server\nwith Server('mariadb') as server: print(server.sql('SELECT 1'))"
    owners = [_python(text, PENSTOCK_SERVERS=str(tmp_path)) for _ in range(3)]

    assert [owner.communicate(timeout=TEMPLATE_SECONDS_MAX)[0] for owner in owners] == ["[(1,)]\n"] * 3
    assert len(list((tmp_path / "templates").iterdir())) == 1


def test_machine_without_a_server_gets_install_instructions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_SERVERS", str(tmp_path))
    monkeypatch.setattr(packages, "_program_path", lambda: str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(PartMissing, match="apt-get install mariadb-server"):
        packages.install.__wrapped__("mariadb")


def test_mirror_is_that_of_the_machines_package_sources(tmp_path: Path) -> None:
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    with pytest.raises(PartMissing, match="no Debian mirror"):
        packages.mirror(tmp_path)
    (tmp_path / "sources.list").write_text(
        "# deb http://old.test/debian x main\ndeb [signed-by=/k] http://a.test/debian x main\n"
    )
    assert packages.mirror(tmp_path) == "http://a.test/debian"
    (parts / "one.sources").write_text(
        "Types: deb\nURIs: http://s.test/debian-security http://b.test/debian/\n"
    )
    assert packages.mirror(tmp_path) == "http://b.test/debian/"


def test_command_starts_in_the_foreground_and_stops_by_directory(
    mariadb_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    words = [
        "start",
        "mariadb",
        "--dir",
        str(tmp_path / "kept"),
        "--port",
        str(port),
        "--option",
        "skip-log-bin",
    ]
    running = subprocess.Popen(
        [sys.executable, "-m", "tools.servers", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    assert f"root@127.0.0.1:{port}" in running.stdout.readline() + running.stdout.readline()

    assert main(["stop", str(tmp_path / "kept")]) == 0
    assert running.wait(WAIT_SECONDS_MAX) == 0
    assert main(["stop", str(tmp_path / "kept")]) == 1
    assert "no server runs" in capsys.readouterr().err


def test_command_ends_its_server_when_interrupted(mariadb_server: Server) -> None:
    # A port that this process holds, so that no other process gets it after the command has ended.
    port = free_port()
    running = subprocess.Popen(
        [sys.executable, "-m", "tools.servers", "start", "mariadb", "--port", str(port)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None
    pid = int(running.stdout.readline().split()[-1])
    assert running.stdout.readline().rstrip().endswith(f":{port}")
    running.send_signal(signal.SIGINT)

    assert running.wait(WAIT_SECONDS_MAX) == 0
    assert _is_gone(pid)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), WAIT_SECONDS_MAX).close()


@pytest.mark.parametrize(("ci", "status", "word"), [("", 0, "skipped"), ("true", 1, "error")])
def test_missing_server_is_a_loud_skip_and_under_ci_a_failure(
    tmp_path: Path, ci: str, status: int, word: str
) -> None:
    test = f"{__file__}::test_mysql_server_copied_from_the_template_has_its_own_uuid"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test],
        cwd=ROOT,
        env={
            **os.environ,
            "CI": ci,
            "PATH": str(tmp_path),
            "PENSTOCK_SERVERS": str(tmp_path),
            "PENSTOCK_FLAVORS": ",".join(FLAVORS),
        },
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == status, done.stdout + done.stderr
    assert f"1 {word}" in done.stdout
    assert (
        "missing: mysql server: mysql is unpacked from Debian packages, and this machine has no apt-get"
        in done.stdout
    )
