# SPDX-License-Identifier: Apache-2.0
"""Resizing from one number of shards to another: where each new shard starts, and what it skips.

Slot s is in shard s % count. So a new shard shares slots with exactly those old shards whose numbers equal
its own number modulo the greatest common divisor of the two counts.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from penstock.coordinate.checkpoint import ShardState
from penstock.coordinate.floors import Floors
from penstock.model import Position


def why_not(states: Sequence[ShardState]) -> str | None:
    """Return why the shards cannot be resized now; None if they can.

    Any such reason goes away as the shards are consumed.
    """
    checkpoints = [state.checkpoint for state in states if state.checkpoint is not None]
    if not checkpoints:
        return None
    if len(checkpoints) < len(states):
        waiting = [shard for shard, state in enumerate(states) if state.checkpoint is None]
        return f"shards {_format_shards(waiting)} have no checkpoint yet, and others have"
    if (
        len(
            {(checkpoint.server_key, Position.parse(checkpoint.position).epoch) for checkpoint in checkpoints}
        )
        > 1
    ):
        return "the checkpoints of the shards are of several servers or epochs"
    with_floors = [shard for shard, state in enumerate(states) if state.floors]
    if with_floors:
        return (
            f"shards {_format_shards(with_floors)} have not caught up since the last change of their number"
        )
    return None


def reshaped(states: Sequence[ShardState], count: int) -> Sequence[ShardState]:
    """Return the initial state of each of `count` new shards, from the final states of the old shards.

    If `why_not` returns a reason, or if the count stays the same, the states are unchanged.
    """
    if count == len(states) or why_not(states) is not None:
        return [replace(state, token=0, fence=0) for state in states]
    if all(state.checkpoint is None for state in states):
        return [ShardState()] * count
    step = math.gcd(len(states), count)
    return [_new_shard(states, range(shard % step, len(states), step)) for shard in range(count)]


def restarted(states: Sequence[ShardState]) -> Sequence[ShardState]:
    """Return the initial states of the shards after the shard columns have changed.

    The number of shards stays the same, but a row's slot changes, so a slot of a new shard does not
    correspond to a slot of an old shard. `why_not` must return no reason. All shards start at the lowest
    checkpoint, so that no row is missed.
    """
    checkpoints = [state.checkpoint for state in states if state.checkpoint is not None]
    lowest = min(checkpoints, key=lambda checkpoint: Position.parse(checkpoint.position), default=None)
    return [ShardState(lowest)] * len(states)


def _new_shard(states: Sequence[ShardState], sharing: Sequence[int]) -> ShardState:
    """Return the initial state of a shard that shares slots with some of the old shards."""
    checkpoints = {
        shard: checkpoint for shard in sharing if (checkpoint := states[shard].checkpoint) is not None
    }
    positions = {shard: Position.parse(checkpoint.position) for shard, checkpoint in checkpoints.items()}
    lowest = min(sharing, key=lambda shard: positions[shard])
    if all(position == positions[lowest] for position in positions.values()):
        return ShardState(checkpoints[lowest])
    versions = [0] * len(states)
    for shard, position in positions.items():
        versions[shard] = position.commit_version
    floors = Floors(tuple(versions), checkpoints[lowest].server_key, positions[lowest].epoch)
    return ShardState(checkpoints[lowest], floors)


def _format_shards(shards: Sequence[int]) -> str:
    return ", ".join(str(shard) for shard in shards)
