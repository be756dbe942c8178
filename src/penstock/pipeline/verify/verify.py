# SPDX-License-Identifier: Apache-2.0
"""Verifies a pipeline, from its settings to the result of the comparison."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import OptionInvalid
from penstock.limits import VERIFY_SHARE_ROWS_DEFAULT
from penstock.model import TablePatterns
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.source_servers import at_answering_servers
from penstock.pipeline.state import PipelineState
from penstock.pipeline.verify.comparison import Comparison, Spreading, TableResult, in_this_process
from penstock.pipeline.verify.differences import Kind
from penstock.pipeline.verify.repair import repair, repairable, rows_condition
from penstock.pipeline.verify.selection import compared_tables, no_such_table, shares_of
from penstock.sinks.sink import keeps_tables


@dataclass
class Verification:
    """The result of comparing a pipeline: each table's result, and the pipeline's offsets.

    `running` is true if the pipeline ran during the comparison. `repaired` counts the repaired rows. If the
    pipeline was running, `requests` contains the resnapshots that were requested instead of repairs.
    """

    results: list[TableResult]
    offsets: dict[str, Any]
    running: bool
    repaired: int = 0
    requests: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether every table equals its source."""
        return all(result.equal for result in self.results)

    @property
    def differs(self) -> bool:
        """Whether a row certainly differs and was not repaired."""
        return self.remaining > 0

    @property
    def remaining(self) -> int:
        """The rows that certainly differ and were not repaired."""
        return max(0, sum(len(repairable(result)) for result in self.results) - self.repaired)

    @property
    def whole(self) -> bool:
        """Whether every row was compared and could be judged."""
        return all(result.whole for result in self.results)


def verify_shards(
    shards: Sequence[PipelineSettings], tables: Sequence[str] = (), **options: Any
) -> Verification:
    """Compare the tables of all shards of a pipeline, each at its own position. Propagates errors from
    `verify`.

    With several shards, the keys of the offsets name the shard and the source.
    """
    joined = Verification([], {}, running=False)
    for settings in shards:
        verification = verify(settings, tables, **options)
        of_shard = f"{settings.shard} " if settings.shard is not None else ""
        joined.results += verification.results
        joined.offsets |= {f"{of_shard}{name}": offset for name, offset in verification.offsets.items()}
        joined.running |= verification.running
        joined.repaired += verification.repaired
        joined.requests += verification.requests
    if not joined.results:
        raise no_such_table(shards[0].name, tables)
    return joined


def verify(
    settings: PipelineSettings,
    tables: Sequence[str] = (),
    *,
    mend: bool = False,
    columns_left_out: Sequence[str] = (),
    spreading: Spreading = in_this_process,
    limit: int = 10_000,
    share_rows: int = VERIFY_SHARE_ROWS_DEFAULT,
) -> Verification:
    """Compare a pipeline's target with its sources, and with `mend` repair the differences.

    `tables` are patterns of target or source tables, empty for all. `limit` is the maximum number of
    differing keys per table that are read in full. A table that cannot be compared has a result with the
    reason. Raises OptionInvalid if the pipeline never ran or its sink keeps no table that can be compared,
    SchemaChanged, and propagates errors from reading either side.
    """
    if not keeps_tables(settings.make_sink()):
        raise OptionInvalid(
            f"a {settings.sink.kind} sink keeps no table that can be compared",
            hint="Compare a pipeline whose sink mirrors tables",
        )
    with closing(PipelineState.of(settings)) as state:
        checkpoint = state.checkpoint()
        if checkpoint is None or not checkpoint.offsets:
            raise OptionInvalid(
                f"the pipeline {settings.name} never ran, so there is nothing to compare",
                hint="penstock run PIPELINE --until caught-up",
            )
        settings = at_answering_servers(settings, checkpoint.offsets)
        compared = compared_tables(settings, state, TablePatterns(list(tables)), columns_left_out)
        shares = shares_of(compared, settings.load, share_rows)
        comparison = Comparison(compared, shares, state, spreading=spreading, limit=limit)
        results = comparison.run()
        verification = Verification(results, dict(checkpoint.offsets), state.runner() is not None)
        if mend and any(repairable(result) for result in results):
            if verification.running:
                verification.requests = _request_rereads(results, state)
            else:
                verification.repaired = repair(results, state)
        return verification


def _request_rereads(results: Sequence[TableResult], state: PipelineState) -> list[str]:
    """Ask the runner to read the differing rows again, and return the numbers of the requests."""
    return [
        state.request_resnapshot(
            source_table.source.name,
            source_table.table.name,
            rows_condition(result),
            remove=has_extra,
            reuse=True,
        )
        for result in results
        if repairable(result)
        for has_extra in [any(difference.kind is Kind.EXTRA for difference in result.found)]
        for source_table in result.table.sources
    ]
