# SPDX-License-Identifier: Apache-2.0
"""The demo: equal tables, again in the same place, nothing left behind, and a verdict that can say no."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import NoReturn

import pyarrow
import pytest
from deltalake import DeltaTable

from demo import shop
from demo.mirror import APPLICATION, Mirror, last_images
from demo.verdict import exact, judge
from tests.fixture_types import FreshDatabase
from tests.patience import wait_until
from tools.servers import REPLICATION_PASSWORD, Server

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
RUN_SECONDS_MAX = 400.0
# Every process that the demo starts inherits it, whoever its parent is by then.
MARK = "PENSTOCK_DEMO_MARK"

# The demo with one value of its mirror changed before the verdict.
DAMAGED_DEMO = """
import sys
from deltalake import DeltaTable
from demo import __main__ as demo

judge = demo.judge

def judge_after_damage(connection, database, mirror, tally):
    if mirror.name == "payments":
        table = DeltaTable(mirror.rows_path)
        key = table.to_pyarrow_table(columns=["id"])["id"][0].as_py()
        table.update(predicate=f"id = {key}", updates={"amount": "amount + 0.01"})
    return judge(connection, database, mirror, tally)

demo.judge = judge_after_damage
sys.exit(demo.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that all runs of this module share, one after the other."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def whole_run(place: Path, missing_part: Callable[[str, str], NoReturn]) -> str:
    """What a whole run prints; it has ended with 0."""
    done = _run(["-m", "demo"], place)
    if done.returncode == 3:
        missing_part("demo", done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_demo_ends_with_every_table_equal_to_the_server(whole_run: str, place: Path) -> None:
    verdicts = dict(re.findall(r"(\w+) +│ .*│ (equal|[\d,]+ DIFFERENCES) +│", whole_run))
    assert verdicts == dict.fromkeys(shop.TABLES, "equal")
    assert str(place / "delta") in whole_run


def test_the_column_added_half_way_is_in_the_mirror_and_in_the_change_feed(
    whole_run: str, place: Path
) -> None:
    assert whole_run
    for name in ("orders", "orders_changes"):
        coupons = DeltaTable(place / "delta" / name).to_pyarrow_table(columns=["coupon"])["coupon"]
        assert "SPRING" in coupons.to_pylist()
        assert coupons.null_count > 0


def test_a_row_under_a_new_key_began_as_the_after_image_of_an_update(whole_run: str, place: Path) -> None:
    assert whole_run
    columns = ["id", "_change_type", "_commit_version"]
    feed = DeltaTable(place / "delta" / "orders_changes").to_pyarrow_table(columns=columns)
    renumbered = feed.filter(pyarrow.compute.field("id") == shop.RENUMBERED_BELOW - 1)
    assert renumbered.sort_by("_commit_version")["_change_type"][0].as_py() == "update_postimage"


def test_the_password_is_printed_nowhere(whole_run: str, place: Path) -> None:
    work = place / "delta" / "work"
    for text in (whole_run, (work / "spark.log").read_text(), (work / "writer.log").read_text()):
        assert REPLICATION_PASSWORD not in text


@pytest.mark.deep(guard="tests/integration/test_demo.py::test_verdict_names_every_difference")
def test_one_wrong_value_in_a_mirror_fails_the_next_run_in_the_same_place(
    whole_run: str, place: Path
) -> None:
    assert whole_run
    done = _run(["-c", DAMAGED_DEMO], place)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.findall(r"column (\w+): the server has", done.stdout) == ["amount"]
    assert len(re.findall(r"│ equal +│", done.stdout)) == 2


@pytest.mark.deep(
    guard="tests/integration/test_servers.py::test_the_command_ends_its_server_when_interrupted"
)
@pytest.mark.parametrize("moment", ["listens on", "writing: "])
def test_an_interrupt_leaves_no_process_and_no_server_directory(place: Path, moment: str) -> None:
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
        # As Ctrl-C does: to the whole group in the foreground.
        os.killpg(process.pid, signal.SIGINT)
        rest, _ = process.communicate(timeout=RUN_SECONDS_MAX)
        assert process.returncode == 130, seen + rest
        assert len(started) > 1, "the demo and its server at least"
        # A JVM that was just starting ends once it runs.
        wait_until(lambda: not _marked(mark))
        assert list((place / "tmp").glob("penstock-*")) == []
    finally:
        for pid in _marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_batch_that_comes_again_changes_nothing(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path, "orders", ("id",))
    changes = _changes([(1, 0, "insert", 7, "new"), (2, 0, "insert", 8, "new")])
    mirror.apply(changes, 0)
    mirror.apply(changes, 0)
    assert _rows(mirror) == {7: "new", 8: "new"}
    assert DeltaTable(mirror.changes_path).to_pyarrow_table().num_rows == 2
    assert DeltaTable(mirror.rows_path).transaction_version(APPLICATION) == 0


def test_a_batch_cut_off_between_feed_and_mirror_is_finished_when_it_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror(tmp_path, "orders", ("id",))
    mirror.apply(_changes([(1, 0, "insert", 7, "new")]), 0)
    second = _changes([(2, 0, "update_preimage", 7, "new"), (2, 0, "update_postimage", 7, "paid")])
    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "_merge", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mirror.apply(second, 1)
    assert _rows(mirror) == {7: "new"}
    mirror.apply(second, 1)
    assert _rows(mirror) == {7: "paid"}
    assert DeltaTable(mirror.changes_path).to_pyarrow_table().num_rows == 3


def test_changes_in_any_order_come_to_the_last_image_of_each_key() -> None:
    changes = _changes(
        [
            (3, 1, "update_postimage", 9, "moved"),
            (3, 1, "update_preimage", 7, "paid"),
            (3, 0, "update_postimage", 7, "paid"),
            (3, 0, "update_preimage", 7, "new"),
            (1, 0, "insert", 7, "new"),
            (4, 0, "delete", 8, "new"),
            (2, 0, "insert", 8, "new"),
        ]
    )
    last = last_images(changes, ("id",)).sort_by("id").select(["id", "_change_type", "status"]).to_pylist()
    assert [tuple(row.values()) for row in last] == [
        (7, "update_preimage", "paid"),
        (8, "delete", "new"),
        (9, "update_postimage", "moved"),
    ]


def test_verdict_names_every_difference(
    mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mariadb_server)
    mariadb_server.sql("CREATE TABLE orders (id INT PRIMARY KEY, status VARCHAR(20))", database=database)
    mariadb_server.sql("INSERT INTO orders VALUES (7, 'new'), (8, 'new')", database=database)
    mirror = Mirror(tmp_path, "orders", ("id",))
    mirror.apply(_changes([(1, 0, "insert", 7, "new"), (1, 1, "insert", 8, "new")]), 0)
    inserts = {"insert": 2, "update": 0, "delete": 0}
    with mariadb_server.connect() as connection:

        def differences(tally: dict[str, int]) -> list[str]:
            return judge(connection, database, mirror, tally).differences

        assert differences(inserts) == []
        assert differences({**inserts, "update": 1}) == [
            "change feed: 0 changes of kind update, the writer made 1"
        ]
        mariadb_server.sql("UPDATE orders SET status = 'paid' WHERE id = 8", database=database)
        assert differences(inserts) == ["row (8,), column status: the server has 'paid', the mirror 'new'"]
        mariadb_server.sql("UPDATE orders SET id = 9, status = 'new' WHERE id = 8", database=database)
        assert differences(inserts) == [
            "row (9,) is missing in the mirror",
            "row (8,) is in the mirror alone",
        ]


def test_a_decimal_of_another_scale_is_another_value() -> None:
    assert exact(Decimal("1.50")) != exact(Decimal("1.5"))
    assert exact(Decimal(7)) == exact(7)


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
    """Return the living processes that carry a mark, by id, with their command line."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}\0".encode() in (directory / "environ").read_bytes():
                found[int(directory.name)] = (directory / "cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def _changes(rows: list[tuple[int, int, str, int, str]]) -> pyarrow.Table:
    """Build typed changes from (commit version, row, change type, id, status)."""
    versions, places, kinds, keys, statuses = zip(*rows, strict=True)
    return pyarrow.table(
        {
            "id": pyarrow.array(keys, pyarrow.int64()),
            "status": pyarrow.array(statuses, pyarrow.string()),
            "_change_type": pyarrow.array(kinds, pyarrow.string()),
            "_commit_version": pyarrow.array(versions, pyarrow.int64()),
            "_metadata": pyarrow.array([{"row": place} for place in places]),
        }
    )


def _rows(mirror: Mirror) -> dict[int, str]:
    rows = DeltaTable(mirror.rows_path).to_pyarrow_table().to_pylist()
    return {row["id"]: row["status"] for row in rows}
