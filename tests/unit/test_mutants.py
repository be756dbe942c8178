# SPDX-License-Identifier: Apache-2.0
"""Mutation testing: sampling mutants, judging them, and resuming a killed run."""

import contextlib
import fcntl
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tools.mutants import __main__ as mutants_main
from tools.mutants import coverage_map, kernel_mutants, python_mutants, results
from tools.mutants.coverage_map import CoverageMap, CoveringTest
from tools.mutants.mutant import Mutant, edit, line_at, numbered, sample_order
from tools.mutants.places import KERNEL_AREAS, PYTHON_AREAS, PYTHON_TESTS, ROOT, sources
from tools.mutants.results import Harmless, Results, Verdict, judgements, report, stale
from tools.mutants.tree import replaced, restore, run, run_pytest, synchronize

CODE = "def larger(a, b):\n    return a if a > b else b\n"
TESTS = """\
from penstock.numbers import larger

def test_larger_number_is_returned():
    assert larger(1, 2) == 2

def test_nothing():
    larger(1, 2)

def test_defect():
    assert larger(1, 2) == 1
"""


def mutant_of(text: str, before: str, after: str, path: str = "src/penstock/numbers.py") -> Mutant:
    start, end, replacement = edit(text, text.replace(before, after))
    line, line_text = line_at(text, start)
    return Mutant("python", "logstore", path, line, line_text, after, start, end, replacement)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy with one module and its tests."""
    for folder in ("src/penstock", "tests", "tools/mutants"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/penstock/__init__.py").touch()
    (tmp_path / "src/penstock/numbers.py").write_text(CODE)
    (tmp_path / "tests/test_numbers.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in ("tools/__init__.py", *sources(("tools/mutants/*.py",))):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def coverage_by(*tests: str, tier: str = "everyday") -> CoverageMap:
    names = [f"tests/test_numbers.py::{test}" for test in tests]
    return CoverageMap(
        {name: CoveringTest(name, tier, 0.1, False) for name in names},
        {"src/penstock/numbers.py": {2: set(names)}},
    )


def test_edit_is_the_smallest_change_between_two_texts() -> None:
    assert edit("if a < b:", "if a <= b:") == (6, 6, "=")
    assert edit("aab", "ab") == (1, 2, "")
    assert edit("same", "same") == (4, 4, "")


def test_mutants_of_equal_lines_have_different_keys() -> None:
    text = "x = a < b\nx = a < b\n"
    first = mutant_of(text[:10], "<", ">")
    second = replace(first, line=2, start=16, end=17)
    keys = [mutant.key for mutant in numbered([first, second])]
    assert len(set(keys)) == 2


def test_larger_sample_begins_with_the_smaller_and_ignores_new_mutants_elsewhere() -> None:
    mutants = [replace(mutant_of(CODE, ">", ">="), path=f"{number}.py") for number in range(40)]
    order = [mutant.path for mutant in sample_order(mutants, seed=1)]
    assert sorted(order) == sorted(mutant.path for mutant in mutants)
    without = [mutant.path for mutant in sample_order(mutants[:30], seed=1)]
    assert without == [path for path in order if path in without]
    assert order != [mutant.path for mutant in sample_order(mutants, seed=2)]


def test_sample_has_one_mutant_per_location() -> None:
    places = [mutant_of(CODE, "a > b", change) for change in ("a X b", "a Y b", "a Z b")]
    assert len(sample_order(places, seed=1)) == 1


def test_listing_of_cargo_mutants_becomes_edits(tmp_path: Path) -> None:
    path = next(iter(sources(KERNEL_AREAS["gtid"])))
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("fn same(a: u8, b: u8) -> bool {\n    a == b\n}\n")
    span = {"start": {"line": 2, "column": 7}, "end": {"line": 2, "column": 9}}
    listed = {
        "file": path,
        "span": span,
        "replacement": "!=",
        "name": f"{path}:2:7: replace == with != in same",
    }
    [mutant] = kernel_mutants.mutants_of(json.dumps([listed]), tmp_path)
    assert mutant.apply((tmp_path / path).read_text()).splitlines()[1] == "    a != b"
    assert (mutant.area, mutant.line, mutant.line_text) == ("gtid", 2, "a == b")
    assert mutant.change == "replace == with != in same"


def test_mutant_is_killed_by_the_test_that_fails(tree: Path) -> None:
    coverage = coverage_by("test_nothing", "test_larger_number_is_returned")
    verdict = python_mutants.judge(mutant_of(CODE, " > ", " < "), coverage, tree)
    killer = "tests/test_numbers.py::test_larger_number_is_returned"
    assert verdict == Verdict("killed", "everyday", killer)
    assert (tree / "src/penstock/numbers.py").read_text() == CODE


@pytest.mark.deep(guard="tests/unit/test_mutants.py::test_recorded_tier_is_that_of_the_selection")
def test_deep_test_is_named_as_the_tier_that_killed(tree: Path) -> None:
    coverage = coverage_by("test_larger_number_is_returned", tier="deep")
    assert python_mutants.judge(mutant_of(CODE, " > ", " < "), coverage, tree).tier == "deep"


def test_mutant_survives_tests_that_check_nothing(tree: Path) -> None:
    verdict = python_mutants.judge(mutant_of(CODE, " > ", " < "), coverage_by("test_nothing"), tree)
    assert verdict.outcome == "survived"


def test_mutant_of_an_uncovered_line_survives(tree: Path) -> None:
    verdict = python_mutants.judge(mutant_of(CODE, " > ", " < "), CoverageMap(), tree)
    assert verdict == Verdict("survived", detail="no test runs this line")


@pytest.mark.deep(
    guard="tests/unit/test_mutants.py::test_tests_of_files_that_import_the_module_judge_its_constants_first"
)
def test_mutant_of_a_line_that_runs_at_import_is_judged_by_all_tests_of_its_file(tree: Path) -> None:
    module = tree / "src/penstock/numbers.py"
    module.write_text(f"LIMIT = 1\n{CODE.replace('else b', 'else b * LIMIT')}")
    mutant = mutant_of(module.read_text(), "LIMIT = 1", "LIMIT = 5")
    verdict = python_mutants.judge(mutant, coverage_by("test_larger_number_is_returned"), tree)
    assert verdict.outcome == "killed"


def test_failure_without_the_mutation_is_no_kill(tree: Path) -> None:
    verdict = python_mutants.judge(mutant_of(CODE, " > ", " >= "), coverage_by("test_defect"), tree)
    assert verdict.outcome == "undecided"


@pytest.mark.deep(
    guard="tests/unit/test_mutants.py::test_tests_that_take_too_long_without_the_mutation_leave_it_undecided"
)
def test_mutant_that_hangs_is_killed_by_the_time_limit(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The same tests must end within this time without the mutation.
    monkeypatch.setattr(python_mutants, "SECONDS_MAX", 10.0)
    hang = mutant_of(CODE, "return a", "while True: a")
    verdict = python_mutants.judge(hang, coverage_by("test_nothing"), tree)
    assert (verdict.outcome, verdict.timeout, verdict.test) == ("killed", True, "")


def test_tests_that_take_too_long_without_the_mutation_leave_it_undecided(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / "tests/test_numbers.py").write_text("import time\ndef test_slow(): time.sleep(3600)\n")
    monkeypatch.setattr(python_mutants, "SECONDS_MAX", 0.5)
    verdict = python_mutants.judge(mutant_of(CODE, " > ", " < "), coverage_by("test_slow"), tree)
    assert (verdict.outcome, verdict.timeout) == ("undecided", False)


@pytest.mark.deep(guard="tests/unit/test_mutants.py::test_failure_without_the_mutation_is_no_kill")
@pytest.mark.parametrize(
    ("ending", "outcome"),
    [("os._exit(5)", "undecided"), ("os.kill(os.getpid(), 11)", "killed")],
    ids=["exit status", "signal"],
)
def test_only_a_signal_is_a_kill_without_a_failed_test(tree: Path, ending: str, outcome: str) -> None:
    text = f"import os\nfrom penstock.numbers import larger\ndef test_a(): larger(1, 2) == 1 and {ending}\n"
    (tree / "tests/test_numbers.py").write_text(text)
    verdict = python_mutants.judge(mutant_of(CODE, " > ", " < "), coverage_by("test_a"), tree)
    assert (verdict.outcome, verdict.test) == (outcome, "")


@pytest.mark.deep(guard="tests/unit/test_mutants.py::test_mutant_is_killed_by_the_test_that_fails")
def test_module_that_cannot_be_imported_is_killed_by_its_test_file(tree: Path) -> None:
    coverage = coverage_by("test_larger_number_is_returned")
    verdict = python_mutants.judge(mutant_of(CODE, "def larger", "def smaller"), coverage, tree)
    assert (verdict.outcome, verdict.test) == ("killed", "tests/test_numbers.py")


@pytest.mark.deep(keep=("always",))
@pytest.mark.parametrize(
    ("hangs", "outcome", "seconds"),
    [('grep -q "a < b" numbers.rs', "killed", 10.0), ("true", "undecided", 0.2)],
    ids=["mutant", "always"],
)
def test_kernel_mutant_whose_tests_hang_is_killed_only_where_they_end_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str, outcome: str, seconds: float
) -> None:
    text = "a > b\n"
    (tmp_path / "numbers.rs").write_text(text)
    cargo = tmp_path / "bin/cargo"
    cargo.parent.mkdir()
    cargo.write_text(
        f'#!/bin/sh\ncase "$*" in *--no-run*) exit 0;; esac\nif {hangs}; then exec sleep 3600; fi\n'
    )
    cargo.chmod(0o755)
    monkeypatch.setenv("PATH", f"{cargo.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(kernel_mutants, "RUST_TEST_SECONDS_MAX", seconds)
    verdict = kernel_mutants.judge(mutant_of(text, ">", "<", "numbers.rs"), tmp_path)
    assert (verdict.outcome, verdict.timeout) == (outcome, outcome == "killed")


def test_recorded_tier_is_that_of_the_selection(tree: Path) -> None:
    (tree / "tests/conftest.py").write_text(
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items: item.user_properties.append(('tier', 'deep'))\n"
    )
    _, records = run_pytest(["tests/test_numbers.py::test_nothing"], 60, tree)
    assert [record["tier"] for record in records] == ["deep"]


def test_record_of_coverage_is_outdated_when_a_module_that_tests_share_changes(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coverage_map, "TREE", tree)
    (tree / "tests/conftest.py").write_text("1")
    (tree / "tests/numbers_made.py").write_text("1")
    (tree / "tests/test_other.py").write_text("1")
    fingerprints = coverage_map._fingerprints(["tests/test_numbers.py", *coverage_map._shared_files()])
    assert coverage_map.is_current(fingerprints)
    (tree / "tests/test_other.py").write_text("2")
    assert coverage_map.is_current(fingerprints)
    for name in ("conftest.py", "numbers_made.py", "test_numbers.py"):
        (tree / "tests" / name).write_text("2")
        assert not coverage_map.is_current(fingerprints)
        fingerprints |= coverage_map._fingerprints([f"tests/{name}"])
    (tree / "tests/added.py").touch()
    assert not coverage_map.is_current(fingerprints)


def test_database_of_a_process_that_was_killed_has_no_lines() -> None:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        assert not coverage_map.has_lines(connection)
        connection.execute("CREATE TABLE line_bits (file_id, context_id, numbits)")
        assert coverage_map.has_lines(connection)


def test_tests_that_import_another_copy_are_refused(tree: Path) -> None:
    shutil.rmtree(tree / "src")
    (tree / "tests/test_numbers.py").write_text("def test_nothing():\n    pass\n")
    ending, records = run_pytest(["tests"], 60, tree)
    assert ending.status == pytest.ExitCode.USAGE_ERROR
    assert "no mutant would be tested" in ending.output
    assert records == []


def test_everyday_and_quick_tests_run_first() -> None:
    tests = [
        CoveringTest("deep", "deep", 0.1, False),
        CoveringTest("server", "everyday", 0.1, True),
        CoveringTest("slow", "everyday", 3.0, False),
        CoveringTest("quick", "everyday", 0.1, False),
    ]
    coverage = CoverageMap({test.name: test for test in tests}, {"a.py": {7: {test.name for test in tests}}})
    assert [test.name for test in coverage.covering("a.py", [7])] == ["quick", "slow", "server", "deep"]
    assert coverage.covering("a.py", [8]) == []


def test_tests_of_files_that_import_the_module_judge_its_constants_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coverage_map, "TREE", tmp_path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_other.py").write_text("import penstock\n")
    (tmp_path / "tests/test_importing.py").write_text("from penstock import limits\n")
    other, importing, unrelated = (
        CoveringTest(f"tests/test_{name}.py::test", "everyday", seconds, False)
        for name, seconds in (("other", 0.1), ("importing", 9.0), ("unrelated", 0.1))
    )
    coverage = CoverageMap(
        {test.name: test for test in (other, importing, unrelated)},
        {"src/penstock/limits.py": {9: {other.name}}},
    )
    assert coverage.importing("src/penstock/limits.py") == [importing, other]


def test_copy_follows_the_repository_and_leaves_equal_files_alone(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    (source / "build").mkdir(parents=True)
    (source / "build/result").touch()
    (source / "kept.py").write_text("1")
    (source / "removed.py").touch()
    synchronize(source, copy)
    before = (copy / "kept.py").stat().st_mtime_ns
    (source / "removed.py").unlink()
    (source / "added.py").write_text("2")
    (copy / "added.py").write_text("3")
    synchronize(source, copy)
    assert sorted(path.name for path in copy.iterdir()) == ["added.py", "kept.py"]
    assert (copy / "added.py").read_text() == "2"
    assert (copy / "kept.py").stat().st_mtime_ns == before


def test_file_is_restored_when_its_judge_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("original")
    with pytest.raises(AssertionError, match="mutant is in place"), replaced(path, b"mutant"):
        assert path.read_text() != "mutant", "mutant is in place"
    assert [file.name for file in tmp_path.iterdir()] == ["a.py"]
    assert path.read_text() == "original"


def test_file_left_mutated_by_a_killed_run_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "src/a.py"
    path.parent.mkdir()
    path.write_text("original")
    script = (
        "import os; from pathlib import Path; from tools.mutants.tree import replaced\n"
        f"with replaced(Path({str(path)!r}), b'mutant'): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == -9
    assert path.read_text() == "mutant"
    restore(tmp_path)
    assert [file.name for file in path.parent.iterdir()] == ["a.py"]
    assert path.read_text() == "original"


def test_process_left_behind_by_a_program_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    script = f"exec 9>{lock}; flock 9; sleep 600 >/dev/null 2>&1 &"
    outcome = run(["sh", "-c", script], 60, tmp_path)
    assert outcome.status == 0
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def test_verdicts_survive_a_run_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    mutant = mutant_of(CODE, ">", ">=")
    Results(path).add(mutant, Verdict("killed", "everyday", "test_a"), "diff", 1.0)
    path.with_suffix(".part").write_text("[{")
    [kept] = Results(path)
    assert (kept["key"], kept["outcome"], kept["test"]) == (mutant.key, "killed", "test_a")


def test_runs_of_both_languages_keep_their_verdicts_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first, second = Results(path), Results(path)
    first.add(mutant_of(CODE, ">", ">="), Verdict("survived"), "", 1.0)
    second.add(mutant_of(CODE, ">", "<"), Verdict("killed", "deep"), "", 1.0)
    assert sorted(kept["outcome"] for kept in Results(path)) == ["killed", "survived"]


def test_verdict_without_its_line_or_its_test_is_outdated(tree: Path) -> None:
    mutant = mutant_of(CODE, " > ", " < ")
    kept = {
        "path": mutant.path,
        "line_text": mutant.line_text,
        "test": "tests/test_numbers.py::test_nothing[1]",
    }
    rust = tree / "native/kernel/src/gtid.rs"
    rust.parent.mkdir(parents=True)
    rust.write_text("fn set_is_parsed() {}\n")
    gone = [
        "tests/test_numbers.py::test_noth",
        "tests/gone.py::test_nothing",
        "cargo test: gtid::tests::set_is",
    ]
    there = ["tests/test_numbers.py", "cargo test: gtid::tests::set_is_parsed", "", kept["test"]]
    assert [test for test in [*gone, *there] if not results.is_outdated(kept | {"test": test}, tree)] == there
    (tree / mutant.path).write_text(CODE.replace("a > b", "a >= b"))
    assert results.is_outdated(kept, tree)


def test_outdated_kill_is_judged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tree: Path) -> None:
    monkeypatch.setattr(mutants_main, "TREE", tree)
    verdicts = Results(tmp_path / "results.json")
    mutant = mutant_of(CODE, " > ", " < ")
    judged: list[Mutant] = []

    def judge(mutant: Mutant) -> Verdict:
        judged.append(mutant)
        return Verdict("killed", "everyday", "tests/test_numbers.py::test_nothing")

    verdicts.add(mutant, Verdict("killed", "everyday", "tests/test_numbers.py::test_gone"), "", 1.0)
    for _ in range(2):
        mutants_main._judge([mutant], 1, judge, False, verdicts)
        assert judged == [mutant]


def test_report_gives_the_score_and_names_survivors(tmp_path: Path, tree: Path) -> None:
    verdicts = Results(tmp_path / "results.json")
    survivor = mutant_of(CODE, ">", ">=")
    for mutant, verdict in (
        (survivor, Verdict("survived", detail="3 of 3 tests that run the line passed")),
        (mutant_of(CODE, ">", "<"), Verdict("killed", "everyday", "tests/test_numbers.py::test_nothing")),
        (
            mutant_of(CODE, "else b", "else a"),
            Verdict("killed", "deep", "tests/test_numbers.py::test_defect"),
        ),
        (mutant_of(CODE, "return a", "return b"), Verdict("killed", "everyday", timeout=True)),
        (mutant_of(CODE, "(a, b)", "(b, a)"), Verdict("unbuildable")),
        (mutant_of(CODE, "def larger", "def least"), Verdict("undecided", detail="pytest ended with 3")),
        (mutant_of("return c > d\n", ">", "<"), Verdict("survived", detail="a line that is gone")),
    ):
        verdicts.add(mutant, verdict, mutant.diff(CODE), 1.0)
    lines = report(verdicts, [], tree)
    [total] = [line for line in lines if line.startswith("all ")]
    assert total.split() == ["all", "4", "3", "2", "1", "75%"]
    [named] = [line for line in lines if line.startswith("survived:")]
    assert "src/penstock/numbers.py:2: not judged" in named
    assert "undecided: src/penstock/numbers.py:1: pytest ended with 3" in lines
    assert "1 verdicts do not count: their line or their test is gone" in lines
    entry = Harmless(survivor.path, survivor.line_text, survivor.change, "both numbers are equal")
    [named] = [line for line in report(verdicts, [entry], tree) if line.startswith("survived:")]
    assert named.endswith("harmless: both numbers are equal")


def test_judgement_goes_stale_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("    x = 1\n")
    kept, changed = (Harmless("a.py", line, "x = 2", "no reader") for line in ("x = 1", "x = 3"))
    gone = Harmless("b.py", "x = 1", "x = 2", "no reader")
    assert stale([kept, changed, gone], tmp_path) == ["a.py: x = 3", "b.py: x = 1"]


def test_judgements_of_the_repository_have_reasons_and_are_not_stale() -> None:
    entries = judgements()
    assert stale(entries) == [], f"judge these mutants again and correct {results.HARMLESS}"
    assert [entry for entry in entries if not entry.reason.strip()] == []


@pytest.mark.parametrize("patterns", [*KERNEL_AREAS.values(), *PYTHON_AREAS.values(), PYTHON_TESTS])
def test_every_area_has_files(patterns: tuple[str, ...]) -> None:
    assert sources(patterns)


def test_area_without_files_is_refused() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        sources(("src/penstock/nowhere/*.py",))
