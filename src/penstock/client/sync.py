# SPDX-License-Identifier: Apache-2.0
"""A subscriber for programs with threads.

from penstock.client import Subscriber

with Subscriber("penstock://h1:7070,h2:7070/shop", name="orders-cache", tables=["shop.orders"]) as subscriber:
    subscriber.run(lambda batch: print(batch.table, batch.to_arrow()))
"""

from collections.abc import Mapping
from typing import Unpack

from penstock.client.consume import Consumption
from penstock.client.following import Following, FollowingStatus
from penstock.client.options import Options, read_options
from penstock.source.daemon_address import DaemonAddress


class Subscriber(Consumption):
    """One member of a subscription: it consumes some of its shards, and all of them while it is alone.

    `source` names an instance and the daemons that serve it; `name` the subscription, of which any number of
    processes on any number of hosts are members, as long as they share `coordination`: by default an SQLite
    file in the user's state folder, which joins the processes of one host; `zookeeper://...` joins hosts.

    What is consumed: `tables` and `exclude` are patterns, none means what the instance shows; `changes` some
    of insert, update and delete; `where` an SQL predicate over columns, and `columns` the wanted ones: the
    daemon applies all of them. Rows are shared out over `shards` by hash of `shard_columns` (table pattern to
    columns; the primary key where none fits), so that changes of one key come in order. One `shards` keeps
    the order of commits. `shards` may be left out: then it is the count that the subscription has.

    Where: `start` "checkpoint" goes on behind what was acked, without a checkpoint from `begin`. `start` may
    also be "earliest", "latest", a time, a GTID set or a position; it then sets the whole subscription there,
    unless other members are at work on it.

    `ack` is "auto" or "manual"; `on_failure` "retry" and "stop" end the subscriber after `retries` more
    tries, "skip" passes the batch over. A checkpoint is written at most `checkpoint_seconds` after its ack.

    Raises OptionInvalid for what is wrong in itself, and where the subscription is another one by that name.
    """

    def __init__(self, source: str | DaemonAddress, *, name: str, **options: Unpack[Options]) -> None:
        found = read_options(source, name=name, **options)
        self.options = found
        self._following = Following(found)
        super().__init__(self._following, found.policy, found.ack)

    def status(self) -> FollowingStatus:
        """Return how this member stands now; never waits."""
        return self._following.status()

    @property
    def positions(self) -> Mapping[int, str]:
        """Where each shard that is ours stands: everything before its position is consumed."""
        return {number: str(shard.done.position) for number, shard in self._following.shards().items()}
