# SPDX-License-Identifier: Apache-2.0
"""The seam: every source of log bytes is "open this byte range and give me raw events".

Planning never reads data: extents come from a directory listing or SHOW BINARY LOGS. A transaction
belongs to the range in which its first byte lies (its GTID event, or the BEGIN where there is none),
so ranges that touch cover every transaction exactly once, wherever the cuts fall.

File numbers and offsets are those of the plain log: a compressed file `mysql-bin.000003.zst` is the file
`mysql-bin.000003`, and its offsets count decompressed bytes.
"""

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from penstock.commit_versions import epoch_base
from penstock.errors import OptionInvalid
from penstock.gtid_sets import LoggedSet
from penstock.limits import RANGE_BYTES_DEFAULT, RANGE_BYTES_MIN, RECONNECT_TRIES_MAX
from penstock.logstore.layout import is_log_folder
from penstock.model import Position, Secret, ServerAddress, TableName, TablePatterns, Tls, is_server_url
from penstock.source.daemon_address import DaemonAddress, is_daemon_url

if TYPE_CHECKING:
    from penstock.capture.schema_history import SchemaHistory

MAGIC = b"\xfebin"
# MySQL's encryption at rest; what a server sends is plain.
MAGIC_ENCRYPTED = b"\xfdbin"
FIRST_EVENT_OFFSET = len(MAGIC)

_NUMBER = re.compile(r"\.(\d+)\Z")


def file_number(file: str) -> int:
    """Return the number at the end of a log file's name, 0 for a file that stands alone without one."""
    match = _NUMBER.search(file)
    return int(match.group(1)) if match else 0


def place_of(position: Position) -> tuple[int, int, int]:
    """Return what positions order by, also where a file's name has no number."""
    return epoch_base(position.epoch), file_number(position.file), position.offset


@dataclass(frozen=True)
class ByteRange:
    """The transactions whose first byte lies in [start, stop) of one file.

    `stop` None means to the end of the file. `aligned` tells whether `start` is known to lie between two
    transactions; otherwise the source says where to open the range (`Source.align`). `is_cut` tells that
    another range of the same plan goes on at `stop`. Transactions of `gtid_after` are left out: the log has
    them further in front, from another server. `fingerprint` is the file's, "" to take any file of the name;
    a live server's is compared. Pickles.
    """

    epoch: int
    file: str
    start: int
    stop: int | None
    aligned: bool
    gtid_after: str = ""
    is_cut: bool = False
    fingerprint: str = ""

    @property
    def position(self) -> Position:
        """Where the range begins."""
        return Position(self.epoch, self.file, self.start)

    def __str__(self) -> str:
        return f"{self.position}-{'' if self.stop is None else self.stop}"


@dataclass(frozen=True)
class Extent:
    """One log file as planning sees it, in one epoch.

    `start` is where its events begin, behind 4 where a log holds the end of a file only. `bytes` is where
    they end: the size where it lies, of a compressed file that of the compressed bytes. Only a `splittable`
    one can be opened at any byte.
    """

    file: str
    bytes: int
    splittable: bool
    epoch: int = 0
    start: int = FIRST_EVENT_OFFSET

    @property
    def position(self) -> Position:
        """Where its first event begins."""
        return Position(self.epoch, self.file, self.start)

    def holds(self, position: Position | None) -> bool:
        """Tell whether a position lies in this file."""
        return position is not None and (position.epoch, position.file) == (self.epoch, self.file)


