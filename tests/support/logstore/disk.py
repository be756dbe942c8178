# SPDX-License-Identifier: Apache-2.0
"""Simulate a disk where power can fail at every step and unsynced bytes may be lost.

Files are held in memory. Synced bytes survive the failure; `Loss` selects what happens to unsynced bytes.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Self

from penstock.errors import DiskFailed, LogFull, LogLocked, SourceMissing
from penstock.logstore.disk import Buffer, Disk

PAGE_BYTES = 64


class PowerLost(BaseException):
    """The power has failed. No production code catches this error."""


class Loss(Enum):
    """What happens to unsynced bytes."""

    KEEP = "keep"
    DROP = "drop"
    GARBLE = "garble"


@dataclass
class Content:
    """The content of one file, and the part of it that survives a power failure."""

    now: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    # Whether the operating system believes that all bytes are on the disk.
    clean: bool = False

    def after_loss(self, loss: Loss, chance: random.Random) -> bytes:
        """Return the content after the power failure."""
        if loss is Loss.KEEP or bytes(self.now) == self.synced:
            return bytes(self.now)
        if loss is Loss.DROP:
            return self.synced
        # Any page written since the last sync may be old, new or garbage; so may the file size.
        size = chance.choice([len(self.synced), len(self.now), chance.randint(0, len(self.now))])
        size = max(size, min(len(self.synced), len(self.now)))
        content = bytearray(size)
        for start in range(0, size, PAGE_BYTES):
            stop = min(start + PAGE_BYTES, size)
            new, old = bytes(self.now[start:stop]), self.synced[start:stop]
            if new == old:
                content[start:stop] = old
                continue
            kept = min(_same_bytes(new, old), stop - start)
            kinds = [new.ljust(stop - start, b"\0"), old.ljust(stop - start, b"\0")]
            kinds.append(new[:kept] + chance.randbytes(stop - start - kept))
            content[start:stop] = chance.choice(kinds)
        return bytes(content)


def _same_bytes(first: bytes, other: bytes) -> int:
    for at, (left, right) in enumerate(zip(first, other, strict=False)):
        if left != right:
            return at
    return min(len(first), len(other))


class SimulatedDisk(Disk):
    """A disk that counts its steps and can stop at one of them.

    `steps` lists the completed steps. With a `stop_at` of n, the n-th step raises PowerLost instead of
    running. A stopped write may have been partly done. `room` limits the total size of all files.
    """

    def __init__(self, *, stop_at: int | None = None, room: int | None = None) -> None:
        self.steps: list[str] = []
        self.stop_at = stop_at
        self.room = room
        self.failing_syncs = False
        self.failed_syncs = 0
        self._names: dict[Path, Content] = {}
        self._synced_names: dict[Path, Content] = {}
        # Creations, renames and removals that no sync of the folder has confirmed yet, in order.
        self._pending: list[dict[Path, Content | None]] = []
        self._folders: set[Path] = {Path("/")}
        self._locked: set[Path] = set()

    # --- Failing ----------------------------------------------------------------------------

    def after_power_failure(self, loss: Loss, seed: int = 0) -> "SimulatedDisk":
        """Return the disk after the power has returned."""
        chance = random.Random(seed)
        names = dict(self._synced_names)
        if loss is Loss.KEEP:
            done = len(self._pending)
        elif loss is Loss.DROP:
            done = 0
        else:
            done = chance.randint(0, len(self._pending))
        for change in self._pending[:done]:
            _apply(names, change)
        recovered = SimulatedDisk(room=self.room)
        recovered._folders = set(self._folders)
        for path, content in names.items():
            after = content.after_loss(loss, chance)
            recovered._names[path] = Content(bytearray(after), after)
        recovered._synced_names = dict(recovered._names)
        return recovered

    def after_kill(self) -> "SimulatedDisk":
        """Return the disk as the next process finds it: no byte is lost, and no further byte is synced."""
        self.stop_at = None
        self._locked.clear()
        return self

    def copy(self) -> "SimulatedDisk":
        """Return a copy with every byte synced and no steps counted."""
        return self.after_power_failure(Loss.KEEP)

    def files(self) -> dict[Path, bytes]:
        """Return every file."""
        return {path: bytes(content.now) for path, content in sorted(self._names.items())}

    def put(self, path: Path, content: bytes) -> None:
        """Replace a file without counting a step."""
        self._names[path] = Content(bytearray(content), content)
        self._synced_names = dict(self._names)

    def step(self, what: str) -> None:
        """Count a step. If it is the step to fail at, lose power instead."""
        self.steps.append(what)
        if self.stop_at is not None and len(self.steps) > self.stop_at:
            raise PowerLost(what)

    # --- The disk ---------------------------------------------------------------------------

    def append_open(self, path: Path) -> "SimulatedFile":
        if path not in self._names:
            self._parent_of(path)
            self.step(f"create {path.name}")
            self._rename({path: Content()})
        return SimulatedFile(self, path, self._names[path])

    def open_read(self, path: Path) -> "SimulatedFile":
        return SimulatedFile(self, path, self._content_of(path))

    def rename(self, old: Path, new: Path) -> None:
        content = self._content_of(old)
        self._parent_of(new)
        self.step(f"rename {old.name} {new.name}")
        self._rename({old: None, new: content})

    def remove(self, path: Path) -> None:
        self._content_of(path)
        self.step(f"remove {path.name}")
        self._rename({path: None})

    def make_folder(self, path: Path) -> None:
        if path not in self._folders:
            self.make_folder(path.parent)
            self.step(f"make {path.name}")
            self._folders.add(path)

    def remove_folder(self, path: Path) -> None:
        if path not in self._folders:
            raise SourceMissing(f"there is no {path}")
        if not any(name.parent == path for name in self._names):
            self.step(f"remove {path.name}")
            self._folders.discard(path)

    def sync_folder(self, path: Path) -> None:
        if path not in self._folders:
            raise SourceMissing(f"there is no {path}")
        self.step(f"sync {path.name}/")
        # A sync also confirms all earlier changes to the same names.
        touched: set[Path] = set()
        confirmed, left = [], []
        for change in reversed(self._pending):
            if touched & change.keys() or any(name.parent == path for name in change):
                touched |= change.keys()
                confirmed.append(change)
            else:
                left.append(change)
        for change in reversed(confirmed):
            _apply(self._synced_names, change)
        self._pending = left[::-1]

    def list(self, folder: Path) -> list[str]:
        names = {path.name for path in self._names if path.parent == folder}
        return sorted(
            names | {path.name for path in self._folders if path.parent == folder and path != folder}
        )

    def exists(self, path: Path) -> bool:
        return path in self._names or path in self._folders

    def size(self, path: Path) -> int:
        return len(self._content_of(path).now)

    def free_bytes(self, folder: Path) -> int:
        return 1 << 40 if self.room is None else self.room - self.used

    def lock(self, path: Path) -> "SimulatedLock":
        self._parent_of(path)
        if path in self._locked:
            raise LogLocked(f"{path} is locked")
        self._locked.add(path)
        return SimulatedLock(self._locked, path)

    @property
    def used(self) -> int:
        """The total size of all files."""
        return sum(len(content.now) for content in self._names.values())

    def _content_of(self, path: Path) -> Content:
        if path not in self._names:
            raise SourceMissing(f"there is no {path}")
        return self._names[path]

    def _parent_of(self, path: Path) -> None:
        if path.parent not in self._folders:
            raise SourceMissing(f"there is no {path.parent}")

    def _rename(self, change: dict[Path, Content | None]) -> None:
        _apply(self._names, change)
        self._pending.append(change)


def _apply(names: dict[Path, Content], change: dict[Path, Content | None]) -> None:
    for path, content in change.items():
        if content is None:
            names.pop(path, None)
        else:
            names[path] = content


class SimulatedFile:
    """A file on the simulated disk, open for reading and appending."""

    def __init__(self, disk: SimulatedDisk, path: Path, content: Content) -> None:
        self.path = path
        self._disk = disk
        self._content = content

    @property
    def size(self) -> int:
        return len(self._content.now)

    def read(self, start: int, stop: int) -> bytes:
        return bytes(self._content.now[start:stop])

    def write(self, buffers: Sequence[Buffer]) -> None:
        written = b"".join(bytes(memoryview(buffer).cast("B")) for buffer in buffers)
        if self._disk.room is not None and self._disk.used + len(written) > self._disk.room:
            raise LogFull(f"there is no room left for {self.path}")
        try:
            self._disk.step(f"write {self.path.name} {len(written)}")
        except PowerLost:
            # The write was done in part.
            self._content.now += written[: len(written) // 2]
            raise
        self._content.now += written
        self._content.clean = False

    def truncate(self, size: int) -> None:
        if size != self.size:
            self._disk.step(f"truncate {self.path.name} {size}")
            del self._content.now[size:]

    def rewrite(self, start: int) -> None:
        if start < self.size:
            self._disk.step(f"rewrite {self.path.name} {start}")
            self._content.clean = False

    def sync(self) -> None:
        if self._disk.failing_syncs:
            # As on Linux, a failed sync marks the pages as clean, and no later sync writes them again.
            self._content.clean = True
            self._disk.failed_syncs += 1
            raise DiskFailed(f"syncing {self.path} failed")
        self._disk.step(f"sync {self.path.name}")
        if not self._content.clean:
            self._content.synced = bytes(self._content.now)

    def close(self) -> None:
        """Do nothing, because the file has no resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SimulatedLock:
    """A lock that stays locked until it is closed."""

    def __init__(self, locked: set[Path], path: Path) -> None:
        self._locked, self._path = locked, path

    @property
    def in_place(self) -> bool:
        return self._path in self._locked

    def close(self) -> None:
        self._locked.discard(self._path)
