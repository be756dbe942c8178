# SPDX-License-Identifier: Apache-2.0
"""Patterns of a pipeline's settings that match no table, which is mostly a slip of the pen.

A step that is for no table does nothing: for `mask` that is a leak, so it keeps the pipeline from running.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence

import structlog

from penstock.changes import Target
from penstock.errors import OptionInvalid
from penstock.model import TableName, TablePatterns
from penstock.pipeline.ghosts import PipelinePatterns
from penstock.pipeline.load.targets import table_names
from penstock.pipeline.settings import PipelineSettings, PipelineSource
from penstock.pipeline.step import could_be_named, target_through
from penstock.pipeline.step_section import StepSection
from penstock.pipeline.steps.mask import VERB as MASK
from penstock.sinks.sink import Finding

_log = structlog.get_logger(__name__)


def tables_on_servers(settings: PipelineSettings) -> dict[str, list[TableName]]:
    """Return every table of each source that has a server, by source. Raises what `connect` raises."""
    return {one.name: table_names(one.server) for one in settings.sources if one.server is not None}


def refuse_fatal(findings: Iterable[Finding]) -> None:
    """Log what was found. Raises OptionInvalid where one of it is fatal."""
    for finding in findings:
        if finding.fatal:
            raise OptionInvalid(f"{finding.subject}: {finding.what}", hint=finding.mend)
        _log.warning(finding.what, setting=finding.subject, hint=finding.mend)


def pattern_findings(
    settings: PipelineSettings,
    there: Mapping[str, Sequence[TableName]],
    tables: Mapping[str, Sequence[Target]],
) -> list[Finding]:
    """Return what is wrong with patterns of tables: of sources, of `load.where`, and of steps.

    `there` are the tables that servers have, `tables` those that the pipeline knows, both by source. Of a
    source without a server nobody knows which tables there are; steps and `load.where` are checked where all
    sources have one.
    """
    found: list[Finding] = []
    for source in settings.sources:
        if source.name in there:
            known = [target.name for target in tables.get(source.name, ())]
            found += _of_source(source, sorted({*there[source.name], *known}))
    if any(source.name not in there for source in settings.sources):
        return found
    reaching = [target for source in settings.sources for target in tables.get(source.name, ())]
    names = [target.name for target in reaching]
    found += _unmatched("load.where", settings.load.where, names)
    for number, step in enumerate(settings.steps):
        place = f"steps[{number}].{step.verb}"
        names = [target.name for target in reaching]
        if isinstance(step.settings, StepSection):
            found += _unmatched(f"{place}.tables", step.settings.tables, names, fatal=step.verb == MASK)
            found += _unmatched(f"{place}.exclude", step.settings.exclude, names)
        chain = [step.make()]
        made = [target_through(chain, target) for target in reaching]
        reaching = [target for target in made if target is not None]
    return found


def _of_source(source: PipelineSource, names: Sequence[TableName]) -> list[Finding]:
    place = f"source {source.name}: tables"
    found = _unmatched(place, source.tables.include, names)
    found += _unmatched(f"source {source.name}: exclude", source.tables.exclude, names)
    wanted = PipelinePatterns(source.tables)
    found += [
        Finding(
            place,
            f"{name} is taken for the copy of an online schema change, and is not read",
            fatal=False,
            mend="To read it, name it without a star",
        )
        for name in names
        if source.tables.matches(name.database, name.table) and not wanted.matches(name.database, name.table)
    ]
    return found


def _unmatched(
    place: str, patterns: Iterable[str], names: Sequence[TableName], *, fatal: bool = False
) -> list[Finding]:
    return [
        Finding(place, f"no table matches {pattern}", fatal, _nearest(pattern, names))
        for pattern in patterns
        if not any(_may_match(pattern, name) for name in names)
    ]


def _may_match(pattern: str, name: TableName) -> bool:
    """Tell whether a pattern matches a table; one that rows name, with braces in its name, may be any."""
    patterns = TablePatterns([pattern])
    if patterns.matches(name.database, name.table):
        return True
    if "{" not in f"{name.database}{name.table}":
        return False
    single = patterns.single()
    return single is None or could_be_named(name, single)


def _nearest(pattern: str, names: Sequence[TableName]) -> str:
    near = difflib.get_close_matches(pattern.replace("`", ""), map(str, names), 1)
    return f"Did you mean {near[0]}?" if near else "Write database.table, with * for any characters"
