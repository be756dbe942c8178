# SPDX-License-Identifier: Apache-2.0
"""Run the tests of one tier or area, and print how long each step took.

    python -m tools.suite.run [--tier everyday|deep|all] [--area WORD[,WORD]] [--workers N]

The steps are the kernel's own tests, the installation of missing database servers, for the deep tier the
build of TiDB's programs, and pytest with N workers. A failed step ends the run with its exit status. pytest
prints the duration of every step above its last line. It reads the durations of the earlier steps from
`PENSTOCK_STEPS`, a JSON object that maps each step to its seconds.

All steps write below one temporary folder, which is removed at the end. The folders of failed tests stay
where pytest keeps them. A run does not start if the disk has less space than the tests need.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tools.suite.pytest_run import BYTECODE
from tools.suite.temporary import DISK_BYTES, DiskTooSmall, temporary_folder

ROOT = Path(__file__).resolve().parents[2]
# How many workers run the tests. Tests wait for servers, processes and sockets about half of the time, so
# each of the two cores gets two workers. Each worker has its own servers and its own Spark session, which
# need about 3 GB.
WORKERS = 4
STEPS_VARIABLE = "PENSTOCK_STEPS"
SLOWEST_TESTS = 15
# After an interrupt, pytest stops its servers within this time.
END_SECONDS_MAX = 60.0


def main(words: list[str] | None = None) -> int:
    """Run the steps in order; return 0, or the exit status of the first step that failed."""
    handle_signals()
    parser = _parser()
    arguments = parser.parse_args(words)
    if arguments.area is not None and not has_tests(area_words(arguments.area)):
        parser.error(f"--area: no test file has one of the words {arguments.area!r} in its path: see tests/")
    parent = Path(tempfile.gettempdir())
    try:
        with temporary_folder(parent, DISK_BYTES[arguments.tier]) as folder:
            # pytest keeps the folders of failed tests, so they are outside the folder that is removed.
            variables = {"TMPDIR": str(folder), "PYTEST_DEBUG_TEMPROOT": str(parent)}
            steps = steps_of(arguments.tier, arguments.area, arguments.workers or WORKERS)
            return run_steps(steps, variables)
    except DiskTooSmall as problem:
        print(f"no test ran: {problem}", file=sys.stderr)
        return 1


def run_steps(commands: dict[str, list[str]], variables: dict[str, str]) -> int:
    """Run the command of each step with additional environment variables.

    Returns the exit status of the first step that failed, or 0.
    """
    steps: dict[str, float] = json.loads(os.environ.get(STEPS_VARIABLE, "{}"))
    for name, command in commands.items():
        environment = os.environ | BYTECODE | variables | {STEPS_VARIABLE: json.dumps(steps)}
        started_at = time.monotonic()
        status = run_step(command, environment)
        steps[name] = time.monotonic() - started_at
        if status:
            return status
    return 0


def run_step(command: list[str], environment: dict[str, str]) -> int:
    """Run a command and return its exit status. An interrupted command ends its tests before the function
    returns.
    """
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        try:
            return process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def handle_signals() -> None:
    """End the tests and remove their folder on SIGTERM, and on an interrupt.

    A shell starts background commands with SIGINT ignored. The steps would inherit that, and could then not
    be interrupted.
    """
    signal.signal(signal.SIGTERM, _end_on_termination)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_on_termination(number: int, frame: FrameType | None) -> NoReturn:
    """Exit by an exception, so that the tests end and their folder is removed."""
    sys.exit(128 + number)


def area_words(text: str) -> list[str]:
    """Return the words of an area, which are separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def in_area(path: str, words: list[str]) -> bool:
    """Return whether a word of the area is part of a test file's path."""
    return any(word in path for word in words)


def has_tests(words: list[str]) -> bool:
    """Return whether an area has a test file."""
    paths = (path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    return any(in_area(path, words) for path in paths)


def steps_of(tier: str, area: str | None, workers: int) -> dict[str, list[str]]:
    """Return the command of each step, in order."""
    kernel = ["cargo", "test", "--package", "penstock-kernel", "--locked", "--quiet"]
    pytest = [sys.executable, "-m", "pytest", "--numprocesses", str(workers)]
    pytest += ["--dist", "loadfile", "--no-loadscope-reorder"]
    pytest += [f"--durations={SLOWEST_TESTS}", "--tier", tier]
    steps = {"kernel tests": kernel}
    if area is not None:
        # The words of an area also select Rust tests, by their path.
        steps = {"kernel tests": [*kernel, "--", *area.split(",")]}
        pytest += ["--area", area]
    steps["database servers"] = [sys.executable, "-m", "tools.servers", "install"]
    if tier != "everyday" and (area is None or in_area("tidb_peers", area_words(area))):
        # The first build takes longer than one test may take.
        steps["TiDB's programs"] = [sys.executable, "-m", "tools.tidb.peers"]
    return steps | {"pytest": pytest}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.suite.run", description="Run the tests.")
    parser.add_argument("--tier", choices=("everyday", "deep", "all"), default="everyday")
    parser.add_argument("--area", help="words in the paths of the tests to run, divided by commas")
    parser.add_argument("--workers", type=int, help=f"pytest workers (default: {WORKERS})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
