# SPDX-License-Identifier: Apache-2.0
"""The status of a pipeline as its state store has it, as plain values."""

import time
from typing import Any

from penstock.pipeline.sink_positions import smallest_offsets
from penstock.pipeline.state import Checkpoint, PipelineState


def summarize_pipeline(state: PipelineState) -> dict[str, Any]:
    """Return the status of a pipeline; with several sinks or shards the status of each, in `sinks` or
    `shards`, and where the first one is.

    A source has to keep its log from the smallest position of all of them. One without rows to write
    advances like the others.
    """
    states = state.parts()
    if not states[0].part:
        return _summarize(state)
    checkpoints = [checkpoint for each in states if (checkpoint := each.checkpoint()) is not None]
    return {
        "pipeline": state.name,
        "sources_keep": {
            name: f"{offset['file']}:{offset['offset']}"
            for name, offset in smallest_offsets(checkpoints).items()
        },
        ("sinks" if states[0].shard is None else "shards"): {each.part: _summarize(each) for each in states},
    }


def summaries_by_part(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the status of each sink or shard by its name, which is "" for a pipeline with one of each."""
    parts: dict[str, dict[str, Any]] = summary.get("sinks") or summary.get("shards") or {"": summary}
    return parts


def _summarize(state: PipelineState) -> dict[str, Any]:
    progress, runner, shown = state.checkpoint(), state.runner(), state.shown()
    state_name = _state(state, progress, runner is not None, shown)
    summary: dict[str, Any] = {
        "pipeline": state.name,
        **({"sink": state.sink} if state.sink else {}),
        **({"shard": str(state.shard)} if state.shard else {}),
        "state": state_name,
        "why": state.pause_message() or _error_of(state_name, shown),
        "runner": runner.name if runner is not None else None,
    }
    if progress is None:
        return summary
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
        name: value for name, value in shown.items() if name not in ("pipeline", "state", "updated_us")
    }
    return summary


def _open_requests(state: PipelineState) -> dict[str, str]:
    """Return the resnapshots that wait, run, or failed without a later success."""
    states: dict[str, str] = {}
    for request in state.requests():
        key = f"{request.source}/{request.table}"
        if request.state == "done":
            states.pop(key, None)
        else:
            states[key] = f"{request.state}: {request.what}" if request.what else request.state
    return states


def _error_of(state_name: str, shown: dict[str, Any]) -> str | None:
    """Return the error that a state is due to, as its runner published it."""
    is_error = state_name in ("failed", "retrying") and "what" in shown
    return f"{shown['error']}: {shown['what']}" if is_error else None


def _state(state: PipelineState, progress: Checkpoint | None, is_run: bool, shown: dict[str, Any]) -> str:
    if state.paused:
        return "pausing" if is_run else "paused"
    if is_run:
        return str(shown.get("state", "starting"))
    if progress is None:
        return "never ran"
    return "failed" if shown.get("state") == "failed" else "stopped"
