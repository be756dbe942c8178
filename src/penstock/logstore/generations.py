# SPDX-License-Identifier: Apache-2.0
"""The files with a log's table definitions as they are sent to a copy of the log: complete, and checked by a
CRC32.
"""

import zlib
from dataclasses import dataclass

from penstock.errors import ServerBusy, SourceMissing
from penstock.logstore.disk import Disk
from penstock.logstore.layout import Layout
from penstock.logstore.schemas import FOLDER, SUFFIX


@dataclass(frozen=True)
class Generation:
    """One file of table definitions: the commit version of its snapshot, its size and its checksum at one
    point in time.
    """

    version: int
    bytes: int
    crc32: int


class GenerationFiles:
    """The files of table definitions in a log's folder. The process that writes them may change them
    concurrently.
    """

    def __init__(self, disk: Disk, layout: Layout) -> None:
        self._disk = disk
        self._folder = layout.folder / FOLDER

    def list(self) -> list[Generation]:
        """Return the files in ascending order."""
        generations = []
        for name in self._disk.list(self._folder):
            version = name.removesuffix(SUFFIX)
            if name == version or not version.isdecimal():
                continue
            try:
                content = self._disk.read(self._folder / name)
            except SourceMissing:
                # The file has just been removed, together with the segments that contain its positions.
                continue
            generations.append(Generation(int(version), len(content), zlib.crc32(content)))
        return sorted(generations, key=lambda generation: generation.version)

    def read(self, version: int) -> bytes:
        """Return the content of a file. Raises SourceMissing."""
        return self._disk.read(self._folder / self._name(version))

    def store(self, generation: Generation, content: bytes) -> None:
        """Replace a file durably. Raises ServerBusy if the content does not match its checksum, LogFull,
        DiskFailed.
        """
        if (len(content), zlib.crc32(content)) != (generation.bytes, generation.crc32):
            raise ServerBusy("table definitions changed while they were copied", hint="Ask again")
        self._disk.make_folder(self._folder)
        self._disk.write_atomic(self._folder / self._name(generation.version), content)

    def remove(self, version: int) -> None:
        """Remove a file durably."""
        self._disk.remove(self._folder / self._name(version))
        self._disk.sync_folder(self._folder)

    def _name(self, version: int) -> str:
        return f"{version:019d}{SUFFIX}"
