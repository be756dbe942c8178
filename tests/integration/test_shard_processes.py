# SPDX-License-Identifier: Apache-2.0
"""The processes of a pipeline with shards: `penstock run --local` starts, restarts and ends them."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from penstock.pipeline.settings import load_pipeline
from penstock.pipeline.shards import Shard
from penstock.pipeline.state import PipelineState
from tests.support.pipeline.sharded import GrowingLog, rows_in_feed, rows_of_log, write_sharded
from tests.support.suite.patience import wait_until

STOP_SECONDS_MAX = 20


@pytest.fixture
def log(tmp_path: Path) -> GrowingLog:
    grown = GrowingLog(tmp_path / "log")
    grown.grow(40)
    return grown


def command(file: Path, *options: str) -> list[str]:
    child = [sys.executable, "-m", "penstock.cli.shared.child", str(os.getpid())]
    return [*child, "run", "--local", str(file), *options]


@contextmanager
def running(file: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(command(file), stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def runner_of(file: Path, shard: Shard) -> int | None:
    """Return the process of a shard, None if it has none."""
    with closing(PipelineState.of(load_pipeline(file).of_shard(shard))) as state:
        runner = state.runner()
    return None if runner is None else int(runner.name.rpartition(":")[2])


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_shards_run_in_processes_until_all_have_caught_up(tmp_path: Path, log: GrowingLog) -> None:
    file = write_sharded(tmp_path, 2)
    done = subprocess.run(
        command(file, "--until", "caught-up"), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "shop caught up" in done.stderr
    assert "40 rows written" in done.stderr
    assert "shop (shard 1-of-2) at binlog.000001" in done.stderr
    assert rows_in_feed(tmp_path) == rows_of_log(log.rows)


@pytest.mark.deep(
    guard="tests/integration/test_shard_processes.py::test_shards_run_in_processes_until_all_have_caught_up"
)
def test_killed_shard_is_started_again_and_sigterm_ends_all(tmp_path: Path, log: GrowingLog) -> None:
    file = write_sharded(tmp_path, 2)
    shards = Shard.all_of(2)
    with running(file) as parent:
        wait_until(lambda: rows_in_feed(tmp_path) == rows_of_log(log.rows))
        killed, other = (runner_of(file, shard) for shard in shards)
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        log.grow(20)
        wait_until(lambda: rows_in_feed(tmp_path) == rows_of_log(log.rows))
        successor = runner_of(file, shards[0])
        assert successor not in (killed, None)
        assert runner_of(file, shards[1]) == other, "the other shard goes on"
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(STOP_SECONDS_MAX) == 0
        assert [runner_of(file, shard) for shard in shards] == [None, None]


@pytest.mark.deep(
    guard="tests/integration/test_shard_processes.py::test_shards_run_in_processes_until_all_have_caught_up"
)
def test_shards_of_a_killed_parent_end_and_another_number_takes_over(tmp_path: Path, log: GrowingLog) -> None:
    file = write_sharded(tmp_path, 2)
    with running(file) as parent:
        wait_until(lambda: rows_in_feed(tmp_path) == rows_of_log(log.rows))
        children = [runner_of(file, shard) for shard in Shard.all_of(2)]
        parent.kill()
        wait_until(lambda: not any(child is not None and is_alive(child) for child in children))
    log.grow(20)
    write_sharded(tmp_path, 3)
    for count in (3, 1):
        write_sharded(tmp_path, count)
        subprocess.run(command(file, "--until", "caught-up"), timeout=300, check=True)
        assert rows_in_feed(tmp_path) == rows_of_log(log.rows)
        log.grow(20)


@pytest.mark.deep(
    guard="tests/integration/test_shard_processes.py::test_shards_run_in_processes_until_all_have_caught_up"
)
def test_error_of_a_shard_is_the_error_of_the_command(tmp_path: Path, log: GrowingLog) -> None:
    file = write_sharded(tmp_path, 2)
    (tmp_path / "feed").write_text("a file where the feed's folder has to be")
    done = subprocess.run(
        command(file, "--until", "caught-up"), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 2, done.stderr
    assert re.search(r"^\w+: shard [01]-of-2: ", done.stderr, re.MULTILINE), done.stderr
