# SPDX-License-Identifier: Apache-2.0
"""Pausing subscriptions and pipelines: the console shows a preview, requires an administrator, and records
the action.
"""

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.coordinate.backends.memory import MemoryStore
from penstock.coordinate.checkpoint import Checkpoint
from penstock.coordinate.lease import Lease
from penstock.coordinate.subscription_record import Subscription, Subscriptions
from penstock.logstore.log import Log
from penstock.pipeline.state import PipelineState
from penstock.serve.coordination import CoordinationProbe
from tests.support.daemon.console import console_of
from tests.support.daemon.served_log import INSTANCE, Answered, ServedLog, captured_log, serving

HOSTILE = "<script>alert(1)</script>\"'&{{1234567*9}}"
ACCOUNTS: list[dict[str, Any]] = [
    {"name": "reader", "token": "reader-token"},
    {"name": "other", "token": "other-token", "admin": True, "subscriptions": ["other"]},
]


@dataclass(frozen=True)
class Coordinated:
    """A daemon with a subscription whose name is hostile. A member holds the subscription's only shard."""

    daemon: ServedLog
    registry: Subscriptions
    store: MemoryStore

    def is_paused(self) -> bool:
        subscription = self.registry.get(INSTANCE, HOSTILE)
        assert subscription is not None
        return subscription.paused

    def send(self, verb: str, token: str | None = None, name: str = "orders-cache") -> Answered:
        return self.daemon.ask(
            "POST", f"/v1/instances/{INSTANCE}/subscriptions/{name}/{verb}", {}, token=token
        )


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with captured_log() as log:
        yield log


@pytest.fixture
def coordinated(log: Log, request: pytest.FixtureRequest) -> Iterator[Coordinated]:
    store = MemoryStore(request.node.name)
    registry = Subscriptions(store)
    for name in ("orders-cache", HOSTILE):
        subscription = registry.create(Subscription(INSTANCE, name))
        assert Lease.acquire(store, store.session(), subscription.lease_path(0), "h1:42") is not None
        registry.reset(INSTANCE, name, Checkpoint.now(str(log.earliest())))
    probe = CoordinationProbe("memory", lambda: store, [INSTANCE])
    with serving(log, {"token": "a-token"}, ACCOUNTS, coordination=probe) as daemon:
        yield Coordinated(daemon, registry, store)


def test_pause_and_resume_are_recorded_once_however_often_they_are_sent(coordinated: Coordinated) -> None:
    with capture_logs() as logs:
        paused = [coordinated.send("pause").json for _ in range(2)]
        shown = coordinated.daemon.ask("GET", "/v1/subscriptions").json["subscriptions"]
        resumed = [coordinated.send("resume").json for _ in range(2)]
    address = {"instance": INSTANCE, "subscription": "orders-cache", "owners": ["h1:42"]}
    assert paused == [{**address, "paused": True}] * 2
    assert [known["paused"] for known in shown if known["subscription"] == "orders-cache"] == [True]
    assert resumed == [{**address, "paused": False}] * 2
    audit = [(entry["action"], entry["account"]) for entry in logs if entry["event"] == "audit"]
    assert audit == [("pause subscription", "everything"), ("resume subscription", "everything")]


def test_pause_is_for_administrators_of_the_subscription(coordinated: Coordinated) -> None:
    for token in ("reader-token", "other-token"):
        assert coordinated.send("pause", token).status == 403
    assert coordinated.send("pause", name="nothing").status == 404
    known = coordinated.registry.get(INSTANCE, "orders-cache")
    assert known is not None
    assert not known.paused


def test_canal_client_is_not_paused(coordinated: Coordinated) -> None:
    known = coordinated.registry.get(INSTANCE, "orders-cache")
    assert known is not None
    coordinated.store.put(known.account_path, b"{}")
    refused = coordinated.send("pause")
    assert (refused.status, "Canal client" in refused.json["detail"]) == (400, True)


