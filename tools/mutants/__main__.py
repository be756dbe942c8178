# SPDX-License-Identifier: Apache-2.0
"""Mutation testing of the kernel and of the Python code.

    python -m tools.mutants --kernel 30 --python 30 --seed 1
    python -m tools.mutants --again
    python -m tools.mutants --report

The mutants of a sample are judged in turn. The verdicts are in build/mutants/results.json. A run that was
stopped continues with the next mutant when it is started again. `--kernel 0` or `--python 0` leaves a
language out.
"""

import argparse
import fcntl
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from tools.mutants import coverage_map, kernel_mutants, python_mutants
from tools.mutants.mutant import Mutant, sample_order
from tools.mutants.places import (
    CARGO_MUTANTS_VERSION,
    CARGO_TOOLS,
    KERNEL_TREE,
    PYTHON_TESTS,
    PYTHON_TOOLS,
    ROOT,
    TREE,
    WORK,
    sources,
)
from tools.mutants.results import COUNTED, Results, Verdict, is_outdated, judgements, report
from tools.mutants.tree import compile_python, restore, synchronize

_REQUIREMENTS = ROOT / "tools/mutants/requirements.txt"
# Python reads .pth files in known folders only; coverage.py uses such a file to start in other processes.
_SITE = "import os\nimport site\n\nsite.addsitedir(os.path.dirname(__file__))\n"


def main(words: list[str] | None = None) -> int:
    """Judge a sample, or print the report; return 1 if a survivor has not been judged, else 0."""
    arguments = _parser().parse_args(words)
    results = Results()
    if not arguments.report:
        if arguments.python:
            _judge_python(arguments, results)
        if arguments.kernel:
            _judge_kernel(arguments, results)
    lines = report(results, judgements())
    print("\n".join(lines))
    return int(any("not judged:" in line for line in lines))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description="Mutation testing.")
    parser.add_argument(
        "--kernel", type=int, default=30, metavar="N", help="mutants of the kernel (default: 30)"
    )
    parser.add_argument("--python", type=int, default=30, metavar="N", help="mutants of Python (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="which mutants are drawn (default: 1)")
    parser.add_argument("--again", action="store_true", help="judge the survivors again, after tests changed")
    parser.add_argument(
        "--keep-copy", action="store_true", help="judge the copy of the last run, whatever has changed since"
    )
    parser.add_argument(
        "--report", action="store_true", help="print the verdicts there are, and judge nothing"
    )
    return parser


def _judge_python(arguments: argparse.Namespace, results: Results) -> None:
    with _alone("python"):
        _install_python_tools()
        _prepare(TREE, arguments.keep_copy)
        test_files = dict.fromkeys(path for pattern in PYTHON_TESTS for path in sources((pattern,), TREE))
        coverage = coverage_map.load(test_files)
        drawn = sample_order(python_mutants.candidates(), arguments.seed)
        mutants = (mutant for mutant in map(python_mutants.mutant_of, drawn) if mutant is not None)
        _judge(
            mutants,
            arguments.python,
            lambda mutant: python_mutants.judge(mutant, coverage),
            arguments.again,
            results,
        )


def _judge_kernel(arguments: argparse.Namespace, results: Results) -> None:
    with _alone("kernel"):
        _install_cargo_mutants()
        _prepare(KERNEL_TREE, arguments.keep_copy)
        mutants = sample_order(kernel_mutants.generate(), arguments.seed)
        kernel_mutants.check_baseline()
        _judge(mutants, arguments.kernel, kernel_mutants.judge, arguments.again, results)


def _prepare(tree: Path, keep_copy: bool) -> None:
    if tree.exists():
        restore(tree)
    if not (keep_copy and tree.exists()):
        synchronize(ROOT, tree)
        compile_python(tree)


def _judge(
    mutants: Iterable[Mutant],
    count: int,
    judge: Callable[[Mutant], Verdict],
    again: bool,
    results: Results,
) -> None:
    """Judge mutants in order until `count` of them were killed or survived."""
    counted = 0
    for mutant in mutants:
        if counted == count:
            return
        tree = KERNEL_TREE if mutant.language == "kernel" else TREE
        result = results.get(mutant.key)
        repeat = result is not None and again and result["outcome"] in ("survived", "undecided")
        if result is None or repeat or is_outdated(result, tree):
            began = time.monotonic()
            diff = mutant.diff((tree / mutant.path).read_text())
            verdict = judge(mutant)
            result = results.add(mutant, verdict, diff, time.monotonic() - began)
            print(f"{result['outcome']:<12}{mutant.key}  ({verdict.test or verdict.detail})", flush=True)
        counted += result["outcome"] in COUNTED


def _alone(language: str) -> ExitStack:
    """Lock the copy for a language. Raises BlockingIOError while another run mutates the copy."""
    WORK.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        lock = stack.enter_context((WORK / f"{language}.lock").open("w"))
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return stack.pop_all()


def _install_python_tools() -> None:
    installed = PYTHON_TOOLS / "requirements.txt"
    if not installed.exists() or installed.read_text() != _REQUIREMENTS.read_text():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--upgrade",
        ]
        command += ["--no-deps", "--target", str(PYTHON_TOOLS), "--requirement", str(_REQUIREMENTS)]
        subprocess.run(command, check=True)
        (PYTHON_TOOLS / "sitecustomize.py").write_text(_SITE)
        installed.write_text(_REQUIREMENTS.read_text())
    sys.path.append(str(PYTHON_TOOLS))


def _install_cargo_mutants() -> None:
    program = CARGO_TOOLS / "bin/cargo-mutants"
    if program.exists():
        version = subprocess.run(
            [program, "mutants", "--version"], check=True, capture_output=True, text=True
        )
        if CARGO_MUTANTS_VERSION in version.stdout:
            return
    command = ["cargo", "install", "cargo-mutants", "--version", CARGO_MUTANTS_VERSION, "--locked", "--quiet"]
    command += ["--force", "--root", str(CARGO_TOOLS), "--target-dir", str(WORK / "cargo-mutants")]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
