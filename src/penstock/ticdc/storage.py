# SPDX-License-Identifier: Apache-2.0
"""The folder or bucket that TiCDC's storage sink writes to."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from penstock.errors import ConnectionLost, EventMalformed, OptionInvalid, SourceMissing
from penstock.logstore.object_store import open_store
from penstock.settings.ticdc import SCHEME
from penstock.ticdc.layout import METADATA

_CHECKPOINT = "checkpoint-ts"
_HINT = "Write ticdc+file:///folder or ticdc+s3://bucket/prefix: the changefeed's sink URI, no parameters"

Value = TypeVar("Value")


class SinkStorage(Protocol):
    """The files below the sink's root. Paths use slashes. Methods raise ConnectionLost, SourceMissing."""

    def sizes(self) -> dict[str, int]:
        """Return the size of every file."""

    def read(self, path: str, start: int = 0, bytes_max: int | None = None) -> bytes:
        """Return a file's content from an offset on."""


class LocalStorage:
    """A folder on this host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sizes(self) -> dict[str, int]:
        """Return the size of every file."""
        sizes = {}
        for parent, _, names in os.walk(self._folder, onerror=_raise):
            for name in names:
                path = Path(parent, name)
                try:
                    sizes[path.relative_to(self._folder).as_posix()] = path.stat().st_size
                except FileNotFoundError:
                    # Skip the unfinished file, which has its final name by now.
                    continue
        return sizes

    def read(self, path: str, start: int = 0, bytes_max: int | None = None) -> bytes:
        """Return a file's content from an offset on."""
        try:
            with (self._folder / path).open("rb") as file:
                file.seek(start)
                return file.read(-1 if bytes_max is None else bytes_max)
        except OSError as problem:
            raise _missing(self._folder / path, problem) from problem


class ObjectStorage:
    """A prefix of an object store."""

    def __init__(self, files: Any, root: str) -> None:
        self._files, self._root = files, root

    def sizes(self) -> dict[str, int]:
        """Return the size of every file."""
        details = self._ask(lambda: self._files.find(self._root, detail=True))
        prefix = f"{self._root}/"
        return {path.removeprefix(prefix): int(file["size"]) for path, file in details.items()}

    def read(self, path: str, start: int = 0, bytes_max: int | None = None) -> bytes:
        """Return a file's content from an offset on."""
        end = None if bytes_max is None else start + bytes_max
        content: bytes = self._ask(lambda: self._files.cat_file(f"{self._root}/{path}", start=start, end=end))
        return content

    def _ask(self, request: Callable[[], Value]) -> Value:
        try:
            # The library would otherwise cache the listing of a store.
            self._files.invalidate_cache()
            return request()
        except FileNotFoundError as problem:
            raise _missing(self._root, problem) from problem
        except Exception as problem:
            # Each store has its own exceptions, and most of them are network errors.
            raise ConnectionLost(f"{self._root}: {problem!r}") from problem


def open_storage(source: str) -> SinkStorage:
    """Return the storage of a `ticdc+...` URL. Raises OptionInvalid, DependencyMissing."""
    url = source.strip().removeprefix(SCHEME)
    kind, _, path = url.partition("://")
    if kind == "file":
        if not path.startswith("/"):
            raise OptionInvalid(f"{source} has no absolute path", hint=_HINT)
        return LocalStorage(Path(path))
    return ObjectStorage(*open_store(url, _HINT))


def read_checkpoint(storage: SinkStorage) -> int:
    """Return the commit timestamp below which all changes are in the files.

    Raises SourceMissing before TiCDC has written it, and EventMalformed.
    """
    content = storage.read(METADATA)
    try:
        values = json.loads(content)
        checkpoint = values[_CHECKPOINT]
        if values.keys() != {_CHECKPOINT} or not isinstance(checkpoint, int) or not 0 < checkpoint < 1 << 63:
            raise ValueError
    except (ValueError, TypeError, KeyError) as problem:
        raise EventMalformed(
            f"{METADATA} of the storage sink has {content[:80]!r}, not its checkpoint",
            hint="Check that the source is the root of a storage sink",
        ) from problem
    return checkpoint


def _missing(path: Any, problem: OSError) -> SourceMissing:
    return SourceMissing(
        f"{path} of the storage sink cannot be read: {problem.strerror or problem}",
        hint="Check the path, the account's permissions, and that the changefeed is running",
    )


def _raise(problem: OSError) -> None:
    raise _missing(problem.filename, problem) from problem