def test_page_says_what_a_pause_does_before_it_is_confirmed(coordinated: Coordinated) -> None:
    address = {"instance": INSTANCE, "subscription": HOSTILE}
    with console_of(coordinated.daemon) as browser, capture_logs() as logs:
        browser.post("/login", {"token": "a-token"})
        assert "/subscriptions/pause" in browser.get("/subscriptions").text
        page = browser.get("/subscriptions/pause", **address)
        assert "Nobody holds a shard while it is paused" in page.words
        assert "h1:42" in page.words
        assert HOSTILE in page.words
        assert "<script>alert" not in page.text
        fields = {**address, "csrf": page.field("csrf"), "daemon": page.field("daemon")}
        assert browser.post("/subscriptions/pause/confirm", fields | {"csrf": "x"}).status == 403
        assert not coordinated.is_paused()
        assert browser.post("/subscriptions/pause/confirm", fields).status == 303
        assert coordinated.is_paused()
        assert "paused Resume…" in browser.get("/subscriptions").words
        assert "goes on at its checkpoint" in browser.get("/subscriptions/pause", **address).words
        assert browser.post("/subscriptions/resume/confirm", fields).status == 303
        assert not coordinated.is_paused()
        gone = browser.get("/subscriptions/pause", instance=INSTANCE, subscription="nothing")
        assert "no such subscription" in gone.words
    consoles = [entry for entry in logs if entry["event"] == "audit" and "client" in entry]
    assert [entry["action"] for entry in consoles] == ["login", "pause subscription", "resume subscription"]


def test_reader_may_not_pause_in_the_console(coordinated: Coordinated) -> None:
    with console_of(coordinated.daemon) as browser:
        browser.post("/login", {"token": "reader-token"})
        shown = browser.get("/subscriptions")
        assert "Pause…" not in shown.words
        address = {"instance": INSTANCE, "subscription": HOSTILE}
        assert browser.get("/subscriptions/pause", **address).status == 403
        url = f"http://127.0.0.1:{coordinated.daemon.port()}"
        fields = {**address, "csrf": shown.field("csrf"), "daemon": url}
        assert browser.post("/subscriptions/pause/confirm", fields).status == 403
    assert not coordinated.is_paused()


def test_pipeline_is_paused_beside_one_with_an_unreadable_state(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/states.db"
    for name in ("another", "notes"):
        with closing(PipelineState.open(url, name)) as state:
            state.write(state.take())
            if name == "another":
                state.store.put("/pipelines/another/standing", b"no state")
    with console_of(stores=(url,)) as browser:
        form = browser.get("/pipelines/pause", store="0", name="notes")
        assert form.field("name") == "notes"
        assert "no such pipeline any longer" in browser.get("/pipelines/pause", store="0", name="x").words


def test_grid_has_the_lag_of_each_shard_under_its_member(coordinated: Coordinated) -> None:
    store = coordinated.store
    wide = coordinated.registry.create(Subscription(INSTANCE, "wide", shard_count=3))
    for shard, member in ((0, "a"), (2, "b")):
        session = store.session()
        session.put_ephemeral(f"{wide.members_path}/{member}", b"")
        assert Lease.acquire(store, session, wide.lease_path(shard), member) is not None
    coordinated.registry.reset(INSTANCE, "wide", Checkpoint.now(str(coordinated.daemon.log.earliest())))
    with console_of(coordinated.daemon) as browser:
        browser.post("/login", {"token": "a-token"})
        text = browser.get("/subscriptions").text
    (grid,) = re.findall(r'<table class="grid">.*?</table>', text, re.DOTALL)
    cells = {
        re.sub("<.*?>", "", member): re.findall(r"<td(.*?)>(.*?)</td>", row)
        for member, row in re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', grid)
    }
    filled = {member: [bool(size) for _, size in row] for member, row in cells.items()}
    nobody = [False, True, False]
    assert filled == {"a": [True, False, False], "b": [False, False, True], "nobody": nobody}
    assert all("shade" in kind for row in cells.values() for kind, size in row if size)
