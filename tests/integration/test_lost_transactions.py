# SPDX-License-Identifier: Apache-2.0
"""A promoted server that is missing transactions of the log, and the command that accepts the loss."""

from pathlib import Path

import pytest

from penstock.capture.status import State
from penstock.logstore.reader import LogReader
from tests.support.capture.captured_log import (
    assert_equal_to_server,
    capturing,
    head_of,
    settings_of,
    wait_for,
    wait_for_position,
)
from tests.support.logstore.kept_log import penstock
from tests.support.suite.fixture_types import StartServer


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
    settings = settings_of(
        tmp_path,
        primary.url(),
        servers=[f"127.0.0.1:{promoted.port}"],
        start="earliest",
        fail_over_after="100ms",
    )
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
