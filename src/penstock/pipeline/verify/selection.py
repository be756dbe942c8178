# SPDX-License-Identifier: Apache-2.0
"""Selects the target tables to compare, determines their source tables, and divides the comparison into
shares.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from penstock.changes import Target
from penstock.errors import OptionInvalid, SourceMissing, VersionConflict
from penstock.model import TableName, TablePatterns
from penstock.pipeline.ghosts import PipelinePatterns
from penstock.pipeline.load.chunks import Chunk
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.load.watermark import Watermark, take_watermark
from penstock.pipeline.settings import LoadSettings, PipelineSettings, StepSettings
from penstock.pipeline.state import Checkpoint, PipelineState, split_key, table_key
from penstock.pipeline.step import Rejected, ShardValue, Slots, Step, named_by_rows, run_steps
from penstock.pipeline.verify.kept_keys import keeps_column
from penstock.pipeline.verify.merges import may_share_rows, shard_of, targets_of_table
from penstock.pipeline.verify.scope import Scope, joint_slots, scope_of
from penstock.pipeline.verify.shares import ComparedTable, LeftOut, Share
from penstock.pipeline.verify.source_rows import SourceChunk, SourceTable, address_of, chunks_of

# How many times to read a record that a runner keeps rewriting.
_READS_MAX = 5


def compared_tables(
    settings: PipelineSettings,
    state: PipelineState,
    tables: TablePatterns,
    columns_left_out: Sequence[str] = (),
) -> list[ComparedTable]:
    """Return the tables that are selected by the name of the target's table or of a source table.

    Source tables that the pipeline continues without, or has not completely loaded, are left out. Raises
    OptionInvalid if a step cannot be compared or a column is unknown, SourceMissing if no table matches,
    which is possible for a shard that has no such table.
    """
    refuse_incomparable_steps(settings)
    known = _KnownTables.of(state)
    chain = settings.make_steps()
    merges: dict[TableName, _Merge] = {}
    selected: set[TableName] = set()
    try:
        for source_table, why in _source_tables(settings, known):
            shard = shard_of(chain, settings.steps, source_table.table, source_table.source.name)
            for target in _targets(chain, source_table, known.targets, read=not why):
                merge = merges.setdefault(target.name, _Merge(target))
                merge.take_scope(chain, settings.steps, source_table.table)
                if why:
                    merge.left_out.append(LeftOut(str(source_table.table.name), why, shard))
                else:
                    merge.sources.append((source_table, shard))
                if any(
                    tables.matches(name.database, name.table)
                    for name in (target.name, source_table.table.name)
                ):
                    selected.add(target.name)
    finally:
        for step in chain:
            step.close()
    if not selected and settings.shard is None:
        raise no_such_table(settings.name, tables.include)
    return [
        ComparedTable(
            merge.target,
            tuple(source_table for source_table, _ in merge.sources),
            settings.steps,
            settings.sink,
            _columns(merge.target, columns_left_out),
            tuple(merge.left_out),
            merge.why_open(),
            merge.slots,
        )
        for name, merge in sorted(merges.items())
        if name in selected
    ]


def no_such_table(name: str, patterns: Sequence[str]) -> SourceMissing:
    """Return the error for patterns that match no table of the pipeline `name`."""
    return SourceMissing(
        f"no table of the pipeline {name} matches {', '.join(patterns)}"
        if patterns
        else f"the pipeline {name} has no tables yet",
        hint="penstock pipelines tables lists its tables",
    )


@dataclass
class _Merge:
    """A target table being assembled: the source tables that go to it, and their shards."""

    target: Target
    sources: list[tuple[SourceTable, ShardValue | None]] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    scopes: list[Scope] = field(default_factory=list)
    slots: tuple[Slots, ...] = ()
    mixed: str = ""

    def take_scope(self, chain: Sequence[Step], steps: Sequence[StepSettings], table: Target) -> None:
        """Add the scope of a source table. If the table cannot be separated from other pipelines, record
        why.
        """
        try:
            self.scopes.append(scope_of(chain, steps, table))
            self.slots = joint_slots(self.scopes)
        except OptionInvalid as problem:
            self.mixed = f"{problem.message} ({problem.hint})"

    def why_open(self) -> str:
        """Return why no row can be compared, "" if some can. A left-out table may own any row."""
        if self.mixed:
            return self.mixed
        for omitted in self.left_out:
            if not self.sources or any(may_share_rows(omitted.shard, shard) for _, shard in self.sources):
                return f"{omitted.name}: {omitted.why}"
        return ""


@dataclass
class _KnownTables:
    """The tables that the pipeline's state knows, by key, and the targets that it has prepared.

    `streamed` are tables that are never loaded, None if not recorded yet.
    """

    checkpoint: Checkpoint
    tables: dict[str, Target]
    streamed: frozenset[str] | None
    targets: list[TableName]

    @classmethod
    def of(cls, state: PipelineState) -> Self:
        checkpoint, value = state.checkpoint(), _read_tables(state)
        assert checkpoint is not None, "a pipeline that never ran is refused before"
        if value is None:
            return cls(checkpoint, {}, None, [])
        return cls(
            checkpoint,
            {key: Target.from_json(record["current"]) for key, record in value["tables"].items()},
            frozenset(key for key, record in value["tables"].items() if record["streamed"]),
            [Target.from_json(record).name for record in value["targets"]],
        )

    def why_left_out(self, key: str, *, loads: bool) -> str:
        """Return why a table is not compared, "" if it is. `loads`: whether the pipeline loads tables."""
        load = self.checkpoint.loads.get(key)
        if key in self.checkpoint.stopped:
            return f"the pipeline goes on without it ({self.checkpoint.stopped[key]})"
        if load is not None:
            return "" if load.finished else "it is not loaded to its end"
        if self.streamed is not None and loads and key not in self.streamed:
            return "the pipeline has not loaded it yet"
        return ""


def _read_tables(state: PipelineState) -> Any:
    """Return the state's record of tables, which a runner may rewrite at the same time."""
    for _ in range(_READS_MAX - 1):
        try:
            return state.get_large("tables")
        except VersionConflict:
            continue
    return state.get_large("tables")


