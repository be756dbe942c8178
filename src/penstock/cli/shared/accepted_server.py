# SPDX-License-Identifier: Apache-2.0
"""Resuming on a server that is missing transactions of the log because they are lost.

A replica that was promoted before it was complete never gets the missing transactions. The log and the
targets keep them: their rows are missing from the new server, and only a comparison finds them.
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
    """The consequences of resuming on a server: `lost` are the GTIDs of the log that the server is missing.

    `tables` are the tables changed by the lost transactions. `statements` are the logged statements among
    them, whose tables are known only from their text.
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
    """Open a session on the named server, by default on the instance's only server."""
    settings = chosen.instance_settings
    addresses = [] if settings is None else settings.addresses()
    matching = [address for address in addresses if server in (None, f"{address.host}:{address.port}")]
    if len(matching) != 1:
        listed = ", ".join(f"{address.host}:{address.port}" for address in addresses)
        hint = f"Give --server, one of: {listed}" if listed else "Name the instance's settings: --config FILE"
        raise OptionInvalid("which server is accepted is not clear", hint=hint)
    with connect(replace(matching[0], server_id=None)) as connection:
        yield connection


def plan_acceptance(chosen: LogFolder, reader: LogReader, connection: Connection) -> Acceptance:
    """Return the consequences of resuming on a server; change nothing.

    Raises OptionInvalid if the server is missing nothing, ServerChanged if its GTIDs are ambiguous (MariaDB,
    or a server that is missing transactions of its own), and the errors of `begin_after`.
    """
    last_epoch, old = reader.epochs.latest, reader.head()
    assert last_epoch is not None, "a log with a byte has an epoch"
    identity = connection.identity()
    log_gtids = GtidSet.parse(end_of_log(reader, last_epoch))
    lost = connection.executed().missing(str(log_gtids))
    if not lost:
        raise OptionInvalid(
            f"{connection.address} lacks no transaction of the log", hint="Start the capture: penstock serve"
        )
    if identity.flavor == MARIADB:
        raise ServerChanged(
            f"{connection.address} lacks {lost} and what precedes it on that server. MariaDB numbers the"
            " transactions of all servers in one sequence, so readers of the log would take new transactions"
            " for these",
            hint=_new_log_hint(reader),
        )
    if identity.server_uuid and identity.server_uuid.lower() in lost.lower():
        raise ServerChanged(
            f"{connection.address} lacks transactions of its own: it was restored, and gives the same GTIDs"
            f" to other transactions: {lost}",
            hint=_new_log_hint(reader),
        )
    shared = str(log_gtids.subtract(GtidSet.parse(lost)))
    epoch = reader.next_epoch
    source = ServerSource(SourceOptions(address=connection.address, instance=chosen.name, epoch=epoch))
    try:
        beginning = begin_after(connection, shared, source, epoch)
    finally:
        source.close()
    tables, statements = _changed_by(chosen, reader, shared, lost)
    return Acceptance(beginning, identity, connection.address, old, lost, tables, statements)


def accept_server(log: Log, plan: Acceptance, audit: AuditLine) -> None:
    """Record durably that capture resumes on this server at its next start. Raises LogFull, DiskFailed."""
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


def _new_log_hint(reader: LogReader) -> str:
    return f"Begin a new log: move {reader.folder} away, and read the tables again"


def _changed_by(
    chosen: LogFolder, reader: LogReader, shared: str, lost: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tables changed by the transactions of a set, and the logged statements among them."""
    source, lost_gtids = chosen.source(), GtidSet.parse(lost)
    tables: set[str] = set()
    statements: list[str] = []
    try:
        start = reader.locate_gtid_set(shared).position
        for byte_range in source.split(start, reader.head()):
            for batch in TransactionWalk(source, byte_range):
                columns = (batch[name].to_pylist() for name in ("gtid", "tables", "statement"))
                for gtid, names, statement in zip(*columns, strict=True):
                    if not gtid or not lost_gtids.contains(GtidSet.parse(gtid)):
                        continue
                    tables.update(name for name in names.split(",") if name)
                    if statement:
                        statements.append(statement)
    finally:
        source.close()
    return tuple(sorted(tables)), tuple(statements)
