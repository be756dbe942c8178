# SPDX-License-Identifier: Apache-2.0
"""Debezium messages that do not carry rows: statements, transactions, truncated tables, heartbeats.

Source: Debezium's `EventDispatcher`, `TransactionMonitor` and `HeartbeatImpl`, version 3.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy
import pyarrow
import pyarrow.compute as pc

import penstock
from penstock.changes import Changes, DefiningStatement, Origin
from penstock.commit_versions import are_positional
from penstock.model import TableName
from penstock.sinks.kafka import connect_schemas
from penstock.sinks.messages import Messages

_TRUNCATE = "TRUNCATE"
# The columns that identify the transaction of a row.
_DESCRIBED_BY = ["_commit_version", "_commit_timestamp", "_metadata"]


@dataclass(frozen=True)
class ConnectRecord:
    """A message with its Kafka Connect schemas. Without a key, `key` and `key_schema` are None.

    `partition` is None if the key determines it.
    """

    topic: str
    key: Mapping[str, Any] | None
    value: Mapping[str, Any]
    key_schema: Mapping[str, Any] | None
    value_schema: Mapping[str, Any]
    partition: int | None = None


# --- Statements -----------------------------------------------------------------------------


def statement_records(topic: str, statement: DefiningStatement) -> Iterator[ConnectRecord]:
    """Yield a message for each table that a statement defines, all in the first partition."""
    for kind, database, table, text in statement.definitions:
        if kind == _TRUNCATE:
            continue
        value = {
            "source": _source_of(statement, TableName(database, table)),
            "ts_ms": statement.origin.commit_us // 1000,
            "databaseName": database,
            "schemaName": None,
            "ddl": text,
            "tableChanges": [],
        }
        yield ConnectRecord(
            topic,
            {"databaseName": database},
            value,
            connect_schemas.STATEMENT_KEY,
            connect_schemas.statement_value(),
            partition=0,
        )


def empties_tables(statement: DefiningStatement) -> bool:
    """Return whether a statement is a TRUNCATE."""
    return any(kind == _TRUNCATE for kind, *_ in statement.definitions)


def truncate_record(
    topic: str, statement: DefiningStatement, table: TableName, schema: Mapping[str, Any], partition: int
) -> ConnectRecord:
    """Return the message of a table that a statement empties. `schema` is that of the table's messages."""
    micros = statement.origin.commit_us
    value = {
        "before": None,
        "after": None,
        "source": _source_of(statement, table),
        "transaction": None,
        "op": "t",
        "ts_ms": micros // 1000,
        "ts_us": micros,
        "ts_ns": micros * 1000,
    }
    return ConnectRecord(topic, None, value, None, schema, partition)


def _source_of(statement: DefiningStatement, table: TableName) -> dict[str, Any]:
    origin = statement.origin
    return {
        "version": penstock.__version__,
        "connector": "mysql",
        "name": statement.instance,
        "ts_ms": origin.commit_us // 1000,
        "snapshot": "false",
        "db": table.database,
        "sequence": None,
        "ts_us": origin.commit_us,
        "ts_ns": origin.commit_us * 1000,
        "table": table.table or None,
        "server_id": origin.server_id,
        "gtid": origin.gtid or None,
        "file": origin.file,
        "pos": origin.offset,
        "row": 0,
        "thread": None,
        "query": None,
    }


# --- Transactions ---------------------------------------------------------------------------


@dataclass
class _OpenTransaction:
    """A transaction whose messages are being counted."""

    instance: str
    version: int
    id: str
    milliseconds: int
    counts: Counter[str] = field(default_factory=Counter)


