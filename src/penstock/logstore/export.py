# SPDX-License-Identifier: Apache-2.0
"""A stretch of the log as plain binlog files, which mysqlbinlog and mariadb-binlog read: one for each
source file.

A file has a head as a segment has: magic, the source file's own format description, a made-up rotate event
that
says where in the source its events stood, and the GTIDs that came before. The events are the server's bytes.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from penstock._native import segment_head
from penstock.errors import OptionInvalid, PositionInvalid
from penstock.logstore.disk import Disk, LocalDisk
from penstock.logstore.reader import LogExtent, LogReader
from penstock.model import Position

# The timestamp, type and server id stand first in every event's header.
_MAGIC_BYTES = 4
_SERVER_ID_AT = slice(_MAGIC_BYTES + 5, _MAGIC_BYTES + 9)


@dataclass(frozen=True)
class Exported:
    """One file that was written: events [start, end) of a source file."""

    path: Path
    start: Position
    end: Position
    bytes_written: int


def export(
    log: LogReader,
    folder: Path,
    start: Position | None = None,
    end: Position | None = None,
    *,
    disk: Disk | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Exported]:
    """Write what lies in [start, end) to files in a folder, named as the source's; by default all there is.

    `start` must be a transaction boundary; from inside a transaction on, tools stop at its first event.
    Files that
    are there already are refused, and one has its name once it is whole. An unbroken run that does not
    begin where
    the source file does has its offset in its name. `progress` is told how many event bytes of how many were
    written. Raises PositionPurged, PositionInvalid, SequenceGap, OptionInvalid for a file that is there,
    LogFull.
    """
    disk = disk or LocalDisk()
    pieces = list(_pieces(log, start, end))
    if not pieces:
        raise PositionInvalid(
            f"the log has nothing between {start or 'its beginning'} and {end or 'its end'}",
            position=str(start or end or ""),
            hint="penstock log list shows what it has",
        )
    named = [(piece, folder / name) for piece, name in zip(pieces, _names(log, pieces), strict=True)]
    for _, path in named:
        if disk.exists(path):
            raise OptionInvalid(f"{path} is there already", hint="Name an empty folder, or remove the file")
    disk.make_folder(folder.absolute())
    total = sum(piece.end - piece.start for piece in pieces)
    done = 0
    written = []
    for piece, path in named:
        written.append(_write(log, piece, path, disk, progress, done, total))
        done += piece.end - piece.start
    return written


def _pieces(log: LogReader, start: Position | None, end: Position | None) -> Iterator[LogExtent]:
    """Yield what of each unbroken run lies within the bounds."""
    extents = log.extents()
    if start is not None and extents and start < extents[0].first:
        # The beginning of a file that the log has whole is no place that it lacks.
        start = log.locate_position(start).position
    for extent in extents:
        first, last = extent.first, extent.last
        if (start is not None and last <= start) or (end is not None and first >= end):
            continue
        begins = start if start is not None and first < start else first
        ends = end if end is not None and end < last else last
        if begins < ends:
            yield replace(extent, start=begins.offset, end=ends.offset)


def _names(log: LogReader, pieces: list[LogExtent]) -> list[str]:
    """Return each piece's file name; what does not begin a source file says where it does begin."""
    epochs = {piece.epoch for piece in pieces}
    names = []
    for piece in pieces:
        whole = piece.start == len(log.head_bytes(piece.epoch, piece.file))
        epoch = f"epoch{piece.epoch}-" if len(epochs) > 1 else ""
        stem, _, number = piece.file.rpartition(".")
        names.append(f"{epoch}{piece.file}" if whole else f"{epoch}{stem}-{piece.start}.{number}")
    return names


def _write(
    log: LogReader,
    piece: LogExtent,
    path: Path,
    disk: Disk,
    progress: Callable[[int, int], None] | None,
    done: int,
    total: int,
) -> Exported:
    file_head = log.head_bytes(piece.epoch, piece.file)
    epoch = log.epochs.get(piece.epoch)
    head = segment_head(
        file_head[_MAGIC_BYTES:],
        piece.file,
        piece.start,
        log.gtid_set(piece.first),
        "mysql" if epoch is None else epoch.flavor,
        int.from_bytes(file_head[_SERVER_ID_AT], "little"),
        int(time.time()),
    )
    tmp = path.with_name(path.name + ".tmp")
    target = disk.append_open(tmp)
    try:
        target.truncate(0)
        target.write([head])
        for view in log.read(piece.epoch, piece.file, piece.start, piece.end):
            target.write([view])
            if progress is not None:
                progress(done + target.size - len(head), total)
        target.sync()
        size = target.size
    finally:
        target.close()
    disk.rename(tmp, path)
    disk.sync_folder(path.parent)
    return Exported(path, piece.first, piece.last, size)
