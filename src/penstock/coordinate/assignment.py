# SPDX-License-Identifier: Apache-2.0
"""Which member has which shard: a pure function, the same for everybody who asks with the same facts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from penstock.coordinate.store import HINT_RECORD, Record, reading_record


@dataclass(frozen=True)
class Assignment:
    """Who is to have which shard of a generation; `token` is of the leader's lease under which it was
    written.
    """

    generation: int = 0
    token: int = 0
    owners: Mapping[int, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the record's value."""
        owners = {str(shard): member for shard, member in self.owners.items()}
        return json.dumps({"generation": self.generation, "token": self.token, "owners": owners}).encode()

    @classmethod
    def of(cls, record: Record | None) -> Self:
        """Read the record; without one nobody is to have anything. Raises SchemaInvalid."""
        if record is None:
            return cls()
        with reading_record("the assignment of shards", HINT_RECORD):
            found = json.loads(record.value)
            owners = {int(shard): member for shard, member in found["owners"].items()}
            return cls(found["generation"], found["token"], owners)

    def shards_of(self, member: str) -> frozenset[int]:
        """Return what a member is to have."""
        return frozenset(shard for shard, owner in self.owners.items() if owner == member)


def assign(
    shards: int, members: Sequence[str], current: Mapping[int, str], pins: Mapping[int, str] | None = None
) -> Mapping[int, str]:
    """Return the member of each shard, spread so that no member has two more than another.

    Shards stay where they are (`current`) as far as the spread allows: no assignment that is spread so
    moves fewer. A pin keeps a shard with its member, even where that makes the spread uneven: then the
    others are spread as evenly as the pins leave it. Pins of members who are not there say nothing. Without
    members the answer is empty.
    """
    names = sorted(set(members))
    if not names:
        return {}
    found = {shard: member for shard, member in (pins or {}).items() if member in names and shard < shards}
    pinned = {name: [shard for shard in sorted(found) if found[shard] == name] for name in names}
    free = [shard for shard in range(shards) if shard not in found]
    kept: dict[str, list[int]] = {name: [] for name in names}
    for shard in free:
        if current.get(shard) in kept:
            kept[current[shard]].append(shard)
    room = _room(len(free), {name: len(pinned[name]) for name in names}, kept)
    for name in names:
        found.update(dict.fromkeys(kept[name][: room[name]], name))
    homeless = iter([shard for shard in free if shard not in found])
    for name in names:
        for _ in range(room[name] - len(kept[name])):
            found[next(homeless)] = name
    return {shard: found[shard] for shard in range(shards)}


def _room(free: int, pinned: Mapping[str, int], kept: Mapping[str, Sequence[int]]) -> Mapping[str, int]:
    """Return how many of the free shards each member is to have.

    Every shard goes to whoever has fewest; among equals to one that has a shard to keep, then by name. So
    whoever already has more is the one that ends up with the one more.
    """
    room = dict.fromkeys(pinned, 0)
    for _ in range(free):
        least = min(room, key=lambda name: (pinned[name] + room[name], len(kept[name]) <= room[name], name))
        room[least] += 1
    return room
