# SPDX-License-Identifier: Apache-2.0
"""Repeat tests beside busy loops and random pauses of their processes, and print how often each test fails.

    python -m tools.suite.stress [--times N] [--parallel P] [--busy K] [--pause-seconds MAX] TEST...

Each repetition is a new pytest process. That process and all processes that it starts are paused by SIGSTOP
at random moments, for 0.1 s up to MAX. TEST is a file or a test id; without one, every test marked `timing`
is repeated, a file at a time. P files run at once, because a paused process needs no processor. The same
`--seed` repeats the moments and lengths of the pauses, and `--no-pauses --busy 0 --parallel 1` finds the
failure rate of an idle machine. The exit status is 1 if a test failed, did not run in every repetition or
left a process running. A server that was started a second time is printed as flaky.

The counts are kept in `build/stress.json` after each repetition. Another run with the same files, pauses and
busy loops continues from these counts, and does not repeat tests that have their N repetitions; `--fresh`
counts from zero. The run begins with an estimate of its time, from the last repetitions of each file.

Mark a test `timing` if the moment at which something happens can change its result:

- it kills, stops or cuts off a process, server or connection while that is at work;
- it lets a lease, session, heartbeat or timeout run out, or must act before one runs out;
- several of its threads or processes compete for the same resource.

A test that only starts a server, or waits for an answer without a limit of its own, is not marked.
"""

import argparse
import contextlib
import os
import random
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.suite.listing import ROOT, files_with, list_tests
from tools.suite.pytest_run import Pauses, PytestProcess
from tools.suite.results import ResultsInUse, only_writer, tree_state
from tools.suite.tallies import TallyFile, TargetTally

RESULTS = ROOT / "build" / "stress.json"
TIMES_DEFAULT = 50
# Long enough for a lease or heartbeat of the tests to run out, short enough for 50 repetitions in a night.
PAUSE_SECONDS_DEFAULT = 4.0
PARALLEL_DEFAULT = 4
RUN_MINUTES_DEFAULT = 60.0
FAILURE_LINES = 20


@dataclass(frozen=True)
class Load:
    """The load that disturbs the tests: the maximum pause (0.0 for none) and the number of busy loops."""

    pause_seconds_max: float
    busy: int

    def __str__(self) -> str:
        return f"pauses up to {self.pause_seconds_max:g} s, {self.busy} busy loops"


