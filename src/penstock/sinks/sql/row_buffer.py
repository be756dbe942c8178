# SPDX-License-Identifier: Apache-2.0
"""Buffers the last images of each key for the tables of a part."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from penstock.changes import Changes, Target
from penstock.sinks.images import LastImages
from penstock.sinks.sql.rows import feed_rows, feed_target

WriteImages = Callable[[Target, LastImages], None]


class RowBuffer:
    """Buffers the rows of a part by table until they are written.

    `write` is called with the rows of a table when its columns change, before rows with the new columns are
    added. With `feed`, every change is a row of its own, and no row replaces another.
    """

    def __init__(self, bytes_max: int, write: WriteImages, *, feed: bool) -> None:
        self._bytes_max = bytes_max
        self._write = write
        self._feed = feed
        self._images: dict[Target, LastImages] = {}
        # Bytes added since the last check. If keys repeat, fewer bytes are buffered.
        self._bytes = 0

    def add(self, changes: Changes) -> None:
        """Buffer changes."""
        if self._feed:
            changes = replace(changes, target=feed_target(changes.target), rows=feed_rows(changes.rows))
        target = changes.target
        if target not in self._images:
            # The columns changed, so write the earlier rows with the old columns.
            for other in [known for known in self._images if known.name == target.name]:
                self._write(other, self._images.pop(other))
            self._images[target] = LastImages(target.keyed)
        images = self._images[target]
        images.add(replace(changes, target=images.target))
        self._bytes += changes.rows.nbytes

    def empty(self, target: Target, version: int) -> None:
        """Drop a table's rows up to a version, including those that arrive later."""
        buffers = [images for known, images in self._images.items() if known.name == target.name]
        for images in buffers or [self._images.setdefault(target, LastImages(target.keyed))]:
            images.empty(version)

    def is_full(self) -> bool:
        """Return whether the buffer is full and has to be written."""
        if self._bytes <= self._bytes_max:
            return False
        self._bytes = sum(images.bytes for images in self._images.values())
        return self._bytes > self._bytes_max // 2

    def take(self) -> Mapping[Target, LastImages]:
        """Return the buffered rows of each table and clear the buffer."""
        images_by_target, self._bytes = self._images, 0
        # Rows that were read before a table was emptied may still arrive.
        self._images = {
            target: images.followed()
            for target, images in images_by_target.items()
            if images.emptied is not None
        }
        return images_by_target

    def clear(self) -> None:
        """Discard all rows."""
        self._images.clear()
        self._bytes = 0
