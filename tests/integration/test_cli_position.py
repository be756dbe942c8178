# SPDX-License-Identifier: Apache-2.0
"""`penstock position`: a real capture starts at a set position, and the command first reports the cost."""

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock as penstock_package
from penstock.errors import SequenceGap
from penstock.logstore.reader import LogReader
from penstock.model import Position
from tests.support.capture.captured_log import (
    assert_equal_to_server,
    capturing,
    head_of,
    settings_of,
    wait_for,
    wait_for_position,
)
from tests.support.logstore.kept_log import KeptLog, insert, penstock, transactions
from tests.support.suite.fixture_types import StartServer
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import REPLICATION_PASSWORD, REPLICATION_USER, Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")

PROGRAM = Path(sys.executable).with_name("penstock")


@pytest.fixture(scope="module", params=["mysql", "mariadb"])
def captured(
    request: pytest.FixtureRequest,
    server_of: Callable[[str], Server],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[KeptLog]:
    server = server_of(request.param)
    server.sql("CREATE DATABASE cli_position")
    yield KeptLog.capture(server, tmp_path_factory.mktemp(request.param), "cli_position")
    server.sql("DROP DATABASE cli_position")


@pytest.fixture
def kept(captured: KeptLog, tmp_path: Path) -> KeptLog:
    """A copy of the log for one test; the server may be ahead of it."""
    return captured.copy(tmp_path / "copy")


def rows_of(kept: KeptLog, **bounds: Any) -> list[tuple[int, int]]:
    """Return commit version and key of every row in the log, in order."""
    read = penstock_package.read_binlog(str(kept.folder), tables=f"{kept.database}.t", **bounds)
    return [
        (row["_commit_version"], row["a"])
        for batch in read
        for row in batch.to_arrow().select(["_commit_version", "a"]).to_pylist()
    ]


# --- show -----------------------------------------------------------------------------------


def test_show_reports_the_capture_position(kept: KeptLog) -> None:
    line = penstock("position", "show", kept.folder, "--json").one
    assert line["position"] == line["visible"] == line["durable"] == str(kept.head)
    assert not line["was_set"]
    assert line["gtid_set"]
    assert line["earliest"].startswith(kept.start.file)
    text = penstock("position", "show", "--config", kept.config).out
    assert str(kept.head) in text
    assert re.search(r"^was set +no$", text, re.MULTILINE)


# --- set ------------------------------------------------------------------------------------


def test_dry_run_counts_repeated_changes_and_changes_nothing(kept: KeptLog) -> None:
    logged = kept.logged
    before = {path: path.read_bytes() for path in kept.folder.rglob("*") if path.is_file()}
    first_file, second_file = kept.files
    for number in (7, 61, 75):
        target = logged[number].start
        planned = penstock("position", "set", kept.folder, "--position", target, "--dry-run", "--json").one
        again = planned["again"]
        behind = [transaction for transaction in logged if transaction.start >= target]
        assert again["transactions"] == again["changes"] == len(behind)
        first_bytes = max(kept.files[first_file] - target.offset, 0) if target.file == first_file else 0
        head_bytes = len(LogReader.open(kept.folder).head_bytes(0, second_file))
        second_from = target.offset if target.file == second_file else head_bytes
        assert again["bytes"] == first_bytes + kept.head.offset - second_from
        assert again["first"] <= again["last"]
        assert (planned["old"], planned["new"]) == (str(kept.head), f"1/{target}")
        assert planned["lost"]["bytes"] == 0
    assert {path: path.read_bytes() for path in kept.folder.rglob("*") if path.is_file()} == before


def test_set_backward_starts_an_epoch_that_repeats_later_changes(kept: KeptLog) -> None:
    target = kept.logged[50].start
    keys = [key for _, key in rows_of(kept)]
    done = penstock(
        "position",
        "set",
        "--config",
        kept.config,
        "--position",
        target,
        "--yes",
        "--reason",
        "torn",
        "--json",
    ).one
    assert done["again"]["transactions"] == len(kept.logged) - 50
    shown = penstock("position", "show", kept.folder, "--json").one
    assert shown["was_set"]
    assert shown["position"] == f"1/{target}"
    (deed,) = map(json.loads, (kept.folder / "audit.log").read_text().splitlines())
    assert (deed["old"], deed["new"], deed["reason"]) == (str(kept.head), f"1/{target}", "torn")
    assert deed["user"]
    assert deed["time"]
    kept.run_capture()
    assert_equal_to_server(kept.folder, kept.server, target)
    rows = rows_of(kept)
    versions = [version for version, _ in rows]
    assert versions == sorted(versions)
    repeated = keys[keys.index(rows_of(kept, start=f"1/{target}")[0][1]) :]
    assert [key for _, key in rows][: len(keys) + len(repeated)] == keys + repeated
    assert penstock("log", "verify", kept.folder).code == 0
    # Readers of epoch 0 still get the same rows.
    assert [key for _, key in rows_of(kept, end=str(kept.head))] == keys


def test_set_forward_reports_the_loss_and_readers_stop_at_the_gap(kept: KeptLog) -> None:
    server = kept.server
    kept.run_capture()
    insert(server, kept.database, 5)
    lost = transactions(server, [head_of(server).file])[-5:]
    target = lost[-1].start
    words = ("position", "set", "--config", kept.config, "--position", target)
    planned = penstock(*words, "--dry-run", "--json").one
    assert planned["again"]["bytes"] == 0
    assert (planned["lost"]["transactions"], planned["lost"]["changes"]) == (4, 4)
    start = int(planned["old"].rpartition(":")[2])
    assert planned["lost"]["gaps"] == [{"file": target.file, "from": start, "to": target.offset}]
    assert "4 transactions" in penstock(*words, "--dry-run").out
    assert penstock(*words, "--yes").code == 0
    kept.run_capture()
    assert_equal_to_server(kept.folder, server, target)
    assert len(rows_of(kept, start=f"1/{target}")) == 1
    with pytest.raises(SequenceGap):
        rows_of(kept)
    # The loss was requested, so verifying the log finds no problem.
    assert penstock("log", "verify", kept.folder).code == 0


def test_time_and_gtid_set_mean_the_first_transaction_after_them(kept: KeptLog) -> None:
    logged = kept.logged
    gtid_set = kept.set_upto(logged[20].gtid)
    of_second_file = next(
        transaction.start for transaction in logged if transaction.start.file != kept.start.file
    )
    for named in ([kept.folder], ["--config", kept.config, "shop"]):
        by_set = penstock("position", "set", *named, "--gtid-set", gtid_set, "--dry-run", "--json").one
        assert by_set["new"] == f"1/{logged[21].start}"
        time = kept.split.isoformat()
        by_time = penstock("position", "set", *named, "--time", time, "--dry-run", "--json").one
        assert by_time["new"] == f"1/{of_second_file}"
        assert by_time["server_asked"] == (named != [kept.folder])


def test_impossible_position_is_refused(kept: KeptLog, mariadb_server: Server) -> None:
    transaction = kept.logged[30]
    inside = f"{transaction.start.file}:{transaction.end.offset - 31}"
    set_to = ("position", "set", "--config", kept.config, "--dry-run", "--position")
    for named in (["--config", kept.config], [kept.folder]):
        refused = penstock("position", "set", *named, "--dry-run", "--position", inside)
        assert refused.code == 2
        assert str(transaction.start) in refused.err, "it names the transaction's beginning"
    stem, _, digits = kept.start.file.rpartition(".")
    assert "PositionPurged" in penstock(*set_to, f"{stem}.{0:0{len(digits)}d}:4").err
    assert "PositionInvalid" in penstock(*set_to, f"{stem}.{900000}:4").err
    insert(kept.server, kept.database, 1)
    ahead = penstock("position", "set", kept.folder, "--dry-run", "--position", head_of(kept.server))
    assert ahead.code == 2
    assert "--config" in ahead.err
    assert penstock("position", "set", kept.folder, "--dry-run").code == 2
    if kept.server is not mariadb_server:
        kept.config.write_text(kept.config.read_text().replace(kept.server.url(), mariadb_server.url()))
        assert "ServerChanged" in penstock(*set_to, kept.start).err


def test_second_set_replaces_the_first(kept: KeptLog) -> None:
    first, second = (kept.logged[number].start for number in (10, 90))
    assert penstock("position", "set", kept.folder, "--position", first, "--yes").code == 0
    planned = penstock("position", "set", kept.folder, "--position", second, "--dry-run", "--json").one
    assert planned["old"] == f"1/{first}"
    # The log contains everything between the two positions.
    assert planned["lost"]["bytes"] == 0
    assert penstock("position", "set", kept.folder, "--position", second, "--yes").code == 0
    kept.run_capture()
    assert_equal_to_server(kept.folder, kept.server, second)
    assert len((kept.folder / "audit.log").read_text().splitlines()) == 2


def test_running_capture_keeps_its_position(kept: KeptLog) -> None:
    target = kept.logged[50].start
    with capturing(kept.settings) as capture:
        wait_for_position(capture, head_of(kept.server))
        refused = penstock("position", "set", kept.folder, "--position", target, "--yes")
        assert refused.code == 2
        assert "LogLocked" in refused.err
        assert str(os.getpid()) in refused.err
        planned = penstock("position", "set", kept.folder, "--position", target, "--dry-run", "--json").one
        assert planned["again"]["transactions"] >= 50
    assert not (kept.folder / "audit.log").exists()


def test_set_position_holds_for_a_server_that_takes_over_first(
    start_server: StartServer, tmp_path: Path
) -> None:
    primary = start_server("mariadb")
    follower = start_server("mariadb", log_slave_updates=True, relay_log="relay")
    follower.sql(
        f"CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={primary.port}, MASTER_USE_GTID=slave_pos,"
        f" MASTER_USER='{REPLICATION_USER}', MASTER_PASSWORD='{REPLICATION_PASSWORD}'; START SLAVE"
    )
    primary.sql("CREATE DATABASE d")
    primary.sql("CREATE TABLE d.t (a INT PRIMARY KEY AUTO_INCREMENT, b VARCHAR(300))")
    insert(primary, "d", 10)
    with capturing(settings_of(tmp_path, primary.url(), start="earliest")) as capture:
        wait_for_position(capture, head_of(primary))
    fifth = transactions(primary, [head_of(primary).file])[-6]
    log = tmp_path / "shop"
    assert penstock("position", "set", log, "--gtid-set", fifth.gtid, "--yes").code == 0
    executed = primary.sql("SELECT @@gtid_binlog_pos")
    wait_until(lambda: follower.sql("SELECT @@gtid_binlog_pos") == executed)
    primary.kill()
    with capturing(settings_of(tmp_path, follower.url())) as capture:
        status = wait_for(
            capture, lambda status: status.epoch == 2 and status.position == f"2/{head_of(follower)}"
        )
    assert status.gtid_set == executed[0][0]
    first = next(extent.first for extent in LogReader.open(log).extents() if extent.epoch == 2)
    assert LogReader.open(log).gtid_set(first) == fifth.gtid
    assert_equal_to_server(log, follower, first)


def test_set_asks_for_confirmation_interactively_and_needs_yes_in_scripts(kept: KeptLog) -> None:
    target = kept.logged[50].start
    words = ("position", "set", kept.folder, "--position", target)
    assert "--yes" in penstock(*words).err
    assert at_terminal("n\n", *words) == 1
    assert not penstock("position", "show", kept.folder, "--json").one["was_set"]
    assert at_terminal("y\n", *words) == 0
    assert penstock("position", "show", kept.folder, "--json").one["position"] == f"1/{target}"


def at_terminal(typed: str, *words: object) -> int:
    """Run the program with a terminal as its input, and return its exit status."""
    controller, terminal = pty.openpty()
    try:
        os.write(controller, typed.encode())
        done = subprocess.run(
            [PROGRAM, *map(str, words)],
            stdin=terminal,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS_MAX,
        )
    finally:
        os.close(controller)
        os.close(terminal)
    assert "would be read twice" in done.stdout
    return done.returncode


def test_log_that_has_not_started_reports_its_start_setting(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    output = penstock(
        "position", "set", tmp_path / "log", "--position", Position(0, "b.000001", 4), "--dry-run"
    )
    assert output.code == 2
