# SPDX-License-Identifier: Apache-2.0
"""From a pipeline's settings to what its comparison found."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import OptionInvalid
from penstock.model import TablePatterns
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.source_servers import at_answering_servers
from penstock.pipeline.state import PipelineState
from penstock.pipeline.verify.comparison import Comparison, Spreading, TableResult, in_this_process
from penstock.pipeline.verify.differences import Kind
from penstock.pipeline.verify.repair import mended, repair, rows_condition
from penstock.pipeline.verify.selection import compared_tables, shares_of
from penstock.sinks.sink import keeps_tables

# About how many rows are compared at once.
SHARE_ROWS = 500_000


@dataclass
class Verification:
    """What came of comparing a pipeline: each table's outcome, and where the pipeline stood.

    `running` tells whether it ran meanwhile. `repaired` counts the rows that were made right, `requests` are
    the resnapshots that a running pipeline was asked for instead.
    """

    results: list[TableResult]
    offsets: dict[str, Any]
    running: bool
    repaired: int = 0
    requests: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether every table was what its source is."""
        return all(one.equal for one in self.results)

    @property
    def differs(self) -> bool:
        """Whether a row differs for certain, and was not repaired."""
        return sum(len(mended(one)) for one in self.results) > self.repaired

    @property
    def whole(self) -> bool:
        """Whether every row was compared, and could be judged."""
        return all(one.whole for one in self.results)


def verify(
    settings: PipelineSettings,
    tables: Sequence[str] = (),
    *,
    mend: bool = False,
    columns_left_out: Sequence[str] = (),
    spreading: Spreading = in_this_process,
    limit: int = 10_000,
    share_rows: int = SHARE_ROWS,
) -> Verification:
    """Compare a pipeline's target with its sources, and with `mend` make it right where it differs.

    `tables` are patterns of the target's tables or of the sources', none for all. `limit` is how many
    differing keys of a table are read in full. Tables that cannot be compared have results that say
    why. Raises OptionInvalid where the pipeline never ran or its sink
    keeps no table that can be compared, SchemaChanged, and what reading either side raises.
    """
    if not keeps_tables(settings.make_sink()):
        raise OptionInvalid(
            f"a {settings.sink.kind} sink keeps no table that can be compared",
            hint="Compare a pipeline whose sink mirrors tables",
        )
    state = PipelineState.open(settings.state, settings.name)
    try:
        standing = state.standing()
        if standing is None or not standing.offsets:
            raise OptionInvalid(
                f"the pipeline {settings.name} never ran, so there is nothing to compare",
                hint="penstock run PIPELINE --until caught-up",
            )
        settings = at_answering_servers(settings, standing.offsets)
        compared = compared_tables(settings, state, TablePatterns(list(tables)), columns_left_out)
        shares = shares_of(compared, settings.load, share_rows)
        comparison = Comparison(compared, shares, state, spreading=spreading, limit=limit)
        results = comparison.run()
        found = Verification(results, dict(standing.offsets), state.runner() is not None)
        if mend and any(mended(one) for one in results):
            if found.running:
                found.requests = _asked(results, state)
            else:
                found.repaired = repair(results, state)
        return found
    finally:
        state.close()


def _asked(results: Sequence[TableResult], state: PipelineState) -> list[str]:
    """Ask the runner to read again what differs, and return the numbers of the requests."""
    return [
        state.request_resnapshot(one.source.name, one.table.name, rows_condition(result), remove=has_extra)
        for result in results
        if mended(result)
        for has_extra in [any(one.kind is Kind.EXTRA for one in result.found)]
        for one in result.table.sources
    ]
