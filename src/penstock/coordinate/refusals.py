# SPDX-License-Identifier: Apache-2.0
"""Rejects invalid requests to a subscription: unknown shards, and options that differ from the stored
subscription.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.errors import OptionInvalid
from penstock.limits import SUBSCRIPTION_SHARDS_MAX

if TYPE_CHECKING:
    from penstock.coordinate.subscription_record import Subscription


def refuse_count(shard_count: int) -> None:
    """Raise OptionInvalid for an invalid number of shards."""
    if not 1 <= shard_count <= SUBSCRIPTION_SHARDS_MAX:
        raise OptionInvalid(f"a subscription has 1 to {SUBSCRIPTION_SHARDS_MAX} shards, not {shard_count}")


def refuse_shard(subscription: "Subscription", shard: int | None) -> None:
    """Raise OptionInvalid for a shard that a subscription does not have."""
    if shard is not None and not 0 <= shard < subscription.shard_count:
        raise OptionInvalid(
            f"subscription {subscription.name} has no shard {shard}",
            hint=f"Its shards are 0 to {subscription.shard_count - 1}",
        )


def refuse_move(subscription: "Subscription", shard: int, member: str, members: Sequence[str]) -> None:
    """Raise OptionInvalid if a shard cannot be given to a member."""
    refuse_shard(subscription, shard)
    if member not in members:
        raise OptionInvalid(
            f"subscription {subscription.name} has no member {member!r}",
            hint=f"Its members: {', '.join(members) or 'none; start a subscriber'}",
        )


def refuse_resizing(name: str, shard_count: int) -> None:
    """Raise OptionInvalid for a subscription whose shards are being changed."""
    raise OptionInvalid(
        f"subscription {name} is being changed to {shard_count} shards",
        hint="Wait until that is done: penstock subscriptions show",
    )


def refuse_another(existing: "Subscription", requested: "Subscription") -> None:
    """Raise OptionInvalid if an existing subscription differs from the requested one."""
    if (requested.tables, requested.exclude) == existing.selected_tables:
        # The program requests the values that an operator has already set, so nothing differs.
        requested = replace(requested, tables=existing.tables, exclude=existing.exclude)
    if requested.shard_columns == existing.members_shard_columns:
        requested = replace(requested, shard_columns=existing.shard_columns)
    for what, help_out in (
        ("tables", "change them with: penstock subscriptions set"),
        ("exclude", "change it with: penstock subscriptions set"),
        ("shard_columns", "change them with: penstock subscriptions set"),
        ("shard_count", "change it with: penstock subscriptions resize"),
    ):
        if getattr(existing, what) != getattr(requested, what):
            raise OptionInvalid(
                f"subscription {existing.name} of {existing.instance} has"
                f" {what} {getattr(existing, what)!r}, not {getattr(requested, what)!r}",
                hint=f"Use what it has, {help_out}",
            )
