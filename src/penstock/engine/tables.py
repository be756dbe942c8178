# SPDX-License-Identifier: Apache-2.0
"""The driver's knowledge of tables: their definitions, and the targets that were prepared for them.

This knowledge is stored in the pipeline's state. Tasks report unknown tables as surprises. `learn` processes
surprises in log order, prepares targets, and returns what the tasks must know when the batch is run again.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from penstock.changes import Target
from penstock.engine.dropped_columns import ColumnCheck
from penstock.engine.fitting import TargetFitting
from penstock.engine.shared_targets import SharedTargets
from penstock.engine.tables_record import TablesRecord
from penstock.engine.task_plan import (
    OF_CHUNK,
    OF_DEFINITION,
    OF_MOVE,
    OF_STATEMENT,
    OF_TARGET,
    Failure,
    KnownTable,
    Surprise,
    place_key,
)
from penstock.engine.tracked_table import (
    Learned,
    TrackedTable,
    columns_agree,
    keys_of,
    logged_target,
    with_known_keys,
)
from penstock.errors import (
    OptionInvalid,
    PenstockError,
    PrivilegeMissing,
    SchemaChanged,
    SchemaInvalid,
    ServerUnsupported,
    StreamError,
    TransientError,
)
from penstock.model import Column, TableName, TablePatterns
from penstock.pipeline import hidden_changes
from penstock.pipeline.ghosts import PipelinePatterns
from penstock.pipeline.load.chunks import Chunk, is_reordered
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.pattern_check import pattern_findings, refuse_fatal, tables_on_servers
from penstock.pipeline.settings import PipelineSettings, PipelineSource
from penstock.pipeline.shards import whole_patterns
from penstock.pipeline.state import PipelineState, split_key, table_key
from penstock.pipeline.step import Step, target_through
from penstock.pipeline.table_changes import (
    Consequences,
    TableBefore,
    columns_after,
    consequences_of,
)
from penstock.pipeline.verify.merges import Emptied
from penstock.schema.statements.tokens import ServerSpelling
from penstock.sinks.concurrent_calls import call_for_each
from penstock.sinks.sink import Sink, keeps_tables
from penstock.source.reading import LoggedStatement, schema_version

_log = structlog.get_logger(__name__)

# Errors that may concern a single table, if that table is known. All other errors stop the pipeline: a full
# disk or a refused login would otherwise skip every table in turn. If no row of a batch could be written, the
# run treats such an error as a problem of the whole target.
_OF_ONE_TABLE = (StreamError, OptionInvalid, PrivilegeMissing, SchemaInvalid, ServerUnsupported)

# The maximum number of times that a chunk is retried with a new definition because its table was altered.
_LOOKS_MAX = 5


class PipelineTables:
    """All tables of a pipeline.

    `reread(source, table, because, remove=False)` requests that a table be read again. `because` is a log
    position or other text; repeated requests with the same `because` count as one. `remove` also deletes
    target rows that the source does not have.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        state: PipelineState,
        sink: Sink,
        steps: Sequence[Step],
        reread: Callable[..., None],
    ) -> None:
        self._settings = settings
        self._record = TablesRecord(state)
        self._sink = sink
        self._steps = steps
        self._reread = reread
        self._tables: dict[str, TrackedTable] = {}
        self.shared = SharedTargets(settings, steps, self._tables)
        self.targets: dict[TableName, Target] = {}
        # Targets from before a reset. Their rows must be deleted even if no new row names these targets.
        self._written: set[TableName] = set()
        self.fitting = TargetFitting(sink, settings.schema_changes)
        self.columns = ColumnCheck(sink, settings.schema_changes)
        self._created: set[str] = set()  # Tables that are known only from their CREATE TABLE statement.
        # Tables that the pipeline continues without, and why. The runner stores them in the checkpoint.
        self.stopped: dict[str, str] = {}

    # --- What is known ----------------------------------------------------------------------

    def open(self, *, checks_patterns: bool = True) -> None:
        """Load the tables of the state, add those that the servers have now, and prepare new targets.

        Pass `checks_patterns=False` if the settings omit some of the pipeline's sources, because a table
        pattern may match only tables of the omitted sources.
        """
        tables, self.targets, self._written = self._record.read()
        self._tables.update(tables)
        for source in self._settings.sources:
            self._read_server(source)
        if checks_patterns:
            known: dict[str, list[Target]] = {}
            for key, table in self._tables.items():
                known.setdefault(split_key(key)[0], []).append(table.current)
            if self._settings.shard is not None:
                # Check the patterns against the tables of all shards, because a pattern may match only tables
                # of other shards.
                for source in self._settings.sources:
                    if source.server is not None:
                        on_server = targets_of(source.server, whole_patterns(source.tables))
                        known.setdefault(source.name, []).extend(on_server)
            refuse_fatal(pattern_findings(self._settings, tables_on_servers(self._settings), known))
        self._prepare()

    def known(self, floors: Mapping[str, int]) -> dict[str, KnownTable]:
        """Return the tables in the form that tasks receive."""
        return {
            key: KnownTable(table.definitions, table.current, floors.get(key, 0), table.gone)
            for key, table in self._tables.items()
        }

    def there(self) -> list[str]:
        """Return the sorted keys of the tables that exist in their sources."""
        return sorted(key for key, table in self._tables.items() if not table.gone)

    def is_streamed(self, key: str) -> bool:
        """Whether the log contains every row of a table, from its CREATE TABLE on."""
        return self._tables[key].streamed

    def is_keyless(self, key: str) -> bool:
        """Whether a table has no key that identifies its rows, at the source or in its target.

        An added column may be null in older rows of a target, so a key that contains such a column does not
        identify rows of the target.
        """
        table = self._tables.get(key)
        if table is None:
            return False
        stepped = self.shared.target_of(key)
        prepared = None if stepped is None else self.targets.get(stepped.name)
        return not table.current.row_key or (prepared is not None and not prepared.row_key)

    def known_targets(self) -> dict[str, Target]:
        """Return the current definition of every table, by key."""
        return {key: table.current for key, table in self._tables.items()}

    def source_target(self, key: str) -> Target | None:
        """Return the current definition of a table, None if the table is unknown."""
        table = self._tables.get(key)
        return None if table is None else table.current

    def _read_server(
        self, source: PipelineSource, only: TableName | None = None, *, new_keys: bool = False
    ) -> dict[TableName, Target]:
        """Read the current definitions from a server, record them and return them.

        The server's definitions are ahead of the log: rows still to be read may violate a unique key that the
        table has gained since, and would replace each other in the target. With `new_keys`, such keys are
        adopted nevertheless.
        """
        patterns: TablePatterns = PipelinePatterns(source.tables)
        if source.server is None or not (only is None or patterns.matches(only.database, only.table)):
            return {}
        patterns = patterns if only is None else TablePatterns([only.sql])
        on_server = {}
        for target in targets_of(source.server, patterns):
            on_server[target.name] = target
            key = table_key(source.name, target.name)
            tracked = self._tables.get(key)
            number = schema_version(target.columns)
            if tracked is None:
                self._tables[key] = TrackedTable(
                    target, {number: target}, logged=target.columns, keys=keys_of(target)
                )
                self._tables[key].streamed = key in self._created
                continue
            current = target if new_keys else with_known_keys(target, tracked.current)
            if tracked.current != current:
                tracked.current = current
                tracked.definitions[number] = current
        return on_server

    def jump(self, source: PipelineSource) -> list[TableName]:
        """Adopt the current definitions of a source's server after a part of its log was lost.

        Returns the known tables that still exist, which must be read again.
        """
        assert source.server is not None, "only tables of a server are read again"
        known = {
            key
            for key, table in self._tables.items()
            if split_key(key)[0] == source.name and not table.gone and key not in self.stopped
        }
        self._read_server(source, new_keys=True)
        on_server = {
            table_key(source.name, target.name)
            for target in targets_of(source.server, PipelinePatterns(source.tables))
        }
        for key in known:
            table = self._tables[key]
            table.gone = key not in on_server
            table.logged = table.current.columns
            if table.gone:
                _log.warning("a table is gone from its source; its target is left", table=key)
        self._prepare()
        self.done()
        return [split_key(key)[1] for key in sorted(known & on_server)]

    def done(self) -> None:
        """Save which tables are gone. Call this once the sink has committed the batch."""
        for table in self._tables.values():
            table.was_gone = table.gone
        self._save()

    def undone(self) -> None:
        """Restore which tables were gone before the batch, because all of its statements will be read
        again.
        """
        for table in self._tables.values():
            table.gone = table.was_gone

    # --- What is learned --------------------------------------------------------------------

    def learn(self, surprises: Iterable[Surprise], learned: Learned, floors: Mapping[str, int]) -> None:
        """Process surprises in log order, and prepare the targets that they need.

        Raises SchemaChanged for a change that is not allowed, or that cannot be followed without a server.
        """
        altered: set[str] = set()
        for surprise in surprises:
            if surprise.what == OF_DEFINITION:
                self._learn_definition(surprise)
            elif surprise.what == OF_STATEMENT:
                self._learn_statement(surprise, learned, floors)
            elif surprise.what == OF_TARGET:
                self._prepare_met(*surprise.value)
            elif surprise.what == OF_CHUNK:
                key = table_key(surprise.source, surprise.value[0])
                if key not in altered:
                    altered.add(key)
                    self._learn_altered(surprise, learned)
            else:
                assert surprise.what == OF_MOVE, "there is nothing else"
                learned.together.add(surprise.value)
        self._prepare()

    def _learn_definition(self, surprise: Surprise) -> None:
        value, source = surprise.value, self._settings.source(surprise.source)
        key = table_key(surprise.source, value["table"])
        tracked = self._tables.get(key)
        if tracked is None or not columns_agree(tracked.current, value["columns"]):
            self._read_server(source, value["table"])
            tracked = self._tables.get(key)
        logged = logged_target(value, tracked, mariadb=self._is_mariadb(source))
        if tracked is None:
            tracked = self._tables[key] = TrackedTable(logged, {}, streamed=key in self._created)
        elif tracked.gone:
            tracked.gone = False
        if columns_agree(tracked.current, value["columns"]):
            # The columns are the same, but the server declares their types more precisely than the log.
            logged = replace(tracked.current)
        elif source.server is None:
            # Use the log's definition: the source names no server that could have a later definition.
            tracked.current = logged
        tracked.definitions[value["version"]] = logged
        tracked.logged = tuple(value["columns"])

    def _learn_altered(self, surprise: Surprise, learned: Learned) -> None:
        """Read the definition of a table that was altered while its chunk was read.

        If the table's key now orders rows differently, or the table has been altered too often, its load
        starts over.
        """
        name, problem, chunk = surprise.value
        source, key = self._settings.source(surprise.source), table_key(surprise.source, name)
        assert source.server is not None, "only tables of a server are cut into chunks"
        self._read_server(source, name)
        learned.altered[key] = learned.altered.get(key, 0) + 1
        is_there = targets_of(source.server, TablePatterns([name.sql]))
        if not is_there:
            _log.warning("a table is gone before it was read to its end", table=key, why=str(problem))
            learned.unread.add(key)
        elif learned.altered[key] > _LOOKS_MAX or is_reordered(source.server, Chunk.from_json(chunk)):
            _log.warning("a table was altered, its load begins again", table=key, why=str(problem))
            learned.unread.add(key)
            learned.again.add(key)

    def _is_mariadb(self, source: PipelineSource) -> bool:
        own = (table.current for key, table in self._tables.items() if key.startswith(f"{source.name}/"))
        return next((target.mariadb for target in own), False)

    def _learn_statement(self, surprise: Surprise, learned: Learned, floors: Mapping[str, int]) -> None:
        statement: LoggedStatement = surprise.value
        source = self._settings.source(surprise.source)
        patterns = PipelinePatterns(source.tables)
        spelling = ServerSpelling(self._is_mariadb(source), sql_mode=statement.sql_mode)
        before = {
            name: TableBefore(table.logged, table.dropped, partial(self._now, source, name))
            for name in statement.tables
            if (table := self._tables.get(table_key(source.name, name))) is not None
        }
        consequences = consequences_of(statement, spelling, before)
        _log.info(
            "a table's definition changes",
            source=source.name,
            position=str(statement.position),
            statement=statement.text[:200],
        )
        version = statement.version

        def ours(names: Iterable[TableName]) -> list[TableName]:
            # Leave out tables whose load started after the statement, because such a load already includes
            # its effect.
            return [
                name
                for name in sorted(names)
                if patterns.matches(name.database, name.table)
                and floors.get(table_key(source.name, name), 0) <= version
            ]

        emptied = self._note_added_and_removed(source, consequences, ours)
        is_copy, has_key = partial(self._is_copy, source), partial(self._has_key, source)
        rereads = hidden_changes.rereads_after(consequences, self._sink, ours, is_copy, has_key)
        self._ask_again(source, rereads, statement, emptied)
        rekeyed = (
            statement.tables & before.keys() - consequences.removed - consequences.added
            if consequences.alters_keys
            else set()
        )
        for name in ours(
            consequences.altered
            | consequences.swapped
            | consequences.replaced
            | consequences.unlogged
            | rekeyed
        ):
            self._follow(source, name, consequences, statement, spelling)
        names: dict[str, TableName] = {}
        for name in sorted(emptied):
            key = table_key(source.name, name)
            how, target = self.shared.emptied(key, self.targets), self.shared.target_of(key)
            if how is Emptied.WHOLE and target is not None:
                names[key] = target.name
            elif how is not Emptied.STAYS:
                self._ask_without(source, name, statement, how)
        learned.together |= set(names.values())
        learned.statements[place_key(source.name, statement.position)] = names

    def _now(self, source: PipelineSource, name: TableName) -> Target | None:
        """Return a table's current definition on its server, None if the source names no server."""
        return self._read_server(source, name).get(name)

    def _follow(
        self,
        source: PipelineSource,
        name: TableName,
        consequences: Consequences,
        statement: LoggedStatement,
        spelling: ServerSpelling,
    ) -> None:
        """Record a table's definition after a statement."""
        new_keys = (
            consequences.alters_keys
            or name in consequences.swapped | consequences.replaced
            or bool(consequences.dropped.get(name))
        )
        self._read_server(source, name, new_keys=new_keys)
        table = self._tables.get(table_key(source.name, name))
        if table is None:
            return
        table.gone = False
        dropped = consequences.dropped.get(name, set())
        logged: tuple[Column, ...] | None = table.current.columns
        if name in consequences.swapped or name in consequences.replaced:
            table.keys = keys_of(table.current)
        else:
            logged = columns_after(name, table.logged, statement.text, statement.database, spelling)
            if consequences.alters_keys:
                table.keys = None
        if table.logged is not None:
            columns = {column.name.lower() for column in (logged or table.current.columns)}
            dropped = dropped | ({column.name.lower() for column in table.logged} - columns)
        table.dropped |= dropped
        table.logged = logged

    def _ask_without(
        self, source: PipelineSource, name: TableName, statement: LoggedStatement, how: Emptied
    ) -> None:
        """Request that a table's rows are deleted from targets that may also contain rows of other tables.

        To find these rows, the target is compared with the source. Raises SchemaChanged if this comparison is
        not possible.
        """
        follows = hidden_changes.follows(self._sink)
        if follows is hidden_changes.Follows.NOTHING:
            return
        if follows is hidden_changes.Follows.REOPENS or not keeps_tables(self._sink):
            hidden_changes.refuse_shared(self._settings, name, statement)
        if source.server is None or not self._has_key(source, name) or how is Emptied.UNKNOWN:
            hint = "Name the server the log is of (source.server), so that the tables can be compared"
            if how is Emptied.UNKNOWN:
                hint = "Let rows of a load pass (only: {load: true}), so that the tables can be compared"
            elif source.server is not None:
                hint = "Give the tables a primary key: without one nothing tells the rows of one from others'"
            raise SchemaChanged(
                f"{name} was emptied, and its target may have rows that stay: {statement.text[:200]}",
                position=str(statement.position),
                hint=hint,
            )
        self._reread(source.name, name, statement.position, remove=True)

    def _note_added_and_removed(
        self, source: PipelineSource, consequences: Consequences, ours: Any
    ) -> set[TableName]:
        """Record tables that a statement dropped or created; return the tables whose targets must be
        emptied.
        """
        emptied = set(ours(consequences.emptied))
        for name in ours(consequences.added):
            self._created.add(table_key(source.name, name))
            table = self._tables.get(table_key(source.name, name))
            if table is not None and (table.gone or name in consequences.surely_added):
                # An earlier table had this name. Its rows do not belong to the new table.
                table.gone = False
                emptied.add(name)
                # If the columns are the same, the logged rows do not reveal that the keys differ.
                self._read_server(source, name, new_keys=True)
                table.logged = table.keys = None
        for key, table in self._tables.items():
            of, name = split_key(key)
            is_named = name in consequences.removed or name.database in consequences.removed_databases
            if of == source.name and is_named and ours([name]):
                table.gone = True
                _log.warning("a table is gone from its source; its target is left", table=key)
        return emptied

    def _ask_again(
        self,
        source: PipelineSource,
        rereads: hidden_changes.Rereads,
        statement: LoggedStatement,
        emptied: set[TableName],
    ) -> None:
        """Request a reread of the tables whose new values are not in the log."""
        if hidden_changes.follows(self._sink) is hidden_changes.Follows.NOTHING:
            hidden_changes.warn_of_feed(self._settings, rereads.tables, statement)
            return
        emptied.update(rereads.emptied)
        for name in sorted(rereads.tables):
            if source.server is None:
                raise SchemaChanged(
                    f"{name} was changed so that its rows have values which the log does not show:"
                    f" {statement.text[:200]}",
                    position=str(statement.position),
                    hint="Name the server the log is of (source.server), so that the table can be read again",
                )
            # Requests with the same reason are merged. Each request for an emptied table must therefore also
            # state whether rows have to be removed.
            key = table_key(source.name, name)
            how = self.shared.emptied(key, self.targets) if name in emptied else Emptied.STAYS
            remove = name in rereads.compared or (how is Emptied.COMPARED and keeps_tables(self._sink))
            self._reread(source.name, name, statement.position, remove=remove)

    def _is_copy(self, source: PipelineSource, name: TableName) -> bool:
        before = self._tables.get(table_key(source.name, name))
        now = self._now(source, name)
        return before is not None and now is not None and before.has_same_rows(now)

    def _has_key(self, source: PipelineSource, name: TableName) -> bool:
        table = self._tables.get(table_key(source.name, name))
        return table is not None and bool(table.current.primary_key)

    # --- Tables that the pipeline continues without -----------------------------------------

    def stop(self, failures: Iterable[Failure]) -> bool:
        """Continue without tables whose rows cannot be processed or written; return whether trying again
        makes sense.

        It does if every failure is transient or belongs to a table that was not stopped before.
        """
        problems = {
            failure.table: failure.error
            for failure in failures
            if not isinstance(failure.error, TransientError)
        }
        if not problems or not all(
            key in self._tables and key not in self.stopped and isinstance(problem, _OF_ONE_TABLE)
            for key, problem in problems.items()
        ):
            return False
        for key, problem in problems.items():
            self._continue_without(key, problem)
        return True

    def take_up(self, key: str) -> None:
        """Include a stopped table again; the caller must load all of its rows.

        If the table's target cannot be prepared, raises the error and leaves the table stopped.
        """
        name, table = split_key(key)
        why = self.stopped.pop(key)
        _log.info("the pipeline goes on with a table again", table=key, was=why)
        try:
            self._read_server(self._settings.source(name), table, new_keys=True)
            self.prepare_again(key)
        except PenstockError:
            self.stopped[key] = why
            raise

    def prepare_again(self, key: str) -> None:
        """Prepare a table's target again, in case it was dropped or replaced."""
        current = self._tables[key].current
        stepped = target_through(self._steps, current)
        known = self._written | self.targets.keys()
        self._prepare(set() if stepped is None else set(self.shared.names_of(current, stepped, known)))

    # --- Prepared targets -------------------------------------------------------------------

    def _prepare(self, again: Collection[TableName] = ()) -> None:
        """Prepare every target whose columns or keys have changed, and all targets in `again`."""
        wanted = self.shared.wanted(self.stopped, self._written | self.targets.keys())
        self._sink.check_together([target for target, _ in wanted.values()])

        def prepare(name: TableName) -> None:
            target, key = wanted[name]
            self._prepare_or_stop(key, target, again=name in again)

        with self._sink.preparing():
            call_for_each(prepare, wanted, self._sink.prepare_threads_max)
        self._save()

    def check_columns(self) -> None:
        """If a check is due, check that the targets still have the columns with which they were prepared.

        Raises SchemaChanged. Call it between batches, and after a batch that an earlier run began: that run
        may have altered a target further.
        """
        if not self.columns.is_due:
            return
        wanted = self.shared.wanted(self.stopped, self._written | self.targets.keys())
        current = {name: target for name, (target, _) in wanted.items()}
        for problem in self.columns.find(self.targets, current):
            if self._settings.errors.table != "skip_table":
                raise problem.error
            key = wanted[problem.target][1]
            for stopped in (key, *self.shared.sharing(key, problem.target)):
                if stopped not in self.stopped and not self._tables[stopped].gone:
                    self._continue_without(stopped, problem.error)

    def _prepare_met(self, key: str, target: Target) -> None:
        """Prepare a target for rows that were read. A target that was already prepared keeps its keys."""
        known = self.targets.get(target.name)
        if known is not None:
            target = replace(target, primary_key=known.primary_key, unique_keys=known.unique_keys)
        self._prepare_or_stop(key, target)

    def _prepare_or_stop(self, key: str, target: Target, *, again: bool = False) -> None:
        """Prepare a target, or continue without its table if the settings allow it."""
        try:
            self._prepare_target(target, again=again)
        except _OF_ONE_TABLE as problem:
            if self._settings.errors.table != "skip_table":
                raise
            self._continue_without(key, problem)

    def _continue_without(self, key: str, problem: PenstockError) -> None:
        self.stopped[key] = str(problem)
        _log.error("the pipeline goes on without a table", table=key, why=str(problem))

    def _prepare_target(self, target: Target, *, again: bool = False) -> None:
        self.targets[target.name] = self.fitting.prepare(self.targets.get(target.name), target, again=again)

    def _save(self) -> None:
        self._record.save(self._tables, self.targets, self._written)
