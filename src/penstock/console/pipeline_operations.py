# SPDX-License-Identifier: Apache-2.0
"""The operations for stopped pipelines: reset, rewind, skipping a transaction, and moving the progress to
another sink.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from penstock.console.forms import needed_number
from penstock.console.operation import Fields, Input, Operation, Sentence, say
from penstock.console.visit import Visit
from penstock.errors import AccessDenied
from penstock.model import Position, TableName
from penstock.pipeline.load.conditions import prove_condition
from penstock.pipeline.moving import PlannedRewind, plan_rewinds, plan_skips
from penstock.serve.masking import HIDDEN_TEXT
from penstock.source.bounds import parse_bound

_SUBJECT = ("store", "name")
_SINK = Input("sink", "Sink (none: all)")
_SOURCE = Input("source", "Source, of several")


def _reset(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    store, sink = needed_number(fields, "store"), fields["sink"] or None
    begun = visit.states.reset(store, fields["name"], sink, dry_run=dry_run)
    if not begun:
        return []
    return [
        say("This progress is forgotten: {names}", names=", ".join(begun)),
        say(
            "The next run loads every table again into the existing target. Rows that only the target has are"
            " deleted, if the target can be read back; a feed receives every row again."
            " With `load: none` it loads nothing, and begins at the start of its sources."
        ),
    ]


def _rewind(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    pipeline = visit.files.load(needed_number(fields, "store"), fields["name"])
    source, sink = fields["source"] or None, fields["sink"] or None
    with ExitStack() as states:
        plans = plan_rewinds(pipeline, parse_bound(fields["to"]), source, sink, states)
        for plan in plans:
            plan.state.refuse_while_run()
        for plan in plans if not dry_run else ():
            plan.run()
        return [sentence for plan in plans for sentence in _rewind_effects(plan)]


def _rewind_effects(plan: PlannedRewind) -> list[Sentence]:
    sentences = [
        say(
            "{source}: from {before} back to {after}. The log in between is read again, {size} bytes.",
            source=f"{plan.part}, {plan.source}" if plan.part else plan.source,
            before=plan.before,
            after=plan.after,
            size=f"{plan.bytes:,}",
        )
    ]
    if plan.feed:
        sentences.append(say("The target receives these changes twice: {kind}", kind=plan.feed))
    elif plan.keyless:
        tables = ", ".join(map(str, plan.keyless))
        sentences.append(
            say("Tables without a key are read again into emptied targets: {tables}", tables=tables)
        )
    return sentences


def _skip(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    pipeline = visit.files.load(needed_number(fields, "store"), fields["name"])
    position, source, sink = (
        Position.parse(fields["position"]),
        fields["source"] or None,
        fields["sink"] or None,
    )
    sentences = []
    with ExitStack() as states:
        for plan in plan_skips(pipeline, position, source, sink, states):
            plan.state.refuse_while_run()
            if not dry_run:
                plan.run()
            skipped = plan.transaction
            statement = HIDDEN_TEXT if visit.masking else skipped.statement
            sentences.append(
                say(
                    "Never applied: {gtid}, {begin} to {end}, {what}",
                    gtid=skipped.gtid or position,
                    begin=f"{skipped.begin['file']}:{skipped.begin['offset']}",
                    end=skipped.end["offset"],
                    what=skipped.tables or statement or say("no table"),
                )
            )
    sentences.append(say("The target misses these changes: compare and repair it once it has caught up."))
    return sentences


def _adopt(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    store, name, sink = needed_number(fields, "store"), fields["name"], fields["sink"]
    # This call raises an error unless the pipeline file has a sink with this name.
    visit.files.settings(store, name, sink)
    visit.states.adopt(store, name, sink, dry_run=dry_run)
    return [
        say("{sink} continues at the position and the batch of the former sink.", sink=sink),
        say("The other sinks begin with a full load."),
    ]


def _read_again(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    store, name, sink = needed_number(fields, "store"), fields["name"], fields["sink"]
    source, table, where = fields["source"], fields["table"], fields["where"] or None
    visit.states.prove_table(store, name, sink, source, table)
    if where is not None:
        if visit.masking:
            raise AccessDenied(
                f"account {visit.account} does not see every column, and a condition may tell values",
                hint="Read the whole table again, or log in with an account without masked and columns:"
                " access in penstock.yaml",
            )
        prove_condition(visit.files.load(store, name), source, TableName.parse(table), where)
    if not dry_run:
        visit.states.resnapshot(store, name, sink, source, table, where, remove=not fields["keep"])
    sentences = [
        say(
            "The pipeline {name} reads {table} chunk by chunk between its batches, while replication"
            " continues. A pipeline that does not run begins with it at its next start.",
            name=name,
            table=table,
        )
    ]
    if where is not None:
        sentences.append(say("Only these rows are read and compared: {condition}", condition=where))
    if fields["keep"]:
        return [*sentences, say("Rows that the source no longer has stay in the target.")]
    return [
        *sentences,
        say(
            "Rows that the source no longer has are deleted from the target, if the target can be read back;"
            " a feed receives every row again."
        ),
    ]


def _names(visit: Visit, fields: Fields) -> Mapping[str, Sequence[str]]:
    """Return the names of the sinks and sources in the pipeline file."""
    store = needed_number(fields, "store")
    if visit.files.find(store, fields["name"]) is None:
        return {}
    pipeline = visit.files.load(store, fields["name"])
    return {
        "sink": [sink.name for sink in pipeline.sinks if sink.name],
        "source": [source.name for source in pipeline.sources],
    }


def _operation(
    path: str,
    action: str,
    title: str,
    question: str,
    run: Callable[[Visit, Fields, bool], Sequence[Sentence]],
    inputs: tuple[Input, ...],
) -> Operation:
    return Operation(
        path,
        title,
        question,
        action,
        _SUBJECT,
        run,
        "/pipelines",
        inputs,
        prove=Visit.prove_sees_pipelines,
        suggest=_names,
    )


OPERATIONS = (
    Operation(
        "/tables/resnapshot",
        "Read the table again",
        "What happens if this table is read again?",
        "read table again",
        ("store", "name", "source", "table"),
        _read_again,
        "/tables",
        (
            Input("sink", "Sink", kind="hidden"),
            Input(
                "where",
                "Only rows with this condition, in the server's SQL",
                example="created > '2026-01-01'",
            ),
            Input("keep", "Keep rows that the source no longer has", kind="check"),
        ),
        back_fields=("store", "name", "sink"),
        prove=Visit.prove_sees_pipelines,
        # Send the form with POST. The condition in it is checked by the source's server.
        is_posted=True,
    ),
    _operation(
        "/pipelines/reset",
        "reset pipeline",
        "Reset the pipeline",
        "What happens if this pipeline begins again?",
        _reset,
        (_SINK,),
    ),
    _operation(
        "/pipelines/rewind",
        "rewind pipeline",
        "Rewind the pipeline",
        "What happens if this pipeline applies earlier changes again?",
        _rewind,
        (
            Input(
                "to",
                "Back to (a position, a GTID set, or a time in UTC)",
                is_needed=True,
                example="mysql-bin.000003:1542",
            ),
            _SOURCE,
            _SINK,
        ),
    ),
    _operation(
        "/pipelines/skip",
        "skip transaction",
        "Skip a transaction",
        "What does the target miss if this pipeline skips a transaction?",
        _skip,
        (
            Input(
                "position",
                "A position inside the transaction",
                is_needed=True,
                example="mysql-bin.000003:1542",
            ),
            _SOURCE,
            _SINK,
        ),
    ),
    _operation(
        "/pipelines/adopt",
        "adopt progress",
        "Adopt the progress",
        "What happens if one of several sinks gets the progress of the former only sink?",
        _adopt,
        (Input("sink", "Sink", is_needed=True),),
    ),
)
