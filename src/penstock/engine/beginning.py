# SPDX-License-Identifier: Apache-2.0
"""Checks made when a run starts. They cover the sink, rows that are already in the target, pauses, and
positions.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from penstock.changes import Target
from penstock.engine.source_log import SourceLog
from penstock.errors import OptionInvalid, PositionPurged
from penstock.model import TableName
from penstock.pipeline.ghosts import PipelinePatterns
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.relay_checkpoints import relay_offsets
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.state import Checkpoint, PipelineState, table_key
from penstock.pipeline.step import named_by_rows, target_through
from penstock.pipeline.step_section import StepSection
from penstock.sinks.sink import BatchMark, Sink, Spread, is_repeated, keeps_tables
from penstock.source.offsets import Offset

_log = structlog.get_logger(__name__)


def check_sink(settings: PipelineSettings, sink: Sink) -> None:
    """Raise OptionInvalid if a sink cannot be used with these settings."""
    for source in settings.sources:
        if source.on_lost != "stop" and not (sink.keeps_state and keeps_tables(sink)):
            raise OptionInvalid(
                f"source {source.name}: on_lost: {source.on_lost} would write every row again into"
                f" {sink.kind}, which keeps no table that can be compared",
                hint="Leave on_lost out: then the run stops where its log was purged",
            )
    fatal = [finding for finding in sink.check() if finding.fatal]
    if fatal:
        problems = "; ".join(f"{finding.subject}: {finding.what}" for finding in fatal)
        raise OptionInvalid(
            f"the sink cannot be used: {problems}",
            hint="; ".join(finding.mend for finding in fatal if finding.mend) or None,
        )


def refuse_undividable(settings: PipelineSettings) -> None:
    """Raise OptionInvalid, listing every reason, if a pipeline cannot be divided by tables."""
    reasons = []
    if len(settings.sinks) > 1:
        reasons.append("it has several sinks, each of which can have a pipeline of its own")
    sinks = [sink.make() for sink in settings.sinks]
    if settings.apply == "serial":
        reasons.append("apply: serial writes the transactions of all tables in one order")
    if settings.on_cascade == "reread":
        reasons.append("on_cascade: reread needs parents and children in one process")
    reasons += [f"a {sink.kind} sink writes all rows to one output" for sink in sinks if sink.in_driver]
    reasons += [
        f"the {sink.kind} sink writes the changes of all tables in one order, by its settings"
        for sink in sinks
        if sink.spread is Spread.WHOLE and not sink.in_driver
    ]
    reasons += [
        f"a {sink.kind} sink compares the keys of all tables with each other"
        for sink in sinks
        if type(sink).check_together is not Sink.check_together
    ]
    reasons += [
        f"the step {step.verb} names targets by the values of rows"
        for step in settings.steps
        if isinstance(step.settings, StepSection) and step.settings.is_named_by_rows
    ]
    reasons += [
        f"source {source.name} has a server_id, and each process needs one of its own"
        for source in settings.sources
        if source.options.address is not None and source.options.address.server_id is not None
    ]
    if reasons:
        raise OptionInvalid(
            f"the pipeline {settings.name} cannot have shards: {'; '.join(reasons)}", hint="Leave shards out"
        )


def refuse_lost_state(settings: PipelineSettings, sink: Sink, checkpoint: Checkpoint) -> None:
    """Raise OptionInvalid if the target has rows of a pipeline whose state is empty.

    Either the state was lost, or another pipeline has the same name but a separate state. A load would delete
    the other pipeline's rows, and a feed would contain every row twice. Targets whose names come from a
    column of the rows are not checked, and neither are the targets of a source without a server.
    """
    if checkpoint.earlier is not None:
        if sink.keeps_state:
            _log.warning("the target has rows of an earlier run: the load deletes what its source has not")
        return
    if not sink.remembers(settings.name, _first_targets(settings, sink)):
        return
    if not sink.keeps_state and not sink.remembers_alone:
        what = "the target remembers a pipeline of this name; if its state was lost, rows come again"
        _log.warning(what, pipeline=settings.name)
        return
    after = "the load then deletes rows that the sources do not have"
    if not sink.keeps_state:
        after = "every row is then written once more"
    raise OptionInvalid(
        f"the target has rows that a pipeline named {settings.name} wrote, and its state knows of none:"
        " it was lost, or another pipeline has the same name",
        hint=f"Restore the state (state: in the file). Or begin anew, {after}:"
        f" penstock pipelines reset {settings.path or settings.name} --yes."
        " Where another pipeline writes there: give this one another name",
    )


def refuse_outdated_state(
    settings: PipelineSettings, sink: Sink, state: PipelineState, checkpoint: Checkpoint
) -> None:
    """Raise StateOutdated if the target has a batch that the state does not know.

    Every batch is recorded before it is written. A batch that is in the target but not in the state therefore
    proves that the state is outdated, even if the batch is the next one after the last recorded batch. If its
    number were planned again, the sink could not tell the two batches apart.
    """
    begun = state.begun(checkpoint)
    number = checkpoint.number if begun is None else begun.number
    mark = BatchMark(settings.name, checkpoint.generation, number)
    targets: dict[TableName, Target] = {}
    if sink.remembers_by_target:
        tables = state.get_large("tables") or {"targets": []}
        targets = {target.name: target for target in map(Target.from_json, tables["targets"])}
    if sink.remembers_alone and number:
        # Each table stores its own batch number, and the target may have tables that the state does not know.
        targets = {target.name: target for target in _first_targets(settings, sink)} | targets
    is_repeated(mark, sink.last_number(mark, list(targets.values())))


def _first_targets(settings: PipelineSettings, sink: Sink) -> list[Target]:
    """Return the targets of the tables that now exist on the servers, by name; [] if the sink needs none."""
    if not sink.remembers_by_target or type(sink).remembers is Sink.remembers:
        return []
    steps, targets = settings.make_steps(), dict[TableName, Target]()
    for source in settings.sources:
        tables = [] if source.server is None else targets_of(source.server, PipelinePatterns(source.tables))
        for table in tables:
            target = target_through(steps, table)
            if target is not None and not named_by_rows(steps, table):
                targets[target.name] = target
    return [targets[name] for name in sorted(targets)]


def first_offsets(
    settings: PipelineSettings,
    sink: Sink,
    state: PipelineState,
    logs: Mapping[str, SourceLog],
    checkpoint: Checkpoint,
) -> dict[str, dict[str, Any]]:
    """Return where a run begins to read each source that has no offset yet.

    Raises OptionInvalid if the state of a pipeline with a target was lost, StateOutdated if the state is
    older than the target, or any error from querying the logs.
    """
    relayed: Mapping[str, Offset] = {}
    refuse_outdated_state(settings, sink, state, checkpoint)
    if not checkpoint.offsets:
        if checkpoint.earlier is None:
            relayed = relay_offsets(settings, state.store)
        if not relayed and settings.shard is None:
            # Other shards may have written rows already. The parent process has checked all shards together.
            refuse_lost_state(settings, sink, checkpoint)
    offsets = {}
    for name, log in logs.items():
        if name in checkpoint.offsets:
            continue
        if name in relayed:
            _log.warning("the run goes on where a relay stopped", source=name, position=str(relayed[name]))
        offset = relayed.get(name) or log.first((checkpoint.earlier or {}).get(name))
        offsets[name] = offset.to_json()
    return offsets


def refuse_keyless(
    known: Mapping[str, Target], source: str, tables: list[TableName], problem: PositionPurged
) -> None:
    """Raise PositionPurged if one of the tables has no key by which its rows in the target could be deleted.
    `known` maps table keys to the targets. `problem` is the original error.
    """
    keyless = [
        str(table)
        for table in tables
        if (target := known.get(table_key(source, table))) and not target.primary_key
    ]
    if keyless:
        raise PositionPurged(
            f"{problem.message}; tables without a primary key cannot be read again: {', '.join(keyless)}",
            position=problem.position,
            hint="Empty their targets, then begin again: penstock pipelines reset FILE --yes",
        ) from problem


def purged(settings: PipelineSettings, sink: Sink, problem: PositionPurged) -> PositionPurged:
    """Return the error for a purged log, with a hint for this pipeline."""
    again = f"penstock pipelines reset {settings.path or settings.name} --yes"
    hint = f"Set on_lost: repair for the source, which compares every table; or begin again: {again}"
    if not (sink.keeps_state and keeps_tables(sink)):
        hint = (
            f"Begin again, which writes every row once more: {again}."
            " Or set fail_on_data_loss: false for the source, which goes on without the purged changes"
        )
    return PositionPurged(problem.message, position=problem.position, hint=hint)


def refuse_paused(settings: PipelineSettings, paused: str, *, until_caught_up: bool) -> None:
    """Report that a pipeline is paused. Raises OptionInvalid if the caller wants to run until the pipeline
    has caught up, because a run that ended now would look as if that had happened.
    """
    hint = f"penstock pipelines resume {settings.path or settings.name}"
    if until_caught_up:
        raise OptionInvalid(f"{paused}, so it has not caught up", hint=hint)
    _log.warning(paused, hint=hint)


def refuse_mixed(offsets: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise OptionInvalid if some sources are TiDB clusters and others are not, or if one is a merge.

    TiDB uses timestamps as commit versions, and these cannot be compared with commit versions derived from
    log positions. The positions of a merge do not correspond to the rows that a load reads from a server.
    """
    merges = [name for name, offset in offsets.items() if _is_of("merge", offset)]
    if merges:
        raise OptionInvalid(
            f"the source {', '.join(merges)} is a merge of instances, which a pipeline does not read",
            hint="Name the instances of the merge as sources of the pipeline, which merges them too",
        )
    clusters = [name for name, offset in offsets.items() if _is_of("tidb", offset)]
    if clusters and len(clusters) < len(offsets):
        raise OptionInvalid(
            f"a pipeline has TiDB clusters ({', '.join(clusters)}) and other sources, whose commit versions"
            " cannot be compared",
            hint="Give the TiDB clusters a pipeline of their own",
        )


def _is_of(kind: str, offset: Mapping[str, Any]) -> bool:
    return str(offset.get("server_key") or "").startswith(f"{kind}:")


def at_their_servers(
    logs: Mapping[str, SourceLog], checkpoint: Checkpoint, retried: Callable[[Callable[[], Any]], Any]
) -> Checkpoint:
    """Return the checkpoint with each source's position translated to the log of the server that answers now.

    Rows of a load carry the epoch of that log. If they carried the previous server's epoch, they would count
    as older than the rows in the target.
    """
    offsets = dict(checkpoint.offsets)
    for name, log in logs.items():
        begin = Offset.from_json(offsets[name])
        try:
            here: Offset = retried(partial(log.resume, begin))
        except PositionPurged:
            # The next plan raises and handles the same error.
            continue
        if (here.server_key, here.position.epoch) != (begin.server_key, begin.position.epoch):
            offsets[name] = here.to_json()
    return replace(checkpoint, offsets=offsets)
