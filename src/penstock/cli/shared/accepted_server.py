# SPDX-License-Identifier: Apache-2.0
"""Resumes capture on a server that has lost some of the log's transactions.

A replica that was promoted before it was complete never receives the missing transactions. The log and the
targets still contain them, but the new server does not have their rows. Only comparing the targets with the
server reveals these rows.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from penstock._native import GtidSet
from penstock.capture.resume import end_of_log
from penstock.cli.shared.log_folder import LogFolder
from penstock.errors import OptionInvalid, ServerChanged
from penstock.gtid_sets import ExecutedSet, LoggedSet, OutsideSet, mariadb_gtids
from penstock.logstore.audit import AuditLine
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.model import Position, ServerAddress
from penstock.mysql.connection import MARIADB, Connection, ServerIdentity, connect
from penstock.mysql.start import Beginning, begin_after
from penstock.schema.statements.secrets import without_secrets
from penstock.source.server import ServerSource
from penstock.source.source import SourceOptions
from penstock.source.walk import TransactionWalk


@dataclass(frozen=True)
class Acceptance:
    """What happens if capture resumes on a server.

    `lost` contains the GTIDs in the log that are missing from the server; on MariaDB, the last GTID of each
    domain and server. `tables` are the tables changed by the lost transactions. `statements` are the lost
    statements, whose tables are known only from their text.
    """

    beginning: Beginning
    identity: ServerIdentity
    address: ServerAddress
    old: Position
    lost: LoggedSet
    tables: tuple[str, ...]
    statements: tuple[str, ...]


@contextmanager
def chosen_server(chosen: LogFolder, server: str | None) -> Iterator[Connection]:
    """Open a session on the named server, by default on the instance's only server."""
    addresses = chosen.servers()
    matching = [address for address in addresses if server in (None, f"{address.host}:{address.port}")]
    if len(matching) != 1:
        listed = ", ".join(f"{address.host}:{address.port}" for address in addresses)
        hint = f"Give --server, one of: {listed}" if listed else "Name the instance's settings: --config FILE"
        raise OptionInvalid("which server is accepted is not clear", hint=hint)
    with connect(replace(matching[0], server_id=None)) as connection:
        yield connection


def plan_acceptance(chosen: LogFolder, reader: LogReader, connection: Connection) -> Acceptance:
    """Return the consequences of resuming on a server; change nothing.

    Raises OptionInvalid if nothing is missing from the server, ServerChanged if the server lost transactions
    that it wrote itself or its GTIDs are ambiguous, or any error from `begin_after`.
    """
    last_epoch, old = reader.epochs.latest, reader.head()
    assert last_epoch is not None, "a log with a byte has an epoch"
    identity = connection.identity()
    log_gtids, executed = end_of_log(reader, last_epoch), connection.executed()
    missing = executed.missing(log_gtids)
    if not missing:
        raise OptionInvalid(
            f"{connection.address} lacks no transaction of the log", hint="Start the capture: penstock serve"
        )
    _check_origin(reader, connection.address, identity, missing)
    shared = executed.shared(log_gtids)
    lost, tables, statements = _lost_after(chosen, reader, shared, executed)
    _check_origin(reader, connection.address, identity, lost)
    epoch = reader.next_epoch
    with closing(
        ServerSource(SourceOptions(address=connection.address, instance=chosen.name, epoch=epoch))
    ) as source:
        beginning = begin_after(connection, shared, source, epoch)
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
        lost=plan.lost,
    )


def _new_log_hint(reader: LogReader) -> str:
    return f"Begin a new log: move {reader.folder} away, and read the tables again"


def _check_origin(reader: LogReader, address: ServerAddress, identity: ServerIdentity, lost: str) -> None:
    """Raise ServerChanged if the server is missing transactions that it wrote itself."""
    if identity.flavor == MARIADB:
        is_own = any(server == identity.server_id for _, server, _ in mariadb_gtids(lost))
    else:
        is_own = identity.server_uuid is not None and identity.server_uuid.lower() in lost.lower()
    if is_own:
        raise ServerChanged(
            f"{address} is missing transactions that it wrote itself: it was restored, and reuses their"
            f" GTIDs for other transactions: {lost}",
            hint=_new_log_hint(reader),
        )


def _lost_after(
    chosen: LogFolder, reader: LogReader, shared: str, executed: ExecutedSet
) -> tuple[LoggedSet, tuple[str, ...], tuple[str, ...]]:
    """Return the transactions of a log that are outside a GTID set, the tables that they changed and their
    logged statements.

    Raises ServerChanged if the server has executed one of these transactions, because the server's GTIDs then
    do not show which transactions are missing.
    """
    source = chosen.source()
    lost = GtidSet.parse("")
    tables: set[str] = set()
    statements: list[str] = []
    try:
        start = reader.locate_gtid_set(shared).position
        is_outside = OutsideSet(shared, reader.gtid_set(start))
        for byte_range in source.split(start, reader.head()):
            for batch in TransactionWalk(source, byte_range):
                columns = (batch[name].to_pylist() for name in ("gtid", "tables", "statement"))
                for gtid, names, statement in zip(*columns, strict=True):
                    if not is_outside(gtid):
                        continue
                    if executed.contains(gtid):
                        raise ServerChanged(
                            f"the server has {gtid}, which follows transactions that it lacks in the log",
                            hint=_new_log_hint(reader),
                        )
                    lost = lost.union(GtidSet.parse(gtid))
                    tables.update(name for name in names.split(",") if name)
                    if statement:
                        statements.append(without_secrets(statement))
    finally:
        source.close()
    return LoggedSet(str(lost)), tuple(sorted(tables)), tuple(statements)
