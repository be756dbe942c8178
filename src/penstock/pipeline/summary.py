# SPDX-License-Identifier: Apache-2.0
"""Summarizes the status of pipelines from their state store, as plain values."""

import functools
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from penstock.coordinate.snapshot import snapshot_of
from penstock.coordinate.store import CoordinationStore, path_of
from penstock.pipeline.sink_positions import smallest_offsets
from penstock.pipeline.state import Checkpoint, PipelineState
from penstock.pipeline.verification_record import read_verification

# How many results of `_is_readable` are cached, and for records of up to how many bytes. They are cached
# because a page about thousands of pipelines repeats these checks every few seconds.
_PROGRESSES_CACHED, _CACHED_BYTES_MAX = 4096, 4096


def summarize_pipelines(store: CoordinationStore) -> list[dict[str, Any]]:
    """Return the status of every pipeline that a store knows, by name; see `summarize_pipeline`."""
    return [summarize_pipeline(state) for state in copied_states(store)]


def copied_states(store: CoordinationStore) -> list[PipelineState]:
    """Return the state of every pipeline that a store knows, by name, with the records that a status needs.

    The store is queried once for all pipelines. The states are copies in memory.
    """
    snapshot = snapshot_of(store, path_of("pipelines"), _is_summarized)
    return [PipelineState(snapshot, name) for name in PipelineState.names(snapshot)]


def _is_summarized(path: str) -> bool:
    """Return whether a summary needs this record. Summaries do not need large records, which only batches
    use.
    """
    _, _, _, *names = path.split("/")
    while names[:1] in (["sinks"], ["shards"]):
        names = names[2:]
    return names[:1] not in (["batch"], ["tables"], ["loads"], ["reset"])


def summarize_pipeline(state: PipelineState) -> dict[str, Any]:
    """Return the status of a pipeline.

    With several sinks or shards, `sinks` or `shards` has the status of each, and the position is the lowest
    of all. A source has to keep its log from that position on. A sink or shard without rows to write advances
    like the others.
    """
    states = state.parts()
    if not states[0].part:
        return summarize_part(state)
    checkpoints = [checkpoint for each in states if (checkpoint := each.checkpoint()) is not None]
    return {
        "pipeline": state.name,
        "sources_keep": {
            name: f"{offset['file']}:{offset['offset']}"
            for name, offset in smallest_offsets(checkpoints).items()
        },
        ("sinks" if states[0].shard is None else "shards"): {
            each.part: summarize_part(each) for each in states
        },
    }


def name_state(state: PipelineState) -> str:
    """Return the name of the state of a sink or shard, as its status shows it.

    The state is `lost` if the last run ended without recording its end, because its process was killed or its
    host failed.
    """
    return _name_state(state, state.runner() is not None, state.shown(), lambda: _is_begun(state))


def summaries_by_part(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the status of each sink or shard by its name, which is "" for a pipeline with one of each."""
    parts: dict[str, dict[str, Any]] = summary.get("sinks") or summary.get("shards") or {"": summary}
    return parts


def summarize_part(state: PipelineState) -> dict[str, Any]:
    """Return the status of a sink or shard. `gone` is true in the state `lost`."""
    progress, runner, shown = state.checkpoint(), state.runner(), state.shown()
    state_name = _name_state(state, runner is not None, shown, lambda: progress is not None)
    summary: dict[str, Any] = {
        "pipeline": state.name,
        **({"sink": state.sink} if state.sink else {}),
        **({"shard": str(state.shard)} if state.shard else {}),
        "state": state_name,
        "why": state.pause_message() or _reason_of(state_name, shown),
        "runner": runner.name if runner is not None else None,
    }
    if progress is None:
        return summary
    if state_name == "lost":
        summary["gone"] = True
    if (verified := read_verification(state)) is not None:
        summary["verified"] = verified.to_json()
    summary |= {
        "generation": progress.generation,
        "batches": progress.number,
        "positions": {
            name: f"{offset['file']}:{offset['offset']}" for name, offset in progress.offsets.items()
        },
        "loads": {
            key: f"{load.done} of {load.chunks} chunks"
            for key, load in progress.loads.items()
            if not load.finished
        },
        "tables_loaded": sum(load.finished for load in progress.loads.values()),
        "stopped": dict(progress.stopped),
        "resnapshots": _open_requests(state),
    }
    if "updated_us" in shown:
        summary["seconds_since_update"] = round(time.time() - shown["updated_us"] / 1e6, 1)
    summary["progress"] = {
        name: value
        for name, value in shown.items()
        if name not in ("pipeline", "state", "updated_us", "ended")
    }
    return summary


def _open_requests(state: PipelineState) -> dict[str, str]:
    """Return the resnapshots that are waiting or running, or that failed without a later success."""
    states: dict[str, str] = {}
    for request in state.requests():
        key = f"{request.source}/{request.table}"
        if request.state == "done":
            states.pop(key, None)
        else:
            states[key] = f"{request.state}: {request.what}" if request.what else request.state
    return states


def _reason_of(state_name: str, shown: dict[str, Any]) -> str | None:
    """Return the error that caused a state, as the runner published it; for a lost runner, the time of its
    last report.
    """
    if state_name == "lost":
        updated = datetime.fromtimestamp(shown["updated_us"] // 1_000_000, UTC)
        return f"its process was killed or its host is lost; its last sign of life is of {updated:%FT%TZ}"
    is_error = state_name in ("failed", "retrying") and "what" in shown
    return f"{shown['error']}: {shown['what']}" if is_error else None


def _name_state(
    state: PipelineState, is_run: bool, shown: dict[str, Any], is_begun: Callable[[], bool]
) -> str:
    if state.paused:
        return "pausing" if is_run else "paused"
    if is_run:
        return str(shown.get("state", "starting"))
    if not is_begun():
        return "never ran"
    if shown.get("state") == "failed":
        return "failed"
    if shown.get("ended"):
        return "finished"
    # A runner of an earlier version did not record its end, so a missing end does not mean that it was
    # killed.
    return "lost" if shown.get("ended") is False and "updated_us" in shown else "stopped"


def _is_begun(state: PipelineState) -> bool:
    """Return whether progress is recorded. Raises SchemaInvalid if it cannot be read."""
    record = state.record("standing")
    if record is None:
        return False
    is_small = len(record.value) <= _CACHED_BYTES_MAX
    return _is_readable(record.value) if is_small else _is_readable.__wrapped__(record.value)


@functools.lru_cache(_PROGRESSES_CACHED)
def _is_readable(value: bytes) -> bool:
    Checkpoint.decode(value)
    return True
