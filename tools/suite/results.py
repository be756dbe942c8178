# SPDX-License-Identifier: Apache-2.0
"""The results of long sweeps: a JSON list in one file, which is replaced atomically."""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.suite.listing import ROOT

# The time limit cut the sweep off. It has no result yet and will be restarted.
UNFINISHED = "unfinished"
# Nothing ran, for example because the machine is missing a part. This is neither a success nor a result.
SKIPPED = "skipped"
GOOD_OUTCOMES = ("passed", UNFINISHED)


class ResultsInUse(RuntimeError):
    """Another run is writing the same results file."""


@dataclass(frozen=True)
class SweepResult:
    """The outcome of a sweep with one seed.

    `seed` is None for a sweep without random numbers. `when` is the time at which it ended, in UTC.
    `failures` contains the id and the last lines of each failed test, or of each skipped test if no test ran.
    `late_starts` lists the servers that needed a second start.
    """

    sweep: str
    seed: int | None
    outcome: str
    seconds: float
    when: str
    commit: str | None
    machine: dict[str, Any]
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)
    late_starts: list[str] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int | None]:
        """The key of the result. A file has at most one result for each key."""
        return self.sweep, self.seed


class ResultsFile:
    """A results file with a single writer. Each change replaces the file atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._results = {}
        if path.exists():
            results = (SweepResult(**entry) for entry in json.loads(path.read_text()))
            self._results = {result.key: result for result in results}

    def get(self, sweep: str, seed: int | None) -> SweepResult | None:
        """Return the result of a sweep and seed, including an unfinished result."""
        return self._results.get((sweep, seed))

    def has(self, sweep: str, seed: int | None, tree: str | None) -> bool:
        """Return whether a sweep has ended with a seed on a state of the working tree (see `tree_state`)."""
        result = self.get(sweep, seed)
        if result is None or tree is None or result.commit != tree:
            return False
        return result.outcome not in (UNFINISHED, SKIPPED)

    def append(self, result: SweepResult) -> None:
        """Append a result; replace an earlier result of the same sweep and seed."""
        self._results.pop(result.key, None)
        self._results[result.key] = result
        self._write()

    def forget(self, keys: Iterable[tuple[str, int | None]]) -> None:
        """Drop results. A copy of the old file is kept with `.previous` in its name."""
        if self.path.exists():
            previous = self.path.with_suffix(f".previous{self.path.suffix}")
            previous.write_text(self.path.read_text())
        for key in keys:
            self._results.pop(key, None)
        self._write()

    def _write(self) -> None:
        replace_json(self.path, [asdict(result) for result in self._results.values()])


def replace_json(path: Path, entries: list[dict[str, Any]]) -> None:
    """Replace a file with a JSON list atomically and durably."""
    unfinished = path.with_suffix(".new")
    with unfinished.open("w") as file:
        json.dump(entries, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Lock a results file for writing during the block. Raises ResultsInUse."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResultsInUse(f"another run is writing {path}") from None
        yield


def machine() -> dict[str, Any]:
    """Describe the parts of this machine that affect how fast tests run."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def tree_state(root: Path = ROOT) -> str | None:
    """Return a name for the state of the working tree, or None outside of git.

    The name is the commit, followed by `+` and a digest of all differences from the commit, if there are any.
    If two states have the same name, they have the same files.
    """

    def git(*words: str) -> bytes:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, check=True).stdout

    try:
        head = git("rev-parse", "HEAD").decode().strip()
        changes = hashlib.sha256(git("diff", "HEAD", "--binary"))
        untracked = git("ls-files", "--others", "--exclude-standard", "-z")
    except (OSError, subprocess.CalledProcessError):
        return None
    for name in filter(None, untracked.split(b"\0")):
        path = root / os.fsdecode(name)
        if path.is_symlink():
            content = os.fsencode(path.readlink())
        else:
            # A nested repository is listed as a folder.
            content = path.read_bytes() if path.is_file() else b""
        changes.update(name + b"\0" + hashlib.sha256(content).digest())
    clean = changes.digest() == hashlib.sha256().digest()
    return head if clean else f"{head}+{changes.hexdigest()[:12]}"
