# SPDX-License-Identifier: Apache-2.0
"""Changes of rows that a statement makes without logging them: which tables are read again, and how.

A target that can be read back is compared with what is read. A history cannot: it ends the periods of all
rows of such a table first, and those that are read begin new ones. A feed has changes alone, so its
operator decides.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import NoReturn

import structlog

from penstock.errors import SchemaChanged
from penstock.model import TableName
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.table_changes import Consequences
from penstock.sinks.sink import Sink, keeps_tables
from penstock.source.reading import LoggedStatement

_log = structlog.get_logger(__name__)


class Follows(Enum):
    """What a sink does with rows that changed without being logged."""

    # Rows are read again; those that are gone are deleted.
    COMPARES = auto()
    # Rows are read again as new periods; those that are gone end.
    REOPENS = auto()
    # Nothing: what was written stays.
    NOTHING = auto()


@dataclass(frozen=True)
class Rereads:
    """Tables to read again after a statement.

    Of those in `compared` the rows that only the target has are deleted, those in `emptied` lose all rows
    before.
    """

    tables: frozenset[TableName]
    compared: frozenset[TableName]
    emptied: frozenset[TableName]


def follows(sink: Sink) -> Follows:
    """Return what a sink does with rows that changed without being logged."""
    if sink.keeps_state:
        return Follows.COMPARES
    return Follows.REOPENS if sink.keeps_history else Follows.NOTHING


def rereads_after(
    found: Consequences,
    sink: Sink,
    ours: Callable[[Iterable[TableName]], list[TableName]],
    is_copy: Callable[[TableName], bool],
    has_key: Callable[[TableName], bool],
) -> Rereads:
    """Return what to read again after a statement.

    `ours` selects tables of the pipeline, `is_copy` tells whether the copy that took a table's place keeps
    every value of its columns and keys, `has_key` whether a primary key finds rows in the target.
    """
    lost = set(ours(found.unlogged))
    lost |= {name for name in ours(found.swapped) if name not in found.copied or not is_copy(name)}
    if keeps_tables(sink):
        lost |= set(ours(found.rekeyed))
    # Without a key, and in a history, rows that are gone are not found: all go, and those that stay are read.
    compared = {name for name in lost if follows(sink) is Follows.COMPARES and has_key(name)}
    replaced = ours(found.replaced)
    return Rereads(
        frozenset([*ours(found.reread), *replaced, *lost]),
        frozenset(compared),
        frozenset([*replaced, *(lost - compared)]),
    )


def warn_of_feed(settings: PipelineSettings, tables: Iterable[TableName], statement: LoggedStatement) -> None:
    """Say of each table that a feed has no change of rows that a statement changed."""
    file = settings.path or settings.name
    for table in sorted(tables):
        _log.warning(
            "rows changed without being logged, so the feed has no change of them",
            table=str(table),
            position=str(statement.position),
            statement=statement.text[:200],
            hint=f"To have all rows of the table in the feed once more: penstock resnapshot {file} {table}",
        )


def refuse_shared(settings: PipelineSettings, name: TableName, statement: LoggedStatement) -> NoReturn:
    """Raise SchemaChanged: a history of several tables cannot tell which rows ended with one of them."""
    file, place = settings.path or settings.name, statement.position
    raise SchemaChanged(
        f"{name} lost rows, and its history has rows of other tables: {statement.text[:200]}",
        position=str(statement.position),
        hint="Write each table to a history of its own (a route step, and penstock pipelines reset); or leave"
        f" its open rows as they are: penstock pipelines skip {file} {place.file}:{place.offset}",
    )