@dataclass(frozen=True)
class SourceOptions:
    """What makes a source, wherever it is needed: `open_source` takes it on a driver or an executor.

    One of `paths` (files, folders, glob patterns, or one log folder), `address` (a live server) and `daemon`.
    `instance` names the source in every row. `epoch` grows whenever the server behind an instance changes;
    `server_key` is the identity (`ServerIdentity.key`) that positions of this epoch belong to, None to take
    any. A kept log has epochs of its own: `epochs` are those (number and server key) that positions are
    written in, () to take the log's own numbers. A lost connection is retried `reconnect_tries` times without
    progress. Pickles.
    """

    paths: tuple[str, ...] = ()
    address: ServerAddress | None = None
    instance: str = ""
    epoch: int = 0
    server_key: str | None = None
    daemon: DaemonAddress | None = None
    epochs: tuple[tuple[int, str], ...] = ()
    reconnect_tries: int = RECONNECT_TRIES_MAX

    @property
    def is_kept(self) -> bool:
        """Whether this is a log that Penstock keeps: a daemon's, or a log folder."""
        return self.daemon is not None or (len(self.paths) == 1 and _is_log(self.paths[0]))

    @classmethod
    def parse(
        cls,
        location: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        instance: str | None = None,
        epoch: int = 0,
        user: str | None = None,
        password: str | Secret | None = None,
        password_file: str | None = None,
        server_id: int | None = None,
        tls: Tls | None = None,
        token: str | Secret | None = None,
        token_file: str | None = None,
    ) -> Self:
        """Read a server or daemon URL, a path, a folder, a glob pattern, or several paths.

        The default instance is `host:port` of a server, the instance's own name at a daemon, a log folder's
        name, and "files" of files. Raises OptionInvalid.
        """
        texts = [location] if isinstance(location, str | os.PathLike) else list(location)
        names = [os.fspath(text).removeprefix("file://") for text in texts]
        urls = [name for name in names if is_server_url(name) or is_daemon_url(name)]
        if urls and len(names) > 1:
            raise OptionInvalid("a server and other sources are named together", hint="Name one server")
        if urls and is_daemon_url(urls[0]):
            if any(one is not None for one in (user, password, password_file, server_id)):
                raise OptionInvalid(
                    "user, password and server id are for a database server",
                    hint="A daemon is shown a token: PENSTOCK_TOKEN, token or token_file",
                )
            daemon = DaemonAddress.parse(urls[0], token=token, token_file=token_file, tls=tls)
            return cls(daemon=daemon, instance=instance or daemon.instance, epoch=epoch)
        if token is not None or token_file is not None:
            raise OptionInvalid(
                "a token is for a daemon", hint="Write the source as penstock://host:7070/instance"
            )
        if urls:
            address = ServerAddress.parse(
                urls[0],
                user=user,
                password=password,
                password_file=password_file,
                server_id=server_id,
                tls=tls,
            )
            default = address.unix_socket or f"{address.host}:{address.port}"
            return cls(address=address, instance=instance or default, epoch=epoch)
        if not names:
            raise OptionInvalid(
                "no source is named", hint="Name binlog files, a folder, or mysql://user@host"
            )
        kept = len(names) == 1 and _is_log(names[0])
        default = os.path.basename(names[0].rstrip("/")) if kept else "files"
        return cls(paths=tuple(names), instance=instance or default, epoch=epoch)


