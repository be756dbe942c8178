# SPDX-License-Identifier: Apache-2.0
"""A subscriber for programs with threads.

from penstock.client import Subscriber

with Subscriber("penstock://h1:7070,h2:7070/shop", name="orders-cache", tables=["shop.orders"]) as subscriber:
    subscriber.run(lambda batch: print(batch.table, batch.to_arrow()))
"""

from penstock.client.consume import Consumption
from penstock.client.member import Member


class Subscriber(Member, Consumption):
    """One member of a subscription, which consumes some of the subscription's shards, or all of them while it
    is the only member.

    `source` is either the address of an instance with the daemons that serve it, or a server,
    `mysql://user@host:3306`. A server's log is read and filtered in this process, without a daemon. `name` is
    the subscription. Any number of processes on any number of hosts can be its members, as long as they share
    the store `coordination`. The default is an SQLite file in the user's state folder, which only the
    processes of one host can share; processes on several hosts share `zookeeper://...`. `state` is another
    way to set this store: its URL, or the path of an SQLite file.

    Selection, applied by the daemon: `tables` and `exclude` are patterns, by default all tables that the
    instance shows; `changes` is a subset of insert, update and delete; `where` is an SQL predicate over
    columns; `columns` are the columns to send. Rows are distributed over `shards` by a hash of
    `shard_columns`, so changes of one key stay in order. `shard_columns` maps table patterns to columns;
    tables without a matching pattern use the primary key. A single shard keeps the commit order of all
    changes. Without `shards`, the subscription keeps its number of shards.

    Start: `start` "checkpoint" continues after the last acked change, or from `begin` if there is no
    checkpoint. `start` may also be "earliest", "latest", a time, a GTID set or a position; the whole
    subscription is then moved there, unless other members are running.

    `ack` is "auto" or "manual". After `retries` failed retries of a batch, an `on_failure` of "retry" or
    "stop" ends the subscriber, while "skip" skips the batch. A checkpoint is written at most
    `checkpoint_seconds` after its ack.

    Raises OptionInvalid if an option is invalid, or if a different subscription already has the name.
    """
