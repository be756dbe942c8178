# SPDX-License-Identifier: Apache-2.0
"""An operator's decisions to commit or roll back transactions whose outcome cannot be determined otherwise.
Each decision is a small file.

    <the Pump's folder>/decisions/470639218043387904.json           {"commit_ts": 470639218044174336}
    <the Pump's folder>/decisions/carried-out/470639218043387904.json
    <the Pump's folder>/decisions/refused/470639218043387904.json

Anyone who may write to the Pump's folder may decide, so the running Pump needs no port for it. A decision
takes effect when its prewrite arrives. After the decision has been applied or refused, its file is kept as a
record, with the time and the reason.
"""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import structlog

from penstock.errors import OptionInvalid
from penstock.logstore.disk import Disk
from penstock.logstore.epochs import seal_json, unseal_json

_log = structlog.get_logger(__name__)

_NAME = re.compile(r"(\d{1,20})\.json")
_CARRIED_OUT, _REFUSED = "carried-out", "refused"


def check_decision(start_ts: int, commit_ts: int) -> None:
    """Raise OptionInvalid for a commit before the transaction began; a `commit_ts` of 0 is a rollback."""
    if commit_ts and commit_ts <= start_ts:
        raise OptionInvalid(f"a transaction that began at {start_ts} cannot commit at {commit_ts}")


class Decisions:
    """The decisions stored in a Pump's folder. Every method raises DiskFailed, LogFull."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk = disk
        self._folder = folder / "decisions"
        # Unreadable files that were reported.
        self._reported: set[Path] = set()

    def check(self, start_ts: int, commit_ts: int) -> None:
        """Raise OptionInvalid for an impossible decision, or if the transaction was decided before."""
        check_decision(start_ts, commit_ts)
        self._refuse_decided(start_ts)

    def put(self, start_ts: int, commit_ts: int) -> Path:
        """Decide a transaction: a commit, or a rollback if `commit_ts` is 0. Returns the decision's file.

        Raises OptionInvalid if the transaction was decided before.
        """
        self._refuse_decided(start_ts)
        path = self._folder / f"{start_ts}.json"
        self._disk.make_folder(self._folder)
        self._disk.write_atomic(path, seal_json({"commit_ts": commit_ts}))
        return path

    def waiting(self) -> Iterator[tuple[int, int]]:
        """Yield the start and commit timestamps of decisions that were not applied yet."""
        for name in self._disk.list(self._folder):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            path, record = self._folder / name, self._folder / _CARRIED_OUT / name
            commit_ts = self._read_outcome(path)
            if commit_ts is None:
                continue
            if not self._disk.exists(record):
                yield int(match[1]), commit_ts
                continue
            before = self._read_outcome(record)
            if commit_ts == before:
                # Remove the file, which a Pump left when it was killed.
                self._disk.remove(path)
            else:
                self.close(int(match[1]), commit_ts, f"it was decided before: {_outcome_text(before)}")

    def _refuse_decided(self, start_ts: int) -> None:
        record = self._folder / _CARRIED_OUT / f"{start_ts}.json"
        if self._disk.exists(record):
            raise OptionInvalid(
                f"the transaction {start_ts} was decided before: {_outcome_text(self._read_outcome(record))}",
                hint=f"The decision was carried out: {record}",
            )

    def _read_outcome(self, path: Path) -> int | None:
        """Return the commit timestamp of a decision, 0 for a rollback, None if it cannot be read."""
        try:
            return int(unseal_json(self._disk.read(path))["commit_ts"])
        except (KeyError, ValueError, TypeError) as problem:
            if path not in self._reported:
                _log.error("a decision cannot be read", path=str(path), why=repr(problem))
            self._reported.add(path)
            return None

    def close(self, start_ts: int, commit_ts: int, refusal: str | None) -> None:
        """Record that a decision was applied, or why it was refused."""
        if refusal is None:
            _log.warning("an operator's decision was carried out", start_ts=start_ts, commit_ts=commit_ts)
        else:
            _log.error(
                "an operator's decision is refused", start_ts=start_ts, commit_ts=commit_ts, why=refusal
            )
        folder = self._folder / (_CARRIED_OUT if refusal is None else _REFUSED)
        values = {"commit_ts": commit_ts, "time": round(time.time()), "why": refusal}
        self._disk.make_folder(folder)
        self._disk.write_atomic(folder / f"{start_ts}.json", seal_json(values))
        self._disk.remove(self._folder / f"{start_ts}.json")

    def hint(self, start_ts: int) -> str:
        """Return what an operator can do about an undecided transaction."""
        return (
            f"Let TiKV be reached, or find out its outcome and run:"
            f" penstock pump decide {self._folder.parent} {start_ts} --commit TIMESTAMP (or --rollback)"
        )


def _outcome_text(commit_ts: int | None) -> str:
    if commit_ts is None:
        return "the outcome cannot be read"
    return f"it committed at {commit_ts}" if commit_ts else "it was rolled back"
