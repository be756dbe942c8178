# SPDX-License-Identifier: Apache-2.0
"""A run of pytest in a separate process tree, and the parsing of its JUnit report."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tools.servers.starting import LATE_STARTS_VARIABLE
from tools.suite.listing import ROOT

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
# Keep compiled modules, even if the caller's environment forbids it: a run starts hundreds of processes.
BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}
_SEVERITY = (PASSED, SKIPPED, FAILED)
# A killed command's folder is removed and its processes are reaped within this time.
_STOP_SECONDS_MAX = 60.0


@dataclass(frozen=True)
class TestOutcome:
    """The outcome of a test: passed, failed or skipped. `lines` contains the last lines of the failure, or
    the reason for skipping.
    """

    # Tells pytest not to collect this class.
    __test__ = False

    outcome: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pauses:
    """Random pauses of the whole process tree. `seed` determines when they happen, and how long they last."""

    seconds_max: float
    seed: str


@dataclass(frozen=True)
class Run:
    """A run of pytest.

    Without a report, pytest died or was killed, and `tests` is empty. `late_starts` has a line for each
    server that answered only after a second start. `leaks` has a line for each process that outlived pytest.
    """

    status: int
    seconds: float
    timed_out: bool
    has_report: bool
    tests: dict[str, TestOutcome] = field(default_factory=dict)
    output: tuple[str, ...] = ()
    late_starts: tuple[str, ...] = ()
    leaks: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """passed, failed (also for leaks), skipped (nothing ran), died (no report), or timed out."""
        if self.timed_out:
            return "timed out"
        if not self.has_report:
            return "died"
        outcomes = {test.outcome for test in self.tests.values()}
        if FAILED in outcomes or self.leaks or self.status not in (0, 5):
            return FAILED
        return PASSED if PASSED in outcomes else SKIPPED


def run_pytest(
    arguments: Sequence[str],
    *,
    environment: dict[str, str] | None = None,
    seconds_max: float,
    pauses: Pauses | None = None,
    lines_max: int = 40,
) -> Run:
    """Run pytest in a new process tree; end the tree after a time limit or on any exception."""
    with PytestProcess(arguments, environment=environment, seconds_max=seconds_max, pauses=pauses) as process:
        return process.finish(lines_max)


class PytestProcess:
    """Runs pytest in its own process tree, inside a `with` block.

    The end of the block ends the tree, and kills it if it does not end in time.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        environment: dict[str, str] | None = None,
        seconds_max: float,
        pauses: Pauses | None = None,
    ) -> None:
        self._arguments = arguments
        self._environment = environment or {}
        self._pauses = pauses
        self._seconds_max = seconds_max
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-suite-"))
            self._folder = Path(folder)
            self._started_at = time.monotonic()
            # The runner gets a separate session, so that Ctrl-C reaches only this process, which then ends
            # the tree.
            self._process = subprocess.Popen(
                self._argv(),
                cwd=ROOT,
                env=os.environ
                | BYTECODE
                | self._environment
                | {LATE_STARTS_VARIABLE: str(self._folder / "late-starts")},
                start_new_session=True,
            )
            stack.callback(_end, self._process)
            self.descriptor = os.pidfd_open(self._process.pid)
            stack.callback(os.close, self.descriptor)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the tree and remove its folder, if that has not been done."""
        self._stack.close()

    @property
    def seconds_left(self) -> float:
        """The time until the limit, 0.0 after it. `descriptor` becomes readable when pytest ends."""
        return max(0.0, self._started_at + self._seconds_max - time.monotonic())

    def finish(self, lines_max: int) -> Run:
        """Wait for the end or the time limit, and return the outcome. A truncated report counts as no
        report.
        """
        timed_out = False
        try:
            self._process.wait(self.seconds_left)
        except subprocess.TimeoutExpired:
            timed_out = True
            _end(self._process)
        seconds = time.monotonic() - self._started_at
        tests = None if timed_out else read_report(self._folder / "report.xml", lines_max)
        return Run(
            self._process.returncode,
            seconds,
            timed_out,
            tests is not None,
            tests or {},
            _lines(self._folder / "output")[-lines_max:],
            _lines(self._folder / "late-starts"),
            _lines(self._folder / "leaks"),
        )

    def _argv(self) -> list[str]:
        pytest_words = ["-q", "--tb=short", "-p", "no:cacheprovider"]
        report_words = ["-o", "junit_family=xunit1", f"--junit-xml={self._folder / 'report.xml'}"]
        tree_words = ["--output", str(self._folder / "output"), "--leaks", str(self._folder / "leaks")]
        if self._pauses is not None:
            tree_words += ["--pause-seconds", str(self._pauses.seconds_max), "--seed", self._pauses.seed]
        return [
            *(shutil.which("setpriv") or "setpriv", "--pdeathsig", "TERM", "--"),
            *(sys.executable, "-m", "tools.suite.tree", *tree_words),
            *(sys.executable, "-m", "pytest", *pytest_words, *report_words, *self._arguments),
        ]


def left_running(run: Run) -> list[str]:
    """Return a line for each process that a run left behind."""
    return [f"left running at the end, killed now: {leak}" for leak in run.leaks]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the runner of a tree, which ends the tree; kill it after a timeout."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _lines(path: Path) -> tuple[str, ...]:
    return tuple(path.read_text(errors="replace").splitlines()) if path.exists() else ()


def read_report(report: Path, lines_max: int) -> dict[str, TestOutcome] | None:
    """Return the outcomes in a JUnit report by test id, or None if there is no complete report.

    A test whose teardown fails has two entries, of which the worse counts. A file that cannot be imported has
    an entry of its own.
    """
    tests: dict[str, TestOutcome] = {}
    try:
        root = ElementTree.parse(report).getroot()
    except (FileNotFoundError, ElementTree.ParseError):
        # Pytest writes its report last, so it died earlier or while writing.
        return None
    for case in root.iter("testcase"):
        test = _test_id(case)
        outcome = _outcome(case, lines_max)
        earlier = tests.get(test)
        if earlier is None or _SEVERITY.index(outcome.outcome) > _SEVERITY.index(earlier.outcome):
            tests[test] = outcome
    return tests


def _test_id(case: ElementTree.Element) -> str:
    name, path = case.get("name", ""), case.get("file")
    if path is None:
        return name
    module = path.removesuffix(".py").replace("/", ".")
    classes = case.get("classname", "").removeprefix(module).strip(".")
    return "::".join((path, *filter(None, classes.split(".")), name))


def _outcome(case: ElementTree.Element, lines_max: int) -> TestOutcome:
    for kind in ("failure", "error"):
        failure = case.find(kind)
        if failure is not None:
            text = failure.text or failure.get("message") or ""
            return TestOutcome(FAILED, tuple(text.splitlines()[-lines_max:]))
    skipped = case.find("skipped")
    if skipped is not None:
        return TestOutcome(SKIPPED, tuple(skipped.get("message", "").splitlines()[-lines_max:]))
    return TestOutcome(PASSED)
