# SPDX-License-Identifier: Apache-2.0
"""A promoted server that is missing transactions of the log, and the command that accepts the loss."""

from pathlib import Path

import pytest

from penstock.capture.status import State
from penstock.logstore.reader import LogReader
from penstock.source.source import SourceOptions, open_source
from tests.support.binlog.mariadb_log import gtids_between
from tests.support.capture.captured_log import (
    assert_equal_to_server,
    capturing,
    failing_over,
    head_of,
    wait_for,
    wait_for_position,
)
from tests.support.logstore.kept_log import penstock
from tests.support.suite.fixture_types import StartServer
from tools.servers import Server


@pytest.mark.deep(
    guard="tests/unit/test_capture_resume.py"
    "::test_server_with_a_file_of_the_same_name_but_missing_transactions_is_behind"
)
def test_lost_transactions_are_named_and_accepted_by_a_command(
    start_server: StartServer, tmp_path: Path
) -> None:
    primary, promoted = start_server("mysql"), start_server("mysql")
    for server in (primary, promoted):
        server.sql("CREATE DATABASE d; CREATE TABLE d.t (a INT); CREATE TABLE d.u (a INT)")
    settings = failing_over(tmp_path, primary, promoted, "100ms")
    with capturing(settings) as capture:
        primary.sql("INSERT INTO d.t VALUES (1)")
        wait_for_position(capture, head_of(primary))
        shared = capture.snapshot().gtid_set
        primary.sql("INSERT INTO d.u VALUES (2)")
        wait_for_position(capture, head_of(primary))
        promoted.sql(f"RESET BINARY LOGS AND GTIDS; SET GLOBAL gtid_purged = '{shared}'")
        promoted.sql("INSERT INTO d.t VALUES (3)")
        primary.stop()
        status = wait_for(capture, lambda status: status.state is State.BEHIND)
        lost = f"{shared.partition(':')[0]}:{int(shared.rpartition('-')[2]) + 1}"
        assert status.missing_gtids == lost
        assert status.epoch == 0
    config = tmp_path / "penstock.yaml"
    config.write_text(
        f"log: {{folder: {tmp_path}}}\n"
        f"instances: {{shop: {{source: '{primary.url()}', servers: ['127.0.0.1:{promoted.port}']}}}}\n"
    )
    command = ("position", "accept", "shop", "--config", config, "--server", f"127.0.0.1:{promoted.port}")
    planned = penstock(*command, "--dry-run", "--json").one
    assert (planned["lost"], planned["tables"]) == (lost, ["d.u"])
    assert LogReader.open(tmp_path / "shop").epochs.latest.epoch == 0  # type: ignore[union-attr]
    assert "penstock verify" in penstock(*command, "--yes").out
    with capturing(settings) as capture:
        promoted.sql("INSERT INTO d.t VALUES (4)")
        status = wait_for(capture, lambda status: status.position == f"1/{head_of(promoted)}")
        assert status.missing_gtids is None
    assert_equal_to_server(tmp_path / "shop", promoted)


def replicate(server: Server, primary: Server, number: int, statement: str) -> None:
    """Execute a statement of the primary on a MariaDB server, with its GTID, as a replica does."""
    server.sql(f"SET server_id = {primary.port}, gtid_seq_no = {number}; {statement}")


@pytest.mark.deep(
    guard="tests/unit/test_mariadb_gtid_order.py"
    "::test_reader_of_lost_transactions_receives_those_of_the_accepted_server"
)
def test_transactions_lost_on_mariadb_are_accepted_and_no_reader_mistakes_new_ones_for_them(
    start_server: StartServer, tmp_path: Path
) -> None:
    primary, promoted = start_server("mariadb"), start_server("mariadb")
    for number, statement in enumerate(("CREATE DATABASE d", "CREATE TABLE d.t (a INT)"), 1):
        primary.sql(statement)
        replicate(promoted, primary, number, statement)
    primary.sql("CREATE TABLE d.u (a INT)")
    replicate(promoted, primary, 3, "CREATE TABLE d.u (a INT)")
    settings = failing_over(tmp_path, primary, promoted, "100ms")
    lost = f"0-{primary.port}-6"
    with capturing(settings) as capture:
        for value in (1, 2, 3):
            primary.sql(f"INSERT INTO d.u VALUES ({value})")
        wait_for_position(capture, head_of(primary))
        assert capture.snapshot().gtid_set == lost
        # The promoted server assigns the numbers of the lost transactions to its own transactions.
        for value in (4, 5, 6, 7):
            promoted.sql(f"INSERT INTO d.t VALUES ({value})")
        primary.stop()
        status = wait_for(capture, lambda status: status.state is State.BEHIND)
        assert status.missing_gtids == lost
    config = tmp_path / "penstock.yaml"
    config.write_text(
        f"log: {{folder: {tmp_path}}}\n"
        f"instances: {{shop: {{source: '{primary.url()}', servers: ['127.0.0.1:{promoted.port}']}}}}\n"
    )
    command = ("position", "accept", "shop", "--config", config, "--server", f"127.0.0.1:{promoted.port}")
    planned = penstock(*command, "--dry-run", "--json").one
    assert (planned["lost"], planned["tables"]) == (lost, ["d.u"])
    assert planned["gtid_set"] == f"0-{primary.port}-3"
    assert "penstock verify" in penstock(*command, "--yes").out
    with capturing(settings) as capture:
        wait_for(capture, lambda status: status.position == f"1/{head_of(promoted)}")
        # When capture starts again, the log continues from the same server.
    with capturing(settings) as capture:
        promoted.sql("INSERT INTO d.t VALUES (8)")
        status = wait_for(capture, lambda status: status.position == f"1/{head_of(promoted)}")
        assert (status.epoch, status.missing_gtids) == (1, None)
    assert_equal_to_server(tmp_path / "shop", promoted)
    source = open_source(SourceOptions(paths=(str(tmp_path / "shop"),)))
    for start, numbers in [(lost, (4, 5, 6, 7, 8)), (f"0-{promoted.port}-5", (6, 7, 8))]:
        assert gtids_between(source, start) == [f"0-{promoted.port}-{number}" for number in numbers]
