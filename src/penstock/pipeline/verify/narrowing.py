# SPDX-License-Identifier: Apache-2.0
"""Reads only the rows again that differ, of tables that wait to be read again as a whole."""

from collections.abc import Collection

import structlog

from penstock.errors import PenstockError
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.state import PipelineState, table_key
from penstock.pipeline.verify.comparison import Spreading, TableResult
from penstock.pipeline.verify.differences import Kind
from penstock.pipeline.verify.repair import mended, rows_condition
from penstock.pipeline.verify.verify import verify

_log = structlog.get_logger(__name__)


def narrow_rereads(settings: PipelineSettings, state: PipelineState, spreading: Spreading) -> None:
    """Compare tables that wait to be read again whole, and ask for the rows that differ instead: those of
    sources with `on_lost: repair`.

    A request ends only once those for its rows are written down, so whoever dies meanwhile reads more than is
    needed. A table that cannot be compared to its end, or that differs in too many rows for a condition, is
    read whole.
    """
    sources = {source.name for source in settings.sources if source.on_lost == "repair"}
    waiting = {
        table_key(wish.source, wish.table): wish
        for wish in state.requests()
        if wish.state == "asked" and wish.where is None and wish.source in sources
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
        for one in result.table.sources:
            key = table_key(one.source.name, one.table.name)
            if key in waiting and key not in whole and mended(result):
                has_extra = any(row.kind is Kind.EXTRA for row in result.found)
                where = rows_condition(result)
                state.request_resnapshot(one.source.name, one.table.name, where, remove=has_extra)
    for key in waiting.keys() & (compared - whole):
        state.note_request(waiting[key], "done", "compared, and only what differed is read again")
        _log.info("a table was compared instead of read again", table=key)


def _keys_of(result: TableResult) -> list[str]:
    return [table_key(one.source.name, one.table.name) for one in result.table.sources]


def _is_narrow(result: TableResult, waiting: Collection[str]) -> bool:
    """Tell whether a condition has all rows of a table that may differ."""
    known = result.whole and all(key in waiting for key in _keys_of(result))
    return known and (not mended(result) or rows_condition(result) is not None)
