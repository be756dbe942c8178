# SPDX-License-Identifier: Apache-2.0
"""Subscriptions as they are kept: their record, and what a person may do to them.

Everything of a subscription lies below its path. Members (see `membership`) follow the record and act on
it: what is done here to a running subscription takes effect there, and a subscription that nobody runs is
changed the same way.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from penstock.coordinate.checkpoint import Checkpoint, Checkpoints, ShardState, shard_path
from penstock.coordinate.lease import Holder
from penstock.coordinate.resize import reshaped, why_not
from penstock.coordinate.store import (
    ABSENT,
    HINT_RECORD,
    CoordinationStore,
    decoded_name,
    path_of,
    reading_record,
)
from penstock.errors import OptionInvalid, VersionConflict
from penstock.limits import SUBSCRIPTION_SHARDS_MAX

# So long members have to finish what they are at before their shards become others.
RESIZE_SECONDS = 15.0

_POLL_SECONDS = 0.1
_TRIES_MAX = 20

# Counts the generations of all subscriptions, so that none has a number, and so a path, that another had.
_GENERATIONS = "/generations"


def subscription_path(instance: str, name: str) -> str:
    """Return the path below which everything of a subscription lies."""
    return path_of("subscriptions", instance, name)


@dataclass(frozen=True)
class Resizing:
    """A change of the number of shards that has begun: to how many, and in which generation they will be."""

    shard_count: int
    generation: int


@dataclass(frozen=True)
class Subscription:
    """A named consumer of an instance.

    `tables` and `exclude` are patterns, no table pattern is every table; `shard_columns` has the columns by
    whose hash rows are shared out, by table pattern (none: the primary key). `generation` grows when the
    shards are others than before. `pins` says which member a shard was moved to. `resets` counts how often
    a checkpoint was set by hand. `created_us` is microseconds UTC since 1970.
    """

    instance: str
    name: str
    tables: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    shard_count: int = 1
    shard_columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    generation: int = 0
    created_us: int = 0
    resets: int = 0
    pins: Mapping[int, str] = field(default_factory=dict)
    resizing: Resizing | None = None

    @property
    def path(self) -> str:
        """The path below which everything of it lies."""
        return subscription_path(self.instance, self.name)

    @property
    def record_path(self) -> str:
        """The path of its record."""
        return self.path + "/record"

    @property
    def members_path(self) -> str:
        """The path below which its members are."""
        return self.path + "/members"

    @property
    def assignment_path(self) -> str:
        """The path of what says which member has which shard."""
        return self.path + "/assignment"

    @property
    def leader_path(self) -> str:
        """The path of the lease of whoever writes the assignment."""
        return self.path + "/leader"

    def lease_path(self, shard: int) -> str:
        """Return the path of the lease of a shard."""
        return shard_path(self.path, self.generation, shard, "lease")

    def checkpoints(self, store: CoordinationStore) -> Checkpoints:
        """Return the checkpoints of its shards, as they are now numbered."""
        return Checkpoints(store, self.path, self.generation)

    def encode(self) -> bytes:
        """Return the record's value."""
        found = asdict(self)
        found["pins"] = {str(shard): member for shard, member in self.pins.items()}
        return json.dumps(found).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Read a record's value. Raises SchemaInvalid."""
        with reading_record("the record of a subscription", HINT_RECORD):
            found: dict[str, Any] = json.loads(value)
            resizing = found.pop("resizing")
            return cls(
                instance=found["instance"],
                name=found["name"],
                tables=tuple(found["tables"]),
                exclude=tuple(found["exclude"]),
                shard_count=found["shard_count"],
                shard_columns={table: tuple(names) for table, names in found["shard_columns"].items()},
                generation=found["generation"],
                created_us=found["created_us"],
                resets=found["resets"],
                pins={int(shard): member for shard, member in found["pins"].items()},
                resizing=None if resizing is None else Resizing(**resizing),
            )


@dataclass(frozen=True)
class ShardView:
    """A shard as people see it: who has it, under which token, and how far it is."""

    shard: int
    holder: Holder | None
    state: ShardState