def shares_of(tables: Sequence[ComparedTable], load: LoadSettings, chunk_rows: int) -> list[Share]:
    """Divide tables that are not open into shares of about `chunk_rows` rows, if their keys allow it."""
    watermarks: dict[str, Watermark] = {}
    return [
        share for table in tables if not table.open for share in _shares(table, load, chunk_rows, watermarks)
    ]


def refuse_incomparable_steps(settings: PipelineSettings) -> None:
    """Raise OptionInvalid if a step makes the target's state depend on the history of changes."""
    for step in settings.steps:
        if step.verb == "only":
            raise OptionInvalid(
                "a target to which only some kinds of change come is not what its source is",
                hint="Compare a pipeline without the step `only`",
            )


def _targets(
    chain: Sequence[Step], source_table: SourceTable, known: Sequence[TableName], *, read: bool
) -> list[Target]:
    """Return the target tables of a source table's rows: one, none, or the tables that the rows name."""
    targets = {target.name: target for target in targets_of_table(chain, source_table.table, known)}
    if read and named_by_rows(chain, source_table.table):
        targets |= {target.name: target for target in _named_by_rows(chain, source_table)}
    return list(targets.values())


def _named_by_rows(steps: Sequence[Step], source_table: SourceTable) -> list[Target]:
    targets: dict[TableName, Target] = {}
    for changes in SourceChunk(
        source_table, Chunk(source_table.table.name), take_watermark(address_of(source_table.source))
    ).rows(loaded=False):
        for stepped in run_steps(steps, changes):
            if not isinstance(stepped, Rejected):
                targets.setdefault(stepped.target.name, stepped.target)
    return list(targets.values())


def keeps_keys(table: ComparedTable) -> bool:
    """Return whether a range of the source's keys holds the same rows as that range in the target."""
    return (
        len(table.sources) == 1
        and table.target.primary_key == table.sources[0].table.primary_key
        and all(keeps_column(table.steps, name) for name in table.target.primary_key)
    )


def _shares(
    table: ComparedTable, load: LoadSettings, chunk_rows: int, watermarks: dict[str, Watermark]
) -> Iterator[Share]:
    in_ranges = keeps_keys(table) and table.sink.make().reads_ranges
    chunks = []
    for source_table in table.sources:
        name = source_table.source.name
        if name not in watermarks:
            watermarks[name] = take_watermark(address_of(source_table.source))
        where = load.where_of(source_table.table.name.database, source_table.table.name.table)
        chunks += chunks_of(source_table, watermarks[name], chunk_rows, where, in_ranges=in_ranges)
    if all(chunk.low is None and chunk.high is None for chunk in chunks):
        yield Share(table, tuple(chunks))
        return
    for chunk in chunks:
        yield Share(table, (chunk,))


def _source_tables(settings: PipelineSettings, known: _KnownTables) -> Iterator[tuple[SourceTable, str]]:
    """Yield every source table, and why it is not compared, "" if it is."""
    for source in settings.sources:
        server_tables = targets_of(address_of(source), PipelinePatterns(source.tables))
        for table in server_tables:
            if source.name in known.checkpoint.offsets:
                why = known.why_left_out(
                    table_key(source.name, table.name), loads=settings.load.mode != "none"
                )
            else:
                why = "the pipeline has not read its source yet"
            yield SourceTable(source, table), why
        # A table that the pipeline continues without may have been dropped, but its target still exists.
        names = {table_key(source.name, table.name) for table in server_tables}
        for key in sorted(known.checkpoint.stopped.keys() & known.tables.keys() - names):
            if split_key(key)[0] == source.name:
                yield SourceTable(source, known.tables[key]), known.why_left_out(key, loads=True)


def _columns(target: Target, left_out: Sequence[str]) -> tuple[str, ...]:
    compared = tuple(name for name in target.column_names if name not in left_out)
    missing = [name for name in target.primary_key if name not in compared]
    if missing:
        raise OptionInvalid(
            f"{', '.join(missing)} is of the key of {target.name}, by which rows are compared"
        )
    return compared