class Source(Protocol):
    """A log that can be opened at byte ranges.

    Not pickled itself: `options` are, and `open_source(options)` gives an equal source elsewhere.
    """

    @property
    def options(self) -> SourceOptions:
        """What this source was made from."""

    @property
    def live(self) -> bool:
        """Whether a server sends the bytes: they begin with its own rotate event and format description."""

    def close(self) -> None:
        """Let go of what is held between calls. The source can be used again."""

    @property
    def instance(self) -> str:
        """The name that rows of this source carry."""

    def earliest(self) -> Position:
        """Return the first position there is. Raises SourceMissing where there is no file."""

    def head(self) -> Position:
        """Return the end of the last whole transaction known now."""

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return the GTIDs of every transaction before a position, "" where the log has none."""

    def fingerprint(self, file: str) -> str:
        """Return the fingerprint of a file as it is now; see `penstock.fingerprint`."""

    def find_gtid_set(self, gtid_set: str) -> Position:
        """Return a position with no transaction outside the set before it: the start of reading after it.

        Transactions of the set may follow it, so the reader still filters. Raises PositionPurged.
        """

    def find_time(self, time_us: int) -> Position:
        """Return a position before which no transaction was committed at or after the time.

        The time is microseconds UTC since 1970.
        """

    def extents(self, start: Position | None = None, end: Position | None = None) -> list[Extent]:
        """Return the files that [start, end) touches, in order, without reading data.

        Raises SequenceGap where a file is missing between two, PositionPurged where `start` lies before the
        first file, PositionInvalid where it lies past the last.
        """

    def split(
        self,
        start: Position | None = None,
        end: Position | None = None,
        ranges_min: int = 1,
        range_bytes: int = RANGE_BYTES_DEFAULT,
    ) -> list[ByteRange]:
        """Cut [start, end) into ranges of about `range_bytes`, at least `ranges_min` where that is possible.

        None means from the first byte there is, to the end of the last file. Raises what `extents` raises.
        """

    def open(
        self, byte_range: ByteRange, resume_at: Callable[[], Position] | None = None
    ) -> Iterator[memoryview]:
        """Yield raw event bytes from the range's start on, past its stop as far as the caller asks.

        Every buffer is of no more use once the next one is asked for. When a connection is lost, `resume_at`
        is asked for a transaction boundary and the bytes begin again there, within bounds; without it
        ConnectionLost is raised.
        """

    def align(self, byte_range: ByteRange) -> ByteRange:
        """Return a range that is not aligned from an event on that begins at or before its start.

        The event is proved by the log's index, or by following event headers from the front of the file; it
        is never recognized by its bytes. The range is aligned where no transaction is open there.
        """

    def joint(self, byte_range: ByteRange) -> int | None:
        """Return the offset at which an event must begin, so that the next range of a cut file is read.

        None where no other range goes on at the stop.
        """

    def head_bytes(self, file: str, epoch: int | None = None) -> bytes:
        """Return the file's magic and format description, which bytes from its middle need to be read.

        Only a log of several epochs asks which one's file it is.
        """

    def schema_history(
        self, position: Position, name: TableName | None = None, *, again: bool = False
    ) -> "SchemaHistory | None":
        """Return the definitions in force at a position, of one table or of all, as a log keeps them.

        With `again` the table is read again by the daemon that captures the log, if there is one.

        None where the source keeps none: then the server is asked, or the schema is given.
        """

    def find_prepared(self, xid: str, before: Position) -> ByteRange | None:
        """Return where an XA transaction was prepared that commits at a position, None if unknown.

        `xid` is its id as statements have it: `X'67747269',X'',1`.
        """

    def walk(
        self,
        start: Position,
        end: Position,
        rows_max: int | None = None,
        bytes_max: int | None = None,
    ) -> Position:
        """Return the last transaction end up to `end` with at most so many rows and log bytes after `start`.

        At least one transaction, where there is one. Reads event headers, no row values.
        """


def open_source(options: SourceOptions) -> Source:
    """Make the source that the options describe. Neither connects nor lists anything yet."""
    if options.address is not None:
        from penstock.source.server import ServerSource

        return ServerSource(options)
    if options.daemon is not None:
        from penstock.source.daemon import DaemonSource

        return DaemonSource(options)
    if options.is_kept:
        from penstock.source.log import LogSource

        return LogSource(options)
    from penstock.source.files import FileSource

    return FileSource(options)


def shown_tables(source: Source, asked: TablePatterns) -> TablePatterns:
    """Return which tables a reader sees: those it asks for, else those that a daemon shows by itself."""
    if source.options.daemon is None or asked.include or asked.exclude:
        return asked
    from penstock.source.daemon import DaemonSource

    assert isinstance(source, DaemonSource), "a source with a daemon's address is a daemon's"
    return source.tables()


def _is_log(path: str) -> bool:
    """Tell whether a path is a log's folder, of this host or by a URL."""
    if "://" in path:
        return True
    return is_log_folder(Path(path))


def cut(
    extents: Sequence[Extent],
    start: Position,
    end: Position | None,
    ranges_min: int = 1,
    range_bytes: int = RANGE_BYTES_DEFAULT,
    boundary: Callable[[Position], int] | None = None,
) -> list[ByteRange]:
    """Cut consecutive extents into ranges that cover [start, end), in order.

    A file is cut where `boundary`, asked for the last transaction boundary at or before a position, says,
    and all its ranges are aligned. Without it cuts fall anywhere, and each range finds its first event by
    itself; none is under RANGE_BYTES_MIN, so that this costs little. `start` and `end` must be transaction
    boundaries.
    """
    spans = []
    for extent in extents:
        first = max(start.offset, extent.start) if extent.holds(start) else extent.start
        last = end.offset if end is not None and extent.holds(end) else None
        if last is None or last > first:
            spans.append((extent, first, last))
    total = sum((last or extent.bytes) - first for extent, first, last in spans)
    size = max(min(range_bytes, -(-total // max(ranges_min, 1))), RANGE_BYTES_MIN)
    ranges = []
    for extent, first, last in spans:
        pieces = round(((last or extent.bytes) - first) / size) if extent.splittable else 1
        step = ((last or extent.bytes) - first) // max(pieces, 1)
        inner = [first + step * piece for piece in range(1, pieces)]
        if boundary is not None:
            places = (Position(extent.epoch, extent.file, offset) for offset in inner)
            inner = sorted({offset for offset in map(boundary, places) if offset > first})
        for begin, stop in itertools.pairwise([first, *inner, last]):
            assert begin is not None, "only the last cut may be the end of a file"
            aligned = begin == first or boundary is not None
            ranges.append(ByteRange(extent.epoch, extent.file, begin, stop, aligned, is_cut=stop in inner))
    return ranges
