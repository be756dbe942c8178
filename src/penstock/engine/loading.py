# SPDX-License-Identifier: Apache-2.0
"""Plans the chunks of the full load and of resnapshots.

A chunk is read at some log position. Its rows are applied before every change after that position, so a later
change of the same key overwrites them. This holds however far the pipeline lags, so a chunk may be read at
any time, without locks.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import structlog

from penstock.changes import Target
from penstock.engine.tables import PipelineTables
from penstock.errors import OptionInvalid, PenstockError, SchemaChanged, SchemaPending, TransientError
from penstock.limits import SMALL_TABLE_ROWS
from penstock.model import Position, TableName
from penstock.pipeline.hidden_changes import Follows, follows
from penstock.pipeline.load.chunks import Chunk, plan_over
from penstock.pipeline.load.session import LoadSession, check_condition, open_session
from penstock.pipeline.load.small_tables import small_chunks
from penstock.pipeline.load.watermark import Watermark, watermark_of
from penstock.pipeline.record import BatchRecord, ChunkWork
from penstock.pipeline.resnapshot import Resnapshot
from penstock.pipeline.settings import PipelineSettings, PipelineSource
from penstock.pipeline.state import Checkpoint, PipelineState, TableLoad, split_key, table_key
from penstock.pipeline.verify.merges import Emptied, may_have_other_rows
from penstock.sinks.sink import Sink, Spread, keeps_tables
from penstock.source.offsets import Offset

_log = structlog.get_logger(__name__)

# Chunks per task in one batch: enough to amortize the overhead of a job, few enough that little is repeated
# after a restart.
_CHUNKS_PER_CORE = 4
_CHUNKS_MAX = 256
# This many chunks per core keep a single writer busy. With more, a batch would only take longer.
_CHUNKS_PER_CORE_OF_ONE_WRITER = 1
# A small table counts as this fraction of a chunk.
_SMALL_SHARE = 1 / 16
# If there are fewer tables than this, cut each table separately. This costs about as much as first finding
# out which tables are small.
_SMALL_TABLES_MIN = 8
# The reason recorded for a full load that was started again. Unlike the first attempt, such a load may find
# its own rows in the target.
_AGAIN = "again"


class Loading:
    """Plans loads, one table after another."""

    def __init__(self, settings: PipelineSettings, state: PipelineState, sink: Sink, cores: int) -> None:
        self._settings = settings
        self._state = state
        self._sink = sink
        has_one_writer = (sink.load_spread or sink.spread) is Spread.WHOLE
        per_core = _CHUNKS_PER_CORE_OF_ONE_WRITER if has_one_writer else _CHUNKS_PER_CORE
        self._width = (settings.load.parallel or cores) * per_core
        self._room = _CHUNKS_MAX * per_core / _CHUNKS_PER_CORE
        # Chunks by the name of their record. The record of several small tables contains their chunks by key.
        self._chunks: dict[str, Any] = {}
        self._sessions: dict[str, tuple[LoadSession, Watermark]] = {}
        self._epochs: dict[str, int] = {}
        self._sources = {source.name for source in settings.sources}
        # The keys of tables whose loads wait for a source that is set aside.
        self._waiting: set[str] = set()
        # The keys, in the checkpoint, of tables that have no primary or unique key.
        self._keyless: set[str] = set()

    # --- Requests ---------------------------------------------------------------------------

    def reread(self, source: str, table: TableName, because: Position | str, *, remove: bool = False) -> None:
        """Request that a table is read again.

        `because` is the log position or the text that explains why. Repeated requests with the same reason
        count as one. If a request for the table is already waiting, no other is needed: the table will be
        read later than now.
        """
        if any(
            wish.state == "asked" and wish.by_pipeline and wish.where is None and wish.remove >= remove
            for wish in self._state.requests()
            if (wish.source, wish.table) == (source, table)
        ):
            return
        digest = hashlib.blake2b(f"{source}/{table}/{because}".encode(), digest_size=6).hexdigest()
        self._state.request_resnapshot(source, table, remove=remove, number=digest)
        _log.info("a table is to be read again", source=source, table=str(table), because=str(because))

    def planned(self, checkpoint: Checkpoint, tables: PipelineTables) -> Checkpoint:
        """Plan the load of every table of a full load, once, and of all requested tables."""
        loads = dict(checkpoint.loads)
        self._epochs = {
            name: Offset.from_json(offset).position.epoch for name, offset in checkpoint.offsets.items()
        }
        wishes = self._state.requests()
        asked = [wish for wish in wishes if wish.state == "asked"]
        try:
            if self._settings.load.mode != "none":
                self._plan_new(checkpoint, tables, loads)
            for wish in asked:
                if wish.source in self._sources:
                    self._take_up(wish, tables, loads)
            for key, load in loads.items():
                if load.begins_again and self._is_active(key) and key not in tables.stopped:
                    loads[key] = self._plan_again(key, tables, load)
        finally:
            for session, _ in self._sessions.values():
                session.close()
            self._sessions.clear()
        # Check the columns only after planning the requested tables, because planning a table again also
        # prepares its target again.
        tables.check_columns()
        self._let_go(tables, loads)
        unfinished = {key: load for key, load in loads.items() if not load.finished}
        self._waiting = self._waiting_keys(unfinished, tables)
        self._keyless = {key for key in unfinished if tables.is_keyless(key)}
        if loads != checkpoint.loads or not checkpoint.planned or tables.stopped != checkpoint.stopped:
            before = {load.pages for load in checkpoint.loads.values() if not load.finished}
            checkpoint = self._state.write(
                replace(checkpoint, loads=loads, planned=True, stopped=dict(tables.stopped))
            )
            self._forget(before, loads)
        running = {load.request for load in loads.values() if not load.finished}
        for wish in asked:
            if wish.number in running:
                self._state.note_request(wish, "running")
        for wish in wishes:
            if wish.state == "running" and wish.number not in running:
                # A runner completed its last batch and died before recording that.
                self._note_ended(wish.number, checkpoint)
        return checkpoint

    def _plan_new(self, checkpoint: Checkpoint, tables: PipelineTables, loads: dict[str, TableLoad]) -> None:
        """Plan the first load of every table that has no load yet."""
        remove = self._is_written_before(checkpoint)
        keys = [
            key
            for key in tables.there()
            if key not in loads
            and self._is_active(key)
            and key not in tables.stopped
            and not tables.is_streamed(key)
        ]
        small = {} if remove else self._cut_small(keys, tables)
        for key in keys:
            load = self._plan(key, tables, loads, None, remove=remove, pages=small.get(key))
            if load is not None:
                loads[key] = load

    def _is_active(self, key: str) -> bool:
        return _source_of(key) in self._sources

    def _waiting_keys(self, loads: Mapping[str, TableLoad], tables: PipelineTables) -> set[str]:
        """Return the loads that need a source that is set aside.

        A load needs its table's source. If the load removes rows, it also needs the sources of the target's
        other rows.
        """
        aside = {_source_of(key) for key in tables.known_targets()} - self._sources if loads else set()
        return {
            key
            for key, load in loads.items()
            if not self._is_active(key)
            or (load.remove and aside and tables.shared.may_be_shared_with(key, aside))
        }

    def _is_written_before(self, checkpoint: Checkpoint) -> bool:
        """Return whether targets may contain rows from an earlier generation, which a comparison would
        find.
        """
        return checkpoint.earlier is not None and self._sink.keeps_state and keeps_tables(self._sink)

    def _note_ended(self, number: str, checkpoint: Checkpoint) -> None:
        """Record the outcome of a request whose last batch is done."""
        wish = self._state.request(number)
        if wish is None or wish.state not in ("asked", "running"):
            return
        why = checkpoint.stopped.get(table_key(wish.source, wish.table))
        if why is None:
            self._state.note_request(wish, "done")
        else:
            self._state.note_request(wish, "failed", f"the pipeline goes on without it: {why}")

    def _take_up(self, wish: Resnapshot, tables: PipelineTables, loads: dict[str, TableLoad]) -> None:
        key = table_key(wish.source, wish.table)
        before = loads.get(key)
        if before is not None and not before.finished:
            if before.request == wish.number:
                return
            if before.request or before.where is not None or wish.where is not None:
                # Two different requests for a table run one after another.
                return
        if tables.source_target(key) is None:
            self._state.note_request(wish, "failed", f"the pipeline has no table {key}")
            return
        if tables.is_keyless(key) and wish.where is not None and self._sink.keeps_state:
            why = "its rows have no key by which they could be replaced, so it has to be read whole"
            self._state.note_request(wish, "failed", why)
            return
        if key in tables.stopped and wish.where is not None:
            why = "the pipeline went on without it, so it has to be read whole: without --where"
            self._state.note_request(wish, "failed", why)
            return
        stopped = tables.stopped.get(key)
        failed = f"no server is named that has {key}"
        load: TableLoad | None = None
        try:
            if stopped is not None:
                tables.take_up(key)
            elif wish.where is None:
                # A user may have dropped the target table so that it is loaded again.
                tables.prepare_again(key)
            load = self._plan(key, tables, loads, wish, afresh=stopped is not None)
        except TransientError:
            raise
        except PenstockError as problem:
            failed = str(problem)
        if load is not None:
            loads[key] = load
            return
        self._state.note_request(wish, "failed", failed)
        if stopped is not None:
            # Stop the table again: without the reread, changes would be missing from its target.
            tables.stopped[key] = stopped

    def _let_go(self, tables: PipelineTables, loads: dict[str, TableLoad]) -> None:
        """End the resnapshots of tables that the pipeline continues without."""
        for key, why in tables.stopped.items():
            load = loads.get(key)
            if load is not None and load.request and not load.finished:
                wish = self._state.request(load.request)
                if wish is not None:
                    self._state.note_request(wish, "failed", f"the pipeline goes on without it: {why}")
                loads[key] = replace(load, done=load.chunks, begins_again=False)

    def _plan(
        self,
        key: str,
        tables: PipelineTables,
        loads: Mapping[str, TableLoad],
        wish: Resnapshot | None,
        *,
        afresh: bool = False,
        remove: bool = False,
        pages: str | None = None,
    ) -> TableLoad | None:
        """Cut a table into chunks, unless `pages` has them; return None if nothing has to be read.

        `afresh` means that the pipeline had continued without the table and may have missed deletes. With
        `remove`, the table's first load deletes rows that only the target has.
        """
        name, table = split_key(key)
        source, target = self._settings.source(name), tables.source_target(key)
        if source.server is None or target is None or tables.shared.target_of(key) is None:
            return None
        if pages is None:
            pages = _pages_of(f"{key} {wish and wish.number}")
            rows = [
                chunk.rows
                for chunk in self._cut(key, target, tables, pages, first=wish is None and not remove)
            ]
        else:
            rows = [chunk["rows"] for chunk in self._chunks[pages][key]]
        _, watermark = self._session(source)
        settings = self._settings.load
        where = settings.where_of(table.database, table.table)
        if wish is not None and wish.where is not None:
            where = wish.where if where is None else f"({where}) AND ({wish.where})"
        if where is not None:
            check_condition(self._session(source)[0], target, where)
        before = loads.get(key)
        misses_deletes = afresh and bool(target.row_key)
        remove = remove or (wish is not None and (wish.remove or (wish.by_pipeline and misses_deletes)))
        if remove and not keeps_tables(self._sink):
            _log.warning(
                f"a {self._sink.kind} sink cannot be compared, so rows that the source no longer has stay",
                table=key,
            )
            remove = False
        reopens = afresh and follows(self._sink) is Follows.REOPENS and ends_all(key, tables)
        # When a table is read again, its target already has rows, so changes up to the watermark, including
        # deletes and statements, are still applied. A skipped table has missed some of these changes. One of
        # the missed changes may be the reason why the table was skipped, so a skipped table does not apply
        # them.
        keyless = wish is not None and not wish.remove and not target.primary_key
        anew = wish is None or (wish.where is None and (afresh or keyless))
        floor = watermark.version + 1 if anew else before.floor if before is not None else 0
        return TableLoad(
            chunks=len(rows),
            rows=sum(rows),
            pages=pages,
            where=where,
            remove=remove,
            request=wish.number if wish is not None else "",
            floor=floor if not source.options.is_kept else 0,
            read_to=before.read_to if before is not None else 0,
            ends_before=watermark.version if reopens else 0,
        )

    def _plan_again(self, key: str, tables: PipelineTables, load: TableLoad) -> TableLoad:
        """Plan a load again from its beginning. The log has every change since the first plan."""
        target = tables.source_target(key)
        if target is None or tables.shared.target_of(key) is None:
            return replace(load, done=load.chunks, begins_again=False)
        # Small tables share a record of chunks.
        pages = _pages_of(f"{key} {load.request or _AGAIN}")
        chunks = self._cut(key, target, tables, pages, first=False)
        return replace(
            load,
            pages=pages,
            chunks=len(chunks),
            done=0,
            rows=sum(chunk.rows for chunk in chunks),
            request=load.request or _AGAIN,
            begins_again=False,
        )

    def _cut(
        self, key: str, target: Target, tables: PipelineTables, pages: str, *, first: bool
    ) -> list[Chunk]:
        """Cut a table into chunks and store them under `pages`.

        Raises SchemaPending if the table was altered after its definition was read.
        """
        # Cutting chunks by a key that the target does not have would duplicate rows that have changed since
        # the chunks were planned.
        is_keyless = tables.is_keyless(key) and self._sink.keeps_state
        if is_keyless:
            self._refuse_others(key, tables, first=first)
        session, watermark = self._session(self._settings.source(_source_of(key)))
        try:
            chunks = plan_over(session, target, rows=self._settings.load.chunk_rows, is_keyless=is_keyless)
        except SchemaChanged as problem:
            raise SchemaPending(problem.message) from problem
        chunks = [replace(chunk, commit_ts=watermark.commit_ts) for chunk in chunks]
        self._state.put_large(pages, [chunk.to_json() for chunk in chunks])
        self._chunks.pop(pages, None)
        _log.info("a load begins", table=key, chunks=len(chunks), rows=sum(chunk.rows for chunk in chunks))
        return chunks

    def _cut_small(self, keys: Sequence[str], tables: PipelineTables) -> dict[str, str]:
        """Find the small tables among those to be loaded first; return, by key, the name of the record with
        their chunks.

        All small tables of a source share one record.
        """
        pages: dict[str, str] = {}
        for source in self._settings.sources:
            by_name = {
                target.name: key
                for key in keys
                if _source_of(key) == source.name
                and (target := tables.source_target(key)) is not None
                and not tables.is_keyless(key)
            }
            if source.server is None or len(by_name) < _SMALL_TABLES_MIN:
                continue
            session, watermark = self._session(source)
            targets = [
                target for key in by_name.values() if (target := tables.source_target(key)) is not None
            ]
            chunks = {
                by_name[chunk.table]: [replace(chunk, commit_ts=watermark.commit_ts).to_json()]
                for chunk in small_chunks(session, targets, self._settings.load.chunk_rows)
            }
            if not chunks:
                continue
            name = _pages_of(" ".join(chunks))
            self._state.put_large(name, chunks)
            self._chunks[name] = chunks
            pages |= dict.fromkeys(chunks, name)
            _log.info("small tables are loaded whole", source=source.name, tables=len(chunks))
        return pages

    def _refuse_others(self, key: str, tables: PipelineTables, *, first: bool) -> None:
        """Raise OptionInvalid if emptying the target of a keyless table, before the table is read, would
        delete rows of other tables. In a `first` load, every existing row belongs to another table.
        """
        hint = "Give the table a primary key, or write it to a target of its own"
        if may_have_other_rows(self._settings.make_steps(), tables.known_targets(), key, first=first):
            raise OptionInvalid(
                f"{key} has no key, and its target may have rows of others: rows that are read again could"
                " not be distinguished from them",
                hint=hint,
            )
        wanted = tables.shared.target_of(key)
        target = None if wanted is None else tables.targets.get(wanted.name)
        if first and target is not None and any(rows.num_rows for rows in self._sink.read(target)):
            raise OptionInvalid(
                f"{key} has no key, and {target.name} has rows that this pipeline has not written: its load"
                " would delete them",
                hint=f"{hint}; or empty the target. To have the load delete them:"
                f" penstock pipelines reset {self._settings.path or self._settings.name} --yes",
            )

    def _session(self, source: PipelineSource) -> tuple[LoadSession, Watermark]:
        """Return a planning session, and a log position. Rows read from now on include every change before
        the position.
        """
        assert source.server is not None, "only tables of a server are cut into chunks"
        if source.name not in self._sessions:
            session = open_session(source.server)
            epoch = self._epochs.get(source.name, 0)
            self._sessions[source.name] = session, watermark_of(session, epoch)
        return self._sessions[source.name]

    # --- Batches ----------------------------------------------------------------------------

    def is_asked(self, checkpoint: Checkpoint) -> bool:
        """Return whether a resnapshot is waiting or running, not counting those that wait for a source that
        was set aside.
        """
        unfinished = [
            (key, load) for key, load in checkpoint.loads.items() if load.request and not load.finished
        ]
        if any(key not in self._waiting for key, _ in unfinished):
            return True
        waiting = {load.request for _, load in unfinished}
        return any(
            wish.state in ("asked", "running") and wish.source in self._sources and wish.number not in waiting
            for wish in self._state.requests()
        )

    def is_loading(self, checkpoint: Checkpoint) -> bool:
        """Return whether tables are being loaded, or are to be loaded next."""
        return not checkpoint.planned or any(
            not load.finished and key not in checkpoint.stopped and key not in self._waiting
            for key, load in checkpoint.loads.items()
        )

    def is_first_load(self, checkpoint: Checkpoint) -> bool:
        """Return whether the full load is unfinished. Changes are read only after it."""
        return any(
            not load.finished
            and not load.request
            and key not in checkpoint.stopped
            and key not in self._waiting
            for key, load in checkpoint.loads.items()
        )

    def next(self, checkpoint: Checkpoint) -> tuple[list[ChunkWork], Mapping[str, int], list[str]]:
        """Return the chunks of the next batch, the progress of each table after the batch, and the requests
        that the batch finishes.
        """
        works: list[ChunkWork] = []
        rows, rows_max = 0, self._width * self._settings.load.chunk_rows
        room = self._room
        done: dict[str, int] = {}
        finished: list[str] = []
        for key, load in checkpoint.loads.items():
            if load.finished or key in checkpoint.stopped or key in self._waiting:
                continue
            if room <= 0 or rows >= rows_max:
                break
            source, table = split_key(key)
            # In a table without a key, rows read a moment after the log position would be applied twice.
            chunks = self._chunks_of(key, load)
            exact = key in self._keyless and not chunks[0]["key"]
            if exact and works:
                break
            taken = []
            for chunk in chunks[load.done :]:
                if rows >= rows_max or room <= 0:
                    break
                rows += chunk["rows"]
                room -= 1 if chunk["rows"] > SMALL_TABLE_ROWS else _SMALL_SHARE
                taken.append(chunk)
            works += [
                ChunkWork(
                    source,
                    table,
                    chunk,
                    load.where,
                    load.remove,
                    load.request,
                    exact,
                    0 if number else load.ends_before,
                )
                for number, chunk in enumerate(taken, load.done)
            ]
            done[key] = load.done + len(taken)
            if done[key] == load.chunks and load.request:
                finished.append(load.request)
            if exact:
                break
        return works, done, finished

    def begin_again(self, checkpoint: Checkpoint, keys: Collection[str]) -> Checkpoint:
        """Record, before a batch is committed, that the loads of these tables begin again after the batch."""
        if not keys:
            return checkpoint
        again = {key: replace(checkpoint.loads[key], begins_again=True) for key in keys}
        return self._state.write(replace(checkpoint, loads={**checkpoint.loads, **again}))

    def done(self, checkpoint: Checkpoint, record: BatchRecord) -> None:
        """Record the requests and loads that a batch finished."""
        running = {load.request for load in checkpoint.loads.values() if not load.finished}
        for number in record.finished:
            if number not in running:
                self._note_ended(number, checkpoint)
        finished = {checkpoint.loads[key].pages for key in record.loads if checkpoint.loads[key].finished}
        self._forget(finished, checkpoint.loads)

    def _forget(self, names: Collection[str], loads: Mapping[str, TableLoad]) -> None:
        """Delete the records of chunks with these names, except those that an unfinished load reads."""
        for name in set(names) - {load.pages for load in loads.values() if not load.finished}:
            self._chunks.pop(name, None)
            self._state.drop_large(name)

    def _chunks_of(self, key: str, load: TableLoad) -> Sequence[Mapping[str, Any]]:
        chunks = self._chunks.get(load.pages)
        if chunks is None:
            chunks = self._chunks[load.pages] = self._state.get_large(load.pages) or []
        chunks_of_table: Sequence[Mapping[str, Any]] = chunks[key] if isinstance(chunks, Mapping) else chunks
        return chunks_of_table


def _pages_of(what: str) -> str:
    """Return the name of the record of a load's chunks."""
    return f"loads-{hashlib.blake2b(what.encode(), digest_size=8).hexdigest()}"


def _source_of(key: str) -> str:
    # Every batch calls this for every table, and `split_key` has to parse the name.
    return key.partition("/")[0]


def ends_all(key: str, tables: PipelineTables) -> bool:
    """Return whether all open rows of a table's history end when the table is read again.

    Raises OptionInvalid if some of the rows may belong to other tables.
    """
    effect = tables.shared.emptied(key, tables.targets)
    if effect not in (Emptied.WHOLE, Emptied.STAYS):
        raise OptionInvalid(
            f"the history of {key} may have rows of other tables, so it is not known which rows ended while"
            " the pipeline went on without the table",
            hint="Write each table to a history of its own (a route step), and run: penstock pipelines reset",
        )
    return effect is Emptied.WHOLE
