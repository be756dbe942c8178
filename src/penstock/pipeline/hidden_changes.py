# SPDX-License-Identifier: Apache-2.0
"""Handles rows that a statement changes without logging them: which tables to read again, and how.

A target that can be read back is compared with the rows read from the source. A history cannot be compared.
Instead, the periods of all its current rows of the table end, and the rows read from the source begin new
periods. A feed contains only changes, so the operator decides.
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
    """What a sink does about rows that changed without being logged."""

    # Rows are read again, and missing rows are deleted.
    COMPARES = auto()
    # Rows are read again as new periods, and the periods of missing rows end.
    REOPENS = auto()
    # The target keeps everything that was written.
    NOTHING = auto()


@dataclass(frozen=True)
class Rereads:
    """Tables to read again after a statement.

    In the tables of `compared`, rows that exist only in the target are deleted. The tables of `emptied` are
    emptied first.
    """

    tables: frozenset[TableName]
    compared: frozenset[TableName]
    emptied: frozenset[TableName]


def follows(sink: Sink) -> Follows:
    """Return how a sink handles rows that changed without being logged."""
    if sink.keeps_state:
        return Follows.COMPARES
    return Follows.REOPENS if sink.keeps_history else Follows.NOTHING


def rereads_after(
    consequences: Consequences,
    sink: Sink,
    select_own: Callable[[Iterable[TableName]], list[TableName]],
    is_copy: Callable[[TableName], bool],
    has_key: Callable[[TableName], bool],
) -> Rereads:
    """Return the tables to read again after a statement.

    `select_own` selects the tables of the pipeline. `is_copy` returns whether the copy that replaced a table
    keeps every value of its columns and keys. `has_key` returns whether the target can find rows by a primary
    key.
    """
    lost = set(select_own(consequences.unlogged))
    lost |= {
        name
        for name in select_own(consequences.swapped)
        if name not in consequences.copied or not is_copy(name)
    }
    if keeps_tables(sink) or sink.keeps_state:
        lost |= set(select_own(consequences.rekeyed))
    # Rows that are missing from the source cannot be identified if the table has no key, if the target is a
    # history, or if it cannot be read back. In these cases, empty the target's table and read the source
    # again.
    can_compare = keeps_tables(sink) and follows(sink) is Follows.COMPARES
    compared = {name for name in lost if can_compare and has_key(name)}
    replaced = select_own(consequences.replaced)
    return Rereads(
        frozenset([*select_own(consequences.reread), *replaced, *lost]),
        frozenset(compared),
        frozenset([*replaced, *(lost - compared)]),
    )


def warn_of_feed(settings: PipelineSettings, tables: Iterable[TableName], statement: LoggedStatement) -> None:
    """Warn, for each table, that a feed has no changes for rows that a statement changed."""
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
    """Raise SchemaChanged: if a shared target cannot be compared, nothing shows which table each of its rows
    belongs to.
    """
    file, position = settings.path or settings.name, statement.position
    raise SchemaChanged(
        f"{name} lost rows, and its target may have rows of other tables: {statement.text[:200]}",
        position=str(statement.position),
        hint="Write each table to a target of its own (a route step, and penstock pipelines reset); or leave"
        f" the target's rows as they are: penstock pipelines skip {file} {position.file}:{position.offset}",
    )
