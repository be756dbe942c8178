# SPDX-License-Identifier: Apache-2.0
"""A copy of the repository whose files may be mutated, and programs that run in it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tools.mutants.places import CARGO_TARGET, PYTHON_TOOLS, RECORD_VARIABLE, ROOT, TREE, TREE_VARIABLE

EXTENSION = "src/penstock/_native.abi3.so"
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tools.mutants.recording")
_CLEANUP_SECONDS_MAX = 15.0
_ORIGINAL = ".original"
_LEFT_OUT = {"build", "target", "dist", "__pycache__"}


class Outcome(NamedTuple):
    """The outcome of a program. `status` is None if the program was stopped at its time limit."""

    status: int | None
    output: str


def synchronize(source: Path = ROOT, tree: Path = TREE) -> None:
    """Make the copy equal to the repository. Unchanged files keep their times, so they are not recompiled."""
    names = set(_files(source))
    tree.mkdir(parents=True, exist_ok=True)
    for name in set(_files(tree)) - names:
        (tree / name).unlink()
    for name in names:
        content = (source / name).read_bytes()
        target = tree / name
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target)
        target.chmod((source / name).stat().st_mode)


def compile_python(tree: Path = TREE) -> None:
    """Compile the copy's Python files. Imports check their hashes, so a mutant is always compiled again."""
    folders = [name for name in ("src", "tests", "tools", "bench", "demo") if (tree / name).is_dir()]
    command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", *folders]
    subprocess.run(command, cwd=tree, check=True)


@contextlib.contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    """Replace a file's content during the block.

    The original is kept next to it, so that `restore` can recover it after a run was killed.
    """
    original = path.with_name(path.name + _ORIGINAL)
    shutil.copyfile(path, original)
    try:
        # A process may have the old library mapped, so write a new file instead of overwriting its inode.
        part = path.with_name(path.name + ".part")
        part.write_bytes(content)
        part.replace(path)
        yield
    finally:
        original.replace(path)
        # Cargo recompiles files that are newer than the last build.
        path.touch()


def restore(tree: Path) -> None:
    """Restore files that a killed run left replaced in a copy."""
    for original in tree.rglob(f"*{_ORIGINAL}"):
        path = original.with_name(original.name.removesuffix(_ORIGINAL))
        original.replace(path)
        path.touch()


def environment(tree: Path = TREE) -> dict[str, str]:
    """Return an environment that imports the copy's modules, not the repository's."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        # With CI set, all flavors would be required.
        if name != "CI" and not name.startswith(("PYTEST", "COV"))
    }
    return {
        # A third flavor would test the same lines a third time.
        "PENSTOCK_FLAVORS": "mysql,mariadb",
        **inherited,
        "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}{os.pathsep}{PYTHON_TOOLS}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "CARGO_TARGET_DIR": str(CARGO_TARGET),
        TREE_VARIABLE: str(tree),
    }


def run_pytest(
    arguments: list[str], seconds: float, tree: Path = TREE, variables: Mapping[str, str] | None = None
) -> tuple[Outcome, list[dict[str, Any]]]:
    """Run tests in the copy; return pytest's outcome and the records of the recording plugin."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "tests.jsonl"
        record.touch()
        variables = {**(variables or {}), RECORD_VARIABLE: str(record)}
        outcome = run([sys.executable, *_PYTEST, *arguments], seconds, tree, variables)
        return outcome, [json.loads(line) for line in record.read_text().splitlines()]


def run(
    command: list[str], seconds: float, tree: Path = TREE, variables: Mapping[str, str] | None = None
) -> Outcome:
    """Run a program in the copy; at the time limit, stop it and every process that it started."""
    process = subprocess.Popen(
        command,
        cwd=tree,
        env={**environment(tree), **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        # An interrupted pytest still ends the servers that it started.
        _signal_group(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_CLEANUP_SECONDS_MAX)
        _signal_group(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return Outcome(None, output)
    # A mutant may leave processes behind that hold ports and memory.
    _signal_group(process.pid, signal.SIGKILL)
    return Outcome(process.returncode, output)


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


def _files(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name for name in folders if name not in _LEFT_OUT and (not name.startswith(".") or name == ".ci")
        ]
        for name in names:
            if not name.endswith(".pyc"):
                yield os.path.relpath(os.path.join(folder, name), root)
