# SPDX-License-Identifier: Apache-2.0
"""The runners of long sweeps and of stress tests: real pytest runs over small test files."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.daemon import process as daemon_process
from tests.support.suite import sweep_seed
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import ServerFailed
from tools.servers.starting import LATE_STARTS_VARIABLE
from tools.suite import long, pytest_run, stress
from tools.suite.listing import ROOT
from tools.suite.long import LongRun, Sweep, Task, failures_of, parse_seeds, pending, plan, summarize
from tools.suite.pytest_run import FAILED, PASSED, SKIPPED, Run, TestOutcome, read_report, run_pytest
from tools.suite.results import (
    UNFINISHED,
    ResultsFile,
    ResultsInUse,
    SweepResult,
    only_writer,
    tree_state,
)
from tools.suite.stress import Load, Stress
from tools.suite.tallies import TallyFile, TargetTally

TREE = [sys.executable, "-m", "tools.suite.tree"]

# Starts an orphan process in another session. Both processes write their process ids to a file. With
# "pauses", the orphan ends once it has been resumed and the file `seen` exists. The command ends after the
# orphan.
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


# Stops a child process. Ends after being resumed twice itself, with status 0 if the child was still stopped.
FREEZER = """
import os, signal, subprocess, sys, time
resumed = []
signal.signal(signal.SIGCONT, lambda *_: resumed.append(1))
child = subprocess.Popen(["sleep", "3600"])
os.kill(child.pid, signal.SIGSTOP)
os.waitid(os.P_PID, child.pid, os.WSTOPPED)
while len(resumed) < 2:
    time.sleep(0.01)
state = open(f"/proc/{child.pid}/stat").read().rpartition(")")[2].split()[0]
child.kill()
child.wait()
sys.exit(0 if state == "T" else 7)
"""


@pytest.fixture(autouse=True)
def _few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load only the plugin that each pytest run needs; the other plugins take a second to load."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "_hypothesis_pytestplugin")


def family(folder: Path, mode: str, *options: str) -> list[str]:
    """Return the command that runs the family under the process tree runner."""
    return [
        *TREE,
        "--output",
        str(folder / "output"),
        "--leaks",
        str(folder / "leaks"),
        *options,
        sys.executable,
        "-c",
        FAMILY,
        str(folder),
        mode,
    ]


def wait_for_family(folder: Path) -> list[int]:
    """Wait until the command and the orphan are running; return their process ids."""
    files = [folder / "command", folder / "orphan"]
    wait_until(lambda: all(file.exists() for file in files))
    return [int(file.read_text()) for file in files]


def write_tests(folder: Path, text: str) -> str:
    """Write a test file outside this project, and return its path."""
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
    # With this seed the first four pauses start within two seconds.
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


def test_pauses_do_not_resume_a_process_that_the_command_stopped(tmp_path: Path) -> None:
    files = ("--output", str(tmp_path / "output"), "--leaks", str(tmp_path / "leaks"))
    words = [*TREE, *files, "--pause-seconds", "0.2", "--seed", "294"]
    done = subprocess.run([*words, sys.executable, "-c", FREEZER], cwd=ROOT, check=False)
    assert done.returncode == 0, (tmp_path / "output").read_text()


def test_process_that_outlives_its_command_is_named_and_killed(tmp_path: Path) -> None:
    files = ("--output", str(tmp_path / "output"), "--leaks", str(tmp_path / "leaks"))
    words = [*TREE, *files, "--end-seconds", "0.1"]
    command = f"setsid sleep 3600 >/dev/null 2>&1 & echo $! > {tmp_path}/pid"
    assert subprocess.run([*words, "sh", "-c", command], cwd=ROOT, check=False).returncode == 0
    assert (tmp_path / "leaks").read_text() == "sleep 3600\n"
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


# --- Runs of pytest -------------------------------------------------------------------------

OUTCOMES = """
import os, pytest, sys
from tools.servers.starting import record_late_start
@pytest.fixture
def broken_at_its_end():
    yield
    raise RuntimeError("teardown")
@pytest.mark.parametrize("number", [1, 2])
def test_number(number): assert number == 1
def test_skipped(): pytest.skip("part missing")
def test_compiled_modules_are_kept(): assert not sys.dont_write_bytecode
def test_teardown(broken_at_its_end): pass
class TestGroup:
    def test_inside(self):
        assert os.environ["WORD"] == "given"
        record_late_start("ZooKeeper")
