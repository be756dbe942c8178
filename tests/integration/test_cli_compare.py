# SPDX-License-Identifier: Apache-2.0
"""`penstock compare` between the two ports of a real daemon: that for Canal's clients, and its own."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.canal.following import arrived, settings_of
from tests.support.daemon.process import DaemonProcess
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server


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

        ours = f"penstock://127.0.0.1:{daemon.port}/shop"
        shared = ["--json", "--seconds", "3", "--tables", f"{database}.*"]

        def compare(client: int, *words: str) -> tuple[int, list[dict[str, object]]]:
            canal = f"canal://127.0.0.1:{daemon.ports['canal']}/shop"
            done = subprocess.run(
                ["penstock", "compare", canal, ours, "--client-id", str(client), *shared, *words],
                capture_output=True,
                text=True,
                timeout=100,
            )
            return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]

        status, [counts] = compare(1)
        assert (status, counts["entries"], counts["rows"], counts["different"]) == (0, 7, 7, 0)
        status, lines = compare(2, "--zone", "+08:00", "--shown", "2")
        assert (status, len(lines), lines[0]["path"]) == (1, 3, "row 0 before.at")
        assert lines[0]["canal"] == "'2026-03-01 01:02:03'"
        # Its entries are acknowledged.
        status, [counts] = compare(1)
        assert (status, counts["entries"], counts["start"]) == (5, 0, None)
