# SPDX-License-Identifier: Apache-2.0
"""The subscriptions that a command works on, with their store, daemons and output."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from penstock.cli.shared.asked_daemon import AskedDaemon, Lag, shown_lag
from penstock.cli.shared.rendering import write_json
from penstock.client.options import default_coordination
from penstock.coordinate.checkpoint import Checkpoint
from penstock.coordinate.store import CoordinationStore, open_store
from penstock.coordinate.subscription_record import ShardView, Subscription, Subscriptions
from penstock.errors import ConnectionLost, OptionInvalid, PenstockError, SourceMissing
from penstock.settings.daemon import load_settings


@dataclass(frozen=True)
class ShownShard:
    """A shard of a subscription, with its lag."""

    view: ShardView
    lag: Lag

    @property
    def owner(self) -> str | None:
        return self.view.holder.name if self.view.holder else None


class Backends:
    """The coordination store and the daemons that a command line selects."""

    def __init__(
        self, store: CoordinationStore, url: str | None, config: Path | None, ca: Path | None = None
    ) -> None:
        self.registry = Subscriptions(store)
        self._url = url
        self._config = config
        self._ca = ca
        self._daemons: dict[str, AskedDaemon | None] = {}
        self.unreachable: PenstockError | None = None

    @classmethod
    @contextmanager
    def of(
        cls, coordination: str | None, url: str | None, config: Path | None, ca: Path | None = None
    ) -> Iterator["Backends"]:
        """Open the store. Raises OptionInvalid if no option names one."""
        if coordination is None:
            if config is None:
                raise OptionInvalid(
                    "nothing tells where subscriptions are kept",
                    hint=f"Name the store with --coordination, or --config penstock.yaml. {default_store()}",
                )
            coordination = load_settings(config, with_secrets=False).coordination_url()
        store = open_store(coordination)
        backends = cls(store, url, config, ca)
        try:
            yield backends
        finally:
            for daemon in backends._daemons.values():
                if daemon is not None:
                    daemon.close()
            store.close()

    def choose(self, text: str) -> Subscription:
        """Return the subscription with this name. Raises SourceMissing, OptionInvalid."""
        subscriptions = self.registry.list()
        matching = [
            candidate
            for candidate in subscriptions
            if text in (candidate.name, f"{candidate.instance}/{candidate.name}")
        ]
        if not matching:
            names = ", ".join(full_name(candidate) for candidate in subscriptions) or "none yet"
            hint = f"There are: {names}. {default_store()}"
            raise SourceMissing(f"there is no subscription {text!r}", hint=hint)
        if len(matching) > 1:
            raise OptionInvalid(
                f"{text!r} is a subscription of several instances",
                hint=f"Write one of: {', '.join(full_name(candidate) for candidate in matching)}",
            )
        return matching[0]

    def daemon(self, instance: str) -> AskedDaemon | None:
        """Return the daemon of an instance, None if it does not answer; `unreachable` then holds the
        reason.
        """
        if self.unreachable is not None:
            return None
        if instance not in self._daemons:
            self._daemons[instance] = AskedDaemon.find(instance, self._url, self._config, self._ca)
        return self._daemons[instance]

    def shards(self, subscription: Subscription) -> list[ShownShard]:
        """Return every shard with its lag, where the lag is known."""
        return [
            ShownShard(view, self._lag(subscription, view.state.checkpoint))
            for view in self.registry.shards(subscription)
        ]

    def _lag(self, subscription: Subscription, checkpoint: Checkpoint | None) -> Lag:
        try:
            return shown_lag(self.daemon(subscription.instance), checkpoint)
        except ConnectionLost as problem:
            self.unreachable = problem
            return shown_lag(None, checkpoint)


def default_store() -> str:
    """Return the store of subscriptions that applies if none is configured. A daemon's settings do not name a
    store.
    """
    return f"A Subscriber without `coordination` keeps them in --coordination {default_coordination()}"


def print_outcome(as_json: bool, line: dict[str, Any], dry_run: bool, message: str) -> None:
    """Print what a command did, as a JSON object or in words."""
    if as_json:
        write_json(sys.stdout, [line])
    else:
        typer.echo("nothing was changed" if dry_run else message)


def full_name(subscription: Subscription) -> str:
    """Return INSTANCE/NAME."""
    return f"{subscription.instance}/{subscription.name}"


def position_of(view: ShardView) -> str | None:
    """Return the position of a shard's checkpoint, None before the first checkpoint."""
    return view.state.checkpoint.position if view.state.checkpoint else None
