# SPDX-License-Identifier: Apache-2.0
"""Shows what a pipeline would do, without running it."""

from typing import Any

from penstock.changes import Target
from penstock.model import TableName
from penstock.pipeline.cascades import cascade_findings
from penstock.pipeline.ghosts import PipelinePatterns
from penstock.pipeline.load.chunks import plan_chunks
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.pattern_check import pattern_findings, tables_on_servers
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.step import target_through
from penstock.sinks.endpoint import encryption_findings


def preview(settings: PipelineSettings) -> dict[str, Any]:
    """Return what is read, prepared and written, as plain JSON values.

    The tables of a source without a server are None: they are not known before the log is read.

    Queries servers and sink but changes nothing. Raises an error if the source, the steps or the sink cannot
    be used.
    """
    sink, steps = settings.make_sink(), settings.make_steps()
    sources, targets = [], []
    known: dict[str, list[Target]] = {}
    prepared_targets: dict[TableName, Target] = {}
    for source in settings.sources:
        source_targets = (
            [] if source.server is None else targets_of(source.server, PipelinePatterns(source.tables))
        )
        known[source.name] = source_targets
        names = None if source.server is None else [str(target.name) for target in source_targets]
        sources.append({"name": source.name, "tables": names})
        for target in source_targets:
            prepared = target_through(steps, target)
            if prepared is None:
                continue
            prepared_targets[prepared.name] = prepared
            chunks = []
            if settings.load.mode != "none" and source.server is not None:
                chunks = plan_chunks(source.server, target, rows=settings.load.chunk_rows)
            targets.append(
                {
                    "source": f"{source.name}/{target.name}",
                    "target": str(prepared.name),
                    "chunks": len(chunks),
                    "rows": sum(chunk.rows for chunk in chunks),
                    "statements": list(sink.plan(prepared, settings.schema_changes)),
                }
            )
    sink.check_together(list(prepared_targets.values()))
    all_findings = [*sink.check(), *cascade_findings(settings, sink)]
    all_findings += pattern_findings(settings, tables_on_servers(settings), known)
    for source in settings.sources:
        all_findings += [] if source.server is None else encryption_findings(source.server)
    findings = [
        {"subject": finding.subject, "what": finding.what, "fatal": finding.fatal, "mend": finding.mend}
        for finding in all_findings
    ]
    sink.close()
    return {
        "pipeline": settings.name,
        "sources": sources,
        "sink": sink.kind,
        "sink_name": settings.sink.name,
        "delivery": str(sink.delivery),
        "findings": findings,
        "targets": targets,
    }
