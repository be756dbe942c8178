# SPDX-License-Identifier: Apache-2.0
"""Set the checkpoints of a subscription over HTTP and in the console: verified, previewed, and recorded."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.coordinate.backends.memory import MemoryStore
from penstock.coordinate.lease import Lease
from penstock.coordinate.subscription_record import Subscription, Subscriptions
from penstock.errors import CoordinationLost, PositionInvalid
from penstock.logstore.log import Log
from penstock.model import Position
from penstock.serve.coordination import CoordinationProbe
from penstock.serve.own_log import OwnSource
from penstock.source.transaction import prove_boundary
from tests.support.daemon.console import console_of
from tests.support.daemon.served_log import INSTANCE, Answered, ServedLog, captured_log, serving
from tests.support.suite.nonempty import each

HOSTILE = "<script>alert(1)</script>"
ACCOUNTS: list[dict[str, Any]] = [
    {"name": "reader", "token": "reader-token"},
    {"name": "other", "token": "other-token", "admin": True, "subscriptions": ["other"]},
]
PATH = f"/v1/instances/{INSTANCE}/subscriptions/orders-cache/reset"


@dataclass(frozen=True)
class Coordinated:
    """A daemon whose subscription has two shards. A member holds the second shard."""

    daemon: ServedLog
    registry: Subscriptions
    subscription: Subscription

    def positions(self) -> list[str | None]:
        states = [view.state.checkpoint for view in self.registry.shards(self.subscription)]
        return [None if checkpoint is None else checkpoint.position for checkpoint in states]

    def reset(self, token: str | None = None, **body: Any) -> Answered:
        return self.daemon.ask("POST", PATH, body, token=token)


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with captured_log() as log:
        yield log


@pytest.fixture
def coordinated(log: Log, request: pytest.FixtureRequest) -> Iterator[Coordinated]:
    store = MemoryStore(request.node.name)
    registry = Subscriptions(store)
    subscription = registry.create(Subscription(INSTANCE, "orders-cache", shard_count=2))
    assert Lease.acquire(store, store.session(), subscription.lease_path(1), "h1:42") is not None
    probe = CoordinationProbe("memory", lambda: store, [INSTANCE])
    with serving(log, {"token": "a-token"}, ACCOUNTS, coordination=probe) as daemon:
        yield Coordinated(daemon, registry, subscription)


def test_every_boundary_of_the_log_is_accepted_and_nothing_between(log: Log) -> None:
    source = OwnSource(INSTANCE, log)
    for extent in each(log.extents()):
        prove_boundary(log, source, extent.last)
    assert log.visible is not None
    prove_boundary(log, source, log.visible)
    with pytest.raises(PositionInvalid) as refusal:
        prove_boundary(log, source, Position(0, "mysql-bin.000002", 1000))
    assert "begins at" in str(refusal.value.hint)


def test_dry_run_says_what_happens_and_changes_nothing(coordinated: Coordinated) -> None:
    earliest = str(coordinated.daemon.log.earliest())
    assert coordinated.reset(to="earliest").json == {
        "instance": INSTANCE,
        "subscription": "orders-cache",
        "shards": [0, 1],
        "old": {"0": None, "1": None},
        "new": earliest,
        "owners": ["h1:42"],
        "dry_run": True,
    }
    assert coordinated.positions() == [None, None]


def test_shards_that_are_held_need_force(coordinated: Coordinated) -> None:
    refused = coordinated.reset(to="latest", dry_run=False)
    assert (refused.status, "consumed by h1:42" in refused.json["detail"]) == (400, True)
    assert coordinated.positions() == [None, None]
    with capture_logs() as logs:
        assert coordinated.reset(to="latest", dry_run=False, shard=0).status == 200
        latest = str(coordinated.daemon.log.visible)
        assert coordinated.positions() == [latest, None]
        assert coordinated.reset(to="earliest", dry_run=False, force=True).status == 200
    earliest = str(coordinated.daemon.log.earliest())
    assert coordinated.positions() == [earliest, earliest]
    audit = [(entry["account"], entry["after"]) for entry in logs if entry["event"] == "audit"]
    assert audit == [("everything", latest), ("everything", earliest)]
    shown = coordinated.daemon.ask("GET", "/v1/subscriptions").json["subscriptions"][0]["shards"]
    assert {shard["checkpoint"] for shard in shown} == {earliest}, "not as of a few seconds ago"


class FailingStore(MemoryStore):
    """A store that fails when the checkpoint of the second shard is written."""

    def put(self, path: str, value: bytes, version: int | None = None) -> int:
        if path.endswith("/shards/1/checkpoint"):
            raise CoordinationLost("the store does not answer", position=path)
        return super().put(path, value, version)


def test_reset_that_ends_halfway_is_recorded(log: Log) -> None:
    store = FailingStore("halfway")
    registry = Subscriptions(store)
    subscription = registry.create(Subscription(INSTANCE, "orders-cache", shard_count=2))
    probe = CoordinationProbe("memory", lambda: store, [INSTANCE])
    with serving(log, {"token": "a-token"}, ACCOUNTS, coordination=probe) as daemon, capture_logs() as logs:
        coordinated = Coordinated(daemon, registry, subscription)
        assert coordinated.reset(to="latest", dry_run=False).status == 503
        latest = str(log.visible)
        assert coordinated.positions() == [latest, None]
    audit = [(entry["before"], entry["after"]) for entry in logs if entry["event"] == "audit"]
    assert audit == [({"0": None, "1": None}, latest)]


REFUSED: dict[str, dict[str, Any]] = {
    "beyond the log": {"to": {"position": "mysql-bin.000001:9999999"}},
    "inside a transaction": {"to": {"position": "mysql-bin.000002:1000"}},
    "no time": {"to": {"time": "yesterday"}},
    "no edge": {"to": "somewhere"},
    "no such shard": {"to": "latest", "shard": 7},
    "unknown field": {"to": "latest", "shards": 7},
    "no place": {},
}


def test_place_that_the_log_does_not_have_is_refused(coordinated: Coordinated) -> None:
    for case, body in each(REFUSED.items()):
        answer = coordinated.reset(**body, dry_run=False, force=True)
        assert 400 <= answer.status < 500, f"{case}: {answer.body!r}"
    assert coordinated.positions() == [None, None]


def test_reset_is_for_administrators_of_the_subscription(coordinated: Coordinated) -> None:
    for token in ("reader-token", "other-token"):
        assert coordinated.reset(token, to="latest").status == 403
    unknown = coordinated.daemon.ask("POST", PATH.replace("orders-cache", "nothing"), {"to": "latest"})
    assert unknown.status == 404


def test_page_shows_the_effect_before_the_reset(coordinated: Coordinated) -> None:
    daemon = coordinated.daemon
    address = {
        "daemon": f"http://127.0.0.1:{daemon.port()}",
        "instance": INSTANCE,
        "subscription": "orders-cache",
    }
    with console_of(daemon) as browser, capture_logs() as logs:
        browser.post("/login", {"token": "a-token"})
        assert "/subscriptions/reset" in browser.get("/subscriptions").text
        form = browser.get("/subscriptions/reset", **address)
        assert "<form" in form.text
        wrong = browser.get("/subscriptions/reset", **address, kind="position", value=HOSTILE)
        assert (wrong.status, HOSTILE in wrong.text) == (200, False)
        assert f"{HOSTILE!r} is not a position" in wrong.problem
        page = browser.get("/subscriptions/reset", **address, kind="earliest")
        assert "begin again there: h1:42" in page.words
        assert coordinated.positions() == [None, None]
        fields = {**address, "csrf": page.field("csrf"), "position": page.field("position"), "shard": ""}
        assert browser.post("/subscriptions/reset/confirm", fields | {"csrf": "x"}).status == 403
        assert browser.post("/subscriptions/reset/confirm", fields).status == 303
        earliest = str(daemon.log.earliest())
        assert coordinated.positions() == [earliest, earliest]
        assert earliest in browser.get("/subscriptions").words
        browser.post("/logout", fields)
        browser.post("/login", {"token": "reader-token"})
        assert browser.get("/subscriptions/reset", **address).status == 403
        fields["csrf"] = browser.get("/subscriptions").field("csrf")
        assert browser.post("/subscriptions/reset/confirm", fields).status == 403
    actions = [entry.get("action") for entry in logs if entry["event"] == "audit"]
    assert actions.count("reset subscription") == 2, "once at the daemon, and once at the console"
