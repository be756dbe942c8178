# SPDX-License-Identifier: Apache-2.0
"""`penstock compare`, run on a real daemon: against the daemon's own port for Canal clients, and against
Canal's own server.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.canal_server import canal_server
from bench.compiled import ToolMissing
from tests.support.canal.following import arrived, settings_of
from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import DaemonProcess
from tests.support.suite.fixture_types import FreshDatabase, MissingPart, StartServer
from tools.servers import Server


def compare(daemon: DaemonProcess, canal: str, tables: str, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Run a comparison for a few seconds; return its exit status and output lines."""
    command = ["penstock", "compare", canal, f"penstock://127.0.0.1:{daemon.port}/shop"]
    command += ["--json", "--tables", tables, "--seconds", "5", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout, done.stderr
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.deep(guard="tests/unit/test_compare_canal.py::test_entries_of_the_same_log_have_no_difference")
def test_comparison_reports_equal_logs_differences_and_nothing_by_its_status(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, at TIMESTAMP, price DECIMAL(9,2))")
    settings = settings_of(mysql_server, canal_start="earliest")
    with DaemonProcess(tmp_path, settings) as daemon:
        for number in range(4):
            mysql_server.sql(
                f"INSERT INTO {database}.t VALUES ({number}, '2026-03-01 01:02:03', 0);"
                f"UPDATE {database}.t SET price = 1.5 WHERE id = {number}"
            )
        arrived(mysql_server, daemon)

        canal = f"canal://127.0.0.1:{daemon.ports['canal']}/shop"
        tables = f"{database}.*"
        status, [counts] = compare(daemon, canal, tables, "--client-id", "1")
        assert (status, counts["entries"], counts["rows"], counts["different"]) == (0, 7, 7, 0)
        status, lines = compare(daemon, canal, tables, "--zone", "+08:00", "--shown", "2")
        assert (status, len(lines), lines[0]["path"]) == (1, 3, "row 0 before.at")
        assert lines[0]["canal"] == "'2026-03-01 01:02:03'"
        # The entries of the first comparison are acknowledged.
        status, [counts] = compare(daemon, canal, tables, "--client-id", "1")
        assert (status, counts["entries"], counts["start"]) == (5, 0, None)


@pytest.mark.deep(guard="tests/unit/test_compare_canal.py::test_entries_of_the_same_log_have_no_difference")
def test_comparison_with_canals_own_server_finds_the_known_differences_alone(
    start_server: StartServer, missing_part: MissingPart, tmp_path: Path
) -> None:
    server = start_server(default_time_zone="+00:00")
    server.sql(
        "CREATE DATABASE shop; CREATE TABLE shop.t (id INT PRIMARY KEY, at TIMESTAMP, price DECIMAL(9,2))"
    )
    settings = settings_of(server)
    settings["instances"]["shop"]["start"] = "earliest"
    with DaemonProcess(tmp_path, settings) as daemon:
        try:
            with canal_server(server, r"shop\..*", head_of(server).file) as canal:
                address = f"canal://127.0.0.1:{canal.port}/bench"
                for number in range(4):
                    server.sql(f"INSERT INTO shop.t VALUES ({number}, '2026-03-01 01:02:03', 1.25)")
                status, [counts] = compare(daemon, address, "shop.*", "--seconds", "20")
                assert (status, counts["different"], counts["behind"]) == (0, 0, None)
                assert counts["rows"] >= 4
                server.sql("INSERT INTO shop.t VALUES (9, NULL, 0)")
                server.sql("INSERT INTO shop.t VALUES (10, NULL, 3)")
                status, [difference, counts] = compare(daemon, address, "shop.*", "--seconds", "20")
        except ToolMissing as problem:
            missing_part("Canal's server", str(problem))
    # The comparison begins after the first transaction. Canal shows a decimal without trailing zeros; see
    # docs/formats/messages.md.
    assert (status, difference["path"]) == (1, "row 0 after.price")
    assert (difference["canal"], difference["penstock"]) == ("'3.0'", "'3.00'")
