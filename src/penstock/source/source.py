# SPDX-License-Identifier: Apache-2.0
"""The interface of all sources of log bytes: open a byte range and return raw events.

Planning never reads data: extents come from a directory listing or SHOW BINARY LOGS. A transaction belongs to
the range that contains its first byte (its GTID event, or the BEGIN if there is none), so adjacent ranges
cover every transaction exactly once, wherever they are cut.

File numbers and offsets refer to the plain log: a compressed file `mysql-bin.000003.zst` is the file
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
from penstock.logstore.extent import Extent
from penstock.logstore.layout import is_log_folder
from penstock.model import Position, Secret, ServerAddress, TableName, TablePatterns, Tls, is_server_url
from penstock.source.daemon_address import DaemonAddress, is_daemon_url

if TYPE_CHECKING:
    from penstock.schema.history import SchemaHistory

MAGIC = b"\xfebin"
# The magic of files with MySQL's encryption at rest; a server sends them decrypted.
MAGIC_ENCRYPTED = b"\xfdbin"
FIRST_EVENT_OFFSET = len(MAGIC)

_NUMBER = re.compile(r"\.(\d+)\Z")


def file_number(file: str) -> int:
    """Return the number at the end of a log file's name, 0 for a single file without a number."""
    match = _NUMBER.search(file)
    return int(match.group(1)) if match else 0


def place_of(position: Position) -> tuple[int, int, int]:
    """Return the sort key of a position, which also works for file names without a number."""
    return epoch_base(position.epoch), file_number(position.file), position.offset


@dataclass(frozen=True)
class ByteRange:
    """The transactions whose first byte lies in [start, stop) of one file.

    `stop` None means the end of the file. `aligned` is true if `start` is known to lie between two
    transactions; otherwise the source decides where to open the range (`Source.align`). `is_cut` means that
    another range of the same plan continues at `stop`. Transactions in `gtid_after` are skipped, because an
    earlier epoch of the log already contains them from another server. `gtid_before` contains the GTIDs of
    the earlier epoch. `fingerprint` identifies the file on a live server; "" accepts any file with the name.
    Can be pickled.
    """

    epoch: int
    file: str
    start: int
    stop: int | None
    aligned: bool
    gtid_after: str = ""
    is_cut: bool = False
    fingerprint: str = ""
    gtid_before: str = ""

    @property
    def position(self) -> Position:
        """The start of the range."""
        return Position(self.epoch, self.file, self.start)

    def __str__(self) -> str:
        return f"{self.position}-{'' if self.stop is None else self.stop}"


@dataclass(frozen=True)
class SourceOptions:
    """The parameters of a source; `open_source` accepts them on a driver or an executor.

    Exactly one of `paths` (files, folders, glob patterns, or one log folder), `address` (a live server) and
    `daemon` is set. `instance` names the source in every row. `epoch` increases whenever the server behind an
    instance changes; `server_key` is the identity (`ServerIdentity.key`) of the server that positions of this
    epoch belong to; None accepts any server. A kept log has its own epochs: `epochs` lists the (number,
    server key) pairs used in positions, () to use the log's numbers. A lost connection is retried
    `reconnect_tries` times without progress. Can be pickled.
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
        """Whether the source is a log kept by Penstock: a daemon's log, or a log folder."""
        return self.daemon is not None or (len(self.paths) == 1 and _is_log(self.paths[0]))

    @property
    def log_option(self) -> str:
        """The option by which `penstock schema` names this log."""
        return f"--url {self.daemon}" if self.daemon else f"--log {next(iter(self.paths), 'FOLDER')}"

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
        """Parse a server or daemon URL, a path, a folder, a glob pattern, or several paths.

        The default instance is `host:port` of a server, the instance of a daemon, the name of a log folder,
        and "files" for files. Raises OptionInvalid.
        """
        texts = [location] if isinstance(location, str | os.PathLike) else list(location)
        names = [os.fspath(text).removeprefix("file://") for text in texts]
        urls = [name for name in names if is_server_url(name) or is_daemon_url(name)]
        if urls and len(names) > 1:
            raise OptionInvalid("a server and other sources are named together", hint="Name one server")
        if urls and is_daemon_url(urls[0]):
            if any(option is not None for option in (user, password, password_file, server_id)):
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
            return cls(address=address, instance=instance or address.name, epoch=epoch)
        if not names:
            raise OptionInvalid(
                "no source is named", hint="Name binlog files, a folder, or mysql://user@host"
            )
        kept = len(names) == 1 and _is_log(names[0])
        default = os.path.basename(names[0].rstrip("/")) if kept else "files"
        return cls(paths=tuple(names), instance=instance or default, epoch=epoch)


