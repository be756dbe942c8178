# SPDX-License-Identifier: Apache-2.0
"""Moving, resizing, narrowing and deleting subscriptions over HTTP and in the console."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.coordinate.backends.memory import MemoryStore
from penstock.coordinate.checkpoint import Checkpoint
from penstock.coordinate.lease import Lease
from penstock.coordinate.store import path_of
from penstock.coordinate.subscription_record import Subscription, Subscriptions
from penstock.errors import CoordinationLost
from penstock.logstore.holds import Hold, Holds, consumer_hold_name
from penstock.logstore.log import Log
from penstock.serve.coordination import CoordinationProbe
from tests.support.daemon.console import console_of
from tests.support.daemon.served_log import INSTANCE, Answered, ServedLog, captured_log, serving
from tests.support.suite.nonempty import each

HOSTILE = "<script>alert(1)</script>\"'&{{1234567*9}}"
ACCOUNTS: list[dict[str, Any]] = [
    {"name": "reader", "token": "reader-token"},
    {"name": "other", "token": "other-token", "admin": True, "subscriptions": ["other"]},
    {"name": "masked", "token": "masked-token", "admin": True, "masked": {"shop.users": ["email"]}},
]
BODIES: dict[str, dict[str, Any]] = {
    "move": {"shard": 0, "member": "h1:42"},
    "resize": {"shards": 4},
    "set": {"where": "id > 7"},
    "delete": {"force": True},
}

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Coordinated:
    """A daemon with a subscription that has two shards and one member. The member holds the second shard."""

    daemon: ServedLog
    registry: Subscriptions
    name: str

    @property
    def subscription(self) -> Subscription:
        subscription = self.registry.get(INSTANCE, self.name)
        assert subscription is not None
        return subscription

    def send(self, word: str, token: str | None = None, name: str | None = None, **body: Any) -> Answered:
        path = path_of(INSTANCE, "subscriptions", name or self.name)
        return self.daemon.ask("POST", f"/v1/instances{path}/{word}", body, token=token)


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with captured_log() as log:
        yield log


@pytest.fixture
def coordinated(log: Log) -> Iterator[Coordinated]:
    space = f"subscription-changes-{next(_numbers)}"
    store = MemoryStore(space)
    registry = Subscriptions(store)
    subscription = registry.create(Subscription(INSTANCE, HOSTILE, shard_count=2))
    session = store.session()
    assert Lease.acquire(store, session, subscription.lease_path(1), "h1:42") is not None
    session.put_ephemeral(subscription.members_path + path_of("h1:42"), b"{}")
    registry.reset(INSTANCE, HOSTILE, Checkpoint.now(str(log.earliest())))
    probe = CoordinationProbe("memory", lambda: MemoryStore(space), [INSTANCE])
    with serving(log, {"token": "a-token"}, ACCOUNTS, coordination=probe) as daemon:
        yield Coordinated(daemon, registry, HOSTILE)


def audit_of(logs: Any) -> list[tuple[str, str]]:
    """Return the recorded actions of a daemon, with their accounts."""
    return [(line["action"], line["account"]) for line in logs if line["event"] == "audit"]


def test_dry_run_of_a_change_is_the_default_and_changes_nothing(coordinated: Coordinated) -> None:
    before = coordinated.subscription
    with capture_logs() as logs:
        for word, body in each(BODIES.items()):
            answer = coordinated.send(word, **body)
            assert (answer.status, answer.json["dry_run"]) == (200, True), answer.body
    assert (coordinated.subscription, audit_of(logs)) == (before, [])


def test_changes_are_for_administrators_of_the_subscription(coordinated: Coordinated) -> None:
    before = coordinated.subscription
    for word, body in each(BODIES.items()):
        for token in ("reader-token", "other-token"):
            assert coordinated.send(word, token, **body, dry_run=False).status == 403
        assert coordinated.send(word, name="nothing", **body, dry_run=False).status == 404
        assert coordinated.send(word, **body, unknown=1).status == 400
    assert coordinated.subscription == before


def test_shard_is_moved_to_a_member(coordinated: Coordinated) -> None:
    for shard, member in ((2, "h1:42"), (0, "h9:1")):
        assert coordinated.send("move", shard=shard, member=member, dry_run=False).status == 400
    assert coordinated.subscription.pins == {}
    with capture_logs() as logs:
        assert coordinated.send("move", **BODIES["move"], dry_run=False).json["member"] == "h1:42"
    assert coordinated.subscription.pins == {0: "h1:42"}
    assert audit_of(logs) == [("move shard", "everything")]


def test_subscription_is_resized_while_the_daemon_answers(
    coordinated: Coordinated, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert coordinated.send("resize", shards=0, dry_run=False).status == 400
    monkeypatch.setattr(Subscriptions.resize, "__defaults__", (0.0,))
    assert coordinated.send("resize", shards=4).json["owners"] == ["h1:42"]
    with capture_logs() as logs:
        assert coordinated.send("resize", shards=4, dry_run=False).json["old"] == 2
    assert coordinated.subscription.shard_count == 4
    assert audit_of(logs) == [("resize subscription", "everything")]
    (shown,) = coordinated.daemon.ask("GET", "/v1/subscriptions").json["subscriptions"]
    assert len(shown["shards"]) == 4


def test_selection_is_set_field_by_field_and_dropped(
    coordinated: Coordinated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Subscriptions.rekey, "__defaults__", (0.0,))
    with capture_logs() as logs:
        assert coordinated.send("set", tables=["shop.*"], exclude=["shop.log"], dry_run=False).status == 200
        answer = coordinated.send("set", where="id > 7", changes=["update"], dry_run=False).json
        updates = ["update_preimage", "update_postimage"]
        expected = {"tables": ["shop.*"], "exclude": ["shop.log"], "where": "id > 7", "changes": updates}
        assert (answer["new"], coordinated.subscription.selection.fields()) == (expected, expected)
        keyed = coordinated.send("set", shard_columns={"shop.orders": ["customer"]}, dry_run=False).json
        assert keyed["new_shard_columns"] == {"shop.orders": ["customer"]}
        assert coordinated.subscription.shard_columns == {"shop.orders": ("customer",)}
        assert coordinated.send("set", as_members_ask=True, dry_run=False).json["new"] == {}
    assert coordinated.subscription.shard_columns == {}
    assert audit_of(logs) == [("set subscription", "everything")] * 4


REFUSED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "both": {"where": "id > 7", "as_members_ask": True},
    "exclude alone": {"exclude": ["shop.log"]},
    "no condition": {"where": "no such ("},
    "no kind of change": {"changes": ["upsert"]},
    "a slow pattern": {"tables": ["/(a|b|c|d)*x*y*z*/"]},
    "shard columns": {"shard_columns": {"shop.orders": []}},
}


def test_selection_that_no_member_could_ask_for_is_refused(coordinated: Coordinated) -> None:
    before = coordinated.subscription
    for case, body in each(REFUSED.items()):
        assert coordinated.send("set", **body, dry_run=False).status == 400, case
    assert coordinated.subscription == before


def test_label_changes_nothing_else(coordinated: Coordinated) -> None:
    before = coordinated.subscription
    assert coordinated.send("set", labels={"team": "orders"}, dry_run=False).json["labels"] == {
        "team": "orders"
    }
    assert coordinated.send("set", labels={"unit": HOSTILE}).json["labels"] == {
        "team": "orders",
        "unit": HOSTILE,
    }
    after = coordinated.subscription
    assert (after.labels, after.revision) == ({"team": "orders"}, before.revision)


def test_rows_are_not_chosen_by_a_column_that_is_masked_for_the_account(coordinated: Coordinated) -> None:
    before = coordinated.subscription
    masked: list[dict[str, Any]] = [{"where": "email = 1"}, {"shard_columns": {"shop.users": ["email"]}}]
    for body in each(masked):
        assert coordinated.send("set", "masked-token", **body).status == 403
    assert coordinated.send("set", "masked-token", where="id > 7").status == 200
    assert coordinated.subscription == before


def test_deleted_subscription_releases_its_hold(coordinated: Coordinated) -> None:
    log = coordinated.daemon.log
    position = log.earliest()
    assert position is not None
    hold = Hold(consumer_hold_name(HOSTILE), position, None, "everything")
    Holds(log.disk, log.layout).put(hold, log=log, admin=True)
    refused = coordinated.send("delete", dry_run=False)
    assert (refused.status, "consumed by h1:42" in refused.json["detail"]) == (400, True)
    with capture_logs() as logs:
        answer = coordinated.send("delete", force=True, dry_run=False).json
    earliest = str(coordinated.daemon.log.earliest())
    assert answer["checkpoints"] == {"0": earliest, "1": earliest}
    assert answer["released"] is True
    assert coordinated.registry.get(INSTANCE, coordinated.name) is None
    assert audit_of(logs) == [("delete subscription", "everything")]
    assert coordinated.daemon.ask("GET", "/v1/subscriptions").json["subscriptions"] == []


def test_description_names_each_change_with_its_body(coordinated: Coordinated) -> None:
    paths = coordinated.daemon.ask("GET", "/v1/openapi.json").json["paths"]
    for word in each(BODIES):
        call = paths[f"/v1/instances/{{instance}}/subscriptions/{{subscription}}/{word}"]["post"]
        schema = call["requestBody"]["content"]["application/json"]["schema"]
        assert "dry_run" in schema["properties"]


# --- In the console ---------------------------------------------------------------------------


IN_THE_CONSOLE: dict[str, tuple[dict[str, Any], str, Callable[[Subscription | None], bool]]] = {
    "move": (
        {"shard": "0", "member": "h1:42"},
        "h1:42 gets the shard",
        lambda known: known is not None and known.pins == {0: "h1:42"},
    ),
    "resize": (
        {"shards": "4"},
        "From 2 to 4 shards",
        lambda known: known is not None and known.shard_count == 4,
    ),
    "set": (
        {"where": f"note = '{HOSTILE.replace(chr(39), '')}'", "tables": "shop.*", "exclude": "shop.log"}
        | {"labels": "team=orders, unit=x", "shard_columns": "shop.orders=customer, id; shop.users=id"},
        "Delivered then: tables: shop.*; exclude: shop.log; where: note =",
        lambda known: known is not None and known.selection.tables == ("shop.*",),
    ),
    "delete": ({}, "These members stop with an error: h1:42", lambda known: known is None),
}


@pytest.mark.parametrize("word", IN_THE_CONSOLE)
def test_page_says_what_a_change_does_before_it_is_confirmed(
    coordinated: Coordinated, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Subscriptions.resize, "__defaults__", (0.0,))
    values, effect, is_changed = IN_THE_CONSOLE[word]
    address: dict[str, Any] = {
        "daemon": f"http://127.0.0.1:{coordinated.daemon.port()}",
        "instance": INSTANCE,
        "subscription": HOSTILE,
    }
    path = f"/subscriptions/{word}"
    with console_of(coordinated.daemon) as browser, capture_logs() as logs:
        browser.post("/login", {"token": "a-token"})
        assert path in browser.get("/subscriptions").text
        page = browser.get(path, **address, **values)
        assert (page.status, effect in page.words, "<script>alert" in page.text) == (200, True, False), page
        assert not is_changed(coordinated.registry.get(INSTANCE, HOSTILE))
        fields = {**address, **values, "csrf": page.field("csrf")}
        assert browser.post(f"{path}/confirm", fields | {"csrf": "x"}).status == 403
        assert not is_changed(coordinated.registry.get(INSTANCE, HOSTILE))
        assert "分片" in browser.get(path, **address, **values, lang="zh").words
        confirmed = browser.post(f"{path}/confirm", fields)
        assert (confirmed.status, confirmed.headers["location"]) == (303, "/subscriptions")
        assert is_changed(coordinated.registry.get(INSTANCE, HOSTILE))
        browser.post("/logout", fields)
        browser.post("/login", {"token": "reader-token"})
        shown = browser.get("/subscriptions")
        assert (path in shown.text, browser.get(path, **address, **values).status) == (False, 403)
        fields["csrf"] = browser.get("/").field("csrf")
        assert browser.post(f"{path}/confirm", fields).status == 403
    actions = [line["action"] for line in logs if line["event"] == "audit" and "client" not in line]
    consoles = [line for line in logs if line["event"] == "audit" and "client" in line]
    (done,) = [line for line in consoles if line["action"] == actions[0]]
    assert (len(actions), done["outcome"], done["subscription"]) == (1, "done", HOSTILE)


def test_page_of_a_change_keeps_its_form_and_says_what_is_wrong(coordinated: Coordinated) -> None:
    address: dict[str, Any] = {
        "daemon": f"http://127.0.0.1:{coordinated.daemon.port()}",
        "instance": INSTANCE,
        "subscription": HOSTILE,
    }
    with console_of(coordinated.daemon) as browser:
        browser.post("/login", {"token": "a-token"})
        empty = browser.get("/subscriptions/move", **address)
        assert ("<form" in empty.text, "h1:42" in empty.text, "confirm" in empty.text) == (True, True, False)
        wrong = browser.get("/subscriptions/move", **address, shard="0", member=HOSTILE)
        assert (wrong.status, "has no member" in wrong.words, "<script>alert" in wrong.text) == (
            200,
            True,
            False,
        )
        for shard in ("x", "-1"):
            page = browser.get("/subscriptions/move", **address, shard=shard, member="h1:42")
            assert "is no number" in page.words
        same = browser.get("/subscriptions/resize", **address, shards="2")
        assert "There is nothing to do." in same.words
        fields = {**address, "csrf": empty.field("csrf"), "shard": "9", "member": "h1:42"}
        assert browser.post("/subscriptions/move/confirm", fields).status == 400


def test_change_that_ends_halfway_is_recorded(
    coordinated: Coordinated, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = MemoryStore.put

    def failing(store: MemoryStore, path: str, value: bytes, version: int | None = None) -> int:
        if path.endswith("/record"):
            raise CoordinationLost("the store does not answer", position=path)
        return put(store, path, value, version)

    monkeypatch.setattr(MemoryStore, "put", failing)
    address: dict[str, Any] = {
        "daemon": f"http://127.0.0.1:{coordinated.daemon.port()}",
        "instance": INSTANCE,
        "subscription": HOSTILE,
    }
    with console_of(coordinated.daemon) as browser, capture_logs() as logs:
        browser.post("/login", {"token": "a-token"})
        csrf = browser.get("/subscriptions/resize", **address, shards="4").field("csrf")
        failed = browser.post("/subscriptions/resize/confirm", {**address, "shards": "4", "csrf": csrf})
        assert (failed.status, "does not answer" in failed.words) == (503, True)
    assert coordinated.subscription.shard_count == 2
    resizes = [line for line in logs if line.get("action") == "resize subscription"]
    assert [line.get("outcome") for line in resizes] == [None, "failed"], "at the daemon, and at the console"
