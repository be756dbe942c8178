# SPDX-License-Identifier: Apache-2.0
"""The local driver: runs over a binlog file, with crashes, cancelled batches and spilled rows."""

import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deltalake
import pyarrow
import pyarrow.parquet as parquet
import pytest

import penstock.engine.batches as batches_module
import penstock.engine.run as run_module
from penstock.changes import Changes
from penstock.engine.task_plan import COUNTS, PROBLEM, ROWS, Failure, TaskPlan
from penstock.engine.task_rows import Row
from penstock.errors import ConnectionLost, DiskFailed, OptionInvalid, PenstockError
from penstock.limits import COORDINATION_RECORD_BYTES_MAX
from penstock.local import driver as local_driver
from penstock.local.driver import LocalDriver, TaskThread
from penstock.local.shuffle import Shuffle
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.state import PipelineState
from penstock.pipelines import Pipeline
from penstock.sinks.files.sink import FilesSink
from tests.support.binlog.forged_log import NOTE_IDS
from tests.support.pipeline.local_runs import notes_pipeline, run_here
from tests.support.suite.patience import WAIT_SECONDS_MAX


class Death(BaseException):
    """Simulates the death of the process."""


# The steps of a batch, as the functions that perform them.
STEPS: dict[str, tuple[Any, str]] = {
    "write the batch down": (PipelineState, "begin"),
    "run its tasks": (batches_module, "run_job"),
    "commit it": (FilesSink, "commit"),
    "note it as done": (PipelineState, "write"),
}


@pytest.fixture
def feed(tmp_path: Path) -> PipelineSettings:
    return notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})


def ids_in(feed: PipelineSettings) -> list[int]:
    folder = Path(str(feed.sink.settings.path)) / "shop" / "notes"  # type: ignore[attr-defined]
    files = sorted(folder.glob("[!_]*.parquet"))
    return sorted(number for file in files for number in parquet.read_table(file)["id"].to_pylist())


def test_feed_receives_each_change_of_a_log_once(feed: PipelineSettings) -> None:
    progress = run_here(feed)
    assert (ids_in(feed), progress.number) == (list(NOTE_IDS), 2)
    assert run_here(feed).number == 2, "there is nothing more"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_crash_around_any_step_of_a_batch_loses_and_repeats_nothing(
    feed: PipelineSettings, step: str, when: str
) -> None:
    owner, name = STEPS[step]
    does: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def die(*words: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and when == "before":
            raise Death
        returned = does(*words, **options)
        if calls == 2:
            raise Death
        return returned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, die)
        with pytest.raises(Death):
            run_here(feed)
    run_here(feed)
    assert ids_in(feed) == list(NOTE_IDS)


@pytest.mark.parametrize("buffered_bytes_max", [0, 1 << 30])
def test_mirror_is_equal_with_rows_in_memory_and_with_rows_spilled(
    tmp_path: Path, buffered_bytes_max: int
) -> None:
    lake = {"delta": {"path": str(tmp_path / "lake")}}
    run_here(notes_pipeline(tmp_path, lake), LocalDriver(3, buffered_bytes_max))
    table = deltalake.DeltaTable(str(tmp_path / "lake" / "shop" / "notes")).to_pyarrow_table()
    assert sorted(table["id"].to_pylist()) == list(NOTE_IDS)
    assert {len(note.as_py()) > 10_000 for note in table["note"]} == {False, True}


def test_stdout_sink_writes_all_changes_in_log_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(notes_pipeline(tmp_path, {"stdout": {}}))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line.split('"id":')[1].split(",")[0] for line in lines] == [str(number) for number in NOTE_IDS]


