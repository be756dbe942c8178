# SPDX-License-Identifier: Apache-2.0
"""Run the long sweeps, one after the other, and keep each result in `build/long.json`.

    python -m tools.suite.long [--seeds A-B] [--minutes M] [--only PATTERN] [--fresh]

A sweep is one test function with all of its parameters, run with PENSTOCK_LONG=1: every test marked `long`,
the tests below `tests/fault` and `tests/fuzz`, the test files that read PENSTOCK_LONG, and the tests of
hypothesis, which then generate new examples. A sweep that draws random numbers runs once for each seed of the
range, which it gets as PENSTOCK_SEED and `--hypothesis-seed`; any other sweep runs once.

A sweep with a result for the same files is not run again, so an interrupted run resumes at the next sweep.
Every other sweep is pending: its result is from another commit or from files that have changed since, all of
its tests were skipped, or the time limit cut it off. Sweeps that failed run first, those that were cut off
last. The exit status is 1 if any selected sweep failed or was skipped when it ran last, whatever the commit,
and 0 if only the time ran out. `--fresh` runs the selected sweeps whatever results they have.
"""

import argparse
import fnmatch
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.suite.listing import ROOT, files_with, list_tests
from tools.suite.pytest_run import FAILED, SKIPPED, Run, left_running, run_pytest
from tools.suite.results import (
    GOOD_OUTCOMES,
    UNFINISHED,
    ResultsFile,
    ResultsInUse,
    SweepResult,
    machine,
    only_writer,
    tree_state,
)

RESULTS = ROOT / "build" / "long.json"
SWEEP_FOLDERS = ("tests/fault/", "tests/fuzz/")
SWEEP_MINUTES_DEFAULT = 120.0
LEFT_LINES_MAX = 20
_LONG_FILE = r'environ\.get\("PENSTOCK_LONG"\)'
_SEEDED_FILE = r"^from tests\.support\.suite\.sweep_seed import"
_SWEEP_FILE = rf"{_LONG_FILE}|mark\.long\b|^from hypothesis import|{_SEEDED_FILE}"


@dataclass(frozen=True)
class Sweep:
    """A test function to run in its long form. `seeded` is true if its random numbers depend on the seed."""

    name: str
    seeded: bool


@dataclass(frozen=True)
class Task:
    """A sweep with one seed. `seed` is None for a sweep that is not seeded."""

    sweep: Sweep
    seed: int | None

    @property
    def key(self) -> tuple[str, int | None]:
        """The key of the task's result."""
        return self.sweep.name, self.seed

    def __str__(self) -> str:
        return self.sweep.name if self.seed is None else f"{self.sweep.name} seed {self.seed}"


def list_sweeps(pattern: str | None = None) -> list[Sweep]:
    """Return the sweeps in the order of their files; `pattern` is a part of a test id or a glob."""
    long_files, seeded_files = set(files_with(_LONG_FILE)), seeded_test_files()
    files = {file for file in files_with(".") if file.startswith(SWEEP_FOLDERS)}
    files |= set(files_with(f"(?m){_SWEEP_FILE}"))
    sweeps: dict[str, Sweep] = {}
    for test in list_tests(sorted(files), {"PENSTOCK_LONG": "1"}):
        file = test.id.partition("::")[0]
        is_sweep = (
            "long" in test.markers
            or file.startswith(SWEEP_FOLDERS)
            or file in long_files
            or test.is_hypothesis
        )
        if is_sweep and (pattern is None or fnmatch.fnmatch(test.function, f"*{pattern}*")):
            seeded = test.is_hypothesis or file in seeded_files
            sweeps.setdefault(test.function, Sweep(test.function, seeded))
    return list(sweeps.values())


def seeded_test_files() -> set[str]:
    """Return the test files that draw random numbers from the seed of a sweep."""
    return set(files_with(f"(?m){_SEEDED_FILE}"))


