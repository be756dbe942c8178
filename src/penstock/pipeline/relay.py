# SPDX-License-Identifier: Apache-2.0
"""A pipeline without Spark: a daemon's subscriber drives steps and sink, milliseconds behind the commit.

A relay loads nothing and follows rows alone: it sees no TRUNCATE and no other statement. Each source has one
shard, so that its changes come in the order of commits; a second relay of the same name stands by. What
was written is written before its checkpoint, so a relay that dies writes its last batches again.
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
from penstock.pipeline.conforming import conformed
from penstock.pipeline.dead_letter import aside_of
from penstock.pipeline.evolution import evolved
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.loops import without_own
from penstock.pipeline.settings import PipelineSettings, PipelineSource
from penstock.pipeline.step import Rejected, Step, rows_of, through
from penstock.pipeline.told_values import refuse_partial
from penstock.retry import RECONNECT
from penstock.sinks.sink import BatchMark, Receipt, Sink, Spread, Writer
from penstock.source.daemon import DaemonSource

_log = structlog.get_logger(__name__)

# What has arrived is written together: so much at most, and what came first waits no longer than this.
_HELD_BYTES_MAX = 16 << 20
_HELD_SECONDS_MAX = 0.02

Told = Callable[[Mapping[str, Any]], None]
# Batches by token, round and number: the same ones have the same rows.
_Content = tuple[tuple[int, int, int], ...]


@dataclass
class RelayCounts:
    """What a relay has done: batches and rows written, rows put aside or skipped, since it began."""

    batches: int = 0
    rows: int = 0
    rejected: int = 0


class Relay:
    """Runs one pipeline until `stop`.

    `told` is called with plain values after each write: source, tables, rows, rejected, position, and delay,
    the seconds from the last commit in it until it was written. Raises OptionInvalid where a source is no
    daemon's instance, or a full load is asked for.
    """

    def __init__(self, settings: PipelineSettings, *, told: Told | None = None) -> None:
        _refuse_misfit(settings)
        self._settings = settings
        self._told = told
        self._sink = settings.make_sink()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self.counts = RelayCounts()
        self._lines = [_Line(self, settings, source, self._sink) for source in settings.sources]

    def run(self) -> None:
        """Relay until `stop`. Raises what ends it: an error that more tries do not mend, or one that lasted
        for `errors.retry_for`."""
        fatal = [one for one in self._sink.check() if one.fatal]
        if fatal:
            told = "; ".join(f"{one.subject}: {one.what}" for one in fatal)
            mend = " ".join(one.mend for one in fatal if one.mend)
            raise OptionInvalid(f"the sink {self._sink.kind} cannot be used: {told}", hint=mend or None)
        threads = [
            threading.Thread(target=self._run_line, args=(line,), name=f"relay-{line.source.name}")
            for line in self._lines
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                # A wait without a bound would keep an interrupt from the keyboard out.
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
        """End behind the batch in hand. Safe for threads and signals."""
        for line in self._lines:
            line.stop()

    @property
    def positions(self) -> dict[str, str]:
        """Before which place of each source everything is written, of those that this relay has."""
        return {line.source.name: place for line in self._lines for place in line.places()}

    def _run_line(self, line: "_Line") -> None:
        try:
            line.run()
        except BaseException as problem:
            self.fail(problem)
            if not isinstance(problem, PenstockError):
                raise
        finally:
            # One source that ends for good ends the others: nobody would notice that it is silent.
            self.stop()

    def fail(self, problem: BaseException) -> None:
        """Note what ends the relay; the first one counts."""
        with self._lock:
            self._failure = self._failure or problem

    def count(self, rows: int, rejected: int, line: Mapping[str, Any]) -> None:
        """Count a batch that is written, and tell of it."""
        with self._lock:
            self.counts.batches += 1
            self.counts.rows += rows
            self.counts.rejected += rejected
            if self._told is not None:
                self._told(line)


def _refuse_misfit(settings: PipelineSettings) -> None:
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
    """One source on its way to the sink. Its rows come in one thread, batch by batch."""

    def __init__(self, relay: Relay, settings: PipelineSettings, source: PipelineSource, sink: Sink) -> None:
        self._relay = relay
        self._settings = settings
        self.source = source
        self._sink = sink
        self._steps: list[Step] = settings.make_steps()
        self._definitions = _Definitions(source)
        self._prepared: dict[TableName, Target] = {}
        self._held: list[ChangeBatch] = []
        self._bytes, self._since = 0, 0.0
        # No other run of the relay counts its batches under this name: batches are cut anew each time.
        self._generation = f"relay-{uuid.uuid4().hex[:12]}"
        self._number = 1
        # What was held when writing it failed; () where nothing was.
        self._tried: _Content = ()
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
            retries=_tries_in(settings.errors.retry_for),
            ack="manual",
        )

    def run(self) -> None:
        try:
            self._subscriber.run(self._take)
        finally:
            for step in self._steps:
                step.close()
            self._definitions.close()

    def stop(self) -> None:
        self._subscriber.stop()

    def places(self) -> list[str]:
        return list(self._subscriber.positions.values())

    def _take(self, batch: ChangeBatch) -> None:
        """Hold a batch while more have arrived, then write all that is held.

        What trying again may mend is tried again by the subscriber, which brings the last batch again.
        """
        if self._held and (batch.token, batch.round) != (self._held[-1].token, self._held[-1].round):
            # The shard was lost, or rolled back, and what was held comes again.
            self._held = []
        if not self._held:
            self._bytes, self._since = 0, time.monotonic()
        if not self._held or self._held[-1].number != batch.number:
            self._held.append(batch)
            self._bytes += batch.to_arrow().nbytes
        early = time.monotonic() < self._since + _HELD_SECONDS_MAX and self._bytes < _HELD_BYTES_MAX
        if early and self._subscriber.waiting and self._tried != self._content():
            return
        try:
            self._write()
        except TransientError as problem:
            self._note(batch, problem)
            raise
        except BaseException as problem:
            self._relay.fail(problem)
            self._subscriber.stop()
            raise
        for held in self._held:
            held.ack()
        self._held = []

    def _content(self) -> "_Content":
        return tuple((one.token, one.round, one.number) for one in self._held)

    def _note(self, batch: ChangeBatch, problem: PenstockError) -> None:
        _log.warning(
            "a batch is not written yet",
            source=self.source.name,
            table=batch.table,
            position=str(batch.position),
            why=str(problem),
        )

    def _write(self) -> None:
        """Write what is held."""
        came = self._joined()
        content = self._content()
        if self._tried and self._tried != content:
            # The sink may have the number already, and would leave out what is new.
            self._number += 1
        self._tried = content
        mark = BatchMark(self._settings.name, self._generation, self._number)
        settings = self._settings
        aside = aside_of(settings.steps, settings.dead_letter, mark, 0, comes_again=False)
        receipt: Receipt | None = None
        rejected = 0
        passed: list[Changes] = []
        writer = self._sink.open(mark, 0)
        try:
            for changes in came:
                for made in through(self._steps, changes):
                    if isinstance(made, Rejected):
                        rejected += len(made.changes)
                        if aside is not None:
                            aside.add(made, changes)
                        continue
                    if self._sink.keeps_state:
                        self._prepare(made.target)
                        writer.write(made)
                    else:
                        passed.append(made)
            self._write_feed(writer, passed)
            if aside is not None:
                aside.finish()
            receipt = writer.finish()
        finally:
            if receipt is None:
                writer.abort()
        self._sink.commit(mark, [receipt])
        # What failed keeps its number, so that a sink knows it again.
        self._number += 1
        self._tried = ()
        self._relay.count(receipt.rows, rejected, self._line_of(came, receipt, rejected))

    def _write_feed(self, writer: Writer, passed: list[Changes]) -> None:
        """Write changes of any definitions, each in columns that hold those of all."""
        for changes in passed:
            self._prepare(changes.target)
        for changes in passed:
            prepared = self._prepared[changes.target.name]
            writer.write(conformed(changes, prepared) if self._sink.shares_columns else changes)

    def _joined(self) -> list[Changes]:
        """Return what is held as changes, those of a table joined as far as their order allows."""
        found: list[list[Changes]] = []
        places: dict[Target, int] = {}
        for batch in self._held:
            changes = self._definitions.changes_of(batch)
            changes = changes.with_rows(without_own(changes.rows, self._settings.loops))
            if self._sink.keeps_state:
                refuse_partial(changes.source, changes.rows)
            place = places.get(changes.target)
            # Who writes all tables in log order has them as they come.
            if place is None or (self._sink.spread is Spread.WHOLE and place != len(found) - 1):
                places[changes.target] = len(found)
                found.append([])
            found[places[changes.target]].append(changes)
        return [_as_one(group) for group in found]

    def _line_of(self, came: list[Changes], receipt: Receipt, rejected: int) -> dict[str, Any]:
        newest = max(
            (
                changes.rows.column("_commit_timestamp")[-1].cast(pyarrow.int64()).as_py()
                for changes in came
                if len(changes)
            ),
            default=time.time_ns() // 1000,
        )
        return {
            "source": self.source.name,
            "tables": sorted({str(changes.source) for changes in came}),
            "rows": receipt.rows,
            "rejected": rejected,
            "position": str(self._held[-1].position),
            "delay": round(max(0.0, time.time() - newest / 1e6), 6),
        }

    def _prepare(self, target: Target) -> None:
        """Prepare a target before its first rows, and before those with other columns."""
        before, policy = self._prepared.get(target.name), self._settings.schema_changes
        if before is not None and not self._sink.keeps_state:
            # Rows of all definitions are written, and those of shards need not be in the order of the log.
            target = evolved(before, target, policy, keeps_state=False)
        if before != target:
            self._sink.prepare(target, policy)
            self._prepared[target.name] = target


def _as_one(group: list[Changes]) -> Changes:
    if len(group) == 1:
        return group[0]
    return rows_of(group[0], pyarrow.Table.from_batches([one.rows for one in group]))


def _begin(source: PipelineSource) -> str:
    return "latest" if source.start is None else str(source.start)


def _tries_in(seconds: float) -> int:
    """Return how many tries, with pauses that double, take so long."""
    tries, waited = 0, 0.0
    while waited < seconds:
        tries += 1
        waited += RECONNECT.bound(tries)
    return tries


class _Definitions:
    """The tables of one source, as the daemon keeps their definitions, or as the server itself tells them."""

    def __init__(self, source: PipelineSource) -> None:
        self._source = source
        self._known: dict[tuple[str, int], Target] = {}
        self._daemon: DaemonSource | None = None

    def close(self) -> None:
        if self._daemon is not None:
            self._daemon.close()

    def changes_of(self, batch: ChangeBatch) -> Changes:
        """Return a batch with the table it is of. Raises SchemaUnknown where nobody tells its types."""
        key = batch.table, batch.schema_version
        rows = batch.to_arrow()
        if key not in self._known:
            self._known[key] = self._found(batch, rows)
        target = self._known[key]
        return Changes(target, rows.select([*target.column_names, *SYSTEM_COLUMNS]), target.name)

    def _found(self, batch: ChangeBatch, rows: pyarrow.RecordBatch) -> Target:
        name = TableName.parse(batch.table)
        for tell in (partial(self._of_server, name), partial(self._of_daemon, name, rows, batch.key)):
            target = tell()
            if target is not None and _fits(target, rows.schema):
                return target
        place = rows.column("_metadata")[0].as_py()
        raise SchemaUnknown(
            f"nobody tells the types of {name} as its rows have them",
            position=f"{place['file']}:{place['offset']}",
            hint="Name the server in the source: server: mysql://user@host:3306",
        )

    def _of_server(self, name: TableName) -> Target | None:
        if self._source.server is None:
            return None
        *others, last = self._source.servers or (self._source.server,)
        for server in others:
            try:
                return self._told_by(server, name)
            except ConnectionLost as problem:
                _log.warning("another server is asked", server=str(server), why=str(problem))
        return self._told_by(last, name)

    def _told_by(self, server: ServerAddress, name: TableName) -> Target | None:
        return next((one for one in targets_of(server, self._source.tables) if one.name == name), None)

    def _of_daemon(self, name: TableName, rows: pyarrow.RecordBatch, key: tuple[str, ...]) -> Target | None:
        if self._daemon is None:
            self._daemon = DaemonSource(self._source.options)
        head = self._daemon.head()
        place = rows.column("_metadata")[0].as_py()
        # Where the table has changed since, its definition is that of where the rows stand.
        for position in (head, Position(head.epoch, place["file"], place["offset"])):
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
    """Tell whether rows have a table's columns, in its types."""
    own = [field for field in schema if field.name not in SYSTEM_COLUMNS]
    return {field.name: field.type for field in own} == {field.name: field.type for field in target.arrow()}
