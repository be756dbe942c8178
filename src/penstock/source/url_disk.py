# SPDX-License-Identifier: Apache-2.0
"""A folder of an object store as a disk that is only read, by any URL that fsspec knows: `s3://bucket/shop`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NoReturn, Self

from penstock.errors import ConnectionLost, OptionInvalid, SourceMissing
from penstock.limits import MIB
from penstock.logstore.disk import AppendFile, Disk, Held
from penstock.logstore.object_store import open_store

# The folder's own path on its disk.
ROOT = Path("/")

_HINT_URL = "Write penstock://host:7070/instance, mysql://user@host, or s3://bucket/folder of a log"

# A request costs about as much as this takes, so that is the least that is asked for.
_REQUEST_BYTES = MIB


class UrlDisk(Disk):
    """The files below a URL, by their path below it. Every method that would write raises OptionInvalid.

    Raises DependencyMissing where fsspec, or the package for this kind of URL, is not installed.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._files, self._root = open_store(url, _HINT_URL)

    def open_read(self, path: Path) -> "UrlFile":
        """Open a file for reading. Raises SourceMissing, ConnectionLost."""
        with self._reaching(path):
            return UrlFile(self, path, int(self._files.info(self._place(path))["size"]))

    def list(self, folder: Path) -> list[str]:
        """Return the names in a folder, sorted; none where there is no folder."""
        try:
            with self._reaching(folder):
                # Other processes write here, so nothing that fsspec remembers counts.
                self._files.invalidate_cache(self._place(folder))
                found = self._files.ls(self._place(folder), detail=False)
        except SourceMissing:
            return []
        return sorted(PurePosixPath(one).name for one in found)

    def exists(self, path: Path) -> bool:
        """Tell whether there is such a file or folder."""
        with self._reaching(path):
            return bool(self._files.exists(self._place(path)))

    def size(self, path: Path) -> int:
        """Return a file's size."""
        with self._reaching(path):
            return int(self._files.info(self._place(path))["size"])

    def get(self, path: Path, start: int, stop: int) -> bytes:
        """Return the bytes of [start, stop) of a file."""
        with self._reaching(path):
            return bytes(self._files.cat_file(self._place(path), start=start, end=stop))

    def append_open(self, path: Path) -> AppendFile:
        """Refuse."""
        self._refuse()

    def rename(self, old: Path, new: Path) -> None:
        """Refuse."""
        self._refuse()

    def remove(self, path: Path) -> None:
        """Refuse."""
        self._refuse()

    def make_folder(self, path: Path) -> None:
        """Refuse."""
        self._refuse()

    def remove_folder(self, path: Path) -> None:
        """Refuse."""
        self._refuse()

    def sync_folder(self, path: Path) -> None:
        """Refuse."""
        self._refuse()

    def free_bytes(self, folder: Path) -> int:
        """Refuse."""
        self._refuse()

    def lock(self, path: Path) -> Held:
        """Refuse."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise OptionInvalid(f"{self._url} is only read", hint="A log is written on its daemon's own disk")

    def _place(self, path: Path) -> str:
        return f"{self._root}/{path.relative_to(ROOT)}" if path != ROOT else self._root

    @contextmanager
    def _reaching(self, path: Path) -> Iterator[None]:
        """Turn what a store answers with into our errors; each kind of store has exceptions of its own."""
        try:
            yield
        except FileNotFoundError as problem:
            raise SourceMissing(f"there is no {self._url}{path}") from problem
        except Exception as problem:
            raise ConnectionLost(
                f"{self._url} does not answer as it should: {type(problem).__name__}",
                position=f"{path.name}:0",
                hint="Check its address, its credentials and the network",
            ) from problem


class UrlFile:
    """A file of a store, open for reading; the last piece that was fetched is kept. Closing does nothing."""

    def __init__(self, disk: UrlDisk, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._disk = disk
        self._kept: tuple[int, bytes] = (0, b"")

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes of [start, stop), fewer where the file ends."""
        stop = min(stop, self.size)
        if start >= stop:
            return b""
        at, piece = self._kept
        if not at <= start <= stop <= at + len(piece):
            at, piece = (
                start,
                self._disk.get(self.path, start, min(max(stop, start + _REQUEST_BYTES), self.size)),
            )
            self._kept = at, piece
        return piece[start - at : stop - at]

    def close(self) -> None:
        """Let go of what was kept."""
        self._kept = (0, b"")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