def plan(sweeps: Sequence[Sweep], seeds: Sequence[int]) -> list[Task]:
    """Return the tasks, ordered by seed. Sweeps without a seed are part of the first round."""
    tasks = []
    for seed in seeds:
        for sweep in sweeps:
            if sweep.seeded or seed == seeds[0]:
                tasks.append(Task(sweep, seed if sweep.seeded else None))
    return tasks


def pending(tasks: Sequence[Task], results: ResultsFile, tree: str | None) -> list[Task]:
    """Return the tasks without a result for a state of the working tree.

    Tasks that failed before come first. Tasks that were cut off by a time limit come last, in ascending order
    of their duration.
    """

    def order(task: Task) -> tuple[bool, float]:
        result = results.get(*task.key)
        is_bad = result is not None and result.outcome not in GOOD_OUTCOMES
        cut_off = result is not None and result.outcome == UNFINISHED
        return not is_bad, result.seconds if result is not None and cut_off else 0.0

    return sorted((task for task in tasks if not results.has(*task.key, tree)), key=order)


class LongRun:
    """Runs the pending tasks until all are done or the time limit is reached."""

    def __init__(
        self,
        results: ResultsFile,
        current_tree: Callable[[], str | None],
        started_at: float,
        minutes: float | None,
        sweep_minutes: float,
    ) -> None:
        """Start the clock of a run.

        `current_tree` returns a name for the state of the files. The minutes count from `started_at`. A sweep
        during which files changed gets no result, because it is unknown which version of the files it tested.
        """
        self._results = results
        self._sweep_seconds = 60 * sweep_minutes
        self._started_at = started_at
        self._end = None if minutes is None else started_at + 60 * minutes
        self._current_tree, self._tree = current_tree, current_tree()
        self._machine = machine()

    def run(self, tasks: Sequence[Task], done: int) -> None:
        """Run tasks in order and print the progress. `done` is the number of tasks that already have a
        result.
        """
        for number, task in enumerate(tasks, done + 1):
            if self._seconds_left() <= 0:
                return
            result = self._run(task)
            self._results.append(result)
            remaining = "" if self._end is None else f", {format_seconds(self._seconds_left())} left"
            print(
                f"[{number} of {done + len(tasks)}] {task}: {result.outcome}"
                f" in {format_seconds(result.seconds)}"
                f" (elapsed {format_seconds(time.monotonic() - self._started_at)}{remaining})",
                flush=True,
            )
            for failure in result.failures:
                print(f"    {failure['test']}: {''.join(failure['lines'][-1:])}", flush=True)
            for late_start in result.late_starts:
                print(f"    flaky: {late_start}", flush=True)

    def _seconds_left(self) -> float:
        return float("inf") if self._end is None else max(0.0, self._end - time.monotonic())

    def _run(self, task: Task) -> SweepResult:
        environment = {"PENSTOCK_LONG": "1"}
        arguments = [task.sweep.name]
        if task.seed is not None:
            environment["PENSTOCK_SEED"] = str(task.seed)
            arguments.append(f"--hypothesis-seed={task.seed}")
        limit = min(self._sweep_seconds, self._seconds_left())
        run = run_pytest(arguments, environment=environment, seconds_max=limit)
        cut_off = run.timed_out and limit < self._sweep_seconds
        return SweepResult(
            sweep=task.sweep.name,
            seed=task.seed,
            outcome=UNFINISHED if cut_off else run.outcome,
            seconds=round(run.seconds, 1),
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=self._tree if self._current_tree() == self._tree else None,
            machine=self._machine,
            counts=dict(Counter(test.outcome for test in run.tests.values())),
            failures=[] if cut_off else failures_of(run, task),
            late_starts=list(run.late_starts),
        )


def failures_of(run: Run, task: Task) -> list[dict[str, Any]]:
    """Return the failed tests with their last lines. If there is no report, return the sweep with pytest's
    output instead.

    If every test was skipped, return the tests with the reasons for skipping.
    """
    outcome = SKIPPED if run.outcome == SKIPPED else FAILED
    failed: list[dict[str, Any]] = [
        {"test": name, "lines": list(test.lines)}
        for name, test in run.tests.items()
        if test.outcome == outcome
    ]
    if run.leaks:
        failed.append({"test": task.sweep.name, "lines": left_running(run)})
    if not failed and run.outcome not in GOOD_OUTCOMES:
        failed.append({"test": task.sweep.name, "lines": list(run.output)})
    return failed