"""


def test_run_reads_each_outcome_from_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    run = run_pytest([write_tests(tmp_path, OUTCOMES)], environment={"WORD": "given"}, seconds_max=600)
    assert {name: test.outcome for name, test in run.tests.items()} == {
        "test_sample.py::test_number[1]": PASSED,
        "test_sample.py::test_number[2]": FAILED,
        "test_sample.py::test_skipped": SKIPPED,
        "test_sample.py::test_compiled_modules_are_kept": PASSED,
        "test_sample.py::test_teardown": FAILED,
        "test_sample.py::TestGroup::test_inside": PASSED,
    }
    assert "RuntimeError: teardown" in "\n".join(run.tests["test_sample.py::test_teardown"].lines)
    assert (run.outcome, run.status) == (FAILED, 1)
    assert run.late_starts == (
        "ZooKeeper did not answer in time: test_sample.py::TestGroup::test_inside (call)",
    )


def test_run_over_its_time_limit_is_ended_and_reported(tmp_path: Path) -> None:
    tests = write_tests(tmp_path, "import time\ndef test_slow(): time.sleep(3600)\n")
    run = run_pytest([tests], seconds_max=0.5)
    assert (run.outcome, run.tests) == ("timed out", {})


def test_run_whose_report_is_cut_off_has_died(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    assert read_report(report, 1) is None
    report.write_text('<testsuites><testsuite><testcase name="test_a"')
    assert read_report(report, 1) is None
    assert Run(1, 1.0, timed_out=False, has_report=False).outcome == "died"


def test_tree_that_ignores_the_request_to_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest_run, "_STOP_SECONDS_MAX", 0.1)
    script = "trap '' TERM; echo ready; while :; do sleep 1; done"
    process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    pytest_run._end(process)
    assert process.returncode == -signal.SIGKILL


LEAKY = Run(0, 1.0, timed_out=False, has_report=True, leaks=("sleep 3600",))


def test_process_left_running_fails_the_run_by_name() -> None:
    assert LEAKY.outcome == FAILED
    line = "left running at the end, killed now: sleep 3600"
    assert failures_of(LEAKY, Task(Sweep("a.py::test_a", False), None)) == [
        {"test": "a.py::test_a", "lines": [line]}
    ]
    tally = TargetTally(("a.py",), "this")
    tally.count(LEAKY, "repetition 1")
    assert line in tally.tests["a.py"].lines
    assert stress_of(tally, times=1).summarize() == 1


def test_late_daemon_of_penstock_is_not_started_a_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LATE_STARTS_VARIABLE, str(tmp_path / "late-starts"))
    monkeypatch.setattr(daemon_process, "WAIT_SECONDS_MAX", 0.0)
    with pytest.raises(ServerFailed, match="the daemon did not answer in 0 s"):
        daemon_process.DaemonProcess(tmp_path, {}).start()
    assert not (tmp_path / "late-starts").exists()


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


def result_of(
    sweep: str, seed: int | None, outcome: str = PASSED, commit: str | None = "this"
) -> SweepResult:
    return SweepResult(sweep, seed, outcome, 1.0, "2026-01-01T00:00:00+00:00", commit, {})


def this_tree() -> str:
    return "this"


def test_interrupted_sweeps_resume_and_failures_of_earlier_runs_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = Sweep(write_tests(tmp_path, SEEDED) + "::test_seeded", seeded=True)
    tasks = plan([sweep], parse_seeds("4-5"))
    results = ResultsFile(tmp_path / "long.json")
    LongRun(results, this_tree, time.monotonic(), None, 10.0).run(tasks[1:], 0)
    again = ResultsFile(tmp_path / "long.json")
    assert pending(tasks, again, "this") == tasks[:1]
    LongRun(again, this_tree, time.monotonic(), None, 10.0).run(tasks[:1], 1)
    assert (tmp_path / "seeds").read_text() == "5 4 "
    assert summarize(tasks, again, "this") == 1
    printed = capsys.readouterr().out
    assert "[2 of 2]" in printed
    assert "2 of 2 have a result of this\n1 passed at this\n1 failed at this\n" in printed
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
    LongRun(results, this_tree, time.monotonic(), 0.01, 10.0).run(tasks, 0)
    unfinished = results.get(sweep.name, None)
    assert unfinished is not None
    assert (unfinished.outcome, unfinished.failures) == (UNFINISHED, [])
    assert [task.sweep.name for task in pending(tasks, results, "this")] == ["never.py", sweep.name]
    assert summarize(tasks, results, "this") == 0
    assert f"left: {sweep.name} (cut off by the time limit)" in capsys.readouterr().out


def test_results_of_other_files_are_pending_and_failures_among_them_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [Task(Sweep(name, seeded=False), None) for name in ("old", "new", "unknown", "broken")]
    results = ResultsFile(tmp_path / "long.json")
    results.append(result_of("old", None, commit="earlier"))
    results.append(result_of("new", None))
    results.append(result_of("unknown", None, commit=None))
    assert [task.sweep.name for task in pending(tasks, results, None)][:2] == ["old", "new"]
    assert summarize(tasks, results, "this") == 0
    assert "left: old (passed at earlier)" in capsys.readouterr().out
    results.append(result_of("broken", None, FAILED, commit="earlier"))
    assert [task.sweep.name for task in pending(tasks, results, "this")] == ["broken", "old", "unknown"]
    assert summarize(tasks, results, "this") == 1
    printed = capsys.readouterr().out
    assert "1 of 4 have a result of this" in printed
    assert "1 passed at earlier" in printed
    assert "failed: broken, at earlier" in printed


def test_sweep_during_which_files_change_has_no_result(tmp_path: Path) -> None:
    task = Task(Sweep(write_tests(tmp_path, "def test_a(): pass\n"), seeded=False), None)
    results = ResultsFile(tmp_path / "long.json")
    trees = iter(["this", "other"])
    LongRun(results, lambda: next(trees), time.monotonic(), None, 10.0).run([task], 0)
    assert [pending([task], results, tree) for tree in ("this", "other")] == [[task], [task]]


def test_sweep_with_only_skips_is_neither_successful_nor_final(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "import pytest\nfrom tools.servers.starting import record_late_start\n"
        "def test_a():\n record_late_start('ZooKeeper')\n pytest.skip('no such server')\n"
    )
    task = Task(Sweep(write_tests(tmp_path, text), seeded=False), None)
    results = ResultsFile(tmp_path / "long.json")
    LongRun(results, this_tree, time.monotonic(), None, 10.0).run([task], 0)
    assert pending([task], results, "this") == [task]
    assert summarize([task], results, "this") == 1
    printed = capsys.readouterr().out
    assert "no such server" in printed
    assert "(every test was skipped)" in printed
    [entry] = json.loads((tmp_path / "long.json").read_text())
    assert [line in printed for line in entry["late_starts"]] == [True]


def test_state_of_the_tree_names_the_commit_and_every_difference(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        return subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert tree_state(tmp_path) is None
    git("init", "--quiet")
    (tmp_path / "kept").write_text("1")
    git("add", "kept")
    git("commit", "--quiet", "--message", "first")
    clean = tree_state(tmp_path)
    assert clean == git("rev-parse", "HEAD")
    (tmp_path / "link").symlink_to("kept")
    subprocess.run(["git", "init", "--quiet", "inner"], cwd=tmp_path, check=True)
    states = [clean, tree_state(tmp_path)]
    for name, text in (("kept", "2"), ("kept", "3"), ("added", "1"), ("added", "2")):
        (tmp_path / name).write_text(text)
        states.append(tree_state(tmp_path))
        assert tree_state(tmp_path) == states[-1]
    assert len(set(states)) == 6
    assert all(str(state).startswith(clean) for state in states)
    (tmp_path / "link").unlink()
    shutil.rmtree(tmp_path / "inner")
    (tmp_path / "added").unlink()
    (tmp_path / "kept").write_text("1")
    assert tree_state(tmp_path) == clean


def test_sweeps_without_a_seed_run_once_for_any_range() -> None:
    fixed, seeded = Sweep("fixed", seeded=False), Sweep("seeded", seeded=True)
    assert plan([fixed, seeded], parse_seeds("2-3")) == [Task(fixed, None), Task(seeded, 2), Task(seeded, 3)]


def test_test_files_that_draw_from_the_seed_of_a_sweep_are_seeded() -> None:
    line = f"from {sweep_seed.__name__} import"
    paths = [path for path in (ROOT / "tests").rglob("test_*.py") if line in path.read_text()]
    importing = {path.relative_to(ROOT).as_posix() for path in paths}
    assert "tests/fault/test_daemon_kills.py" in importing
    assert long.seeded_test_files() == importing


def test_results_file_keeps_forgotten_failures_and_allows_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "build" / "long.json"
    with only_writer(path):
        with pytest.raises(ResultsInUse, match=r"long\.json"), only_writer(path):
            pass
        results = ResultsFile(path)
        for seed in (1, 2):
            results.append(result_of("sweep", seed))
        results.append(result_of("sweep", 1, FAILED))
        results.forget([("sweep", 2)])
    assert not ResultsFile(path).has("sweep", 2, "this")
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


def stress_of(*tallies: TargetTally, times: int, kept: TallyFile | None = None) -> Stress:
    return Stress(tallies, times, Load(0.0, 0), seed=1, run_minutes=5, parallel=2, kept=kept)


def test_stress_prints_the_failure_rate_of_each_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [write_tests(tmp_path, FLAKY), "--times", "2", "--busy", "1", "--no-pauses", "--seed", "3"]
    words += ["--parallel", "1", "--results", str(tmp_path / "stress.json")]
    assert stress.main(words) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["2", "1", "50.0%", "test_sample.py::test_every_second_run_fails"] in lines
    assert ["2", "0", "0.0%", "test_sample.py::test_steady"] in lines
    assert ["E", "AssertionError:", "an", "even", "run"] in lines
    assert not [child for child in psutil.Process().children() if "while True" in " ".join(child.cmdline())]


MEETING = """
import pathlib, time
def test_meeting():
    folder, me = pathlib.Path(__file__).parents[1], pathlib.Path(__file__).parent.name
    (folder / f"{me}-is-here").touch()
    while len(list(folder.glob("*-is-here"))) < 2:
        time.sleep(0.01)