class Subscriptions:
    """The registry: every subscription in a store. Safe for threads.

    Every call raises CoordinationLost where the store does not answer; it may then be made again.
    """

    def __init__(self, store: CoordinationStore) -> None:
        self._store = store

    def list(self, instance: str | None = None) -> Sequence[Subscription]:
        """Return the subscriptions of an instance, or of all, by instance and name."""
        top = path_of("subscriptions")
        instances = [decoded_name(name) for name in self._store.list(top)] if instance is None else [instance]
        found = [
            self.get(one, decoded_name(name))
            for one in instances
            for name in self._store.list(path_of("subscriptions", one))
        ]
        return sorted((one for one in found if one is not None), key=lambda one: (one.instance, one.name))

    def get(self, instance: str, name: str) -> Subscription | None:
        """Return a subscription, None where there is none."""
        record = self._store.get(subscription_path(instance, name) + "/record")
        return None if record is None else Subscription.decode(record.value)

    def create(self, subscription: Subscription) -> Subscription:
        """Keep a new subscription, or return the one of its name that stands there.

        One that stands there under another selection of tables, shards or shard columns is not what the
        caller means: OptionInvalid.
        """
        if not 1 <= subscription.shard_count <= SUBSCRIPTION_SHARDS_MAX:
            raise OptionInvalid(
                f"a subscription has 1 to {SUBSCRIPTION_SHARDS_MAX} shards, not {subscription.shard_count}"
            )
        found = self.get(subscription.instance, subscription.name)
        if found is None:
            made = replace(subscription, generation=self.next_generation(), created_us=time.time_ns() // 1000)
            try:
                self._store.put(made.record_path, made.encode(), ABSENT)
                return made
            except VersionConflict:
                found = self._must_get(subscription.instance, subscription.name)
        _refuse_another(found, subscription)
        return found

    def delete(self, instance: str, name: str) -> None:
        """Forget a subscription and its checkpoints; its members stop. None of that name is fine."""
        top = subscription_path(instance, name)
        # Without the record nobody takes a lease, so what is deleted then is not made again.
        self._store.delete(top + "/record")
        self._delete_below(top)

    def shards(self, subscription: Subscription) -> Sequence[ShardView]:
        """Return how each shard stands."""
        checkpoints = subscription.checkpoints(self._store)
        return [
            ShardView(
                shard,
                Holder.of(self._store.get(subscription.lease_path(shard))),
                checkpoints.state(shard),
            )
            for shard in range(subscription.shard_count)
        ]

    def members(self, subscription: Subscription) -> Sequence[str]:
        """Return the names of the members that are there."""
        return [decoded_name(name) for name in self._store.list(subscription.members_path)]

    def reset(
        self, instance: str, name: str, checkpoint: Checkpoint | None, shard: int | None = None
    ) -> Subscription:
        """Set the checkpoint of a shard, or of all; None: consume as if for the first time.

        A member that holds such a shard stops it and begins again there. Raises OptionInvalid.
        """
        subscription = self._must_get(instance, name)
        _refuse_shard(subscription, shard)
        checkpoints = subscription.checkpoints(self._store)
        for one in range(subscription.shard_count) if shard is None else [shard]:
            checkpoints.reset(one, checkpoint)
        return self.change(instance, name, lambda found: replace(found, resets=found.resets + 1))

    def move(self, instance: str, name: str, shard: int, member: str) -> Subscription:
        """Give a shard to a member, and leave it there until that member leaves. Raises OptionInvalid."""
        subscription = self._must_get(instance, name)
        _refuse_shard(subscription, shard)
        members = self.members(subscription)
        if member not in members:
            raise OptionInvalid(
                f"subscription {name} has no member {member!r}",
                hint=f"Its members: {', '.join(members) or 'none; start a subscriber'}",
            )
        return self.change(instance, name, lambda found: replace(found, pins={**found.pins, shard: member}))

    def resize(
        self, instance: str, name: str, shard_count: int, seconds: float = RESIZE_SECONDS
    ) -> Subscription:
        """Give a subscription another number of shards, whether it runs or not; return what it is then.

        Members finish what they are at and stop; after `seconds` those that have not are fenced, and what
        they had not yet noted comes again. Then the new shards begin where the old ones ended. Raises
        OptionInvalid, where the hint says what to wait for, and CoordinationLost: run it again, or a member
        brings it to its end.
        """
        _refuse_count(shard_count)
        self._must_get(instance, name)
        generation = self.next_generation()

        def begun(found: Subscription) -> Subscription:
            if found.resizing is None and found.shard_count == shard_count:
                return found
            resizing = found.resizing or Resizing(shard_count, generation)
            if resizing.shard_count != shard_count:
                raise OptionInvalid(
                    f"subscription {name} is being changed to {resizing.shard_count} shards",
                    hint="Wait until that is done: penstock subscriptions show",
                )
            return replace(found, resizing=resizing)

        standing = self._must_get(instance, name)
        if standing.resizing is None and standing.shard_count != shard_count:
            self._refuse_resize(standing)
        done = self.change(instance, name, begun)
        deadline = time.monotonic() + seconds
        # The leader of those who run does the same, and may be first.
        while done.resizing is not None:
            if self.held(done) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                done = self._must_get(instance, name)
            else:
                done = self.finish_resize(done)
        if done.shard_count != shard_count:
            self._refuse_resize(done)
        return done

    def held(self, subscription: Subscription) -> Sequence[int]:
        """Return the shards that somebody holds."""
        return [
            shard
            for shard in range(subscription.shard_count)
            if self._store.get(subscription.lease_path(shard)) is not None
        ]

    def finish_resize(self, subscription: Subscription) -> Subscription:
        """End what `resize` began, as it was read; return what stands then. Any number may do so at once.

        From its first step on nobody can write the old shards. Where they had moved on so that they cannot
        become the wanted number, the new generation has as many as before.
        """
        resizing = subscription.resizing
        if resizing is None:
            return subscription
        checkpoints = subscription.checkpoints(self._store)
        ended = [checkpoints.close(shard) for shard in range(subscription.shard_count)]
        begun = reshaped(ended, resizing.shard_count)
        following = Checkpoints(self._store, subscription.path, resizing.generation)
        for shard, state in enumerate(begun):
            following.begin(shard, state)

        def finished(found: Subscription) -> Subscription:
            if found.resizing != resizing:
                return found
            return replace(
                found, shard_count=len(begun), generation=resizing.generation, resizing=None, pins={}
            )

        return self.change(subscription.instance, subscription.name, finished)

    # --- For members ------------------------------------------------------------------------

    def change(
        self, instance: str, name: str, changed: Callable[[Subscription], Subscription]
    ) -> Subscription:
        """Change a record as it stands; the function may be asked again where another was faster.

        Raises OptionInvalid where there is no such subscription.
        """
        for _ in range(_TRIES_MAX):
            record = self._store.get(subscription_path(instance, name) + "/record")
            if record is None:
                self._must_get(instance, name)
                continue
            found = Subscription.decode(record.value)
            wanted = changed(found)
            if wanted == found:
                return found
            try:
                self._store.put(found.record_path, wanted.encode(), record.version)
            except VersionConflict:
                continue
            return wanted
        raise VersionConflict(
            "others change the subscription all the time", position=subscription_path(instance, name)
        )

    def next_generation(self) -> int:
        """Return a number for a generation of shards that none had before."""
        for _ in range(_TRIES_MAX):
            record = self._store.get(_GENERATIONS)
            number = 1 if record is None else int(record.value) + 1
            try:
                self._store.put(
                    _GENERATIONS, str(number).encode(), ABSENT if record is None else record.version
                )
            except VersionConflict:
                continue
            return number
        raise VersionConflict("others number their generations all the time", position=_GENERATIONS)

    def unpin(self, subscription: Subscription, shards: Collection[int]) -> Subscription:
        """Let shards go where the spread wants them, unless they were moved again meanwhile."""
        moved = {shard: subscription.pins[shard] for shard in shards}

        def unpinned(found: Subscription) -> Subscription:
            kept = {shard: member for shard, member in found.pins.items() if moved.get(shard) != member}
            return replace(found, pins=kept)

        return self.change(subscription.instance, subscription.name, unpinned)

    def generations(self, subscription: Subscription) -> Sequence[int]:
        """Return the generations of which something stands in the store."""
        return [int(name) for name in self._store.list(subscription.path + path_of("generations"))]

    def delete_generation(self, subscription: Subscription, generation: int) -> None:
        """Forget a generation of shards that is over."""
        self._delete_below(subscription.path + path_of("generations", str(generation)))

    def _refuse_resize(self, subscription: Subscription) -> None:
        checkpoints = subscription.checkpoints(self._store)
        reason = why_not([checkpoints.state(shard) for shard in range(subscription.shard_count)])
        if reason is not None:
            raise OptionInvalid(
                f"the shards of subscription {subscription.name} cannot be changed now: {reason}",
                hint="Let its subscribers run until they have caught up, then try again",
            )

    def _must_get(self, instance: str, name: str) -> Subscription:
        found = self.get(instance, name)
        if found is None:
            raise OptionInvalid(
                f"instance {instance} has no subscription {name!r}", hint="Run: penstock subscriptions list"
            )
        return found

    def _delete_below(self, path: str) -> None:
        for name in self._store.list(path):
            self._delete_below(f"{path}/{name}")
        self._store.delete(path)


def _refuse_count(shard_count: int) -> None:
    if not 1 <= shard_count <= SUBSCRIPTION_SHARDS_MAX:
        raise OptionInvalid(f"a subscription has 1 to {SUBSCRIPTION_SHARDS_MAX} shards, not {shard_count}")


def _refuse_shard(subscription: Subscription, shard: int | None) -> None:
    if shard is not None and not 0 <= shard < subscription.shard_count:
        raise OptionInvalid(
            f"subscription {subscription.name} has no shard {shard}",
            hint=f"Its shards are 0 to {subscription.shard_count - 1}",
        )


def _refuse_another(found: Subscription, wanted: Subscription) -> None:
    """Refuse a subscription that stands there and is not the wanted one."""
    for what, help_out in (
        ("tables", "choose another name, or delete it first"),
        ("exclude", "choose another name, or delete it first"),
        ("shard_columns", "choose another name, or delete it first"),
        ("shard_count", "change it with: penstock subscriptions resize"),
    ):
        if getattr(found, what) != getattr(wanted, what):
            raise OptionInvalid(
                f"subscription {found.name} of {found.instance} has {what} {getattr(found, what)!r}, "
                f"not {getattr(wanted, what)!r}",
                hint=f"Use what it has, {help_out}",
            )
