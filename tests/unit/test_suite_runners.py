# SPDX-License-Identifier: Apache-2.0
"""The runners of long sweeps and of stress: real runs of pytest over small files of tests."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import sweep_seed
from tests.patience import WAIT_SECONDS_MAX, wait_until
from tools.suite import long, stress
from tools.suite.listing import ROOT
from tools.suite.long import LongRun, Sweep, Task, parse_seeds, pending, plan, summarize
from tools.suite.pytest_run import FAILED, PASSED, SKIPPED, run_pytest
from tools.suite.results import UNFINISHED, ResultsFile, ResultsInUse, SweepResult, only_writer
from tools.suite.stress import Stress

TREE = [sys.executable, "-m", "tools.suite.tree"]

# Starts an orphan in a session of its own; each of the two writes its process number to a file.
# With "pauses", the orphan ends once it was resumed and the file `seen` exists; the command after the orphan.
FAMILY = """
import os, signal, sys, time
folder, counts_pauses = sys.argv[1], sys.argv[2] == "pauses"
resumed = []
signal.signal(signal.SIGCONT, lambda *_: resumed.append(1))
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    name = "orphan"
else:
    os.wait()
    name = "command"
with open(f"{folder}/{name}.new", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{folder}/{name}.new", f"{folder}/{name}")
wanted = "seen" if name == "orphan" else "orphan-resumed"
while not (counts_pauses and resumed and os.path.exists(f"{folder}/{wanted}")):
    time.sleep(0.01)
open(f"{folder}/{name}-resumed", "w").close()
"""


@pytest.fixture(autouse=True)
def _few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each pytest with the one plugin that its options need: the others take a second."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "_hypothesis_pytestplugin")


def family(folder: Path, mode: str, *options: str) -> list[str]:
    """Return the words that run the family under the runner of trees."""
    return [
        *TREE,
        "--output",
        str(folder / "output"),
        *options,
        sys.executable,
        "-c",
        FAMILY,
        str(folder),
        mode,
    ]


def wait_for_family(folder: Path) -> list[int]:
    """Return the process numbers of the command and of the orphan, once both are at work."""
    files = [folder / "command", folder / "orphan"]
    wait_until(lambda: all(file.exists() for file in files))
    return [int(file.read_text()) for file in files]


def write_tests(folder: Path, text: str) -> str:
    """Write a file of tests that is no part of this project, and return its path."""
    path = folder / "test_sample.py"
    path.write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return str(path)


# --- Process trees --------------------------------------------------------------------------


def test_termination_of_the_runner_ends_orphans_in_other_sessions(tmp_path: Path) -> None:
    process = subprocess.Popen(family(tmp_path, "stay"), cwd=ROOT)
    pids = wait_for_family(tmp_path)
    process.terminate()
    assert process.wait(WAIT_SECONDS_MAX) == 128 + signal.SIGTERM
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_death_of_the_caller_ends_the_tree(tmp_path: Path) -> None:
    tests = write_tests(
        tmp_path,
        f"import sys\ndef test_a():\n sys.argv[1:] = [{str(tmp_path)!r}, 'stay']\n exec({FAMILY!r}, {{}})\n",
    )
    program = f"from tools.suite.pytest_run import run_pytest; run_pytest([{tests!r}], seconds_max=600)"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    caller = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment)
    pids = wait_for_family(tmp_path)
    caller.kill()
    caller.wait()
    wait_until(lambda: not [pid for pid in pids if psutil.pid_exists(pid)])
    wait_until(lambda: not list(tmp_path.glob("ps-*")))


def test_pauses_stop_and_resume_every_process_of_the_tree(tmp_path: Path) -> None:
    # With this seed the first four pauses begin within two seconds.
    words = family(tmp_path, "pauses", "--pause-seconds", "1", "--seed", "294")
    process = subprocess.Popen(words, cwd=ROOT)
    try:
        members = [psutil.Process(pid) for pid in wait_for_family(tmp_path)]
        wait_until(lambda: all(member.status() == psutil.STATUS_STOPPED for member in members))
        (tmp_path / "seen").touch()
        assert process.wait(WAIT_SECONDS_MAX) == 0, (tmp_path / "output").read_text()
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS_MAX)
    assert (tmp_path / "command-resumed").exists()


# --- Runs of pytest -------------------------------------------------------------------------

OUTCOMES = """
import os, pytest
@pytest.fixture
def broken_at_its_end():
    yield
    raise RuntimeError("teardown")
@pytest.mark.parametrize("number", [1, 2])
def test_number(number): assert number == 1
def test_skipped(): pytest.skip("part missing")
def test_teardown(broken_at_its_end): pass
class TestGroup:
    def test_inside(self): assert os.environ["WORD"] == "given"
"""


def test_run_reads_each_outcome_from_the_report(tmp_path: Path) -> None:
    run = run_pytest([write_tests(tmp_path, OUTCOMES)], environment={"WORD": "given"}, seconds_max=600)
    assert {name: test.outcome for name, test in run.tests.items()} == {
        "test_sample.py::test_number[1]": PASSED,
        "test_sample.py::test_number[2]": FAILED,
        "test_sample.py::test_skipped": SKIPPED,
        "test_sample.py::test_teardown": FAILED,
        "test_sample.py::TestGroup::test_inside": PASSED,
    }
    assert "RuntimeError: teardown" in "\n".join(run.tests["test_sample.py::test_teardown"].lines)
    assert (run.outcome, run.status) == (FAILED, 1)


def test_run_over_its_time_limit_is_ended_and_said_to_be(tmp_path: Path) -> None:
    tests = write_tests(tmp_path, "import time\ndef test_slow(): time.sleep(3600)\n")
    run = run_pytest([tests], seconds_max=0.5)
    assert (run.outcome, run.tests) == ("timed out", {})


# --- Long sweeps ----------------------------------------------------------------------------

SEEDED = """
import os, pathlib
def test_seeded():
    seed = int(os.environ["PENSTOCK_SEED"])
    assert os.environ["PENSTOCK_LONG"] == "1"
    with open(pathlib.Path(__file__).with_name("seeds"), "a") as file:
        file.write(f"{seed} ")
    assert seed != 5, "the fifth"
"""


def result_of(sweep: str, seed: int | None, outcome: str = PASSED, seconds: float = 1.0) -> SweepResult:
    return SweepResult(sweep, seed, outcome, seconds, "2026-01-01T00:00:00+00:00", None, {})


def test_interrupted_sweeps_resume_and_failures_of_earlier_runs_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = Sweep(write_tests(tmp_path, SEEDED) + "::test_seeded", seeded=True)
    tasks = plan([sweep], parse_seeds("4-5"))
    results = ResultsFile(tmp_path / "long.json")
    LongRun(results, time.monotonic(), None, 10.0).run(tasks[1:], 0)
    again = ResultsFile(tmp_path / "long.json")
    assert pending(tasks, again) == tasks[:1]
    LongRun(again, time.monotonic(), None, 10.0).run(pending(tasks, again), 1)
    assert (tmp_path / "seeds").read_text() == "5 4 "
    assert summarize(tasks, again) == 1
    printed = capsys.readouterr().out
    assert "[2 of 2]" in printed
    assert "2 of 2 have a result: 1 passed, 1 failed" in printed
    (failed, passed) = json.loads((tmp_path / "long.json").read_text())
    assert (failed["seed"], failed["counts"], passed["seed"]) == (5, {FAILED: 1}, 4)
    assert failed["failures"][0]["test"] == "test_sample.py::test_seeded"
    assert "the fifth" in "\n".join(failed["failures"][0]["lines"])


def test_time_limit_leaves_a_sweep_unfinished_without_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = Sweep(write_tests(tmp_path, "import time\ndef test_slow(): time.sleep(3600)\n"), seeded=False)
    tasks = plan([sweep, Sweep("never.py", seeded=False)], [1])
    results = ResultsFile(tmp_path / "long.json")
    LongRun(results, time.monotonic(), 0.01, 10.0).run(tasks, 0)
    unfinished = results.get(sweep.name, None)
    assert unfinished is not None
    assert (unfinished.outcome, unfinished.failures) == (UNFINISHED, [])
    assert [task.sweep.name for task in pending(tasks, results)] == ["never.py", sweep.name]
    assert summarize(tasks, results) == 0
    assert f"left: {sweep.name} (cut off by the time limit)" in capsys.readouterr().out


def test_sweeps_without_a_seed_run_once_for_any_range() -> None:
    fixed, seeded = Sweep("fixed", seeded=False), Sweep("seeded", seeded=True)
    assert plan([fixed, seeded], parse_seeds("2-3")) == [Task(fixed, None), Task(seeded, 2), Task(seeded, 3)]


def test_results_file_keeps_what_is_forgotten_and_takes_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "build" / "long.json"
    with only_writer(path):
        with pytest.raises(ResultsInUse, match=r"long\.json"), only_writer(path):
            pass
        results = ResultsFile(path)
        for seed in (1, 2):
            results.append(result_of("sweep", seed))
        results.append(result_of("sweep", 1, FAILED))
        results.forget([("sweep", 2)])
    assert not ResultsFile(path).has("sweep", 2)
    assert ResultsFile(path).get("sweep", 1) == result_of("sweep", 1, FAILED)
    assert len(json.loads(path.with_suffix(".previous.json").read_text())) == 2


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-b"])
def test_range_of_seeds_without_a_seed_is_refused(text: str) -> None:
    with pytest.raises(long.argparse.ArgumentTypeError):
        parse_seeds(text)


def test_seed_of_a_sweep_changes_numbers_and_its_absence_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_seed, "SEED", None)
    assert sweep_seed.sweep_random(7).random() == random.Random(7).random()
    assert sweep_seed.sweep_seed(31) == 31
    numbers = set()
    for seed in (1, 2):
        monkeypatch.setattr(sweep_seed, "SEED", seed)
        assert sweep_seed.sweep_random(7).random() == sweep_seed.sweep_random(7).random()
        numbers |= {sweep_seed.sweep_random(7).random(), sweep_seed.sweep_seed(31)}
    assert len(numbers - {31, random.Random(7).random()}) == 4


# --- Stress ---------------------------------------------------------------------------------

FLAKY = """
import os, pathlib, pytest
def test_every_second_run_fails():
    runs = pathlib.Path(__file__).with_name("runs")
    with runs.open("a") as file:
        file.write("x")
    assert len(runs.read_text()) % 2, "an even run"
def test_steady(): pass
"""


def test_stress_prints_the_failure_rate_of_each_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [write_tests(tmp_path, FLAKY), "--times", "2", "--busy", "1", "--no-pauses", "--seed", "3"]
    assert stress.main(words) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["2", "1", "50.0%", "test_sample.py::test_every_second_run_fails"] in lines
    assert ["2", "0", "0.0%", "test_sample.py::test_steady"] in lines
    assert ["E", "AssertionError:", "an", "even", "run"] in lines
    assert not [child for child in psutil.Process().children() if "while True" in " ".join(child.cmdline())]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os\ndef test_dies(): os._exit(7)\n", "pytest died, exit status 7"),
        ("import pytest\ndef test_skips(): pytest.skip('part missing')\n", "never ran: test_sample.py"),
    ],
    ids=["pytest dies", "nothing runs"],
)
def test_stress_without_an_outcome_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    runs = Stress([[write_tests(tmp_path, text)]], times=1, pause_seconds_max=0.0, seed=1, run_minutes=5)
    runs.run()
    assert runs.summarize() == 1
    assert words in capsys.readouterr().out
