# SPDX-License-Identifier: Apache-2.0
"""From shards of one number to shards of another: where each begins, and what it leaves out.

Slot s lies in shard s % count. So a new shard shares slots with those old shards that are equal to it
modulo the greatest common divisor of the two counts, and with no others.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from penstock.coordinate.checkpoint import ShardState
from penstock.coordinate.floors import Floors
from penstock.model import Position


def why_not(states: Sequence[ShardState]) -> str | None:
    """Return why the shards cannot become others as they stand; None where they can.

    Each such reason passes as the shards are consumed.
    """
    begun = [state.checkpoint for state in states if state.checkpoint is not None]
    if not begun:
        return None
    if len(begun) < len(states):
        waiting = [shard for shard, state in enumerate(states) if state.checkpoint is None]
        return f"shards {_listed(waiting)} have no checkpoint yet, and others have"
    if len({(one.server_key, Position.parse(one.position).epoch) for one in begun}) > 1:
        return "the checkpoints of the shards are of several servers or epochs"
    with_floors = [shard for shard, state in enumerate(states) if state.floors]
    if with_floors:
        return f"shards {_listed(with_floors)} have not caught up since the last change of their number"
    return None


def reshaped(states: Sequence[ShardState], count: int) -> Sequence[ShardState]:
    """Return what each of `count` new shards begins with, from what the old ones ended with.

    Where `why_not` has a reason, or the count stays, the shards stay as they were.
    """
    if count == len(states) or why_not(states) is not None:
        return [replace(state, token=0, fence=0) for state in states]
    if all(state.checkpoint is None for state in states):
        return [ShardState()] * count
    step = math.gcd(len(states), count)
    return [_new_shard(states, range(shard % step, len(states), step)) for shard in range(count)]


def _new_shard(states: Sequence[ShardState], sharing: Sequence[int]) -> ShardState:
    """Return what a shard begins with that shares slots with some of the old ones."""
    checkpoints = {shard: found for shard in sharing if (found := states[shard].checkpoint) is not None}
    positions = {shard: Position.parse(one.position) for shard, one in checkpoints.items()}
    least = min(sharing, key=lambda shard: positions[shard])
    if all(position == positions[least] for position in positions.values()):
        return ShardState(checkpoints[least])
    versions = [0] * len(states)
    for shard, position in positions.items():
        versions[shard] = position.commit_version
    floors = Floors(tuple(versions), checkpoints[least].server_key, positions[least].epoch)
    return ShardState(checkpoints[least], floors)


def _listed(shards: Sequence[int]) -> str:
    return ", ".join(str(shard) for shard in shards)
