# SPDX-License-Identifier: Apache-2.0
"""A read-only disk for log files in an object store, at any URL that fsspec supports: `s3://bucket/shop`."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NoReturn

from penstock.closing import Closing
from penstock.errors import ConnectionLost, OptionInvalid, SourceMissing
from penstock.limits import MIB
from penstock.logstore.disk import AppendFile, Disk, Held
from penstock.logstore.object_store import open_store

# The root folder of the disk.
ROOT = Path("/")

_HINT_URL = "Write penstock://host:7070/instance, mysql://user@host, or s3://bucket/folder of a log"

# A request costs about as much as reading this many bytes, so each request reads at least this many.
_REQUEST_BYTES = MIB


class UrlDisk(Disk):
    """The files below a URL, by relative path. Every method that would write raises OptionInvalid.

    Raises DependencyMissing if fsspec or its package for the scheme is not installed.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._files, self._root = open_store(url, _HINT_URL)

    def open_read(self, path: Path) -> "UrlFile":
        """Open a file for reading. Raises SourceMissing, ConnectionLost."""
        with self._reaching(path):
            return UrlFile(self, path, int(self._files.info(self._store_path(path))["size"]))

    def list(self, folder: Path) -> list[str]:
        """Return the names in a folder, sorted. A missing folder has none."""
        try:
            with self._reaching(folder):
                # Other processes write to the folder, so drop fsspec's cached listing.
                self._files.invalidate_cache(self._store_path(folder))
                names = self._files.ls(self._store_path(folder), detail=False)
        except SourceMissing:
            return []
        return sorted(PurePosixPath(name).name for name in names)

    def exists(self, path: Path) -> bool:
        """Return whether a file or folder exists."""
        with self._reaching(path):
            return bool(self._files.exists(self._store_path(path)))

    def size(self, path: Path) -> int:
        """Return a file's size."""
        with self._reaching(path):
            return int(self._files.info(self._store_path(path))["size"])

    def get(self, path: Path, start: int, stop: int) -> bytes:
        """Return the bytes of [start, stop) of a file."""
        with self._reaching(path):
            return bytes(self._files.cat_file(self._store_path(path), start=start, end=stop))

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

    def _store_path(self, path: Path) -> str:
        return f"{self._root}/{path.relative_to(ROOT)}" if path != ROOT else self._root

    @contextmanager
    def _reaching(self, path: Path) -> Iterator[None]:
        """Translate store exceptions into Penstock errors. Every kind of store has its own exceptions."""
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


class UrlFile(Closing):
    """A file of a remote store, open for reading. The most recently fetched piece is cached. Closing it has
    no effect.
    """

    def __init__(self, disk: UrlDisk, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._disk = disk
        self._kept: tuple[int, bytes] = (0, b"")

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes of [start, stop), fewer at the end of the file."""
        stop = min(stop, self.size)
        if start >= stop:
            return b""
        piece_start, piece = self._kept
        if not piece_start <= start <= stop <= piece_start + len(piece):
            piece_start, piece = (
                start,
                self._disk.get(self.path, start, min(max(stop, start + _REQUEST_BYTES), self.size)),
            )
            self._kept = piece_start, piece
        return piece[start - piece_start : stop - piece_start]

    def close(self) -> None:
        """Drop the cached piece."""
        self._kept = (0, b"")
