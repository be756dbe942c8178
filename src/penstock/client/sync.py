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

    `source` names an instance and the daemons that serve it, or a server, `mysql://user@host:3306`. A
    server's log is read and filtered in this process, without a daemon. `name` is the subscription. Any
    number of processes on any number of hosts can be its members, as long as they share `coordination`: by
    default an SQLite file in the user's state folder, which connects the processes of one host;
    `zookeeper://...` connects hosts. `state` is the same store by URL, or the path of an SQLite file.

    Selection, applied by the daemon: `tables` and `exclude` are patterns, by default all tables that the
    instance shows; `changes` is a subset of insert, update and delete; `where` is an SQL predicate over
    columns; `columns` are the columns to send. Rows are distributed over `shards` by a hash of
    `shard_columns` (table pattern to columns; the primary key if none matches), so changes of one key stay in
    order. A single shard keeps the commit order. Without `shards`, the subscription's count applies.

    Start: `start` "checkpoint" continues after the last acked change, or from `begin` if there is no
    checkpoint. `start` may also be "earliest", "latest", a time, a GTID set or a position; it then moves the
    whole subscription there, unless other members are running.

    `ack` is "auto" or "manual". `on_failure` "retry" and "stop" end the subscriber after `retries` retries,
    "skip" skips the batch. A checkpoint is written at most `checkpoint_seconds` after its ack.

    Raises OptionInvalid for invalid options, and if another subscription has the name.
    """