@dataclass
class Stress:
    """Repeats targets, and keeps a tally of each target's tests.

    `parallel` targets run at once. The result of each repetition is saved in `kept` as soon as the repetition
    ends. `seed` determines the pauses.
    """

    tallies: Sequence[TargetTally]
    times: int
    load: Load
    seed: int
    run_minutes: float
    parallel: int = 1
    kept: TallyFile | None = None

    def run(self) -> None:
        """Run the target with the fewest repetitions next, until each has run `times` times."""
        begun = {tally.target: tally.repetitions for tally in self.tallies}
        running: dict[int, tuple[TargetTally, int, PytestProcess]] = {}
        with contextlib.ExitStack() as stack:
            while True:
                while len(running) < self.parallel and (tally := self._next(begun)) is not None:
                    begun[tally.target] += 1
                    process = stack.enter_context(self._process(tally, begun[tally.target]))
                    running[process.descriptor] = tally, begun[tally.target], process
                if not running:
                    return
                seconds = min(process.seconds_left for _, _, process in running.values())
                ended, _, _ = select.select(list(running), [], [], seconds)
                expired = [number for number, (_, _, process) in running.items() if not process.seconds_left]
                for number in {*ended, *expired}:
                    self._finish(*running.pop(number))

    def _next(self, begun: dict[tuple[str, ...], int]) -> TargetTally | None:
        tally = min(self.tallies, key=lambda tally: begun[tally.target])
        return tally if begun[tally.target] < self.times else None

    def _process(self, tally: TargetTally, repetition: int) -> PytestProcess:
        seed = f"{self.seed}/{repetition}/{' '.join(tally.target)}"
        pauses = Pauses(self.load.pause_seconds_max, seed) if self.load.pause_seconds_max else None
        return PytestProcess(tally.target, seconds_max=60 * self.run_minutes, pauses=pauses)

    def _finish(self, tally: TargetTally, repetition: int, process: PytestProcess) -> None:
        run = process.finish(FAILURE_LINES)
        process.close()
        tally.count(run, f"repetition {repetition} of seed {self.seed}")
        if self.kept is not None:
            self.kept.put(tally)
        ended = f"{run.outcome} in {run.seconds:.1f} s"
        print(f"[{repetition} of {self.times}] {tally.label}: {ended}", flush=True)
        for late_start in run.late_starts:
            print(f"    flaky: {late_start}", flush=True)

    def estimate(self) -> str:
        """Return how long the repetitions will take, judged by each target's last repetitions."""
        repetitions = {tally.target: max(0, self.times - tally.repetitions) for tally in self.tallies}
        left = sum(repetitions.values())
        seconds = {
            target: self.kept.seconds_per_repetition(target) if self.kept is not None else None
            for target in repetitions
        }
        known = sum(repetitions[target] * (seconds[target] or 0.0) for target in repetitions)
        text = f"{left} repetitions of {len(self.tallies)} files, {self.parallel} at once"
        if known:
            text += f": about {known / self.parallel / 60:.0f} min"
        if unknown := sum(1 for target, count in repetitions.items() if count and seconds[target] is None):
            text += f"; not counting files that have not run before: {unknown}"
        return text

    def summarize(self) -> int:
        """Print a line for each test, then each first failure; return the exit status."""
        print(f"\nseed {self.seed}\n{'runs':>6}{'failed':>8}{'rate':>8}  test")
        tests = {name: test for tally in self.tallies for name, test in tally.tests.items()}
        for name, test in tests.items():
            rate = f"{test.failures / test.runs:.1%}" if test.runs else "-"
            skips = f" (skipped {test.skips} times)" if test.skips else ""
            print(f"{test.runs:>6}{test.failures:>8}{rate:>8}  {name}{skips}")
        for name, test in tests.items():
            if test.failures:
                print(f"\n{name} failed first in {test.first_failure}:")
                print("\n".join(f"    {line}" for line in test.lines))
        too_seldom = [f"{name} ({test.runs})" for name, test in tests.items() if test.runs < self.times]
        too_seldom += [tally.label for tally in self.tallies if not tally.tests]
        if too_seldom:
            print(f"\nran less than {self.times} times: {', '.join(too_seldom)}")
        failed = any(test.failures for test in tests.values())
        return 1 if failed or too_seldom else 0


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
    parser = _parser()
    options = parser.parse_args(words)
    if not options.no_pauses and options.pause_seconds < 0.1:
        parser.error("--pause-seconds is at least 0.1; use --no-pauses for none")
    if options.times < 1 or options.parallel < 1:
        parser.error("--times and --parallel are at least 1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with only_writer(options.results):
            return _repeat(options)
    except ResultsInUse as problem:
        print(problem, file=sys.stderr)
        return 2


def _repeat(options: argparse.Namespace) -> int:
    targets = [[test] for test in options.tests] or timing_targets()
    if not targets:
        print("no test is marked timing", file=sys.stderr)
        return 2
    kept = TallyFile(options.results)
    if options.fresh:
        kept.forget(targets)
    load = Load(0.0 if options.no_pauses else options.pause_seconds, options.busy)
    tree = tree_state()
    conditions = None if tree is None else f"{tree}, {load}"
    stress = Stress(
        tallies=[kept.resume(target, conditions) for target in targets],
        times=options.times,
        load=load,
        seed=random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed,
        run_minutes=options.run_minutes,
        parallel=options.parallel,
        kept=kept,
    )
    print(stress.estimate(), flush=True)
    try:
        with busy_loops(options.busy):
            stress.run()
    except KeyboardInterrupt:
        print("interrupted: run it again to go on")
        stress.summarize()
        return 128 + signal.SIGINT
    return stress.summarize()


def _parser() -> argparse.ArgumentParser:
    cores = len(os.sched_getaffinity(0))
    lines = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="python -m tools.suite.stress", description=lines[0])
    parser.add_argument("tests", nargs="*", metavar="TEST", help="file or test id (default: marked timing)")
    parser.add_argument("--times", type=int, default=TIMES_DEFAULT, help=f"default: {TIMES_DEFAULT}")
    parser.add_argument(
        "--parallel", type=int, default=PARALLEL_DEFAULT, help=f"files at once (default: {PARALLEL_DEFAULT})"
    )
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
    parser.add_argument("--fresh", action="store_true", help="count from zero")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default: {RESULTS.relative_to(ROOT)}")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
