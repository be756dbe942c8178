# SPDX-License-Identifier: Apache-2.0
"""Mutants of the kernel, generated with cargo-mutants and judged by `cargo test` and then by the Python tests
of decoding.
"""

import contextlib
import functools
import json
import re
import sys
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

from tools.mutants.mutant import Mutant, line_at, numbered
from tools.mutants.places import CARGO_TARGET, CARGO_TOOLS, DECODING_TESTS, KERNEL_AREAS, KERNEL_TREE
from tools.mutants.results import Verdict
from tools.mutants.tree import EXTENSION, replaced, run, run_pytest

BUILD_SECONDS_MAX = 1800.0
RUST_TEST_SECONDS_MAX = 180.0
DECODING_SECONDS_MAX = 900.0
# The timeout of a mutant is this many times the duration of the decoding tests without a mutation.
_PATIENCE = 4
_TEST = ("cargo", "test", "--package", "penstock-kernel", "--locked", "--quiet")
# A debug build shares its dependencies with `cargo test`. Its kernel has the same checks as a release build.
_KERNEL = "profile.dev.package.penstock-kernel"
_BRIDGE = (
    *("cargo", "build", "--package", "penstock-bridge", "--locked", "--quiet"),
    *("--config", f"{_KERNEL}.opt-level=1"),
    *("--config", f"{_KERNEL}.overflow-checks=false"),
    *("--config", f"{_KERNEL}.debug-assertions=false"),
)
# The variables that maturin sets to link the bridge as an extension of this interpreter.
_BRIDGE_VARIABLES = {"PYO3_BUILD_EXTENSION_MODULE": "1", "PYO3_PYTHON": sys.executable}


class BaselineFailed(Exception):
    """Tests fail on the unmutated code, so they cannot be used to judge mutants."""


def generate(tree: Path = KERNEL_TREE) -> list[Mutant]:
    """Return every mutant of the kernel's areas, as cargo-mutants lists them."""
    program = CARGO_TOOLS / "bin/cargo-mutants"
    command = [str(program), "mutants", "--list", "--json", "--package", "penstock-kernel"]
    command += [f"--file={pattern}" for patterns in KERNEL_AREAS.values() for pattern in patterns]
    outcome = run(command, BUILD_SECONDS_MAX, tree)
    if outcome.status != 0:
        raise BaselineFailed(f"cargo-mutants ended with {outcome.status}: {outcome.output[-2000:]}")
    return mutants_of(outcome.output, tree)


def mutants_of(listing: str, tree: Path) -> list[Mutant]:
    """Return the mutants of a JSON listing by cargo-mutants."""
    texts: dict[str, str] = {}
    return numbered(_mutant_of(listed_mutant, tree, texts) for listed_mutant in json.loads(listing))


def check_baseline(tree: Path = KERNEL_TREE) -> None:
    """Run the kernel's own tests without a mutation. Raises BaselineFailed unless they pass."""
    outcome = run(list(_TEST), BUILD_SECONDS_MAX, tree)
    if outcome.status != 0:
        raise BaselineFailed(f"cargo test fails without a mutation: {outcome.output[-2000:]}")


@functools.cache
def decoding_seconds_max(tree: Path = KERNEL_TREE) -> float:
    """Return the timeout for running the decoding tests on a mutant.

    Runs the tests once on the unmutated code, with a bridge built with the same profile. Raises
    BaselineFailed if a test fails.
    """
    bridge = run(list(_BRIDGE), BUILD_SECONDS_MAX, tree, _BRIDGE_VARIABLES)
    if bridge.status != 0:
        raise BaselineFailed(f"the bridge does not build without a mutation: {bridge.output[-2000:]}")
    began = time.monotonic()
    with _bridge_in_place(tree):
        status, failed = _run_decoding(DECODING_SECONDS_MAX, tree)
    if status != 0:
        raise BaselineFailed(f"the tests of decoding fail without a mutation: {failed or status}")
    return _PATIENCE * (time.monotonic() - began)


def judge(mutant: Mutant, tree: Path = KERNEL_TREE) -> Verdict:
    """Judge a mutant by `cargo test`, then by the Python tests of decoding.

    For the decoding tests, the bridge is built with the mutant and installed in the copy of the repository.
    """
    text = (tree / mutant.path).read_text()
    with replaced(tree / mutant.path, mutant.apply(text).encode()):
        build = run([*_TEST, "--no-run"], BUILD_SECONDS_MAX, tree)
        if build.status is None:
            return Verdict("undecided", detail="the build took too long")
        if build.status != 0:
            return Verdict("unbuildable", detail=_first_error(build.output))
        tests = run(list(_TEST), RUST_TEST_SECONDS_MAX, tree)
    if tests.status is None:
        return _judge_timeout("cargo test", RUST_TEST_SECONDS_MAX, _cargo_test_passes(tree))
    if tests.status != 0:
        failed = _failed_test(tests.output)
        if failed is None and not _cargo_test_passes(tree):
            return Verdict(
                "undecided", detail=f"cargo test ended with {tests.status}: {_last_line(tests.output)}"
            )
        detail = "" if failed else _last_line(tests.output)
        return Verdict("killed", "everyday", test=f"cargo test: {failed}" if failed else "", detail=detail)
    # The timeout is measured without a mutation, when the first mutant reaches this line.
    seconds = decoding_seconds_max(tree)
    with replaced(tree / mutant.path, mutant.apply(text).encode()):
        bridge = run(list(_BRIDGE), BUILD_SECONDS_MAX, tree, _BRIDGE_VARIABLES)
    if bridge.status != 0:
        return Verdict("undecided", detail=f"the bridge does not build: {_first_error(bridge.output)}")
    return _judge_decoding(seconds, tree)


