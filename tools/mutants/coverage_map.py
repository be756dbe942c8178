# SPDX-License-Identifier: Apache-2.0
"""The lines that each test runs, recorded once per test file.

A record is valid until the test file, the code that it runs or a module shared by tests changes. Lines that
run outside of a test, such as definitions at import, belong to no test. Lines that run in another process
belong to the test that started the process, if the process exits normally.
"""

import ast
import contextlib
import functools
import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tools.mutants.places import PYTHON_AREAS, TREE, WORK, sources
from tools.mutants.tree import run_pytest

FOLDER = WORK / "coverage"
FILE_SECONDS_MAX = 900.0
_PHASES = (" (setup)", " (call)", " (teardown)")


class CoveringTest(NamedTuple):
    """A test that passes on the unmutated code."""

    name: str
    tier: str
    seconds: float
    server: bool


@dataclass
class CoverageMap:
    """The tests, and for each line of each file, the names of the tests that run the line."""

    tests: dict[str, CoveringTest] = field(default_factory=dict)
    lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)

    def covering(self, path: str, lines: Iterable[int]) -> list[CoveringTest]:
        """Return the tests that run any of these lines of a file: everyday tests first, fast tests before
        slow tests.
        """
        return self._in_order({name for line in lines for name in self.lines.get(path, {}).get(line, ())})

    def importing(self, path: str) -> list[CoveringTest]:
        """Return the tests that can be affected when a file is imported.

        The tests in files that import it come first, followed by all other tests that run any of its lines.
        """
        importing = {name for name in self.tests if _imports(name.partition("::")[0], path)}
        running = {name for tests in self.lines.get(path, {}).values() for name in tests}
        return self._in_order(importing) + self._in_order(running - importing)

    def _in_order(self, names: set[str]) -> list[CoveringTest]:
        tests = [self.tests[name] for name in names if name in self.tests]
        return sorted(tests, key=lambda test: (test.tier != "everyday", test.server, test.seconds, test.name))


def load(test_files: Iterable[str]) -> CoverageMap:
    """Return the coverage of test files, recording those that changed since they were last recorded."""
    coverage = CoverageMap()
    for test_file in test_files:
        recorded = FOLDER / (test_file.replace("/", "-") + ".json")
        content = json.loads(recorded.read_text()) if recorded.exists() else None
        if content is None or not is_current(content["sources"]):
            content = _record(test_file)
            temporary = recorded.with_suffix(".part")
            temporary.write_text(json.dumps(content))
            temporary.replace(recorded)
        _add(coverage, content)
    return coverage


def is_current(fingerprints: Mapping[str, str]) -> bool:
    """Return whether no file has changed since a record was written; `fingerprints` are those in the
    record.
    """
    return fingerprints == _fingerprints([*fingerprints, *_shared_files()])


def _record(test_file: str) -> dict[str, Any]:
    FOLDER.mkdir(parents=True, exist_ok=True)
    work = FOLDER / "recording"
    work.mkdir(exist_ok=True)
    for leftover in work.iterdir():
        leftover.unlink()
    settings = work / "settings.ini"
    included = [f"    {path}" for patterns in PYTHON_AREAS.values() for path in sources(patterns, TREE)]
    # A process started by a test is measured too, and its lines are attributed to the running test.
    settings.write_text(
        "\n".join(
            [
                "[run]",
                f"data_file = {work / 'lines'}",
                "relative_files = true",
                "parallel = true",
                "sigterm = true",
                "context = ${PYTEST_CURRENT_TEST-}",
                "include =",
                *included,
            ]
        )
    )
    variables = {"COVERAGE_PROCESS_START": str(settings)}
    outcome, tests = run_pytest([test_file], FILE_SECONDS_MAX, TREE, variables)
    failed = sorted({test["test"] for test in tests if test["outcome"] == "failed"})
    passed = [test for test in tests if test["outcome"] == "passed" and test["test"] not in failed]
    lines: dict[str, dict[str, list[int]]] = {}
    for path, line, test in _measured(work):
        lines.setdefault(path, {}).setdefault(test, []).append(line)
    if outcome.status is None or failed or not tests:
        ending = outcome.output.strip().rpartition("\n")[2]
        print(f"  {test_file}: {', '.join(failed) or 'no test ended'} failed without a mutation: {ending}")
    return {"sources": _fingerprints([test_file, *_shared_files(), *lines]), "tests": passed, "lines": lines}


def _shared_files() -> list[str]:
    """Return the files below `tests` that any test may run: all files that are not test files."""
    return [path for path in sources(("tests/**/*.py",), TREE) if not Path(path).name.startswith("test_")]


def has_lines(connection: sqlite3.Connection) -> bool:
    """Return whether a process saved its lines; a process killed before that leaves no tables."""
    tables = "SELECT 1 FROM sqlite_master WHERE name = 'line_bits'"
    return connection.execute(tables).fetchone() is not None


def _measured(folder: Path) -> Iterator[tuple[str, int, str]]:
    """Yield file, line and test of each measurement of coverage.py."""
    from coverage.numbits import numbits_to_nums

    for database in sorted(folder.glob("lines*")):
        with contextlib.closing(sqlite3.connect(database)) as connection:
            if not has_lines(connection):
                continue
            rows = connection.execute(
                "SELECT file.path, context.context, line_bits.numbits FROM line_bits"
                " JOIN file ON file.id = line_bits.file_id JOIN context ON context.id = line_bits.context_id"
            )
            for path, context, bits in rows:
                # coverage.py writes `|` between the static and the dynamic context; pytest appends the phase
                # of the test.
                test = context.rpartition("|")[2]
                test = (
                    test.rpartition(" (")[0] if test.endswith(("(setup)", "(call)", "(teardown)")) else test
                )
                if test:
                    for line in numbits_to_nums(bits):
                        yield path, line, test


def _add(coverage: CoverageMap, content: dict[str, Any]) -> None:
    for test in content["tests"]:
        name = test["test"]
        coverage.tests[name] = CoveringTest(name, test["tier"], test["seconds"], test["server"])
    for path, tests in content["lines"].items():
        for name, lines in tests.items():
            for line in lines:
                coverage.lines.setdefault(path, {}).setdefault(line, set()).add(name)


@functools.cache
def _imported_names(test_file: str) -> frozenset[str]:
    """Return the dotted names that a test file imports."""
    file = TREE / test_file
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text() if file.exists() else "")):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return frozenset(names)


def _imports(test_file: str, path: str) -> bool:
    return path.removeprefix("src/").removesuffix(".py").replace("/", ".") in _imported_names(test_file)


def _fingerprints(paths: Iterable[str]) -> dict[str, str]:
    """Return the state of files. A test is recorded again if its file or a file that it runs has changed."""
    files = {path: TREE / path for path in paths}
    return {
        path: hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.exists() else ""
        for path, file in files.items()
    }
