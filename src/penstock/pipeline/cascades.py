# SPDX-License-Identifier: Apache-2.0
"""Foreign keys whose cascading actions the source does not log, and how a pipeline handles them."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow
import pyarrow.compute as pc
import structlog

from penstock.errors import OptionInvalid
from penstock.model import TableName
from penstock.mysql.connection import connect
from penstock.pipeline.ghosts import PipelinePatterns
from penstock.pipeline.row_metadata import absent_columns
from penstock.pipeline.settings import PipelineSettings, PipelineSource
from penstock.pipeline.state import table_key
from penstock.schema.foreign_keys import Cascade, read_cascades
from penstock.sinks.sink import Finding, Sink, keeps_tables

_log = structlog.get_logger(__name__)


def cascades_of(source: PipelineSource) -> list[Cascade]:
    """Return the foreign keys of a source's tables that change rows without logging them.

    An empty list if the source has no server. Propagates errors from `connect`.
    """
    if source.server is None:
        return []
    with connect(source.server) as connection:
        return read_cascades(connection, PipelinePatterns(source.tables))


def cascade_findings(settings: PipelineSettings, sink: Sink) -> list[Finding]:
    """Return a finding for each unlogged cascade. A fatal finding keeps the pipeline from starting."""
    return [
        _finding(settings, sink, source, cascade)
        for source in settings.sources
        for cascade in cascades_of(source)
    ]


def _finding(settings: PipelineSettings, sink: Sink, source: PipelineSource, cascade: Cascade) -> Finding:
    what, policy = cascade.description, settings.on_cascade
    hint = f"{cascade.statement}; or set on_cascade"
    if policy == "refuse":
        return Finding(source.name, what, mend=hint)
    if policy == "reread":
        parent = cascade.parent
        if not sink.keeps_state or not keeps_tables(sink):
            return Finding(source.name, f"{what}, and a target of this sink cannot be compared", mend=hint)
        if not PipelinePatterns(source.tables).matches(parent.database, parent.table):
            what = f"{what}, and changes of {parent}, by which it does so, are not among the source's tables"
            return Finding(source.name, what, mend=f"Add {parent} to the source's tables; or {hint}")
        return Finding(source.name, f"{what}; the table is read again when it may have", fatal=False)
    return Finding(source.name, f"{what}; the target keeps such rows (on_cascade: ignore)", fatal=False)


@dataclass
class CascadeWatch:
    """While a pipeline runs, determines which tables to read again because rows of a parent table changed.

    `parents` maps the key of a parent table to those of its columns that foreign keys refer to.
    """

    settings: PipelineSettings
    sink: Sink
    parents: Mapping[str, frozenset[str]] = field(default_factory=dict)
    _children: Mapping[str, frozenset[TableName]] = field(default_factory=dict)

    def look(self, position: str | None = None) -> None:
        """Read the foreign keys from the servers again.

        Raises OptionInvalid if a foreign key is not allowed. `position` is the position of the statement that
        may have created a foreign key.
        """
        parents: dict[str, frozenset[str]] = {}
        children: dict[str, frozenset[TableName]] = {}
        fatal: list[Finding] = []
        for source in self.settings.sources:
            for cascade in cascades_of(source):
                finding = _finding(self.settings, self.sink, source, cascade)
                if finding.fatal:
                    fatal.append(finding)
                    continue
                _log.warning(
                    "a foreign key changes rows that are not logged", source=source.name, what=finding.what
                )
                if self.settings.on_cascade == "reread":
                    key = table_key(source.name, cascade.parent)
                    parents[key] = parents.get(key, frozenset()) | set(cascade.parent_columns)
                    children[key] = children.get(key, frozenset()) | {cascade.child}
        if fatal:
            raise OptionInvalid(
                "; ".join(finding.what for finding in fatal), position=position, hint=fatal[0].mend
            )
        self.parents, self._children = parents, children

    def children(self, source: str, keys: Iterable[str]) -> list[TableName]:
        """Return the tables whose rows may have changed along with rows of the given tables, transitively."""
        affected: set[TableName] = set()
        left = list(keys)
        while left:
            for child in self._children.get(left.pop(), ()):
                if child not in affected:
                    affected.add(child)
                    left.append(table_key(source, child))
        return sorted(affected)


def may_cascade(rows: pyarrow.RecordBatch, columns: Collection[str]) -> bool:
    """Return whether changes delete rows or modify columns that foreign keys refer to."""
    kinds = rows.column("_change_type")
    if pc.any(pc.equal(kinds, "delete")).as_py():
        return True
    before = rows.filter(pc.equal(kinds, "update_preimage"))
    after = rows.filter(pc.equal(kinds, "update_postimage"))
    if before.num_rows != after.num_rows:
        # An image of an update was filtered out upstream.
        return True
    names = {name.lower() for name in columns}
    if any(name.lower() in names for name in absent_columns(rows)):
        # For these columns, the values before and after the change cannot be compared.
        return True
    return any(
        not before.column(name).equals(after.column(name))
        for name in rows.schema.names
        if name.lower() in names
    )
