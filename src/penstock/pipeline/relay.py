# SPDX-License-Identifier: Apache-2.0
"""A pipeline without Spark: a daemon's subscriber drives steps and sink with millisecond latency.

A relay does no full load and follows rows only: it sees no TRUNCATE or other statement. Each source has one
shard, so that changes arrive in commit order. A second relay of the same name is a standby. Rows are written
before their checkpoint, so a relay that dies writes its last batches again.
"""

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow
import structlog

from penstock.changes import SYSTEM_COLUMNS, Changes, Target
from penstock.client import ChangeBatch, Subscriber
from penstock.errors import ConnectionLost, OptionInvalid, PenstockError, SchemaUnknown, TransientError
from penstock.model import Position, ServerAddress, TableName
from penstock.pipeline.conforming import conform_changes
from penstock.pipeline.dead_letter import open_dead_letter
from penstock.pipeline.evolution import evolve_target
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.loops import drop_own_changes
from penstock.pipeline.row_metadata import refuse_partial
from penstock.pipeline.settings import PipelineSettings, PipelineSource
from penstock.pipeline.step import Rejected, Step, rows_of, run_steps
from penstock.retry import RECONNECT
from penstock.sinks.sink import BatchMark, Receipt, Sink, Spread, Writer
from penstock.source.daemon import DaemonSource

_log = structlog.get_logger(__name__)

# Batches that have arrived are written together, up to this size and for up to this long.
_BUFFERED_BYTES_MAX = 16 << 20
_BUFFERED_SECONDS_MAX = 0.02

OnBatch = Callable[[Mapping[str, Any]], None]
# Batches by token, round and number. Batches with the same key have the same rows.
_Content = tuple[tuple[int, int, int], ...]


@dataclass
class RelayCounts:
    """Counters since a relay started: batches and rows written, rows rejected by a step."""

    batches: int = 0
    rows: int = 0
    rejected: int = 0


