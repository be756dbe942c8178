# SPDX-License-Identifier: Apache-2.0
"""The results of long sweeps: a JSON list in one file, whole at every moment."""

import contextlib
import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tools.suite.listing import ROOT

# A sweep that the time limit cut off. It has no result yet, and is begun again.
UNFINISHED = "unfinished"
GOOD_OUTCOMES = ("passed", "skipped", UNFINISHED)


class ResultsInUse(RuntimeError):
    """Another run writes the same file of results."""


@dataclass(frozen=True)
class SweepResult:
    """How one sweep ended with one seed; `seed` is None for a sweep that draws nothing from it.

    `when` is the end, in UTC. `failures` holds the id and the last lines of each failed test.
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

    @property
    def key(self) -> tuple[str, int | None]:
        """What there is one result of."""
        return self.sweep, self.seed


class ResultsFile:
    """A file of results for one writer at a time. Each change replaces the file as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._results = {}
        if path.exists():
            results = (SweepResult(**entry) for entry in json.loads(path.read_text()))
            self._results = {result.key: result for result in results}

    def get(self, sweep: str, seed: int | None) -> SweepResult | None:
        """Return the result of a sweep and seed, an unfinished one included."""
        return self._results.get((sweep, seed))

    def has(self, sweep: str, seed: int | None) -> bool:
        """Tell whether a sweep ended with a seed."""
        result = self.get(sweep, seed)
        return result is not None and result.outcome != UNFINISHED

    def append(self, result: SweepResult) -> None:
        """Write a result behind the others; an earlier one of the same sweep and seed is replaced."""
        self._results.pop(result.key, None)
        self._results[result.key] = result
        self._write()

    def forget(self, keys: Iterable[tuple[str, int | None]]) -> None:
        """Drop results. The file as it was stays beside this one, with `.previous` in its name."""
        if self.path.exists():
            previous = self.path.with_suffix(f".previous{self.path.suffix}")
            previous.write_text(self.path.read_text())
        for key in keys:
            self._results.pop(key, None)
        self._write()

    def _write(self) -> None:
        entries = [asdict(result) for result in self._results.values()]
        unfinished = self.path.with_suffix(".new")
        with unfinished.open("w") as file:
            json.dump(entries, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.path)


@contextlib.contextmanager
def only_writer(path: Path) -> Iterator[None]:
    """Hold the right to write a file of results for the block. Raises ResultsInUse."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResultsInUse(f"another run is writing {path}") from None
        yield


def machine() -> dict[str, Any]:
    """Describe this machine as far as it decides how fast tests run."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """Return the commit of the working tree, with `+` where files differ from it; None outside of git."""
    try:
        head = _git("rev-parse", "HEAD").strip()
        return f"{head}+" if _git("status", "--porcelain") else head
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout
