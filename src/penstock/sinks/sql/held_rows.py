# SPDX-License-Identifier: Apache-2.0
"""What came of the tables of a part and is not in the target yet: of each key its last image."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from penstock.changes import Changes, Target
from penstock.sinks.images import LastImages
from penstock.sinks.sql.rows import feed_rows, feed_target

WriteImages = Callable[[Target, LastImages], None]


class HeldRows:
    """Holds rows of a part, by table, until they are to be written.

    `write` is given the rows of a table whose columns change, before others come. With `feed` every change is
    a row, and none takes another's place.
    """

    def __init__(self, bytes_max: int, write: WriteImages, *, feed: bool) -> None:
        self._bytes_max = bytes_max
        self._write = write
        self._feed = feed
        self._images: dict[Target, LastImages] = {}
        # What came since the last look: more than is held, where keys came again.
        self._bytes = 0

    def add(self, changes: Changes) -> None:
        """Hold changes."""
        if self._feed:
            changes = replace(changes, target=feed_target(changes.target), rows=feed_rows(changes.rows))
        target = changes.target
        if target not in self._images:
            # The columns changed: what came before has the old ones.
            for other in [one for one in self._images if one.name == target.name]:
                self._write(other, self._images.pop(other))
            self._images[target] = LastImages(target.keyed)
        images = self._images[target]
        images.add(replace(changes, target=images.target))
        self._bytes += changes.rows.nbytes

    def empty(self, target: Target, version: int) -> None:
        """Forget what came of a table up to a version, and what still comes of before it."""
        found = [images for one, images in self._images.items() if one.name == target.name]
        for images in found or [self._images.setdefault(target, LastImages(target.keyed))]:
            images.empty(version)

    def is_full(self) -> bool:
        """Tell whether so much is held that it is to be written."""
        if self._bytes <= self._bytes_max:
            return False
        self._bytes = sum(images.bytes for images in self._images.values())
        return self._bytes > self._bytes_max // 2

    def take(self) -> Mapping[Target, LastImages]:
        """Return what is held of each table, to be written now."""
        taken, self._bytes = self._images, 0
        # What was read before a table was emptied may still come.
        self._images = {
            target: images.followed() for target, images in taken.items() if images.emptied is not None
        }
        return taken

    def clear(self) -> None:
        """Let go of all of it."""
        self._images.clear()
        self._bytes = 0
