# SPDX-License-Identifier: Apache-2.0
"""Records which objects of a store have been read completely and found identical to the segments that the log
moved there.
"""

import threading
from pathlib import Path

import structlog

from penstock.errors import DiskFailed, LogFull
from penstock.logstore.disk import Disk
from penstock.logstore.epochs import seal_json, unseal_json

_log = structlog.get_logger(__name__)


class TierProofs:
    """Objects proved intact, by name, each with its state in remote storage. Safe for concurrent use.

    With `writes`, the proofs are saved to a file, so that an object is read once in total and not once per
    process.
    """

    def __init__(self, disk: Disk, path: Path, *, writes: bool) -> None:
        self._disk = disk
        self._path = path
        self._writes = writes
        self._lock = threading.Lock()
        self._states: dict[str, str] | None = None

    def has(self, name: str, state: str) -> bool:
        """Return whether an object was proved in its current state."""
        with self._lock:
            if self._states is None:
                self._states = self._load()
            return self._states.get(name) == state

    def add(self, name: str, state: str) -> None:
        """Record that an object was proved."""
        with self._lock:
            self._states = {**(self._states or {}), **self._load(), name: state}
            self._keep(self._states)

    def remove(self, name: str) -> None:
        """Forget a removed object."""
        with self._lock:
            states = self._load()
            if states.pop(name, None) is not None:
                self._keep(states)
            self._states = states

    def _load(self) -> dict[str, str]:
        if not self._disk.exists(self._path):
            return {}
        match unseal_json(self._disk.read(self._path)):
            case {"objects": dict(states)}:
                return {str(name): str(state) for name, state in states.items()}
        _log.warning("proofs of objects in the tier cannot be read and are rebuilt", path=str(self._path))
        return {}

    def _keep(self, states: dict[str, str]) -> None:
        if not self._writes:
            return
        try:
            self._disk.write_atomic(self._path, seal_json({"objects": states}))
        except (LogFull, DiskFailed) as problem:
            # If the proofs cannot be saved, the next process proves the object again.
            _log.warning("proofs of objects in the tier are not kept", reason=str(problem))
