# SPDX-License-Identifier: Apache-2.0
"""Which tables of a pipeline's target are compared, whose rows come into each, and how it is divided."""

from collections.abc import Iterator, Sequence

import structlog

from penstock.changes import Target
from penstock.errors import OptionInvalid, SourceMissing
from penstock.model import TableName, TablePatterns
from penstock.pipeline.load.chunks import Chunk
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.load.watermark import Watermark, take_watermark
from penstock.pipeline.settings import LoadSettings, PipelineSettings
from penstock.pipeline.state import Standing, table_key
from penstock.pipeline.step import Rejected, Step, through
from penstock.pipeline.verify.kept_keys import keeps_column
from penstock.pipeline.verify.shares import ComparedTable, Share
from penstock.pipeline.verify.source_rows import SourceChunk, SourceTable, address_of, chunks_of

_log = structlog.get_logger(__name__)


def compared_tables(
    settings: PipelineSettings,
    standing: Standing,
    tables: TablePatterns,
    columns_left_out: Sequence[str] = (),
) -> list[ComparedTable]:
    """Return the tables of the target that are meant, by name of the target's table or of a source's.

    Tables that the pipeline goes on without, and those whose load is not finished, are left out with a
    warning. Raises OptionInvalid where a step cannot be compared or a column is unknown, SourceMissing where
    no table is meant.
    """
    refuse_unlike(settings)
    steps = settings.make_steps()
    made: dict[TableName, tuple[Target, list[SourceTable]]] = {}
    meant: set[TableName] = set()
    try:
        for one in _source_tables(settings, standing):
            for target in _targets(steps, one):
                made.setdefault(target.name, (target, []))[1].append(one)
                if any(tables.matches(name.database, name.table) for name in (target.name, one.table.name)):
                    meant.add(target.name)
    finally:
        for step in steps:
            step.close()
    if not meant:
        raise SourceMissing(
            "the pipeline has no such table that is loaded",
            hint="penstock pipelines show NAME tells its tables and how far they are loaded",
        )
    return [
        ComparedTable(
            target,
            tuple(sources),
            settings.steps,
            settings.sink,
            _columns(target, columns_left_out),
        )
        for name, (target, sources) in sorted(made.items())
        if name in meant
    ]


def shares_of(tables: Sequence[ComparedTable], load: LoadSettings, chunk_rows: int) -> list[Share]:
    """Divide tables into shares of about `chunk_rows` rows, where their keys allow it."""
    watermarks: dict[str, Watermark] = {}
    return [one for table in tables for one in _shares(table, load, chunk_rows, watermarks)]


def refuse_unlike(settings: PipelineSettings) -> None:
    """Raise OptionInvalid where a step makes the target's state depend on the history of changes."""
    for step in settings.steps:
        if step.verb == "only":
            raise OptionInvalid(
                "a target to which only some kinds of change come is not what its source is",
                hint="Compare a pipeline without the step `only`",
            )


def _targets(steps: Sequence[Step], one: SourceTable) -> list[Target]:
    """Return the tables that a source's rows go to: one, none, or those that its rows name."""
    target: Target | None = one.table
    for step in steps:
        if target is not None and step.named_by_rows(target):
            return _named_by_rows(steps, one)
        target = step.target(target) if target is not None else None
    return [] if target is None else [target]


def _named_by_rows(steps: Sequence[Step], one: SourceTable) -> list[Target]:
    found: dict[TableName, Target] = {}
    for changes in SourceChunk(one, Chunk(one.table.name), take_watermark(address_of(one.source))).rows(
        loaded=False
    ):
        for made in through(steps, changes):
            if not isinstance(made, Rejected):
                found.setdefault(made.target.name, made.target)
    return list(found.values())


def keeps_keys(table: ComparedTable) -> bool:
    """Tell whether a range of the one source's keys holds the rows of the same range of the target's."""
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
    for one in table.sources:
        name = one.source.name
        if name not in watermarks:
            watermarks[name] = take_watermark(address_of(one.source))
        where = load.where_of(one.table.name.database, one.table.name.table)
        chunks += chunks_of(one, watermarks[name], chunk_rows, where, in_ranges=in_ranges)
    if all(chunk.low is None and chunk.high is None for chunk in chunks):
        yield Share(table, tuple(chunks))
        return
    for chunk in chunks:
        yield Share(table, (chunk,))


def _source_tables(settings: PipelineSettings, standing: Standing) -> Iterator[SourceTable]:
    for source in settings.sources:
        if source.name not in standing.offsets:
            continue
        for table in targets_of(address_of(source), source.tables):
            key = table_key(source.name, table.name)
            load = standing.loads.get(key)
            if key in standing.stopped:
                _log.warning("not compared: the pipeline goes on without it", table=key)
            elif load is not None and not load.finished:
                _log.warning("not compared: it is not loaded to its end", table=key)
            else:
                yield SourceTable(source, table)


def _columns(target: Target, left_out: Sequence[str]) -> tuple[str, ...]:
    compared = tuple(name for name in target.column_names if name not in left_out)
    missing = [name for name in target.primary_key if name not in compared]
    if missing:
        raise OptionInvalid(
            f"{', '.join(missing)} is of the key of {target.name}, by which rows are compared"
        )
    return compared
