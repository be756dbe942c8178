# SPDX-License-Identifier: Apache-2.0
"""Log folders for tests, written from a server's binlog files by the same code that capture uses."""

import time
from collections.abc import Iterable
from pathlib import Path

from penstock._native import BlockCutter
from penstock.logstore.log import Log
from penstock.logstore.schemas import SchemaLog
from penstock.model import Position, ServerAddress, StatementSession
from penstock.mysql.connection import connect
from penstock.schema.history import SchemaHistory
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.tokens import ServerSpelling
from penstock.settings.daemon import LogSettings
from penstock.source.files import FileSource
from penstock.source.source import ByteRange, SourceOptions
from tools.servers import Server

# These sizes are small enough that little data has many blocks and several segments.
SEGMENT_BYTES = 1 << 20
BLOCK_BYTES = 4096
_PIECE_BYTES = 64 * 1024
# A segment ends when the hour ends. The clock of these logs stands still, so no segment ends for that reason.
_TIME_S = time.time()


def open_log(folder: Path, **settings: object) -> Log:
    """Open a log with the smallest possible segments and blocks."""
    values = {"segment_bytes": SEGMENT_BYTES, "block_bytes": BLOCK_BYTES, "fsync": "never", **settings}
    return Log.open(folder, LogSettings(**values), clock=lambda: _TIME_S)


def binlogs(server: Server) -> FileSource:
    """Return the server's own files as a source; the last file is closed first."""
    server.sql("FLUSH BINARY LOGS")
    return FileSource(SourceOptions(paths=tuple(str(path) for path in server.binlog_files()[:-1])))


def keep(
    log: Log,
    server: Server,
    files: FileSource,
    *,
    epoch: int = 0,
    start: Position | None = None,
    end: Position | None = None,
    names: Iterable[str] | None = None,
) -> None:
    """Append [start, end) of a server's files to a log as an epoch, together with the table definitions in
    its statements.
    """
    with connect(ServerAddress.parse(server.url())) as connection:
        identity = connection.identity()
    start = start or files.earliest()
    begun = Position(epoch, start.file, start.offset)
    gtid_set = files.gtid_set(start)
    log.begin_epoch(
        epoch=epoch,
        server_key=identity.key,
        server_id=identity.server_id,
        flavor=identity.flavor,
        version=identity.version_text,
        file=start.file,
        offset=start.offset,
        gtid_set=gtid_set,
    )
    schemas = SchemaLog(log.folder, SchemaHistory.from_json)
    mariadb = identity.flavor == "mariadb"
    spelling = ServerSpelling(mariadb, identity.version)
    if schemas.position is None or schemas.position.epoch != epoch:
        schemas.seed(SchemaHistory(ServerDefaults(spelling, "utf8mb4", {}, False)), begun)
    for extent in files.extents(start, end):
        if names is not None and extent.file not in names:
            continue
        head = files.head_bytes(extent.file)
        first = max(start.offset, len(head)) if extent.holds(start) else len(head)
        stop = end.offset if extent.holds(end) else extent.end
        cutter = BlockCutter(
            epoch=epoch,
            file=extent.file,
            offset=first,
            flavor=identity.flavor,
            live=False,
            gtid_set=files.gtid_set(Position(0, extent.file, first)),
            block_bytes=BLOCK_BYTES,
            time_max_us=log.time_max_us,
            head=head,
        )
        log.begin_file(
            extent.file,
            first,
            head[4:],
            cutter.gtid_set,
            epoch=epoch,
            server_id=identity.server_id,
            flavor=identity.flavor,
        )
        carried = bytearray()
        wanted = ByteRange(0, extent.file, first, stop, aligned=True)
        content = b"".join(map(bytes, files.open(wanted)))[: stop - first]
        for at in range(0, len(content), _PIECE_BYTES):
            carried += content[at : at + _PIECE_BYTES]
            del carried[: cutter.feed(bytes(carried))]
            append(log, schemas, cutter, epoch)
        assert not carried, "the files end behind a whole event"
    schemas.close()


def append(log: Log, schemas: SchemaLog[SchemaHistory], cutter: BlockCutter, epoch: int) -> None:
    """Append the cutter's output, statements first, as capture does."""
    for text, database, _, position, session in cutter.take_statements():
        known = StatementSession.of_event(*session)
        schemas.apply(text, database, Position(epoch, cutter.file, position), known)
    if cutter.gathered:
        begin, until, boundary = cutter.data_start, cutter.data_end, cutter.boundary
        log.append(
            cutter.take_data(),
            begin,
            until,
            boundary,
            cutter.take_records(),
            time_max_us=cutter.time_max_us,
            gtid_set=cutter.gtid_set,
        )
