# SPDX-License-Identifier: Apache-2.0
"""`penstock subscriptions` on a real store, a real daemon, and live members."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from penstock.cli.shared.rendering import bytes_text
from penstock.client.options import default_coordination
from penstock.coordinate.checkpoint import Checkpoint
from penstock.coordinate.held_shard import HeldShard
from penstock.coordinate.membership import Member
from penstock.coordinate.store import open_store
from penstock.coordinate.subscription_record import Subscription, Subscriptions
from penstock.errors import LeaseLost
from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import DaemonProcess
from tests.support.logstore.kept_log import BLOCK_BYTES, KeptLog, Ran, insert, penstock
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server


@pytest.fixture(scope="module")
def kept(server_of: Callable[[str], Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptLog]:
    server = server_of("mariadb")
    server.sql("CREATE DATABASE cli_subscriptions")
    yield KeptLog.capture(server, tmp_path_factory.mktemp("kept"), "cli_subscriptions")
    server.sql("DROP DATABASE cli_subscriptions")


@pytest.fixture(scope="module")
def daemon(kept: KeptLog, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    settings = {
        "log": {"folder": str(kept.root), "block_bytes": BLOCK_BYTES},
        "instances": {"shop": {"source": kept.server.url(), "start": str(kept.start)}},
        "listen": {"token": "a-token"},
    }
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), settings) as running:
        running.token = "a-token"
        # The daemon derives the log's current time from the commits that it has seen itself.
        insert(kept.server, kept.database, 1)
        head = head_of(kept.server)
        running.wait_for_head(head.file, head.offset)
        yield running


@dataclass
class Kept:
    """A store in a file with the subscription `orders`, which has two shards, and the command line for it."""

    store: str
    config: Path
    subscriptions: Subscriptions
    of_name: str = "orders"
    gained: list[HeldShard] = field(default_factory=list)

    @property
    def subscription(self) -> Subscription:
        stored = self.subscriptions.get("shop", self.of_name)
        assert stored is not None
        return stored

    def run(self, *words: object) -> Ran:
        """Run the command line with the store and the daemon of the settings."""
        return penstock("subscriptions", *words, "--coordination", self.store, "--config", self.config)

    def checkpoint(self, shard: int) -> Checkpoint | None:
        return self.subscriptions.shards(self.subscription)[shard].state.checkpoint

    @contextmanager
    def member(self, name: str) -> Iterator[Member]:
        """Run a subscriber inside the block; its received shards are in `gained`."""
        store = open_store(self.store, WAIT_SECONDS_MAX)
        member = Member(
            store,
            self.subscription,
            name,
            self.gained.append,
            lambda held, why: None,
            session_seconds=WAIT_SECONDS_MAX,
            grace_seconds=WAIT_SECONDS_MAX,
        )
        try:
            with member:
                yield member
        finally:
            store.close()

    def wait_gained(self, count: int) -> list[HeldShard]:
        wait_until(lambda: len(self.gained) >= count)
        return self.gained


@pytest.fixture
def orders(tmp_path: Path, daemon: DaemonProcess) -> Iterator[Kept]:
    url = f"sqlite://{tmp_path}/own.db"
    store = open_store(url, WAIT_SECONDS_MAX)
    subscription = Kept(url, daemon.config, Subscriptions(store))
    subscription.subscriptions.create(Subscription("shop", "orders", ("cli_subscriptions.t",), shard_count=2))
    yield subscription
    store.close()


def consumed(kept: KeptLog, count: int) -> Checkpoint:
    """Return the checkpoint after this many transactions of the log."""
    return Checkpoint.now(str(kept.logged[count - 1].end), "", "", time_us=1)


# --- Showing --------------------------------------------------------------------------------


def test_lag_of_each_shard_is_measured_from_its_checkpoint(
    orders: Kept, kept: KeptLog, daemon: DaemonProcess
) -> None:
    checkpoints = orders.subscription.checkpoints(open_store(orders.store))
    checkpoints.reset(0, consumed(kept, 55))
    checkpoints.reset(1, consumed(kept, 98))
    head, end = daemon.status()["position"], daemon.get("/v1/instances/shop/extents")["extents"][-1]["end"]
    assert head.rpartition(":")[2] == str(end)
    shards = orders.run("show", "orders", "--json").objects
    first_file, second_file = kept.files
    extents = {extent["file"]: extent for extent in daemon.get("/v1/instances/shop/extents")["extents"]}
    start = extents[second_file]["start"]
    assert shards[0]["lag_bytes"] == kept.files[first_file] - kept.logged[54].end.offset + end - start
    assert shards[1]["lag_bytes"] == end - kept.logged[97].end.offset
    # The lag in seconds is measured from the commit time of the last consumed transaction. In this
    # checkpoint, that time is in 1970.
    assert shards[1]["lag_seconds"] == pytest.approx(daemon.status()["time_us"] / 1e6, abs=1)
    assert [shard["owner"] for shard in shards] == [None, None]
    listed = orders.run("list", "--json").one
    assert (listed["lag_bytes"], listed["shards"], listed["owned"]) == (shards[0]["lag_bytes"], 2, 0)
    assert bytes_text(shards[0]["lag_bytes"]) in orders.run("show", "shop/orders").out
    assert "shop/orders" in orders.run("list").out


def test_caught_up_shard_has_no_lag(orders: Kept) -> None:
    assert orders.run("reset", "orders", "--latest", "--yes").code == 0
    assert [line["lag_bytes"] for line in orders.run("show", "orders", "--json").objects] == [0, 0]


def test_checkpoint_of_another_server_has_no_lag_and_gives_the_reason(orders: Kept, kept: KeptLog) -> None:
    checkpoints = orders.subscription.checkpoints(open_store(orders.store))
    checkpoints.reset(0, replace(consumed(kept, 3), server_key="mysql:another"))
    first, second = orders.run("show", "orders", "--json").objects
    assert first["lag_bytes"] is None
    assert "not from mysql:another" in first["lag_unknown"]
    assert second["checkpoint"] is None
    assert "not from mysql:another" in orders.run("list").out


def test_owners_and_their_tokens_are_shown(orders: Kept) -> None:
    with orders.member("host-1"):
        held = orders.wait_gained(2)
        shards = orders.run("show", "orders", "--json").objects
        assert {shard["owner"] for shard in shards} == {"host-1"}
        assert {shard["shard"]: shard["token"] for shard in shards} == {
            shard.shard: shard.token for shard in held
        }
        assert "host-1" in orders.run("show", "orders").out
        listed = orders.run("list", "--json").one
        assert (listed["owned"], listed["members"]) == (2, ["host-1"])


# --- Setting checkpoints --------------------------------------------------------------------


def test_checkpoint_is_set_to_its_position_in_the_log(
    orders: Kept, kept: KeptLog, daemon: DaemonProcess
) -> None:
    logged = kept.logged
    server_key = ""
    for words, position in [
        (("--earliest",), daemon.get("/v1/instances/shop/earliest")["position"]),
        (("--position", f"0/{logged[70].start}".replace("0/0/", "0/")), logged[70].start),
        (("--gtid-set", kept.set_upto(logged[29].gtid)), logged[30].start),
        (("--time", kept.split.isoformat()), None),
    ]:
        done = orders.run("reset", "orders", *words, "--yes", "--json").one
        checkpoint = orders.checkpoint(0)
        assert checkpoint is not None
        assert done["new"]["position"] == checkpoint.position
        assert orders.checkpoint(1) == checkpoint
        server_key = server_key or checkpoint.server_key
        assert checkpoint.server_key == server_key != ""
        if position is not None:
            assert checkpoint.position == str(position)
        else:
            # The server logs whole seconds; transactions committed at or after this time are in the second
            # file.
            assert checkpoint.position in {str(transaction.start) for transaction in logged[60:62]}
    last = orders.checkpoint(0)
    assert last is not None
    assert last.gtid_set


def test_impossible_position_is_refused_and_nothing_changes(orders: Kept, kept: KeptLog) -> None:
    inside = replace(kept.logged[70].start, offset=kept.logged[70].start.offset + 19)
    beyond = replace(kept.head, offset=kept.head.offset + (1 << 30))
    for position, error in [(inside, "no transaction begins"), (beyond, "the log ends at")]:
        refused = orders.run("reset", "orders", "--position", position, "--yes")
        assert refused.code != 0
        assert error in refused.err
    assert orders.run("reset", "orders", "--earliest", "--latest").code == 2
    assert orders.run("reset", "orders", "--earliest", "--shard", "2", "--yes").code == 2
    # There is no terminal to ask for confirmation.
    assert "--dry-run" in orders.run("reset", "orders", "--earliest").err
    assert orders.run("reset", "orders", "--earliest", "--dry-run", "--json").one["dry_run"]
    assert orders.checkpoint(0) is orders.checkpoint(1) is None


def test_single_shard_is_reset_alone(orders: Kept, daemon: DaemonProcess) -> None:
    assert orders.run("reset", "orders", "--latest", "--yes").code == 0
    before = orders.checkpoint(0)
    assert orders.run("reset", "orders", "--earliest", "--shard", "1", "--yes").code == 0
    assert orders.checkpoint(0) == before
    earliest = daemon.get("/v1/instances/shop/earliest")["position"]
    assert (orders.checkpoint(1) or Checkpoint("")).position == earliest


def test_active_shard_is_set_only_by_force_and_its_owner_is_fenced(orders: Kept, kept: KeptLog) -> None:
    with orders.member("host-1"):
        held = list(orders.wait_gained(2))
        refused = orders.run("reset", "orders", "--latest", "--yes")
        assert refused.code == 2
        assert "consumed by host-1" in refused.err
        assert orders.checkpoint(0) is None
        assert orders.run("reset", "orders", "--latest", "--yes", "--force").code == 0
        # The owner's unacknowledged work is void, and the owner acquires both shards again under later
        # tokens.
        after = orders.wait_gained(4)[2:]
        assert {shard.shard for shard in after} == {0, 1}
        assert min(shard.token for shard in after) > max(shard.token for shard in held)
        assert orders.checkpoint(0) == orders.checkpoint(1) != consumed(kept, 1)
        with pytest.raises(LeaseLost):
            held[0].note(consumed(kept, 1))


def test_without_a_daemon_only_an_unverified_position_is_accepted(orders: Kept, kept: KeptLog) -> None:
    nowhere = ("--url", "http://127.0.0.1:1")
    for words in (("--latest",), ("--time", "2026-01-01")):
        refused = orders.run("reset", "orders", *words, "--yes", *nowhere)
        assert refused.code == 4
        assert orders.checkpoint(0) is None
    done = orders.run("reset", "orders", "--position", kept.logged[5].end, "--yes", "--json", *nowhere).one
    assert "nobody has proved" in done["note"]
    shown = orders.run("show", "orders", *nowhere)
    assert shown.code == 0
    assert str(kept.logged[5].end) in shown.out
    assert "lag is not known" in shown.err


# --- Moving, resizing, deleting -------------------------------------------------------------


def test_shard_moved_to_a_member_stays_there(orders: Kept) -> None:
    with orders.member("host-1"), orders.member("host-2") as second:
        orders.wait_gained(2)
        refused = orders.run("move", "orders", "0", "host-3")
        assert refused.code == 2
        assert "host-1, host-2" in refused.err
        for shard in ("0", "1"):
            assert orders.run("move", "orders", shard, "host-2").code == 0
        wait_until(lambda: set(second.shards) == {0, 1})
        assert {line["owner"] for line in orders.run("show", "orders", "--json").objects} == {"host-2"}


def test_running_subscription_is_resized(orders: Kept, kept: KeptLog) -> None:
    checkpoints = orders.subscription.checkpoints(open_store(orders.store))
    checkpoints.reset(0, consumed(kept, 20))
    checkpoints.reset(1, consumed(kept, 40))
    with orders.member("host-1"):
        orders.wait_gained(2)
        assert orders.run("resize", "orders", "5", "--dry-run").code == 0
        assert orders.subscription.shard_count == 2
        assert orders.run("resize", "orders", "5", "--yes", "--json").one["new"] == 5
        assert {shard.shard for shard in orders.wait_gained(7)[2:]} == {0, 1, 2, 3, 4}
        shards = orders.run("show", "orders", "--json").objects
        assert [shard["owner"] for shard in shards] == ["host-1"] * 5
        # Each shard starts no later than the lowest checkpoint of the old shards whose slots it holds.
        assert {shard["checkpoint"]["position"] for shard in shards} == {str(kept.logged[19].end)}


def test_subscription_is_deleted_unless_it_is_active(orders: Kept) -> None:
    with orders.member("host-1"):
        orders.wait_gained(2)
        assert "consumed by host-1" in orders.run("delete", "orders", "--yes").err
        # A dry run reports what would happen, including a refusal.
        assert "consumed by host-1" in orders.run("delete", "orders", "--dry-run").err
    assert orders.run("delete", "orders", "--dry-run").code == 0
    assert orders.run("delete", "orders").code == 2
    assert orders.subscriptions.get("shop", "orders") is not None
    (deleted,) = orders.run("delete", "orders", "--yes", "--json").objects
    assert deleted["released"] is False, "the daemon was asked, and had no hold of it"
    assert orders.subscriptions.get("shop", "orders") is None
    missing = orders.run("show", "orders")
    assert missing.code == 2
    assert "there is no subscription 'orders'" in missing.err
    assert orders.run("list", "--json").objects == []


def test_ambiguous_name_requires_an_instance(orders: Kept) -> None:
    orders.subscriptions.create(Subscription("stock", "orders"))
    refused = orders.run("show", "orders")
    assert refused.code == 2
    assert "shop/orders, stock/orders" in refused.err
    assert orders.run("show", "shop/orders", "--json").objects[0]["instance"] == "shop"
    assert f"--coordination {default_coordination()}" in penstock("subscriptions", "list").err
    orders.subscriptions.delete("shop", "orders")
    orders.subscriptions.delete("stock", "orders")
    assert f"--coordination {default_coordination()}" in orders.run("list").err


def test_settings_name_the_store(kept: KeptLog, daemon: DaemonProcess) -> None:
    assert penstock("subscriptions", "list", "--config", daemon.config, "--json").objects == []
    assert (kept.root / "coordination.db").exists()