"""


def test_stress_runs_several_files_at_once(tmp_path: Path) -> None:
    tallies = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        tallies.append(TargetTally((write_tests(tmp_path / name, MEETING),), "this"))
    stressed = stress_of(*tallies, times=1)
    stressed.run()
    assert stressed.summarize() == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os\ndef test_dies(): os._exit(7)\n", "pytest died, exit status 7"),
        (
            "import pytest\ndef test_skips(): pytest.skip('part missing')\n",
            "ran less than 1 times: test_sample.py::test_skips (0)",
        ),
    ],
    ids=["pytest dies", "nothing runs"],
)
def test_stress_without_an_outcome_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    stressed = stress_of(TargetTally((write_tests(tmp_path, text),), "this"), times=1)
    stressed.run()
    assert stressed.summarize() == 1
    assert words in capsys.readouterr().out


def run_with(outcome: str) -> Run:
    tests = {"a.py::test_a": TestOutcome(outcome, ("why",))}
    return Run(0, 30.0, timed_out=False, has_report=True, tests=tests)


def test_stress_with_a_repetition_that_skips_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    tally = TargetTally(("a.py",), "this")
    for outcome in (PASSED, SKIPPED):
        tally.count(run_with(outcome), "a repetition")
    assert stress_of(tally, times=2).summarize() == 1
    assert "ran less than 2 times: a.py::test_a (1)" in capsys.readouterr().out


def test_stress_resumes_the_repetitions_of_the_same_conditions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "stress.json"
    tally = TargetTally(("a.py",), "this")
    for outcome in (PASSED, FAILED):
        tally.count(run_with(outcome), f"the one that {outcome}")
    TallyFile(path).put(tally)
    kept = TallyFile(path)
    assert kept.resume(["a.py"], "this") == tally
    for conditions in ("other", None):
        assert kept.resume(["a.py"], conditions).repetitions == 0
    # Every repetition is done, so nothing runs, and the failure still counts.
    stressed = stress_of(kept.resume(["a.py"], "this"), times=2, kept=kept)
    stressed.run()
    assert stressed.summarize() == 1
    printed = capsys.readouterr().out
    assert "a.py::test_a failed first in the one that failed:\n    why" in printed
    new = TargetTally(("b.py",), "this")
    assert stress_of(tally, new, times=10, kept=kept).estimate() == (
        "18 repetitions of 2 files, 2 at once: about 2 min; not counting files that have not run before: 1"
    )
    kept.forget([["a.py"]])
    assert kept.resume(["a.py"], "this").repetitions == 0