def summarize(tasks: Sequence[Task], results: ResultsFile, tree: str | None) -> int:
    """Print the outcomes of all tasks with their commits; return the exit status."""
    pending_tasks = [task for task in tasks if not results.has(*task.key, tree)]
    print(f"{len(tasks) - len(pending_tasks)} of {len(tasks)} have a result of {tree or 'these files'}")
    last_results = [result for task in tasks if (result := results.get(*task.key)) is not None]
    counts = Counter((result.commit, result.outcome) for result in last_results)
    for (commit, outcome), count in counts.most_common():
        print(f"{count} {outcome} at {commit}")
    for task in pending_tasks[:LEFT_LINES_MAX]:
        print(f"left: {task} ({_pending_reason(results.get(*task.key))})")
    if len(pending_tasks) > LEFT_LINES_MAX:
        print(f"left: {len(pending_tasks) - LEFT_LINES_MAX} more")
    bad = [result for result in last_results if result.outcome not in GOOD_OUTCOMES]
    for result in bad:
        seed = "" if result.seed is None else f" seed {result.seed}"
        print(f"{result.outcome}: {result.sweep}{seed}, at {result.commit}, {result.when}")
    if flaky := sum(len(result.late_starts) for result in last_results):
        print(f"flaky: {flaky} servers were started a second time: see late_starts")
    print(f"results: {results.path}")
    return 1 if bad else 0


def _pending_reason(result: SweepResult | None) -> str:
    if result is None:
        return "not begun"
    if result.outcome == UNFINISHED:
        return "cut off by the time limit"
    if result.outcome == SKIPPED:
        return "every test was skipped"
    return f"{result.outcome} at {result.commit}"


def format_seconds(seconds: float) -> str:
    """Return a duration in readable form."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def parse_seeds(text: str) -> range:
    """Return the seeds of `A-B` or `A`, both ends included. Raises ArgumentTypeError."""
    first, _, last = text.partition("-")
    try:
        seeds = range(int(first), int(last or first) + 1)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of seeds such as 1-20") from None
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r} holds no seed")
    return seeds


def main(words: list[str]) -> int:
    """Read the command line, run what has no result yet, and print the summary."""
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m tools.suite.long", description=lines[0])
    parser.add_argument("--seeds", type=parse_seeds, default=range(1, 2), metavar="A-B", help="default: 1")
    parser.add_argument("--minutes", type=float, help="stop after this time (default: when all has run)")
    parser.add_argument(
        "--sweep-minutes",
        type=float,
        default=SWEEP_MINUTES_DEFAULT,
        help=f"a sweep that takes longer has failed (default: {SWEEP_MINUTES_DEFAULT:g})",
    )
    parser.add_argument("--only", metavar="PATTERN", help="sweeps with this part, or glob, in their test id")
    parser.add_argument("--fresh", action="store_true", help="run selected sweeps again that have a result")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default: {RESULTS.relative_to(ROOT)}")
    options = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started_at = time.monotonic()
    tree = tree_state()
    tasks = plan(list_sweeps(options.only), options.seeds)
    if not tasks:
        print(f"no sweep matches {options.only}", file=sys.stderr)
        return 2
    try:
        with only_writer(options.results):
            results = ResultsFile(options.results)
            if options.fresh:
                results.forget(task.key for task in tasks)
            todo = pending(tasks, results, tree)
            done = len(tasks) - len(todo)
            print(f"{len(tasks)} sweeps and seeds, {done} of them have a result of {tree}", flush=True)
            try:
                LongRun(results, tree_state, started_at, options.minutes, options.sweep_minutes).run(
                    todo, done
                )
            except KeyboardInterrupt:
                print("interrupted: run it again to go on")
                summarize(tasks, results, tree)
                return 128 + signal.SIGINT
            return summarize(tasks, results, tree)
    except ResultsInUse as problem:
        print(problem, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