def test_steps_of_many_ranges_run_side_by_side(tmp_path: Path) -> None:
    threads: set[str] = set()

    def note_thread(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        threads.add(threading.current_thread().name)
        return batch

    steps = [{"filter": {"where": "id > 10"}}, {"python": {"function": note_thread}}]
    feed = {"files": {"path": str(tmp_path / "feed")}}
    batch = {"interval": 0, "range_bytes": 4096}
    settings = notes_pipeline(tmp_path, feed, steps=steps, batch=batch)
    run_here(settings, LocalDriver(4))
    assert ids_in(settings) == [number for number in NOTE_IDS if number > 10]
    assert threads, "the function is called by tasks"
    assert all(name.startswith("task-") for name in threads)


def test_error_of_a_python_step_stops_the_run(tmp_path: Path) -> None:
    def fail(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        raise RuntimeError("the region is unknown")

    feed = notes_pipeline(
        tmp_path, {"files": {"path": str(tmp_path / "feed")}}, steps=[{"python": {"function": fail}}]
    )
    with pytest.raises(Exception, match="the region is unknown"):
        run_here(feed)


# --- Stopping -------------------------------------------------------------------------------


def test_stopped_run_cancels_a_batch_that_hangs_and_the_next_run_replays_it(
    feed: PipelineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_STOP_SECONDS_MAX", 0.0)
    monkeypatch.setattr("penstock.local.driver._POLL_SECONDS", 0.01)
    monkeypatch.setattr("penstock.local.driver._CANCEL_SECONDS_MAX", 0.1)
    started, never = threading.Event(), threading.Event()

    def hang(writing: object, part: int, source: str, changes: Changes) -> None:
        started.set()
        never.wait(WAIT_SECONDS_MAX)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.engine.part_writing.PartWriting.write", hang)
        run = run_module.PipelineRun(feed, LocalDriver(2))
        stopping = threading.Thread(target=lambda: started.wait(WAIT_SECONDS_MAX) and run.stop())
        stopping.start()
        assert run.run().number == 0
        stopping.join()
    never.set()
    run_here(feed)
    assert ids_in(feed) == list(NOTE_IDS)


def test_interrupt_ends_all_tasks_before_it_leaves_the_run(
    feed: PipelineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.local.driver._POLL_SECONDS", 0.01)
    writing, interrupted = threading.Event(), threading.Event()
    join = TaskThread.join

    def interrupt(thread: TaskThread, timeout: float) -> None:
        if writing.is_set() and not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt
        join(thread, timeout)

    def write(*words: object) -> None:
        writing.set()
        assert interrupted.wait(WAIT_SECONDS_MAX)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskThread, "join", interrupt)
        patch.setattr("penstock.engine.part_writing.PartWriting.write", write)
        with pytest.raises(KeyboardInterrupt):
            run_here(feed)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("task-")]


def test_error_of_a_task_is_raised_after_all_other_tasks_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started, ended = threading.Event(), threading.Event()

    def decode(plan: TaskPlan, works: range, *_: object, **_more: object) -> Iterator[Row]:
        if 0 in works:
            assert started.wait(WAIT_SECONDS_MAX)
            raise OptionInvalid("the first task fails")
        try:
            while True:
                started.set()
                yield between(0, -1, 1, COUNTS, b"word")
        finally:
            ended.set()

    monkeypatch.setattr("penstock.local.driver.decode_works", decode)
    plan: Any = SimpleNamespace(
        record=SimpleNamespace(tasks=(range(1), range(1, 2))), in_one_stage=True, in_driver=False
    )
    with pytest.raises(OptionInvalid, match="the first task fails"):
        LocalDriver(2).run(plan)
    assert ended.is_set()


@pytest.mark.parametrize(
    ("error", "tried"), [(ConnectionLost("no answer"), 1), (OptionInvalid("no such column"), 6)]
)
def test_no_task_begins_after_an_error_that_a_retry_may_resolve(
    monkeypatch: pytest.MonkeyPatch, error: PenstockError, tried: int
) -> None:
    """Each further task would wait for the same server. Other errors of tables are collected."""
    begun: list[int] = []

    def decode(plan: TaskPlan, works: range, *_: object, **_more: object) -> Iterator[Row]:
        begun.append(works[0])
        yield between(0, -1, works[0], PROBLEM, pickle.dumps(Failure(error)))

    monkeypatch.setattr("penstock.local.driver.decode_works", decode)
    record = SimpleNamespace(tasks=tuple(range(number, number + 1) for number in range(6)))
    plan: Any = SimpleNamespace(record=record, in_one_stage=True, in_driver=False)
    messages = list(LocalDriver(1).run(plan))
    assert begun == list(range(tried))
    assert [row.kind for row in messages] == [PROBLEM] * tried


# --- The shuffle -----------------------------------------------------------------------------


def between(part: int, work: int, seq: int, kind: str, body: bytes) -> Row:
    return Row(part, work, seq, kind, body)


@pytest.fixture
def shuffle() -> Iterator[Shuffle]:
    shuffle = Shuffle(bytes_max=1000)
    yield shuffle
    shuffle.close()


def test_rows_of_a_part_are_ordered_by_work_and_sequence_after_all_words(shuffle: Shuffle) -> None:
    for work in (1, 0):
        output = shuffle.output_of(work)
        for seq in range(1, 41):
            # The memory bound has room for only a few of these rows.
            output.append(between(seq % 2, work, seq, ROWS, bytes(100)))
        output.append(between(0, -1, work, COUNTS, b"word"))
    assert shuffle.parts() == [0, 1]
    rows = [(row.work, row.seq) for row in shuffle.rows_of(0)]
    assert rows == [(-1, 0), (-1, 1), *((work, seq) for work in (0, 1) for seq in range(2, 41, 2))]


def test_rows_beyond_the_memory_bound_are_spilled_to_an_unnamed_file(
    tmp_path: Path, shuffle: Shuffle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    output = shuffle.output_of(0)
    before = pyarrow.total_allocated_bytes()
    body = bytes(COORDINATION_RECORD_BYTES_MAX)
    for seq in range(20):
        output.append(between(0, 0, seq, ROWS, body))
    assert pyarrow.total_allocated_bytes() - before < 2 * len(body)
    assert not list(tmp_path.iterdir()), "a kill leaves nothing behind"
    assert [row.body == pyarrow.py_buffer(body) for row in shuffle.rows_of(0)] == [True] * 20


def test_unusable_spill_folder_is_reported_with_tmpdir(
    shuffle: Shuffle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(DiskFailed, match="TMPDIR"):
        shuffle.output_of(0).append(between(0, 0, 1, ROWS, bytes(2000)))


# --- Without Spark --------------------------------------------------------------------------


def test_local_run_imports_no_pyspark(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.support.pipeline.local_runs import notes_pipeline, run_here\n"
        "folder = Path(sys.argv[1])\n"
        "run_here(notes_pipeline(folder, {'files': {'path': str(folder / 'feed')}}))\n"
        "import penstock.cli.run\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('pyspark', 'py4j')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS_MAX,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_local_and_a_spark_session_together_are_refused() -> None:
    pipeline = Pipeline(source="mysql://db1", tables="shop.*", sink="stdout")
    session: Any = object()
    with pytest.raises(OptionInvalid, match="local and a Spark session"):
        pipeline.run(session, local=True)


def test_processes_of_one_host_share_its_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_driver, "_available_cores", lambda: 8)
    drivers = [LocalDriver.of_share(shares) for shares in (1, 3, 16)]
    assert [driver.cores for driver in drivers] == [8, 2, 1]
    assert drivers[1]._buffered_bytes_max == local_driver.BUFFERED_BYTES_MAX // 3
