# SPDX-License-Identifier: Apache-2.0
"""Records which Pumps are merged into a log, in one small file per Pump next to the log.

    <log>/tidb-pumps/pump1%3A8250.json    {"after": 470639218044174336}

A Pump whose entry in the registry is gone or unreadable may still hold transactions. Its file keeps it in the
merge, even after a restart, until it can be read, or until an operator deletes the file.
"""

from collections.abc import Collection
from pathlib import Path
from urllib.parse import quote, unquote

from penstock.errors import LogDamaged
from penstock.logstore.disk import Disk
from penstock.logstore.epochs import seal_json, unseal_json

_FOLDER = "tidb-pumps"
_SUFFIX = ".json"


class KnownPumps:
    """The files in which a log records its Pumps. Used by one thread at a time. Every method raises
    DiskFailed, LogFull.
    """

    def __init__(self, disk: Disk, log_folder: Path) -> None:
        """Read the files. Raises LogDamaged for a damaged file."""
        self._disk = disk
        self._folder = log_folder / _FOLDER
        # The commit timestamp after which to read a Pump; None means the log's position.
        self._after: dict[str, int | None] = {}
        for pump in self._stored():
            path = self.path(pump)
            try:
                after = unseal_json(disk.read(path))["after"]
            except KeyError as problem:
                raise LogDamaged(
                    f"{path} is damaged, which says after what the Pump {pump} is to be read",
                    hint=f"Delete {path} and start the daemon again: the Pump is read from the log's end",
                ) from problem
            self._after[pump] = after

    @property
    def pumps(self) -> Collection[str]:
        """The Pumps in the merge."""
        return tuple(self._after)

    def path(self, pump: str) -> Path:
        """Return the file of a Pump."""
        return self._folder / f"{quote(pump, safe='')}{_SUFFIX}"

    def after(self, pump: str, position: int) -> int:
        """Return the commit timestamp after which to read a known Pump, while the log is at `position`."""
        after = self._after[pump]
        return position if after is None else min(after, position)

    def is_behind(self, pump: str) -> bool:
        """Return whether a Pump has to be read from before the log's position."""
        return self._after.get(pump) is not None

    def put(self, pump: str, after: int | None) -> None:
        """Record durably that a Pump is in the merge, and the timestamp after which to read it."""
        if pump not in self._after or self._after[pump] != after:
            self._disk.make_folder(self._folder)
            self._disk.write_atomic(self.path(pump), seal_json({"after": after}))
            self._after[pump] = after

    def remove(self, pump: str) -> None:
        """Record that everything from a Pump was read, or was given up."""
        if pump in self._after:
            del self._after[pump]
            if self._disk.exists(self.path(pump)):
                self._disk.remove(self.path(pump))

    def take_discarded(self) -> Collection[str]:
        """Return the Pumps whose files an operator deleted, and forget them."""
        discarded = self._after.keys() - set(self._stored())
        for pump in discarded:
            del self._after[pump]
        return discarded

    def settle(self) -> None:
        """Read no Pump from before the log's position any more, because an operator compares the tables."""
        for pump in self._after:
            self.put(pump, None)

    def _stored(self) -> list[str]:
        return [
            unquote(name.removesuffix(_SUFFIX))
            for name in self._disk.list(self._folder)
            if name.endswith(_SUFFIX)
        ]