def _judge_decoding(seconds: float, tree: Path) -> Verdict:
    """Run the decoding tests on the last bridge built, and again on the original bridge if a test fails."""
    with _bridge_in_place(tree):
        status, failed = _run_decoding(seconds, tree)
    if status == 0:
        return Verdict("survived", detail="cargo test and the tests of decoding pass")
    if status is None:
        passes = _run_decoding(seconds, tree)[0] == 0
        return _judge_timeout("tests of decoding", seconds, passes)
    if failed is None:
        if status >= 0 or _run_decoding(seconds, tree)[0] != 0:
            return Verdict("undecided", detail=f"pytest ended with {status}, and no test failed")
        return Verdict("killed", "everyday", detail=f"the tests of decoding died by signal {-status}")
    if _run_tests([failed["test"]], seconds, tree)[0] != 0:
        return Verdict("undecided", detail=f"{failed['test']} fails without the mutation as well")
    return Verdict("killed", failed["tier"], test=failed["test"])


def _judge_timeout(tests: str, seconds: float, passes: bool) -> Verdict:
    """Judge a mutant whose tests timed out; `passes` is true if they pass without the mutation."""
    if not passes:
        return Verdict("undecided", detail=f"{tests}: no end in {seconds:.0f} s without the mutation as well")
    return Verdict("killed", "everyday", detail=f"{tests}: timeout after {seconds:.0f} s", timeout=True)


def _cargo_test_passes(tree: Path) -> bool:
    """Return whether `cargo test` passes without a mutation, within the timeout of a mutant."""
    build = run([*_TEST, "--no-run"], BUILD_SECONDS_MAX, tree)
    return build.status == 0 and run(list(_TEST), RUST_TEST_SECONDS_MAX, tree).status == 0


def _bridge_in_place(tree: Path) -> contextlib.AbstractContextManager[None]:
    """Make the copy import the bridge that was built last."""
    return replaced(tree / EXTENSION, (CARGO_TARGET / "debug/lib_native.so").read_bytes())


def _run_decoding(seconds: float, tree: Path) -> tuple[int | None, dict[str, Any] | None]:
    """Run the decoding tests until one fails, starting with those that need no server."""
    began = time.monotonic()
    status: int | None = 0
    for folder in ("tests/unit", "tests/integration"):
        tests = [path for path in DECODING_TESTS if path.startswith(folder)]
        status, failed = _run_tests(tests, seconds - (time.monotonic() - began), tree)
        if status != 0:
            return status, failed
    return status, None


def _run_tests(tests: list[str], seconds: float, tree: Path) -> tuple[int | None, dict[str, Any] | None]:
    ending, records = run_pytest(["-x", *tests], seconds, tree)
    return ending.status, next((test for test in records if test["outcome"] == "failed"), None)


def _mutant_of(listed_mutant: dict[str, Any], tree: Path, texts: dict[str, str]) -> Mutant:
    path = listed_mutant["file"]
    if path not in texts:
        texts[path] = (tree / path).read_text()
    text = texts[path]
    start, end = (_offset(text, listed_mutant["span"][side]) for side in ("start", "end"))
    line, line_text = line_at(text, start)
    change = re.sub(r"^\S+:\d+:\d+: ", "", listed_mutant["name"])
    area = next(name for name in KERNEL_AREAS if name in Path(path).parts or Path(path).stem == name)
    return Mutant("kernel", area, path, line, line_text, change, start, end, listed_mutant["replacement"])


def _offset(text: str, location: dict[str, int]) -> int:
    """Return the offset of a line and column in a text. Lines and columns count from one."""
    starts = [0, *accumulate(len(line) for line in text.splitlines(keepends=True))]
    return starts[location["line"] - 1] + location["column"] - 1


def _failed_test(output: str) -> str | None:
    """Return the test that `cargo test` reports as failed; None if it names none, as after an abort."""
    name_match = re.search(r"^---- (\S+)(?: \(.*\))? stdout ----|^test (\S+) .*FAILED", output, re.MULTILINE)
    return (name_match[1] or name_match[2]) if name_match else None


def _last_line(output: str) -> str:
    return output.strip().rpartition("\n")[2]


def _first_error(output: str) -> str:
    error = re.search(r"^error.*", output, re.MULTILINE)
    return error[0] if error else _last_line(output)
