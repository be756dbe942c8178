# SPDX-License-Identifier: Apache-2.0
"""Going on with a server that lacks transactions of the log, because they are lost.

A replica that was promoted before it had everything never gets the rest. The log keeps what it has, and so do
the targets: rows that the new server lacks, and only a comparison finds them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from penstock._native import GtidSet
from penstock.capture.resume import end_of_log
from penstock.cli.shared.log_folder import LogFolder
from penstock.errors import OptionInvalid, ServerChanged
from penstock.logstore.audit import AuditLine
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.model import Position, ServerAddress
from penstock.mysql.connection import MARIADB, Connection, ServerIdentity, connect
from penstock.mysql.start import Beginning, begin_after
from penstock.source.server import ServerSource
from penstock.source.source import SourceOptions
from penstock.source.walk import TransactionWalk


@dataclass(frozen=True)
class Acceptance:
    """What going on with a server means: `lost` are the GTIDs of the log that it lacks.

    `tables` are those that the lost transactions changed, `statements` the statements among them, whose
    tables only their text names.
    """

    beginning: Beginning
    identity: ServerIdentity
    address: ServerAddress
    old: Position
    lost: str
    tables: tuple[str, ...]
    statements: tuple[str, ...]


@contextmanager
def chosen_server(chosen: LogFolder, server: str | None) -> Iterator[Connection]:
    """Give a session on the server that is named, by default on the instance's only one."""
    settings = chosen.instance_settings
    addresses = [] if settings is None else settings.addresses()
    fitting = [one for one in addresses if server in (None, f"{one.host}:{one.port}")]
    if len(fitting) != 1:
        listed = ", ".join(f"{address.host}:{address.port}" for address in addresses)
        hint = f"Give --server, one of: {listed}" if listed else "Name the instance's settings: --config FILE"
        raise OptionInvalid("which server is accepted is not clear", hint=hint)
    with connect(replace(fitting[0], server_id=None)) as connection:
        yield connection


def plan_acceptance(chosen: LogFolder, reader: LogReader, connection: Connection) -> Acceptance:
    """Return what going on with a server would mean; nothing is changed.

    Raises OptionInvalid where the server lacks nothing, ServerChanged where its GTIDs cannot tell (MariaDB,
    and a server that lacks transactions of its own), and what `begin_after` raises.
    """
    last, old = reader.epochs.latest, reader.head()
    assert last is not None, "a log with a byte has an epoch"
    identity = connection.identity()
    known = GtidSet.parse(end_of_log(reader, last))
    lost = connection.executed().missing(str(known))
    if not lost:
        raise OptionInvalid(
            f"{connection.address} lacks no transaction of the log", hint="Start the capture: penstock serve"
        )
    if identity.flavor == MARIADB:
        raise ServerChanged(
            f"{connection.address} lacks {lost} and what precedes it on that server. MariaDB numbers the"
            " transactions of all servers in one sequence, so readers of the log would take new transactions"
            " for these",
            hint=_begin_anew(reader),
        )
    if identity.server_uuid and identity.server_uuid.lower() in lost.lower():
        raise ServerChanged(
            f"{connection.address} lacks transactions of its own: it was restored, and gives the same GTIDs"
            f" to other transactions: {lost}",
            hint=_begin_anew(reader),
        )
    shared = str(known.subtract(GtidSet.parse(lost)))
    epoch = reader.next_epoch
    places = ServerSource(SourceOptions(address=connection.address, instance=chosen.name, epoch=epoch))
    try:
        beginning = begin_after(connection, shared, places, epoch)
    finally:
        places.close()
    tables, statements = _changed_by(chosen, reader, shared, lost)
    return Acceptance(beginning, identity, connection.address, old, lost, tables, statements)


def accept_server(log: Log, plan: Acceptance, audit: AuditLine) -> None:
    """Make capture go on with the server when it starts next, durably. Raises LogFull, DiskFailed."""
    audit.write(log.disk, log.layout)
    position, identity = plan.beginning.position, plan.identity
    log.begin_epoch(
        epoch=position.epoch,
        server_key=identity.key,
        server_id=identity.server_id,
        flavor=identity.flavor,
        version=identity.version_text,
        file=position.file,
        offset=position.offset,
        gtid_set=plan.beginning.gtid_set,
    )


def _begin_anew(reader: LogReader) -> str:
    return f"Begin a new log: move {reader.folder} away, and read the tables again"


def _changed_by(
    chosen: LogFolder, reader: LogReader, shared: str, lost: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tables that transactions of a set changed, and the statements among them."""
    source, wanted = chosen.source(), GtidSet.parse(lost)
    tables: set[str] = set()
    statements: list[str] = []
    try:
        start = reader.locate_gtid_set(shared).position
        for byte_range in source.split(start, reader.head()):
            for batch in TransactionWalk(source, byte_range):
                columns = (batch[name].to_pylist() for name in ("gtid", "tables", "statement"))
                for gtid, names, statement in zip(*columns, strict=True):
                    if not gtid or not wanted.contains(GtidSet.parse(gtid)):
                        continue
                    tables.update(name for name in names.split(",") if name)
                    if statement:
                        statements.append(statement)
    finally:
        source.close()
    return tuple(sorted(tables)), tuple(statements)
