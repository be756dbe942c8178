# SPDX-License-Identifier: Apache-2.0
"""Repeat tests beside busy loops and random pauses of their processes, and print how often each one fails.

    python -m tools.suite.stress [--times N] [--busy K] [--pause-seconds MAX] [--no-pauses] TEST...

Each repetition is a fresh pytest with everything that it starts, stopped by SIGSTOP for 0.1 s up to MAX at
random moments. TEST is a file or a test id; without one, every test marked `timing` is repeated, a file at a
time. `--seed` makes the moments and lengths of the pauses the same again, and `--no-pauses --busy 0` finds
the failure rate of an idle machine. The exit status is 1 if a test failed, did not run in every repetition
or left a process running. A server that was started a second time is printed as flaky.

Mark a test `timing` if the moment at which something happens can change its result:

- it kills, stops or cuts off a process, server or connection while that is at work;
- it lets a lease, session, heartbeat or timeout run out, or must come before one does;
- several threads or processes compete in it for the same thing.

A test that only starts a server, or waits for an answer without a limit of its own, is not marked.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tools.suite.listing import files_with, list_tests
from tools.suite.pytest_run import (
    FAILED,
    PASSED,
    SKIPPED,
    Pauses,
    Run,
    TestOutcome,
    left_running,
    run_pytest,
)

TIMES_DEFAULT = 50
PAUSE_SECONDS_DEFAULT = 12.0
RUN_MINUTES_DEFAULT = 60.0
FAILURE_LINES = 20


@dataclass
class Tally:
    """How often a test ran, was skipped and failed, and its first failure."""

    runs: int = 0
    skips: int = 0
    failures: int = 0
    first_failure: str = ""
    lines: tuple[str, ...] = ()

    def count(self, outcome: TestOutcome, where: str) -> None:
        """Count one outcome; `where` names the repetition."""
        if outcome.outcome == SKIPPED:
            self.skips += 1
            return
        self.runs += 1
        if outcome.outcome == FAILED:
            self.failures += 1
            if self.failures == 1:
                self.first_failure, self.lines = where, outcome.lines


@dataclass
class Stress:
    """Repetitions of targets, each a list of paths or ids for one pytest, and the tallies of their tests."""

    targets: Sequence[Sequence[str]]
    times: int
    pause_seconds_max: float
    seed: int
    run_minutes: float
    tallies: dict[str, Tally] = field(default_factory=dict)

    def run(self) -> None:
        """Run every target once, then again, until each has run `times` times."""
        for repetition in range(1, self.times + 1):
            for target in self.targets:
                seed = f"{self.seed}/{repetition}/{' '.join(target)}"
                pauses = Pauses(self.pause_seconds_max, seed) if self.pause_seconds_max else None
                run = run_pytest(
                    target, seconds_max=60 * self.run_minutes, pauses=pauses, lines_max=FAILURE_LINES
                )
                self.count(target, run, f"repetition {repetition}")
                ended = f"{run.outcome} in {run.seconds:.1f} s"
                print(f"[{repetition} of {self.times}] {label_of(target)}: {ended}", flush=True)
                for late_start in run.late_starts:
                    print(f"    flaky: {late_start}", flush=True)

    def count(self, target: Sequence[str], run: Run, where: str) -> None:
        """Count the tests of a run. A failed run without a failed test is a failure of its target."""
        for name, test in run.tests.items():
            self.tallies.setdefault(name, Tally()).count(test, where)
        failed = FAILED in {test.outcome for test in run.tests.values()}
        if run.leaks or (not failed and run.outcome not in (PASSED, SKIPPED)):
            lines = (f"pytest {run.outcome}, exit status {run.status}", *left_running(run), *run.output)
            # If pytest dies, all its tests are affected, and the cause cannot be attributed to one of them.
            self.tallies.setdefault(label_of(target), Tally()).count(TestOutcome(FAILED, lines), where)

    def summarize(self) -> int:
        """Print a line for each test, then each first failure; return the exit status."""
        print(f"\nseed {self.seed}\n{'runs':>6}{'failed':>8}{'rate':>8}  test")
        for name, tally in self.tallies.items():
            rate = f"{tally.failures / tally.runs:.1%}" if tally.runs else "-"
            skips = f" (skipped {tally.skips} times)" if tally.skips else ""
            print(f"{tally.runs:>6}{tally.failures:>8}{rate:>8}  {name}{skips}")
        for name, tally in self.tallies.items():
            if tally.failures:
                print(f"\n{name} failed first in {tally.first_failure}:")
                print("\n".join(f"    {line}" for line in tally.lines))
        too_seldom = [
            f"{name} ({tally.runs})" for name, tally in self.tallies.items() if tally.runs < self.times
        ]
        if too_seldom or not self.tallies:
            print(f"\nran less than {self.times} times: {', '.join(too_seldom) or 'every test'}")
        failed = any(tally.failures for tally in self.tallies.values())
        return 1 if failed or too_seldom or not self.tallies else 0


def label_of(target: Sequence[str]) -> str:
    """Return a short name of a target."""
    return target[0] if len(target) == 1 else f"{target[0].partition('::')[0]} ({len(target)} tests)"


def timing_targets() -> list[list[str]]:
    """Return the ids of the tests marked `timing`, grouped by file."""
    by_file: dict[str, list[str]] = {}
    files = files_with(r"mark\.timing\b")
    for test in list_tests(files, {}) if files else ():
        if "timing" in test.markers:
            by_file.setdefault(test.id.partition("::")[0], []).append(test.id)
    return list(by_file.values())


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Keep `count` cores busy during the block. The loops are killed when this process ends."""
    argv = [shutil.which("setpriv") or "setpriv", "--pdeathsig", "KILL", "--"]
    argv += [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, start_new_session=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def main(words: list[str]) -> int:
    """Read the command line, repeat the tests and print the failure rates."""
    cores = len(os.sched_getaffinity(0))
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m tools.suite.stress", description=lines[0])
    parser.add_argument("tests", nargs="*", metavar="TEST", help="file or test id (default: marked timing)")
    parser.add_argument("--times", type=int, default=TIMES_DEFAULT, help=f"default: {TIMES_DEFAULT}")
    parser.add_argument("--busy", type=int, default=cores, help=f"busy loops (default: {cores}, the cores)")
    parser.add_argument(
        "--pause-seconds",
        type=float,
        default=PAUSE_SECONDS_DEFAULT,
        metavar="MAX",
        help=f"longest pause (default: {PAUSE_SECONDS_DEFAULT:g})",
    )
    parser.add_argument("--no-pauses", action="store_true", help="find the failure rate without pauses")
    parser.add_argument("--seed", type=int, help="of the pauses (default: a random one, which is printed)")
    parser.add_argument(
        "--run-minutes",
        type=float,
        default=RUN_MINUTES_DEFAULT,
        help=f"a pytest that takes longer has failed (default: {RUN_MINUTES_DEFAULT:g})",
    )
    options = parser.parse_args(words)
    if not options.no_pauses and options.pause_seconds < 0.1:
        parser.error("--pause-seconds is at least 0.1; use --no-pauses for none")
    if options.times < 1:
        parser.error("--times is at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    stress = Stress(
        targets=[[test] for test in options.tests] or timing_targets(),
        times=options.times,
        pause_seconds_max=0.0 if options.no_pauses else options.pause_seconds,
        seed=random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed,
        run_minutes=options.run_minutes,
    )
    try:
        with busy_loops(options.busy):
            stress.run()
    except KeyboardInterrupt:
        stress.summarize()
        return 128 + signal.SIGINT
    return stress.summarize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
