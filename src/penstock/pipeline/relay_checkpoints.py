# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of version 0.1's `penstock relay`, which was a subscriber of a daemon.

The relay's subscription had one shard. It was named after the pipeline, or NAME.SOURCE if there were several
sources.
"""

from penstock.coordinate.store import CoordinationStore
from penstock.coordinate.subscription_record import Subscription, Subscriptions
from penstock.errors import LeaseLost, OptionInvalid
from penstock.gtid_sets import LoggedSet
from penstock.model import Position
from penstock.pipeline.settings import PipelineSettings, PipelineSource
from penstock.source.offsets import Offset


def relay_offsets(settings: PipelineSettings, store: CoordinationStore) -> dict[str, Offset]:
    """Return where the relay of a pipeline stopped, by source; {} if there was none.

    Raises LeaseLost while the relay runs, and OptionInvalid if the subscription with the pipeline's name
    reads other tables.
    """
    if settings.load.mode != "none" or settings.sink.name:
        return {}
    offsets = {
        source.name: _offset_of(settings, source, store)
        for source in settings.sources
        if source.options.daemon is not None
    }
    return {name: offset for name, offset in offsets.items() if offset is not None}


def _offset_of(settings: PipelineSettings, source: PipelineSource, store: CoordinationStore) -> Offset | None:
    assert source.options.daemon is not None, "only a daemon has subscriptions"
    name = settings.name if len(settings.sources) == 1 else f"{settings.name}.{source.name}"
    subscriptions = Subscriptions(store)
    subscription = subscriptions.get(source.options.daemon.instance, name)
    if subscription is None:
        return None
    _refuse_other_tables(subscription, source)
    (shard, *_) = subscriptions.shards(subscription)
    if shard.holder is not None:
        raise LeaseLost(
            f"a relay of the pipeline {settings.name} is run by {shard.holder.name}",
            hint="Stop the relay of version 0.1; then this run goes on where it stopped",
        )
    checkpoint = shard.state.checkpoint
    if checkpoint is None:
        return None
    return Offset(
        Position.parse(checkpoint.position),
        LoggedSet(checkpoint.gtid_set),
        checkpoint.server_key,
        fingerprint=checkpoint.fingerprint,
    )


def _refuse_other_tables(subscription: Subscription, source: PipelineSource) -> None:
    patterns = tuple(source.tables.include), tuple(source.tables.exclude)
    if (subscription.tables, subscription.exclude, subscription.shard_count) == (*patterns, 1):
        return
    raise OptionInvalid(
        f"the subscription {subscription.name} of {subscription.instance} has the name of this pipeline, but"
        f" other tables or shards: tables {', '.join(subscription.tables) or 'all'}, without"
        f" {', '.join(subscription.exclude) or 'none'}, in {subscription.shard_count} shards",
        hint="After a relay of version 0.1, give the pipeline the same tables for its first run. Otherwise"
        f" give it another name, or run: penstock subscriptions delete {subscription.name}",
    )
