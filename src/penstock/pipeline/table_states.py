# SPDX-License-Identifier: Apache-2.0
"""Determines the state of each table of a pipeline from the state store."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from penstock.pipeline.resnapshot import Resnapshot
from penstock.pipeline.state import Checkpoint, PipelineState, split_key, table_key

# The states of a table, the most urgent first.
STATES = ("stopped", "set aside", "loading", "asked", "gone", "idle", "streaming")


@dataclass(frozen=True)
class TableState:
    """The state of a table in one sink or shard. `state` is one of `STATES`, and `why` explains it.

    `stopped`: the pipeline continues without the table. `set aside`: the table's source does not answer, and
    the pipeline continues with its other sources. `asked`: the table is waiting to be read again. `gone`: the
    source has dropped the table. `idle`: the pipeline is not running. `rows` is the estimated number of rows
    of the table's last load.
    """

    source: str
    table: str
    state: str
    why: str = ""
    chunks: int = 0
    chunks_done: int = 0
    rows: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def table_states(state: PipelineState) -> list[TableState]:
    """Return the tables of one sink or shard by name; [] if it never ran. Raises CoordinationLost."""
    progress = state.checkpoint()
    if progress is None:
        return []
    known = (state.get_large("tables") or {"tables": {}})["tables"]
    requests = {
        table_key(request.source, request.table): request
        for request in state.requests()
        if not request.ended_us
    }
    is_run = state.runner() is not None
    # The last report of a runner that has ended may name a source that is reachable again by now.
    aside = state.shown().get("sources_aside", {}) if is_run else {}
    usual = "streaming" if is_run else "idle"
    keys = sorted(known.keys() | progress.loads.keys() | progress.stopped.keys())
    return [_table_state(key, progress, known.get(key), requests.get(key), aside, usual) for key in keys]


def _table_state(
    key: str,
    progress: Checkpoint,
    known: Mapping[str, Any] | None,
    request: Resnapshot | None,
    aside: Mapping[str, str],
    usual: str,
) -> TableState:
    source, table = split_key(key)
    load = progress.loads.get(key)
    chunks = (0, 0, 0) if load is None else (load.chunks, load.done, load.rows)
    if key in progress.stopped:
        state, why = "stopped", str(progress.stopped[key])
    elif source in aside:
        state, why = "set aside", aside[source]
    elif load is not None and not load.finished:
        state, why = "loading", ""
    elif request is not None:
        state, why = "asked", request.what
    elif known is not None and known["gone"]:
        state, why = "gone", ""
    else:
        state, why = usual, ""
    return TableState(source, str(table), state, why, *chunks)
