# SPDX-License-Identifier: Apache-2.0
"""What a pipeline would do, without doing any of it."""

from typing import Any

from penstock.changes import Target
from penstock.model import TableName
from penstock.pipeline.cascades import findings_of
from penstock.pipeline.ghosts import PipelinePatterns
from penstock.pipeline.load.chunks import plan_chunks
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.pattern_check import pattern_findings, tables_on_servers
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.step import target_through
from penstock.sinks.mysql.check import encryption_findings


def preview(settings: PipelineSettings) -> dict[str, Any]:
    """Return what is read, prepared and written, as plain JSON values. Asks servers and sink, changes
    nothing.

    Raises what the source, the steps and the sink raise where they cannot be used.
    """
    sink, steps = settings.make_sink(), settings.make_steps()
    sources, targets = [], []
    known: dict[str, list[Target]] = {}
    made_targets: dict[TableName, Target] = {}
    for source in settings.sources:
        found = [] if source.server is None else targets_of(source.server, PipelinePatterns(source.tables))
        known[source.name] = found
        sources.append({"name": source.name, "tables": [str(target.name) for target in found]})
        for target in found:
            made = target_through(steps, target)
            if made is None:
                continue
            made_targets[made.name] = made
            chunks = []
            if settings.load.mode != "none" and source.server is not None:
                chunks = plan_chunks(source.server, target, rows=settings.load.chunk_rows)
            targets.append(
                {
                    "source": f"{source.name}/{target.name}",
                    "target": str(made.name),
                    "chunks": len(chunks),
                    "rows": sum(chunk.rows for chunk in chunks),
                    "statements": list(sink.plan(made, settings.schema_changes)),
                }
            )
    sink.check_together(list(made_targets.values()))
    all_findings = [*sink.check(), *findings_of(settings, sink)]
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
        "delivery": str(sink.delivery),
        "findings": findings,
        "targets": targets,
    }
