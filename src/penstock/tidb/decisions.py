# SPDX-License-Identifier: Apache-2.0
"""An operator's decisions about transactions that no one else can decide: a small file for each.

    <the Pump's folder>/decisions/470639218043387904.json    {"commit_ts": 470639218044174336}

Whoever may write to the Pump's folder may decide, so the running Pump needs no port for it.
"""

import re
from collections.abc import Container, Iterator
from pathlib import Path

import structlog

from penstock.logstore.disk import Disk
from penstock.logstore.epochs import seal_json, unseal_json

_log = structlog.get_logger(__name__)

_NAME = re.compile(r"(\d{1,20})\.json")


class Decisions:
    """The decisions in a Pump's folder."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk = disk
        self._folder = folder / "decisions"

    def put(self, start_ts: int, commit_ts: int) -> Path:
        """Decide a transaction: a commit, or a rollback if `commit_ts` is 0. Returns the file."""
        path = self._folder / f"{start_ts}.json"
        self._disk.make_folder(self._folder)
        self._disk.write_atomic(path, seal_json({"commit_ts": commit_ts}))
        return path

    def take(self, open_transactions: Container[int]) -> Iterator[tuple[int, int]]:
        """Yield the start and commit timestamps of decided transactions. The others' files are removed.

        A file stays until its transaction is no longer open, so a crash does not lose a decision.
        """
        for name in self._disk.list(self._folder):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            path, start_ts = self._folder / name, int(match[1])
            if start_ts not in open_transactions:
                _log.info("a decision was carried out, or is of no open transaction", start_ts=start_ts)
                self._disk.remove(path)
                continue
            try:
                commit_ts = int(unseal_json(self._disk.read(path))["commit_ts"])
            except (KeyError, ValueError, TypeError) as problem:
                _log.error("a decision cannot be read", path=str(path), why=str(problem))
                continue
            _log.warning("an operator decided a transaction", start_ts=start_ts, commit_ts=commit_ts)
            yield start_ts, commit_ts

    def hint(self, start_ts: int) -> str:
        """Return what an operator can do about an undecided transaction."""
        return (
            f"Let TiKV be reached, or find out its outcome and run:"
            f" penstock pump decide {self._folder.parent} {start_ts} --commit TIMESTAMP (or --rollback)"
        )
