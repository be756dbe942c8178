# SPDX-License-Identifier: Apache-2.0
"""Reports table patterns in a pipeline's settings that match no table. Such patterns are usually typos.

A step whose patterns match no table has no effect. For `mask` this would leak values, so the pipeline refuses
to run.
"""

from collections.abc import Iterable, Mapping, Sequence

import structlog

from penstock.changes import Target
from penstock.errors import OptionInvalid
from penstock.model import TableName, TablePatterns
from penstock.narrowed_patterns import nearest_table
from penstock.pipeline.ghosts import PipelinePatterns
from penstock.pipeline.load.targets import table_names
from penstock.pipeline.settings import PipelineSettings, PipelineSource
from penstock.pipeline.step import could_be_named, target_through
from penstock.pipeline.step_section import StepSection
from penstock.pipeline.steps.mask import VERB as MASK
from penstock.sinks.sink import Finding

_log = structlog.get_logger(__name__)


def tables_on_servers(settings: PipelineSettings) -> dict[str, list[TableName]]:
    """Return every table of each source that has a server, by source. Propagates errors from `connect`."""
    return {
        source.name: table_names(source.server) for source in settings.sources if source.server is not None
    }


def refuse_fatal(findings: Iterable[Finding]) -> None:
    """Log the findings. Raises OptionInvalid if a finding is fatal."""
    for finding in findings:
        if finding.fatal:
            raise OptionInvalid(f"{finding.subject}: {finding.what}", hint=finding.mend)
        _log.warning(finding.what, setting=finding.subject, hint=finding.mend)


def pattern_findings(
    settings: PipelineSettings,
    server_tables: Mapping[str, Sequence[TableName]],
    tables: Mapping[str, Sequence[Target]],
) -> list[Finding]:
    """Return the problems with table patterns: of sources, of `load.where`, and of steps.

    `server_tables` are the tables on the servers, `tables` the tables that the pipeline knows, both by
    source. The tables of a source without a server are unknown, so steps and `load.where` are checked only if
    all sources have a server. A mask that is not checked is reported.
    """
    findings: list[Finding] = []
    for source in settings.sources:
        if source.name in server_tables:
            known = [target.name for target in tables.get(source.name, ())]
            findings += _of_source(source, sorted({*server_tables[source.name], *known}))
    unknown = [source.name for source in settings.sources if source.name not in server_tables]
    if unknown:
        return findings + _unchecked_masks(settings, unknown)
    reaching = [target for source in settings.sources for target in tables.get(source.name, ())]
    names = [target.name for target in reaching]
    findings += _unmatched("load.where", settings.load.where, names)
    for number, step in enumerate(settings.steps):
        setting = f"steps[{number}].{step.verb}"
        names = [target.name for target in reaching]
        if isinstance(step.settings, StepSection):
            findings += _unmatched(f"{setting}.tables", step.settings.tables, names, fatal=step.verb == MASK)
            findings += _unmatched(f"{setting}.exclude", step.settings.exclude, names)
        chain = [step.make()]
        changed = [target_through(chain, target) for target in reaching]
        reaching = [target for target in changed if target is not None]
    return findings


def _unchecked_masks(settings: PipelineSettings, unknown: Sequence[str]) -> list[Finding]:
    """Return a finding for each mask that names its tables, because a misspelled name would leak their
    values.
    """
    return [
        Finding(
            f"steps[{number}].{step.verb}.tables",
            f"{', '.join(step.settings.tables)} is not checked: the tables of the source"
            f" {', '.join(unknown)} are unknown",
            fatal=False,
            mend="Compare the names with the source's, or set its server",
        )
        for number, step in enumerate(settings.steps)
        if step.verb == MASK and isinstance(step.settings, StepSection) and step.settings.tables
    ]


def _of_source(source: PipelineSource, names: Sequence[TableName]) -> list[Finding]:
    setting = f"source {source.name}: tables"
    findings = _unmatched(setting, source.tables.include, names)
    findings += _unmatched(f"source {source.name}: exclude", source.tables.exclude, names)
    patterns = PipelinePatterns(source.tables)
    findings += [
        Finding(
            setting,
            f"{name} is taken for the copy of an online schema change, and is not read",
            fatal=False,
            mend="To read it, name it without a star",
        )
        for name in names
        if source.tables.matches(name.database, name.table)
        and not patterns.matches(name.database, name.table)
    ]
    return findings


def _unmatched(
    setting: str, patterns: Iterable[str], names: Sequence[TableName], *, fatal: bool = False
) -> list[Finding]:
    return [
        Finding(setting, f"no table matches {pattern}", fatal, nearest_table(pattern, names))
        for pattern in patterns
        if not any(_may_match(pattern, name) for name in names)
    ]


def _may_match(pattern: str, name: TableName) -> bool:
    """Return whether a pattern may match a table, whose name may contain placeholders in braces."""
    patterns = TablePatterns([pattern])
    if patterns.matches(name.database, name.table):
        return True
    if "{" not in f"{name.database}{name.table}":
        return False
    single = patterns.single()
    return single is None or could_be_named(name, single)
