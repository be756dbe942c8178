# SPDX-License-Identifier: Apache-2.0
"""XA transactions prepared on one server and committed or rolled back on the replica that takes over."""

from pathlib import Path

import pyarrow
import pytest

from penstock.binlog import read_binlog
from penstock.model import Position
from tests.support.capture.captured_log import (
    capturing,
    failing_over,
    head_of,
    wait_for,
    wait_for_position,
)
from tests.support.capture.replicas import gtids_executed, replica_of
from tests.support.suite.fixture_types import StartServer
from tests.support.suite.patience import wait_until


@pytest.mark.deep(
    guard="tests/unit/test_log_prepared.py"
    "::test_rows_prepared_before_a_failover_arrive_once_with_the_commit_on_the_new_server"
)
@pytest.mark.parametrize("flavor", ["mysql", "mariadb"])
def test_rows_prepared_on_the_old_primary_arrive_once_when_the_new_one_commits(
    start_server: StartServer, tmp_path: Path, flavor: str
) -> None:
    primary = start_server(flavor)
    follower = replica_of(primary, start_server)
    primary.sql("CREATE DATABASE d; CREATE TABLE d.t (a INT PRIMARY KEY)")
    settings = failing_over(tmp_path, primary, follower, "300ms")
    with capturing(settings) as capture:
        for number in (1, 2):
            # The new primary commits one of these two prepared transactions and rolls the other back.
            primary.sql(
                f"XA START 'x{number}'; INSERT INTO d.t VALUES ({number});"
                f" XA END 'x{number}'; XA PREPARE 'x{number}'"
            )
        wait_for_position(capture, head_of(primary))
        wait_until(lambda: gtids_executed(follower) == gtids_executed(primary))
        primary.kill()
        follower.sql("STOP SLAVE" if flavor == "mariadb" else "STOP REPLICA")
        follower.sql("INSERT INTO d.t VALUES (3)")
        follower.sql("XA COMMIT 'x1'")
        follower.sql("XA ROLLBACK 'x2'")
        follower.sql("INSERT INTO d.t VALUES (4)")
        wait_for(capture, lambda status: status.position == f"1/{head_of(follower)}")
        first_status = capture.snapshot()
    assert first_status.epoch == 1
    rows = [
        row
        for batch in read_binlog(tmp_path / "shop", ["d.t"])
        for row in pyarrow.record_batch(batch).to_pylist()
    ]
    assert [row["a"] for row in rows] == [3, 1, 4]
    versions = [row["_commit_version"] for row in rows]
    assert versions == sorted(set(versions))
    assert versions[0] >= Position(1, head_of(follower).file, 4).commit_version
