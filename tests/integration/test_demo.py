# SPDX-License-Identifier: Apache-2.0
"""The demo: its source and target tables are equal after a kill and after a second run in the same directory,
and no files remain.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest
from deltalake import DeltaTable

from demo import shop
from tests.support.suite.patience import wait_until
from tools.servers import REPLICATION_PASSWORD

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
RUN_SECONDS_MAX = 400.0
# Every process that the demo starts inherits this variable, whatever its current parent is.
MARK = "PENSTOCK_DEMO_MARK"

# The demo with one value of a Delta table changed before the tables are verified.
DAMAGED_DEMO = """
import sys
from deltalake import DeltaTable
from demo import __main__ as demo
from demo.pipeline import Pipeline

verify = Pipeline.verify

def verify_after_damage(pipeline):
    table = DeltaTable(pipeline.file.parent / "lake/shop/payments")
    key = table.to_pyarrow_table(columns=["id"])["id"][0].as_py()
    table.update(predicate=f"id = {key}", updates={"amount": "amount + 0.01"})
    return verify(pipeline)

Pipeline.verify = verify_after_damage
sys.exit(demo.main(sys.argv[1:]))
"""


# The demo runs its pipeline on Spark; the everyday tests run the same demo in one process.
on_each_driver = pytest.mark.deep(keep=("local",))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that all runs of this module share, one after the other."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module", params=["local", "spark"])
def whole_run(
    place: Path, request: pytest.FixtureRequest, missing_part: Callable[[str, str], NoReturn]
) -> str:
    """The output of a whole run, which has ended with status 0."""
    done = _run(["-m", "demo", *(["--local"] if request.param == "local" else [])], place)
    if done.returncode == 3:
        missing_part("demo", done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@on_each_driver
def test_demo_kills_the_pipeline_and_ends_with_every_table_equal(whole_run: str, place: Path) -> None:
    assert "killed the pipeline with SIGKILL" in whole_run
    verdicts = dict(re.findall(r"shop\.(\w+): (equal|.*)", whole_run))
    assert {table: verdict.partition(",")[0] for table, verdict in verdicts.items()} == dict.fromkeys(
        shop.TABLES, "equal"
    )
    assert str(place / "delta") in whole_run


@on_each_driver
def test_column_added_half_way_is_in_the_delta_table(whole_run: str, place: Path) -> None:
    assert whole_run
    orders = DeltaTable(place / "delta" / "lake" / "shop" / "orders")
    coupons = orders.to_pyarrow_table(columns=["coupon"])["coupon"]
    assert "SPRING" in coupons.to_pylist()
    assert coupons.null_count > 0


@pytest.mark.deep(
    guard="tests/integration/test_demo.py::test_demo_kills_the_pipeline_and_ends_with_every_table_equal"
)
def test_demo_runs_again_in_the_same_directory(whole_run: str, place: Path) -> None:
    assert whole_run
    done = _run(["-m", "demo", "--local", "--kills", "0"], place)
    assert done.returncode == 0, done.stdout + done.stderr


@on_each_driver
def test_password_is_printed_nowhere(whole_run: str, place: Path) -> None:
    files = [path for path in (place / "delta").iterdir() if path.is_file()]
    assert {"pipeline.yaml", "pipeline.log", "writer.log"} <= {path.name for path in files}
    for text in (whole_run.encode(), *(path.read_bytes() for path in files)):
        assert REPLICATION_PASSWORD.encode() not in text


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_verify.py::test_differences_are_reported_despite_an_advancing_source"
)
def test_wrong_value_in_a_delta_table_fails_the_next_demo_in_the_same_directory(
    whole_run: str, place: Path
) -> None:
    assert whole_run
    done = _run(["-c", DAMAGED_DEMO, "--local"], place)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "amount" in done.stdout
    assert len(re.findall(r"shop\.\w+: equal", done.stdout)) == 2


@pytest.mark.deep(guard="tests/integration/test_servers.py::test_command_ends_its_server_when_interrupted")
@pytest.mark.parametrize("moment", ["listens on", "running: "])
def test_interrupt_leaves_no_process_and_no_server_directory(place: Path, moment: str) -> None:
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    process = _start(["-m", "demo"], place, seconds=60, mark=mark)
    try:
        assert process.stdout is not None
        seen = ""
        for line in process.stdout:
            seen += line
            if moment in line:
                break
        assert moment in seen
        started = _marked(mark)
        # Like Ctrl-C: signal the whole foreground process group.
        os.killpg(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=RUN_SECONDS_MAX)
        assert process.returncode == 130, seen + rest
        assert len(started) > 1, "the demo and its server at least"
        # A JVM that was just starting ends once it is running.
        wait_until(lambda: not _marked(mark))
        assert list((place / "tmp").glob("penstock-*")) == []
    finally:
        for pid in _marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _run(program: list[str], place: Path) -> "subprocess.CompletedProcess[str]":
    process = _start(program, place, seconds=6, mark="")
    try:
        output, errors = process.communicate(timeout=RUN_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(program, process.returncode, output, errors)


def _start(program: list[str], place: Path, seconds: float, mark: str) -> "subprocess.Popen[str]":
    (place / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, *program, "--seconds", str(seconds), "--directory", str(place / "delta")],
        cwd=ROOT,
        env=os.environ | {MARK: mark, "TMPDIR": str(place / "tmp"), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _marked(mark: str) -> dict[int, str]:
    """Return the living processes that have a mark in their environment, by id, with their command line."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}\0".encode() in (directory / "environ").read_bytes():
                found[int(directory.name)] = (directory / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found