class Relay:
    """Runs one pipeline until `stop`.

    `on_batch` is called after each write with plain values: source, tables, rows, rejected, position, and
    delay, the seconds from the newest commit in the batch until it was written. Raises OptionInvalid if a
    source is not a daemon's instance, or if a full load is configured.
    """

    def __init__(self, settings: PipelineSettings, *, on_batch: OnBatch | None = None) -> None:
        _refuse_misfit(settings)
        self._settings = settings
        self._on_batch = on_batch
        self._sink = settings.make_sink()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self.counts = RelayCounts()
        self._lines = [_Line(self, settings, source, self._sink) for source in settings.sources]

    def run(self) -> None:
        """Relay changes until `stop`.

        Raises the error that ended the relay: one that is not retryable, or one that lasted for
        `errors.retry_for`.
        """
        fatal = [finding for finding in self._sink.check() if finding.fatal]
        if fatal:
            problems = "; ".join(f"{finding.subject}: {finding.what}" for finding in fatal)
            hints = " ".join(finding.mend for finding in fatal if finding.mend)
            raise OptionInvalid(f"the sink {self._sink.kind} cannot be used: {problems}", hint=hints or None)
        threads = [
            threading.Thread(target=self._run_line, args=(line,), name=f"relay-{line.source.name}")
            for line in self._lines
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                # Join with a timeout, because an unbounded join would block KeyboardInterrupt.
                while thread.is_alive():
                    thread.join(0.5)
        finally:
            self.stop()
            for thread in threads:
                thread.join()
            self._sink.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop after the current batch. Can be called from any thread and from signal handlers."""
        for line in self._lines:
            line.stop()

    @property
    def positions(self) -> dict[str, str]:
        """For each source of this relay, the position before which every change is written."""
        return {line.source.name: position for line in self._lines for position in line.positions()}

    def _run_line(self, line: "_Line") -> None:
        try:
            line.run()
        except BaseException as problem:
            self.fail(problem)
            if not isinstance(problem, PenstockError):
                raise
        finally:
            # If one source ends for good, end the others too. Otherwise nobody would notice its silence.
            self.stop()

    def fail(self, problem: BaseException) -> None:
        """Record the error that ends the relay. Only the first error is kept."""
        with self._lock:
            self._failure = self._failure or problem

    def count(self, rows: int, rejected: int, line: Mapping[str, Any]) -> None:
        """Count a written batch and report it."""
        with self._lock:
            self.counts.batches += 1
            self.counts.rows += rows
            self.counts.rejected += rejected
            if self._on_batch is not None:
                self._on_batch(line)


def _refuse_misfit(settings: PipelineSettings) -> None:
    if len(settings.sinks) > 1:
        raise OptionInvalid(
            f"a relay writes to one sink, and the pipeline {settings.name} has several",
            hint="Run: penstock run --local; or write a file with one sink for each relay",
        )
    for source in settings.sources:
        if source.options.daemon is None:
            raise OptionInvalid(
                f"source {source.name} is no daemon's instance, and a relay follows nothing else",
                hint="Write url: penstock://host:7070/instance; penstock serve captures a server",
            )
        if source.schemas is not None:
            raise OptionInvalid(f"source {source.name}: a daemon knows its definitions; leave schemas out")
    if settings.loops.mark_table is not None:
        raise OptionInvalid(
            "a relay does not know transactions by a table that they write",
            hint="Write loops: {server_ids: [...]}, or gtid_tags where the servers are MySQL 8.3 or newer",
        )
    if settings.load.mode != "none":
        raise OptionInvalid(
            "a relay loads nothing, and the pipeline asks for a full load",
            hint="Write load: none; penstock run loads tables and follows them with Spark",
        )


class _Line:
    """One source, from its subscriber to the sink. One thread delivers its rows batch by batch."""

    def __init__(self, relay: Relay, settings: PipelineSettings, source: PipelineSource, sink: Sink) -> None:
        self._relay = relay
        self._settings = settings
        self.source = source
        self._sink = sink
        self._steps: list[Step] = settings.make_steps()
        self._definitions = _Definitions(source)
        self._prepared: dict[TableName, Target] = {}
        self._buffered: list[ChangeBatch] = []
        self._buffered_bytes, self._buffered_since = 0, 0.0
        # A restarted relay cuts batches differently, so their numbers must be under another name.
        self._generation = f"relay-{uuid.uuid4().hex[:12]}"
        self._number = 1
        # The buffered content of the last failed write; () if the last write succeeded.
        self._failed_content: _Content = ()
        assert source.options.daemon is not None, "it was proved"
        single = len(settings.sources) == 1
        self._subscriber = Subscriber(
            source.options.daemon,
            name=settings.name if single else f"{settings.name}.{source.name}",
            tables=list(source.tables.include) or None,
            exclude=list(source.tables.exclude) or None,
            shards=1,
            begin=_begin(source),
            coordination=settings.state,
            on_failure="retry",
            retries=_retries_within(settings.errors.retry_for),
            ack="manual",
        )

    def run(self) -> None:
        try:
            self._subscriber.run(self._handle_batch)
        finally:
            for step in self._steps:
                step.close()
            self._definitions.close()

    def stop(self) -> None:
        self._subscriber.stop()

    def positions(self) -> list[str]:
        return list(self._subscriber.positions.values())

    def _handle_batch(self, batch: ChangeBatch) -> None:
        """Buffer a batch while more are waiting, then write all buffered batches.

        The subscriber retries transient errors by delivering the last batch again.
        """
        if self._buffered and (batch.token, batch.round) != (
            self._buffered[-1].token,
            self._buffered[-1].round,
        ):
            # The shard was lost or rolled back, and the buffered batches are delivered again.
            self._buffered = []
        if not self._buffered:
            self._buffered_bytes, self._buffered_since = 0, time.monotonic()
        if not self._buffered or self._buffered[-1].number != batch.number:
            self._buffered.append(batch)
            self._buffered_bytes += batch.to_arrow().nbytes
        early = (
            time.monotonic() < self._buffered_since + _BUFFERED_SECONDS_MAX
            and self._buffered_bytes < _BUFFERED_BYTES_MAX
        )
        if early and self._subscriber.waiting and self._failed_content != self._content():
            return
        try:
            self._write()
        except TransientError as problem:
            self._log_failure(batch, problem)
            raise
        except BaseException as problem:
            self._relay.fail(problem)
            self._subscriber.stop()
            raise
        for buffered_batch in self._buffered:
            buffered_batch.ack()
        self._buffered = []

    def _content(self) -> "_Content":
        return tuple((batch.token, batch.round, batch.number) for batch in self._buffered)

    def _log_failure(self, batch: ChangeBatch, problem: PenstockError) -> None:
        _log.warning(
            "a batch is not written yet",
            source=self.source.name,
            table=batch.table,
            position=str(batch.position),
            why=str(problem),
        )

    def _write(self) -> None:
        """Write the buffered batches."""
        arrived = self._join_buffered()
        content = self._content()
        if self._failed_content and self._failed_content != content:
            # The sink may already have this number, and would then drop the new rows.
            self._number += 1
        self._failed_content = content
        mark = BatchMark(self._settings.name, self._generation, self._number)
        settings = self._settings
        aside = open_dead_letter(settings.steps, settings.dead_letter, mark, 0, comes_again=False)
        receipt: Receipt | None = None
        rejected = 0
        passed: list[Changes] = []
        writer = self._sink.open(mark, 0)
        try:
            for changes in arrived:
                for stepped in run_steps(self._steps, changes):
                    if isinstance(stepped, Rejected):
                        rejected += len(stepped.changes)
                        if aside is not None:
                            aside.add(stepped, changes)
                        continue
                    if self._sink.keeps_state:
                        self._prepare(stepped.target)
                        writer.write(stepped)
                    else:
                        passed.append(stepped)
            self._write_feed(writer, passed)
            if aside is not None:
                aside.finish()
            receipt = writer.finish()
        finally:
            if receipt is None:
                writer.abort()
        self._sink.commit(mark, [receipt])
        # A failed write keeps its number, so that the sink recognises the retry.
        self._number += 1
        self._failed_content = ()
        self._relay.count(receipt.rows, rejected, self._line_of(arrived, receipt, rejected))

    def _write_feed(self, writer: Writer, passed: list[Changes]) -> None:
        """Write changes of several definitions, converted to columns that hold all of them."""
        for changes in passed:
            self._prepare(changes.target)
        for changes in passed:
            prepared = self._prepared[changes.target.name]
            writer.write(conform_changes(changes, prepared) if self._sink.shares_columns else changes)

    def _join_buffered(self) -> list[Changes]:
        """Return the buffered batches as changes, joined by table as far as order allows."""
        groups: list[list[Changes]] = []
        group_of_target: dict[Target, int] = {}
        for batch in self._buffered:
            changes = self._definitions.changes_of(batch)
            changes = changes.with_rows(drop_own_changes(changes.rows, self._settings.loops))
            if self._sink.keeps_state:
                refuse_partial(changes.source, changes.rows)
            group_index = group_of_target.get(changes.target)
            # A single writer for all tables in log order needs the changes in their original order.
            if group_index is None or (self._sink.spread is Spread.WHOLE and group_index != len(groups) - 1):
                group_of_target[changes.target] = len(groups)
                groups.append([])
            groups[group_of_target[changes.target]].append(changes)
        return [_concatenate(group) for group in groups]

    def _line_of(self, arrived: list[Changes], receipt: Receipt, rejected: int) -> dict[str, Any]:
        newest = max(
            (
                changes.rows.column("_commit_timestamp")[-1].cast(pyarrow.int64()).as_py()
                for changes in arrived
                if len(changes)
            ),
            default=time.time_ns() // 1000,
        )
        return {
            "source": self.source.name,
            "tables": sorted({str(changes.source) for changes in arrived}),
            "rows": receipt.rows,
            "rejected": rejected,
            "position": str(self._buffered[-1].position),
            "delay": round(max(0.0, time.time() - newest / 1e6), 6),
        }

    def _prepare(self, target: Target) -> None:
        """Prepare a target before its first rows, and again when its columns change."""
        before, policy = self._prepared.get(target.name), self._settings.schema_changes
        if before is not None and not self._sink.keeps_state:
            # The rows of all definitions are written, and rows of different shards may be out of log order.
            target = evolve_target(before, target, policy, keeps_state=False)
        if before != target:
            self._sink.prepare(target, policy)
            self._prepared[target.name] = target


def _concatenate(group: list[Changes]) -> Changes:
    if len(group) == 1:
        return group[0]
    return rows_of(group[0], pyarrow.Table.from_batches([changes.rows for changes in group]))


def _begin(source: PipelineSource) -> str:
    return "latest" if source.start is None else str(source.start)


def _retries_within(seconds: float) -> int:
    """Return the number of retries, with exponential backoff, that take that many seconds."""
    retries, waited = 0, 0.0
    while waited < seconds:
        retries += 1
        waited += RECONNECT.bound(retries)
    return retries


class _Definitions:
    """The tables of one source, with definitions from the server or from the daemon."""

    def __init__(self, source: PipelineSource) -> None:
        self._source = source
        self._known: dict[tuple[str, int], Target] = {}
        self._daemon: DaemonSource | None = None

    def close(self) -> None:
        if self._daemon is not None:
            self._daemon.close()

    def changes_of(self, batch: ChangeBatch) -> Changes:
        """Return a batch with its table's definition. Raises SchemaUnknown if the types are not known."""
        key = batch.table, batch.schema_version
        rows = batch.to_arrow()
        if key not in self._known:
            self._known[key] = self._find_target(batch, rows)
        target = self._known[key]
        return Changes(target, rows.select([*target.column_names, *SYSTEM_COLUMNS]), target.name)

    def _find_target(self, batch: ChangeBatch, rows: pyarrow.RecordBatch) -> Target:
        name = TableName.parse(batch.table)
        for find in (
            partial(self._target_from_server, name),
            partial(self._target_from_daemon, name, rows, batch.key),
        ):
            target = find()
            if target is not None and _fits(target, rows.schema):
                return target
        metadata = rows.column("_metadata")[0].as_py()
        raise SchemaUnknown(
            f"nobody tells the types of {name} as its rows have them",
            position=f"{metadata['file']}:{metadata['offset']}",
            hint="Name the server in the source: server: mysql://user@host:3306",
        )

    def _target_from_server(self, name: TableName) -> Target | None:
        if self._source.server is None:
            return None
        *preferred, last = self._source.servers or (self._source.server,)
        for server in preferred:
            try:
                return self._read_target(server, name)
            except ConnectionLost as problem:
                _log.warning("another server is asked", server=str(server), why=str(problem))
        return self._read_target(last, name)

    def _read_target(self, server: ServerAddress, name: TableName) -> Target | None:
        return next(
            (target for target in targets_of(server, self._source.tables) if target.name == name), None
        )

    def _target_from_daemon(
        self, name: TableName, rows: pyarrow.RecordBatch, key: tuple[str, ...]
    ) -> Target | None:
        if self._daemon is None:
            self._daemon = DaemonSource(self._source.options)
        head = self._daemon.head()
        metadata = rows.column("_metadata")[0].as_py()
        # If the table changed since, use the definition at the position of the rows.
        for position in (head, Position(head.epoch, metadata["file"], metadata["offset"])):
            try:
                history = self._daemon.schema_history(position, name)
                schema = history.schema(name.database, name.table)
            except PenstockError as problem:
                if isinstance(problem, TransientError):
                    raise
                continue
            if schema is None:
                continue
            target = Target(name, schema.columns, schema.primary_key or key, (), history.mariadb)
            if _fits(target, rows.schema):
                return target
        return None


def _fits(target: Target, schema: pyarrow.Schema) -> bool:
    """Return whether rows have exactly the columns of a table, with its types."""
    own = [field for field in schema if field.name not in SYSTEM_COLUMNS]
    return {field.name: field.type for field in own} == {field.name: field.type for field in target.arrow()}