class Source(Protocol):
    """A log that can be opened at byte ranges.

    A source is not pickled. Instead, its `options` are, and `open_source(options)` opens an equal source in
    another process.
    """

    @property
    def options(self) -> SourceOptions:
        """The parameters that this source was opened with."""

    @property
    def live(self) -> bool:
        """Whether a server sends the bytes. Such bytes start with the server's own rotate event and format
        description.
        """

    def close(self) -> None:
        """Release connections and files. The source can be used again."""

    @property
    def instance(self) -> str:
        """The name that rows of this source carry."""

    def earliest(self) -> Position:
        """Return the first available position. Raises SourceMissing if there is no file."""

    def head(self) -> Position:
        """Return the end of the last whole transaction at this moment."""

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return the GTIDs of all transactions before a position, "" if the log has none."""

    def fingerprint(self, file: str) -> str:
        """Return the fingerprint of a file as it is now; see `penstock.fingerprint`."""

    def find_gtid_set(self, gtid_set: str) -> Position:
        """Return the position at which to start reading in order to get every transaction outside the set.

        All transactions before the position belong to the set. More transactions of the set may follow the
        position, so the reader must still filter. Raises PositionPurged.
        """

    def find_time(self, time_us: int) -> Position:
        """Return a position before which no commit is at or after the time.

        The time is in microseconds UTC since 1970.
        """

    def extents(self, start: Position | None = None, end: Position | None = None) -> list[Extent]:
        """Return the files that overlap [start, end), in order, without reading data.

        Raises SequenceGap if a file between two others is missing, PositionPurged if `start` is before the
        first file, PositionInvalid if it is after the last.
        """

    def split(
        self,
        start: Position | None = None,
        end: Position | None = None,
        ranges_min: int = 1,
        range_bytes: int = RANGE_BYTES_DEFAULT,
    ) -> list[ByteRange]:
        """Split [start, end) into ranges of about `range_bytes`, at least `ranges_min` if possible.

        None means the first available byte, or the end of the last file. Propagates errors from `extents`.
        """

    def open(
        self, byte_range: ByteRange, resume_at: Callable[[], Position] | None = None
    ) -> Iterator[memoryview]:
        """Yield raw event bytes from the range's start on, past its stop for as long as the caller requests
        more.

        Requesting the next buffer invalidates the previous one. After a lost connection, `resume_at` returns
        a transaction boundary where the bytes resume, with a bounded number of retries; without `resume_at`,
        ConnectionLost is raised.
        """

    def align(self, byte_range: ByteRange) -> ByteRange:
        """Extend an unaligned range so that it begins with an event at or before its start.

        The start of the event is proved by the log's index, or by following event headers from the start of
        the file. An event is never recognized by its bytes. The returned range is aligned if no transaction
        is open there.
        """

    def joint(self, byte_range: ByteRange) -> int | None:
        """Return the offset at which an event must start, so that the next range of a cut file can be read.

        None if no other range continues at the stop.
        """

    def head_bytes(self, file: str, epoch: int | None = None) -> bytes:
        """Return the file's magic and format description, needed to decode bytes from its middle.

        `epoch` matters only for a log with several epochs.
        """

    def schema_history(
        self, position: Position, name: TableName | None = None, *, again: bool = False
    ) -> "SchemaHistory | None":
        """Return the table definitions that the log stores for a position, of one table or of all tables.

        With `again`, the daemon that captures the log reads the table again, if there is one. None if the
        source keeps no definitions; then the server is queried, or the caller supplies the schema.
        """

    def find_prepared(self, xid: str, before: Position) -> ByteRange | None:
        """Return the range where an XA transaction that commits at a position was prepared, None if unknown.

        `xid` is the id as in SQL statements: `X'67747269',X'',1`.
        """

    def walk(
        self,
        start: Position,
        end: Position,
        rows_max: int | None = None,
        bytes_max: int | None = None,
    ) -> Position:
        """Return the end of a transaction, at most `end`, so that the transactions from `start` to there have
        at most `rows_max` rows and `bytes_max` bytes of log.

        At least one transaction is included, if there is one. Reads event headers but no row values.
        """


def open_source(options: SourceOptions) -> Source:
    """Open the source described by the options. Does not connect or list anything yet."""
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


def shown_tables(source: Source, selected: TablePatterns) -> TablePatterns:
    """Return the tables that a reader sees: the tables that the reader has selected, or otherwise the tables
    that the daemon shows by default.
    """
    if source.options.daemon is None or selected.include or selected.exclude:
        return selected
    from penstock.source.daemon import DaemonSource

    assert isinstance(source, DaemonSource), "a source with a daemon's address is a daemon's"
    return source.tables()


def _is_log(path: str) -> bool:
    """Return whether a path is a log folder, local or at a URL."""
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

    With `boundary`, which returns the last transaction boundary at or before a position, files are cut at
    those boundaries and all ranges are aligned. Otherwise files are cut anywhere and each range finds its
    first event itself; no range is smaller than RANGE_BYTES_MIN, to keep that cheap. `start` and `end` must
    be transaction boundaries.
    """
    spans = []
    for extent in extents:
        first = max(start.offset, extent.start) if extent.holds(start) else extent.start
        last = end.offset if end is not None and extent.holds(end) else None
        if last is None or last > first:
            spans.append((extent, first, last))
    total = sum((last or extent.end) - first for extent, first, last in spans)
    size = max(min(range_bytes, -(-total // max(ranges_min, 1))), RANGE_BYTES_MIN)
    ranges = []
    for extent, first, last in spans:
        pieces = round(((last or extent.end) - first) / size) if extent.splittable else 1
        step = ((last or extent.end) - first) // max(pieces, 1)
        inner = [first + step * piece for piece in range(1, pieces)]
        if boundary is not None:
            positions = (Position(extent.epoch, extent.file, offset) for offset in inner)
            inner = sorted({offset for offset in map(boundary, positions) if offset > first})
        for begin, stop in itertools.pairwise([first, *inner, last]):
            assert begin is not None, "only the last cut may be the end of a file"
            aligned = begin == first or boundary is not None
            ranges.append(ByteRange(extent.epoch, extent.file, begin, stop, aligned, is_cut=stop in inner))
    return ranges
