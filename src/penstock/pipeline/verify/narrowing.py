# SPDX-License-Identifier: Apache-2.0
"""Replaces pending rereads of whole tables by rereads of the rows that differ."""

from collections.abc import Collection

import structlog

from penstock.errors import PenstockError
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.state import PipelineState, table_key
from penstock.pipeline.verify.comparison import Spreading, TableResult
from penstock.pipeline.verify.differences import Kind
from penstock.pipeline.verify.repair import repairable, rows_condition
from penstock.pipeline.verify.verify import verify

_log = structlog.get_logger(__name__)


def narrow_rereads(settings: PipelineSettings, state: PipelineState, spreading: Spreading) -> None:
    """Compare tables with a pending full reread, and request only the rows that differ.

    Applies to sources with `on_lost: repair`. A request ends only after the requests for its rows are stored,
    so a crash may cause needless reads but never loses a read. A table that cannot be compared completely, or
    has too many differences for a condition, is read as a whole.
    """
    sources = {source.name for source in settings.sources if source.on_lost == "repair"}
    waiting = {
        table_key(request.source, request.table): request
        for request in state.requests()
        if request.state == "asked" and request.where is None and request.source in sources
    }
    if not waiting:
        return
    try:
        results = verify(settings, spreading=spreading).results
    except PenstockError as problem:
        _log.warning("the tables cannot be compared, so they are read whole", why=str(problem))
        return
    compared = {key for result in results for key in _keys_of(result)}
    whole = {key for result in results if not _is_narrow(result, waiting) for key in _keys_of(result)}
    for result in results:
        for source_table in result.table.sources:
            key = table_key(source_table.source.name, source_table.table.name)
            if key in waiting and key not in whole and repairable(result):
                has_extra = any(row.kind is Kind.EXTRA for row in result.found)
                where = rows_condition(result)
                state.request_resnapshot(
                    source_table.source.name, source_table.table.name, where, remove=has_extra
                )
    for key in waiting.keys() & (compared - whole):
        state.note_request(waiting[key], "done", "compared, and only what differed is read again")
        _log.info("a table was compared instead of read again", table=key)


def _keys_of(result: TableResult) -> list[str]:
    return [
        table_key(source_table.source.name, source_table.table.name) for source_table in result.table.sources
    ]


def _is_narrow(result: TableResult, waiting: Collection[str]) -> bool:
    """Return whether all rows of a table that may differ are known, and a condition can select them."""
    known = result.whole and all(key in waiting for key in _keys_of(result))
    return known and (not repairable(result) or rows_condition(result) is not None)
