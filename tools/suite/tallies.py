# SPDX-License-Identifier: Apache-2.0
"""How often repeated tests failed, kept in one file, so that an interrupted run can resume."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.suite.pytest_run import FAILED, PASSED, SKIPPED, Run, TestOutcome, left_running
from tools.suite.results import replace_json


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
class TargetTally:
    """The repetitions of one target, which is a list of paths or ids for one pytest.

    `conditions` describe the state of the files and the load. Repetitions under other conditions do not
    count. `seconds` is the total duration of the repetitions.
    """

    target: tuple[str, ...]
    conditions: str
    repetitions: int = 0
    seconds: float = 0.0
    tests: dict[str, Tally] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The short name of the target."""
        if len(self.target) == 1:
            return self.target[0]
        return f"{self.target[0].partition('::')[0]} ({len(self.target)} tests)"

    def count(self, run: Run, where: str) -> None:
        """Count the tests of a run. A failed run without a failed test is a failure of its target."""
        self.repetitions += 1
        self.seconds += run.seconds
        for name, test in run.tests.items():
            self.tests.setdefault(name, Tally()).count(test, where)
        failed = FAILED in {test.outcome for test in run.tests.values()}
        if run.leaks or (not failed and run.outcome not in (PASSED, SKIPPED)):
            lines = (f"pytest {run.outcome}, exit status {run.status}", *left_running(run), *run.output)
            # If pytest dies, all its tests are affected, and the cause cannot be attributed to one of them.
            self.tests.setdefault(self.label, Tally()).count(TestOutcome(FAILED, lines), where)


class TallyFile:
    """The tallies of all targets in one JSON file. Each change replaces the file atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path
        entries = json.loads(path.read_text()) if path.exists() else []
        self._tallies = {tally.target: tally for tally in map(_tally_of, entries)}

    def resume(self, target: Sequence[str], conditions: str | None) -> TargetTally:
        """Return the tally of a target under these conditions, or an empty tally if there is none.

        If the conditions are None, no tally is resumed.
        """
        tally = self._tallies.get(tuple(target))
        if tally is not None and conditions is not None and tally.conditions == conditions:
            return tally
        return TargetTally(tuple(target), conditions or "")

    def seconds_per_repetition(self, target: Sequence[str]) -> float | None:
        """Return the mean duration of a target's last repetitions, under any conditions."""
        tally = self._tallies.get(tuple(target))
        return tally.seconds / tally.repetitions if tally is not None and tally.repetitions else None

    def put(self, tally: TargetTally) -> None:
        """Keep a tally, and replace the previous tally of its target."""
        self._tallies[tally.target] = tally
        replace_json(self.path, [asdict(kept) for kept in self._tallies.values()])

    def forget(self, targets: Iterable[Sequence[str]]) -> None:
        """Drop the tallies of targets."""
        for target in targets:
            self._tallies.pop(tuple(target), None)


def _tally_of(entry: dict[str, Any]) -> TargetTally:
    tests = {name: Tally(**{**test, "lines": tuple(test["lines"])}) for name, test in entry["tests"].items()}
    return TargetTally(**{**entry, "target": tuple(entry["target"]), "tests": tests})
