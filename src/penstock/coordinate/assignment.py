# SPDX-License-Identifier: Apache-2.0
"""The assignment of shards to members: a pure function, so that all callers with the same input agree."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from penstock.coordinate.store import HINT_RECORD, Record, reading_record


@dataclass(frozen=True)
class Assignment:
    """Which member owns each shard of a generation. `token` is the token of the leader's lease when the
    leader wrote the assignment.
    """

    generation: int = 0
    token: int = 0
    owners: Mapping[int, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the value of the record."""
        owners = {str(shard): member for shard, member in self.owners.items()}
        return json.dumps({"generation": self.generation, "token": self.token, "owners": owners}).encode()

    @classmethod
    def of(cls, record: Record | None) -> Self:
        """Read the record. Without a record, no shard has an owner. Raises SchemaInvalid."""
        if record is None:
            return cls()
        with reading_record("the assignment of shards", HINT_RECORD):
            values = json.loads(record.value)
            owners = {int(shard): member for shard, member in values["owners"].items()}
            return cls(values["generation"], values["token"], owners)

    def shards_of(self, member: str) -> frozenset[int]:
        """Return the shards assigned to a member."""
        return frozenset(shard for shard, owner in self.owners.items() if owner == member)


def assign(
    shards: int, members: Sequence[str], current: Mapping[int, str], pins: Mapping[int, str] | None = None
) -> Mapping[int, str]:
    """Return the member of each shard, balanced so that shard counts differ by at most one.

    Shards stay with their `current` owner as far as the balance allows: no other balanced assignment would
    move fewer shards. A pin keeps a shard with its member even if that unbalances the result; the other
    shards are then balanced as well as the pins allow. Pins to absent members are ignored. Without members
    the result is empty.
    """
    names = sorted(set(members))
    if not names:
        return {}
    owners = {shard: member for shard, member in (pins or {}).items() if member in names and shard < shards}
    pinned = {name: [shard for shard in sorted(owners) if owners[shard] == name] for name in names}
    free = [shard for shard in range(shards) if shard not in owners]
    kept: dict[str, list[int]] = {name: [] for name in names}
    for shard in free:
        if current.get(shard) in kept:
            kept[current[shard]].append(shard)
    quota = _share_free_shards(len(free), {name: len(pinned[name]) for name in names}, kept)
    for name in names:
        owners.update(dict.fromkeys(kept[name][: quota[name]], name))
    unassigned = iter([shard for shard in free if shard not in owners])
    for name in names:
        for _ in range(quota[name] - len(kept[name])):
            owners[next(unassigned)] = name
    return {shard: owners[shard] for shard in range(shards)}


def _share_free_shards(
    free: int, pinned: Mapping[str, int], kept: Mapping[str, Sequence[int]]
) -> Mapping[str, int]:
    """Return how many of the free shards each member gets.

    Each shard goes to the member with the fewest shards. Ties go first to a member that keeps a shard, and
    then to the first name. The extra shards therefore stay with members that already have more shards.
    """
    quota = dict.fromkeys(pinned, 0)
    for _ in range(free):
        receiver = min(
            quota, key=lambda name: (pinned[name] + quota[name], len(kept[name]) <= quota[name], name)
        )
        quota[receiver] += 1
    return quota
