# SPDX-License-Identifier: Apache-2.0
"""Stored subscriptions: their records, and the operations of an administrator.

All records of a subscription are below its path. Members (see `membership`) watch the subscription's record,
so an administrator changes a running subscription by writing this record. This also works while the
subscription has no members.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from penstock.coordinate.checkpoint import Checkpoint, Checkpoints, ShardState, shard_path
from penstock.coordinate.lease import Holder
from penstock.coordinate.member_statistics import MemberStatistics
from penstock.coordinate.refusals import (
    refuse_another,
    refuse_count,
    refuse_move,
    refuse_resizing,
    refuse_shard,
)
from penstock.coordinate.resize import reshaped, restarted, why_not
from penstock.coordinate.store import (
    ABSENT,
    HINT_RECORD,
    CoordinationStore,
    decoded_name,
    path_of,
    reading_record,
)
from penstock.errors import OptionInvalid, VersionConflict

# The time that members have to finish their work before their shards are resized.
RESIZE_SECONDS = 15.0

ShardColumns = Mapping[str, tuple[str, ...]]

_POLL_SECONDS = 0.1
_TRIES_MAX = 20

# Counts the generations of all subscriptions, so that no generation number, and no path, is reused.
_GENERATIONS = "/generations"


def subscription_path(instance: str, name: str) -> str:
    """Return the path below which all records of a subscription are stored."""
    return path_of("subscriptions", instance, name)


@dataclass(frozen=True)
class Resizing:
    """A resize in progress: the number and generation of the new shards, and their shard columns if these
    change too.
    """

    shard_count: int
    generation: int
    shard_columns: ShardColumns | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> Self | None:
        """Return the resizing with the given fields, or None without fields."""
        if values is None:
            return None
        return cls(values["shard_count"], values["generation"], _columns_of(values.get("shard_columns")))


@dataclass(frozen=True)
class Selection:
    """Which changes a subscription delivers, as set by an operator.

    For a field that is None, the members' own request applies. `tables` and `exclude` are always set
    together. The fields are those in the body of the `changes` request.
    """

    tables: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None
    changes: tuple[str, ...] | None = None
    where: str | None = None
    columns: tuple[str, ...] | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields that are set, as JSON values."""
        values = {
            name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()
        }
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the selection with the given fields."""
        lists = {name: tuple(values[name]) for name in values if name != "where"}
        return cls(where=values.get("where"), **lists)


AS_MEMBERS_ASK = Selection()


@dataclass(frozen=True)
class Subscription:
    """A named consumer of an instance.

    `tables` and `exclude` are patterns; no pattern means every table. `shard_columns` maps table patterns to
    the columns whose hash determines a row's shard (default: the primary key). `generation` changes whenever
    the shards are replaced. `pins` maps each shard that an operator has moved to the member that it was moved
    to. `resets` counts the checkpoints set by hand. `created_us` is in microseconds since 1970, UTC.
    `revision` counts the changes of `selection`. While the subscription is `paused`, no member holds its
    shards. `labels` are free text set by an operator. If an operator has set shard columns,
    `asked_shard_columns` are the different columns that the members request. The operator's columns apply
    from position `keyed_at` on.
    """

    instance: str
    name: str
    tables: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    shard_count: int = 1
    shard_columns: ShardColumns = field(default_factory=dict)
    generation: int = 0
    created_us: int = 0
    resets: int = 0
    pins: Mapping[int, str] = field(default_factory=dict)
    resizing: Resizing | None = None
    selection: Selection = AS_MEMBERS_ASK
    revision: int = 0
    paused: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    asked_shard_columns: ShardColumns | None = None
    keyed_at: str | None = None

    @property
    def members_shard_columns(self) -> ShardColumns:
        """The shard columns that the subscription's members request."""
        return self.shard_columns if self.asked_shard_columns is None else self.asked_shard_columns

    @property
    def selected_tables(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The patterns of the delivered tables, and of the excluded tables."""
        if self.selection.tables is None:
            return self.tables, self.exclude
        return self.selection.tables, self.selection.exclude or ()

    @property
    def path(self) -> str:
        """The path below which all records of the subscription are stored."""
        return subscription_path(self.instance, self.name)

    @property
    def record_path(self) -> str:
        """The path of the subscription's record."""
        return self.path + "/record"

    @property
    def members_path(self) -> str:
        """The path below which the subscription's members are stored."""
        return self.path + "/members"

    @property
    def assignment_path(self) -> str:
        """The path of the assignment of shards to members."""
        return self.path + "/assignment"

    @property
    def leader_path(self) -> str:
        """The path of the lease of the leader, which writes the assignment."""
        return self.path + "/leader"

    @property
    def account_path(self) -> str:
        """The path of the record that names the account that owns a Canal client. Only Canal clients have
        such a record.
        """
        return self.path + "/account"

    def statistics_path(self, member: str) -> str:
        """Return the path of the statistics of a member."""
        return self.path + path_of("statistics", member)

    def lease_path(self, shard: int) -> str:
        """Return the path of the lease of a shard."""
        return shard_path(self.path, self.generation, shard, "lease")

    def checkpoints(self, store: CoordinationStore) -> Checkpoints:
        """Return the checkpoints of the subscription's shards in the current generation."""
        return Checkpoints(store, self.path, self.generation)

    def encode(self) -> bytes:
        """Return the value of the record."""
        values = asdict(self)
        values["pins"] = {str(shard): member for shard, member in self.pins.items()}
        values["selection"] = self.selection.fields()
        if self.resizing is not None and self.resizing.shard_columns is None:
            # Leave out the field if it is not set: earlier versions do not know it.
            del values["resizing"]["shard_columns"]
        return json.dumps(values).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Parse a record's value. Raises SchemaInvalid."""
        with reading_record("the record of a subscription", HINT_RECORD):
            values: dict[str, Any] = json.loads(value)
            return cls(
                instance=values["instance"],
                name=values["name"],
                tables=tuple(values["tables"]),
                exclude=tuple(values["exclude"]),
                shard_count=values["shard_count"],
                shard_columns=_columns_of(values["shard_columns"]) or {},
                generation=values["generation"],
                created_us=values["created_us"],
                resets=values["resets"],
                pins={int(shard): member for shard, member in values["pins"].items()},
                resizing=Resizing.of(values["resizing"]),
                selection=Selection.of(values.get("selection", {})),
                revision=values.get("revision", 0),
                paused=values.get("paused", False),
                labels=values.get("labels", {}),
                asked_shard_columns=_columns_of(values.get("asked_shard_columns")),
                keyed_at=values.get("keyed_at"),
            )


@dataclass(frozen=True)
class ShardView:
    """A shard's state as shown to users: its owner, token and checkpoint."""

    shard: int
    holder: Holder | None
    state: ShardState


class Subscriptions:
    """The registry of all subscriptions in a store. Thread-safe.

    Every call raises CoordinationLost if the store does not answer, and may then be repeated.
    """

    def __init__(self, store: CoordinationStore) -> None:
        self._store = store

    def list(self, instance: str | None = None) -> Sequence[Subscription]:
        """Return the subscriptions of an instance, or of all, ordered by instance and name."""
        top = path_of("subscriptions")
        instances = [decoded_name(name) for name in self._store.list(top)] if instance is None else [instance]
        subscriptions = [
            self.get(instance_name, decoded_name(name))
            for instance_name in instances
            for name in self._store.list(path_of("subscriptions", instance_name))
        ]
        return sorted(
            (subscription for subscription in subscriptions if subscription is not None),
            key=lambda subscription: (subscription.instance, subscription.name),
        )

    def get(self, instance: str, name: str) -> Subscription | None:
        """Return a subscription, None if there is none."""
        record = self._store.get(subscription_path(instance, name) + "/record")
        return None if record is None else Subscription.decode(record.value)

    def create(self, subscription: Subscription) -> Subscription:
        """Store a new subscription, or return the existing one."""
        refuse_count(subscription.shard_count)
        existing = self.get(subscription.instance, subscription.name)
        if existing is None:
            created = replace(
                subscription, generation=self.next_generation(), created_us=time.time_ns() // 1000
            )
            try:
                self._store.put(created.record_path, created.encode(), ABSENT)
                return created
            except VersionConflict:
                existing = self._must_get(subscription.instance, subscription.name)
        refuse_another(existing, subscription)
        return existing

    def delete(self, instance: str, name: str) -> None:
        """Delete a subscription and its checkpoints; its members stop. A missing subscription is not an
        error.
        """
        top = subscription_path(instance, name)
        # Delete the record first: without it, no member acquires a lease, so the deleted records are not
        # created again.
        self._store.delete(top + "/record")
        self._delete_below(top)

    def shards(self, subscription: Subscription) -> Sequence[ShardView]:
        """Return the state of each shard."""
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
        """Return the names of the current members."""
        return [decoded_name(name) for name in self._store.list(subscription.members_path)]

    def statistics(self, subscription: Subscription) -> Mapping[str, MemberStatistics]:
        """Return the current members' last statistics. Members of earlier versions record none."""
        records = {
            member: self._store.get(subscription.statistics_path(member))
            for member in self.members(subscription)
        }
        return {
            member: MemberStatistics.of(record) for member, record in records.items() if record is not None
        }

    def record_statistics(
        self, subscription: Subscription, member: str, statistics: MemberStatistics
    ) -> None:
        """Replace the statistics of a member."""
        self._store.put(subscription.statistics_path(member), statistics.encode())

    def forget_statistics(self, subscription: Subscription) -> None:
        """Remove the statistics of members that have left."""
        members = self.members(subscription)
        for name in map(decoded_name, self._store.list(subscription.path + "/statistics")):
            if name not in members:
                self._store.delete(subscription.statistics_path(name))

    def reset(
        self, instance: str, name: str, checkpoint: Checkpoint | None, shard: int | None = None
    ) -> Subscription:
        """Set the checkpoint of one shard or of all shards; None means to start over.

        A member that holds one of these shards stops it and restarts it at the new checkpoint. Raises
        OptionInvalid.
        """
        subscription = self._must_get(instance, name)
        refuse_shard(subscription, shard)
        checkpoints = subscription.checkpoints(self._store)
        for shard_number in range(subscription.shard_count) if shard is None else [shard]:
            checkpoints.reset(shard_number, checkpoint)
        return self.change(instance, name, lambda current: replace(current, resets=current.resets + 1))

    def select(self, instance: str, name: str, selecting: Callable[[Selection], Selection]) -> Subscription:
        """Change the selection; the next holder of each shard delivers the new selection.

        `selecting` returns the new selection for the current selection; it is called again after a concurrent
        change. Current holders finish the batch that they are delivering, and then acquire their shards
        again. Raises OptionInvalid for a Canal client.
        """

        def selected(current: Subscription) -> Subscription:
            selection = selecting(current.selection)
            if current.selection == selection:
                return current
            if selection != AS_MEMBERS_ASK:
                self._refuse_canal(current)
            return replace(current, selection=selection, revision=current.revision + 1)

        return self.change(instance, name, selected)

    def pause(self, instance: str, name: str, *, paused: bool) -> Subscription:
        """Stop the delivery of a subscription, or resume it at its checkpoints.

        Raises OptionInvalid for pausing a Canal client.
        """

        def changed(current: Subscription) -> Subscription:
            if paused:
                self._refuse_canal(current)
            return replace(current, paused=paused)

        return self.change(instance, name, changed)

    def label(self, instance: str, name: str, labels: Mapping[str, str]) -> Subscription:
        """Add labels to a subscription, or change them. Raises OptionInvalid if the subscription does not
        exist.
        """
        return self.change(
            instance, name, lambda current: replace(current, labels={**current.labels, **labels})
        )

    def move(self, instance: str, name: str, shard: int, member: str) -> Subscription:
        """Give a shard to a member until that member leaves. Raises OptionInvalid."""
        subscription = self._must_get(instance, name)
        refuse_move(subscription, shard, member, self.members(subscription))
        return self.change(
            instance, name, lambda current: replace(current, pins={**current.pins, shard: member})
        )

    def resize(
        self, instance: str, name: str, shard_count: int, seconds: float = RESIZE_SECONDS
    ) -> Subscription:
        """Change the number of shards of a running or stopped subscription, and return it.

        Members finish their work and stop. After `seconds` the remaining members are fenced, and work whose
        completion they had not recorded is repeated. Then the new shards start where the old shards ended.
        Raises OptionInvalid with a hint that says what to wait for. After CoordinationLost, repeat the call,
        or let a member finish the resize.
        """
        generation = self.next_generation()

        def begun(current: Subscription) -> Subscription:
            self.refuse_resize(current, shard_count)
            if current.resizing is not None or current.shard_count == shard_count:
                return current
            return replace(current, resizing=Resizing(shard_count, generation))

        done = self._finish(self.change(instance, name, begun), seconds)
        if done.shard_count != shard_count:
            self._refuse_new_shards(done)
        return done

    def rekey(
        self,
        instance: str,
        name: str,
        keying: Callable[[Subscription], ShardColumns],
        seconds: float = RESIZE_SECONDS,
    ) -> Subscription:
        """Change the shard columns of a running or stopped subscription; return the resulting subscription.

        `keying` returns the new columns for the current subscription. All new shards start at the lowest
        checkpoint of the old shards, recorded as `keyed_at`. Changes after that position that other shards
        had consumed are delivered again. Otherwise the call works like `resize`.
        """
        generation = self.next_generation()

        def begun(current: Subscription) -> Subscription:
            columns = keying(current)
            if current.resizing is not None:
                refuse_resizing(name, current.resizing.shard_count)
            if columns == current.shard_columns:
                return current
            self._refuse_canal(current)
            self._refuse_new_shards(current)
            return replace(current, resizing=Resizing(current.shard_count, generation, columns))

        wanted = keying(self._must_get(instance, name))
        done = self._finish(self.change(instance, name, begun), seconds)
        if done.shard_columns != wanted:
            self._refuse_new_shards(done)
        return done

    def _finish(self, done: Subscription, seconds: float) -> Subscription:
        """Wait up to `seconds` for the members, then finish a change of the shards."""
        deadline = time.monotonic() + seconds
        # The leader of the running members does the same work, and may finish first.
        while done.resizing is not None:
            if self.held(done) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                done = self._must_get(done.instance, done.name)
            else:
                done = self.finish_resize(done)
        return done

    def held(self, subscription: Subscription) -> Sequence[int]:
        """Return the shards that members hold."""
        return [
            shard
            for shard in range(subscription.shard_count)
            if self._store.get(subscription.lease_path(shard)) is not None
        ]

    def finish_resize(self, subscription: Subscription) -> Subscription:
        """Finish a `resize`, given the subscription as read; return the resulting subscription. Idempotent.

        From the first step on, nobody can write the old shards. If the old shards have advanced to a state
        that cannot be resized, the new generation has the same number of shards.
        """
        resizing = subscription.resizing
        if resizing is None:
            return subscription
        checkpoints = subscription.checkpoints(self._store)
        ended = [checkpoints.close(shard) for shard in range(subscription.shard_count)]
        columns = resizing.shard_columns
        if columns is not None and why_not(ended) is None:
            begun = restarted(ended)
        else:
            columns = None
            begun = reshaped(ended, resizing.shard_count)
        following = Checkpoints(self._store, subscription.path, resizing.generation)
        for shard, state in enumerate(begun):
            following.begin(shard, state)

        def finished(current: Subscription) -> Subscription:
            if current.resizing != resizing:
                return current
            done = replace(
                current, shard_count=len(begun), generation=resizing.generation, resizing=None, pins={}
            )
            if columns is None:
                return done
            asked = current.members_shard_columns
            start = begun[0].checkpoint
            return replace(
                done,
                shard_columns=columns,
                asked_shard_columns=None if columns == asked else asked,
                keyed_at=None if start is None else start.position,
            )

        return self.change(subscription.instance, subscription.name, finished)

    def refuse_resize(self, subscription: Subscription, shard_count: int) -> None:
        """Raise OptionInvalid if a subscription cannot have this number of shards now."""
        refuse_count(shard_count)
        resizing = subscription.resizing
        if resizing is None:
            if subscription.shard_count != shard_count:
                self._refuse_new_shards(subscription)
        elif (resizing.shard_count, resizing.shard_columns) != (shard_count, None):
            refuse_resizing(subscription.name, resizing.shard_count)

    # --- For members ------------------------------------------------------------------------

    def change(
        self, instance: str, name: str, changed: Callable[[Subscription], Subscription]
    ) -> Subscription:
        """Change a record atomically; the function is called again after a concurrent change.

        Raises OptionInvalid if the subscription does not exist.
        """
        for _ in range(_TRIES_MAX):
            record = self._store.get(subscription_path(instance, name) + "/record")
            if record is None:
                self._must_get(instance, name)
                continue
            current = Subscription.decode(record.value)
            updated = changed(current)
            if updated == current:
                return current
            try:
                self._store.put(current.record_path, updated.encode(), record.version)
            except VersionConflict:
                continue
            return updated
        raise VersionConflict(
            "others change the subscription all the time", position=subscription_path(instance, name)
        )

    def next_generation(self) -> int:
        """Return a generation number that was never used before."""
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
        """Remove the pins of shards, except pins that a concurrent move has set again."""
        moved = {shard: subscription.pins[shard] for shard in shards}

        def unpinned(current: Subscription) -> Subscription:
            kept = {shard: member for shard, member in current.pins.items() if moved.get(shard) != member}
            return replace(current, pins=kept)

        return self.change(subscription.instance, subscription.name, unpinned)

    def generations(self, subscription: Subscription) -> Sequence[int]:
        """Return the generations with records in the store."""
        return [int(name) for name in self._store.list(subscription.path + path_of("generations"))]

    def delete_generation(self, subscription: Subscription, generation: int) -> None:
        """Delete a generation of shards that has ended."""
        self._delete_below(subscription.path + path_of("generations", str(generation)))

    def _refuse_canal(self, subscription: Subscription) -> None:
        if self._store.get(subscription.account_path) is not None:
            raise OptionInvalid(
                f"subscription {subscription.name} is a Canal client: it is neither paused nor narrowed",
                hint="Stop the client to pause it; a filter of its own narrows it",
            )

    def _refuse_new_shards(self, subscription: Subscription) -> None:
        checkpoints = subscription.checkpoints(self._store)
        reason = why_not([checkpoints.state(shard) for shard in range(subscription.shard_count)])
        if reason is not None:
            raise OptionInvalid(
                f"the shards of subscription {subscription.name} cannot be changed now: {reason}",
                hint="Let its subscribers run until they have caught up, then try again",
            )

    def _must_get(self, instance: str, name: str) -> Subscription:
        subscription = self.get(instance, name)
        if subscription is None:
            raise OptionInvalid(
                f"instance {instance} has no subscription {name!r}", hint="Run: penstock subscriptions list"
            )
        return subscription

    def _delete_below(self, path: str) -> None:
        for name in self._store.list(path):
            self._delete_below(f"{path}/{name}")
        self._store.delete(path)


def _columns_of(values: Mapping[str, Sequence[str]] | None) -> ShardColumns | None:
    return None if values is None else {table: tuple(names) for table, names in values.items()}