class Transactions:
    """Counts the messages of each transaction, and creates the messages about its beginning and its end.

    Changes must arrive in commit order. Rows of a full load belong to no transaction.
    """

    def __init__(self, topic: str) -> None:
        self._topic = topic
        self._open: _OpenTransaction | None = None

    def counts_before(self, changes: Changes) -> tuple[int, int, int] | None:
        """Return the commit version of the open transaction and the number of its messages so far, in total
        and for this table.

        None for changes without a transaction.
        """
        if changes.origin is Origin.LOAD or not len(changes):
            return None
        transaction = self._open
        if transaction is None or transaction.instance != _instance_of(changes):
            return 0, 0, 0
        counts = transaction.counts
        return transaction.version, counts.total(), counts[str(changes.target.name)]

    def add(self, changes: Changes, messages: Messages) -> Iterator[ConnectRecord]:
        """Count messages, and yield those about transactions that begin or end."""
        if self.counts_before(changes) is None or not len(messages):
            return
        instance, table = _instance_of(changes), str(changes.target.name)
        versions = changes.rows.column("_commit_version").take(messages.row)
        numbers = versions.to_numpy(zero_copy_only=False)
        starts = numpy.concatenate([[0], numpy.flatnonzero(numpy.diff(numbers)) + 1])
        stops = numpy.concatenate([starts[1:], [len(numbers)]])
        rows = changes.rows.select(_DESCRIBED_BY).take(messages.row.take(pyarrow.array(starts)))
        for begun, count in zip(_begun(instance, rows), (stops - starts).tolist(), strict=True):
            if self._open is None or (self._open.instance, self._open.version) != (instance, begun.version):
                yield from self.finish()
                self._open = begun
                yield self._record("BEGIN", begun)
            self._open.counts[table] += count

    def finish(self) -> Iterator[ConnectRecord]:
        """Yield the end of the transaction that is open, if there is one."""
        if self._open is not None:
            yield self._record("END", self._open)
            self._open = None

    def _record(self, status: str, transaction: _OpenTransaction) -> ConnectRecord:
        counts = transaction.counts if status == "END" else None
        tables = None if counts is None else [_count_of(table, count) for table, count in counts.items()]
        value = {
            "status": status,
            "id": transaction.id,
            "event_count": None if counts is None else counts.total(),
            "data_collections": tables,
            "ts_ms": transaction.milliseconds,
        }
        schemas = connect_schemas.TRANSACTION_KEY, connect_schemas.TRANSACTION_VALUE
        return ConnectRecord(self._topic, {"id": transaction.id}, value, *schemas)


def _count_of(table: str, count: int) -> dict[str, Any]:
    return {"data_collection": table, "event_count": count}


def _begun(instance: str, rows: pyarrow.RecordBatch) -> Iterator[_OpenTransaction]:
    """Yield, for each row, the transaction that it belongs to."""
    metadata = rows.column("_metadata")
    files, gtids = (pc.struct_field(metadata, name).to_pylist() for name in ("file", "gtid"))
    times = rows.column("_commit_timestamp").cast(pyarrow.int64()).to_pylist()
    versions = rows.column("_commit_version").to_pylist()
    for version, micros, file, gtid in zip(versions, times, files, gtids, strict=True):
        yield _OpenTransaction(instance, version, gtid or _id_of(file, version), micros // 1000)


def _id_of(file: str, version: int) -> str:
    """Return the id of a transaction that has no GTID, in the form in which the kernel writes it into
    messages.
    """
    if not are_positional(file):
        return f"commit_ts={version}"
    return f"file={file},pos={(version & 0xFFFFFFFF) << 4}"


def _instance_of(changes: Changes) -> str:
    return str(pc.struct_field(changes.rows.column("_metadata"), "instance")[0].as_py())


# --- Heartbeats -----------------------------------------------------------------------------


def heartbeat_record(topic: str, server: str, milliseconds: int) -> ConnectRecord:
    """Return a message, for the first partition, which shows that the pipeline is running."""
    return ConnectRecord(
        topic,
        {"serverName": server},
        {"ts_ms": milliseconds},
        connect_schemas.HEARTBEAT_KEY,
        connect_schemas.HEARTBEAT_VALUE,
        partition=0,
    )
