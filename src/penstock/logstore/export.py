# SPDX-License-Identifier: Apache-2.0
"""Export a range of the log as plain binlog files for mysqlbinlog and mariadb-binlog, one per source file.

Each file has the same head as a segment: the magic, the source file's own format description, an artificial
rotate event with the source position of the events, and the GTIDs before them. The events are the server's
bytes, unchanged.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from penstock._native import segment_head
from penstock.errors import OptionInvalid, PositionInvalid
from penstock.logstore.boundaries import prove_boundary
from penstock.logstore.disk import Disk, LocalDisk
from penstock.logstore.extent import Extent
from penstock.logstore.reader import LogReader
from penstock.model import Position

# Every event header starts with the timestamp, the type and the server id.
_MAGIC_BYTES = 4
_SERVER_ID_AT = slice(_MAGIC_BYTES + 5, _MAGIC_BYTES + 9)


@dataclass(frozen=True)
class Exported:
    """One exported file. It contains the events [start, end) of a source file."""

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
    """Write the log's bytes in [start, end) to a folder, one file per source file; by default the whole log.

    `start` and `end` must be transaction boundaries. If the export began inside a transaction, binlog tools
    would stop at its first event. Existing files are rejected, and a file gets its final name once it is
    complete. The file name includes an offset if the exported bytes do not begin at the start of the source
    file. `progress` receives the event bytes written and their total. Raises PositionPurged, PositionInvalid,
    SequenceGap, OptionInvalid for an existing file, LogFull.
    """
    disk = disk or LocalDisk()
    targets = [(piece, folder / name) for name, piece in exported_files(log, start, end).items()]
    for _, path in targets:
        if disk.exists(path):
            raise OptionInvalid(f"{path} is there already", hint="Name an empty folder, or remove the file")
    disk.make_folder(folder.absolute())
    total = sum(piece.end - piece.start for piece, _ in targets)
    done = 0
    written = []
    for piece, path in targets:
        written.append(_write(log, piece, path, disk, progress, done, total))
        done += piece.end - piece.start
    return written


def exported_files(log: LogReader, start: Position | None, end: Position | None) -> dict[str, Extent]:
    """Return the files of an export by name, each with its range of the log. Raises PositionPurged,
    PositionInvalid.
    """
    pieces = list(_pieces(log, start, end))
    if not pieces:
        raise PositionInvalid(
            f"the log has nothing between {start or 'its beginning'} and {end or 'its end'}",
            position=str(start or end or ""),
            hint="penstock log list shows what it has",
        )
    return dict(zip(_names(log, pieces), pieces, strict=True))


def file_head(log: LogReader, piece: Extent) -> bytes:
    """Return the first bytes of an exported file, before its events."""
    head = log.head_bytes(piece.epoch, piece.file)
    epoch = log.epochs.get(piece.epoch)
    return segment_head(
        head[_MAGIC_BYTES:],
        piece.file,
        piece.start,
        log.gtid_set(piece.first),
        "mysql" if epoch is None else epoch.flavor,
        int.from_bytes(head[_SERVER_ID_AT], "little"),
        int(time.time()),
    )


def _pieces(log: LogReader, start: Position | None, end: Position | None) -> Iterator[Extent]:
    """Yield the part of each unbroken run that lies within the bounds."""
    extents = log.extents()
    if start is not None and extents and start < extents[0].first:
        # If the log contains the start of its first file, that start is a valid position.
        start = log.locate_position(start).position
    for extent in extents:
        first, last = extent.first, extent.last
        if (start is not None and last <= start) or (end is not None and first >= end):
            continue
        begins = start if start is not None and first < start else first
        ends = end if end is not None and end < last else last
        for bound, is_inside in ((begins, begins > first), (ends, ends < last)):
            if is_inside:
                prove_boundary(log, bound)
        if begins < ends:
            yield replace(extent, start=begins.offset, end=ends.offset)


def _names(log: LogReader, pieces: list[Extent]) -> list[str]:
    """Return the file name of each piece, including the offset if it does not start a source file."""
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
    piece: Extent,
    path: Path,
    disk: Disk,
    progress: Callable[[int, int], None] | None,
    done: int,
    total: int,
) -> Exported:
    head = file_head(log, piece)
    tmp = path.with_name(path.name + ".tmp")
    with closing(disk.append_open(tmp)) as target:
        target.truncate(0)
        target.write([head])
        for view in log.read(piece.epoch, piece.file, piece.start, piece.end):
            target.write([view])
            if progress is not None:
                progress(done + target.size - len(head), total)
        target.sync()
        size = target.size
    disk.rename(tmp, path)
    disk.sync_folder(path.parent)
    return Exported(path, piece.first, piece.last, size)
