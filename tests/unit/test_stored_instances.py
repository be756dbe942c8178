# SPDX-License-Identifier: Apache-2.0
"""Instances in the coordination store, over HTTP and in the console: with a preview, for full administrators,
and audited.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from structlog.testing import capture_logs

from penstock.coordinate.store import open_store
from penstock.desired import DesiredSettings, StoredInstances
from penstock.fleet.wanted import WantedInstance, read_wanted, want_instance
from penstock.settings.changes import InstanceChange
from penstock.settings.daemon import Settings
from tests.support.daemon.console import console_of
from tests.support.daemon.served_log import INSTANCE, Answered, ServedLog, captured_log, serving

HOSTILE = "<script>alert(1)</script>\"'&{{1234567*9}}"
ACCOUNTS: list[dict[str, Any]] = [
    {"name": "reader", "token": "reader-token"},
    {"name": "limited", "token": "limited-token", "admin": True, "tables": ["shop.*"]},
]
USERS = {"source": "mysql://repl@db2"}


@dataclass(frozen=True)
class Daemon:
    """A daemon with one instance in its settings file and, at first, none in its store."""

    served: ServedLog
    url: str
    reloads: list[None]

    def ask(self, method: str, call: str, body: Any = None, token: str | None = None) -> Answered:
        return self.served.ask(method, f"/v1/{call}", body, token=token)

    def stored(self) -> dict[str, WantedInstance]:
        with closing(open_store(self.url)) as store:
            return read_wanted(store)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    url, file = f"sqlite://{tmp_path}/coordination.db", tmp_path / "penstock.yaml"
    instances = {INSTANCE: {"source": "mysql://repl@db1"}}
    file.write_text(
        yaml.safe_dump({"coordination": url, "log": {"folder": str(tmp_path)}, "instances": instances})
    )
    desired = DesiredSettings(file)
    running: Settings = desired.first()
    reloads: list[None] = []

    def plan(settings: Settings) -> InstanceChange:
        return InstanceChange.between(running, settings)

    known = StoredInstances(desired, plan, lambda: reloads.append(None))
    with captured_log() as log, serving(log, {"token": "a-token"}, ACCOUNTS, instances=known) as served:
        yield Daemon(served, url, reloads)
    desired.stop()


def audit_of(logs: Any) -> list[tuple[str, str]]:
    return [(line["action"], line["account"]) for line in logs if line["event"] == "audit"]


def test_dry_run_says_what_the_daemon_would_capture(daemon: Daemon) -> None:
    with capture_logs() as logs:
        added = daemon.ask("PUT", "instances/users", {"settings": USERS, "dry_run": True}).json
        assert (added["version"], added["added"], added["dry_run"]) == (1, ["users"], True)
        other = {"settings": {**USERS, "log": {"folder": "/elsewhere"}}, "dry_run": True}
        changed = daemon.ask("PUT", f"instances/{INSTANCE}", other).json
        assert (changed["changed"], changed["with_other_log"]) == ([INSTANCE], [INSTANCE])
        # The last instance stays.
        assert daemon.ask("DELETE", f"instances/{INSTANCE}?dry_run=1").status == 400
        assert daemon.ask("POST", f"instances/{INSTANCE}/forget", {}).status == 404
        refused = daemon.ask("PUT", "instances/users", {"settings": {"source": "?"}, "dry_run": True})
        assert refused.status == 400
    assert (daemon.stored(), daemon.reloads, audit_of(logs)) == ({}, [], [])


def test_instance_is_stored_removed_and_forgotten(daemon: Daemon) -> None:
    with capture_logs() as logs:
        assert daemon.ask("PUT", "instances/users", {"settings": USERS}).json["version"] == 1
        again = daemon.ask("PUT", "instances/users", {"settings": USERS, "dry_run": True}).json
        assert again["version"] == 1, "it is equal"
        assert daemon.ask("DELETE", f"instances/{INSTANCE}").json["removed"] == [INSTANCE]
        (removed, users) = daemon.ask("GET", "stored-instances").json["instances"]
        assert (removed["instance"], removed["document"]) == (INSTANCE, None)
        assert users["document"] == {"instance": "users", "values": {}, "settings": USERS}
        planned = daemon.ask("POST", f"instances/{INSTANCE}/forget", {}).json
        assert (planned["removed"], sorted(daemon.stored())) == ([], [INSTANCE, "users"])
        assert daemon.ask("POST", f"instances/{INSTANCE}/forget", {"dry_run": False}).status == 200
    assert sorted(daemon.stored()) == ["users"]
    assert len(daemon.reloads) == 3
    actions = [action for action, _ in audit_of(logs)]
    assert actions == ["set instance", "remove instance", "forget instance"]


def test_stored_instances_are_shown_without_the_values_of_secrets(daemon: Daemon) -> None:
    text = "source: mysql://repl:${PW}@${HOST}\n"
    with closing(open_store(daemon.url)) as store:
        want_instance(store, WantedInstance("users", text, {"PW": "secret", "HOST": "db2"}))
    shown = daemon.ask("GET", "stored-instances")
    assert b"secret" not in shown.body
    assert shown.json["instances"][0]["document"]["values"] == {"HOST": "db2"}


def test_instances_are_for_full_administrators(daemon: Daemon) -> None:
    daemon.ask("PUT", "instances/users", {"settings": USERS})
    before = daemon.stored()
    for token in ("reader-token", "limited-token"):
        for method, call, body in (
            ("PUT", "instances/more", {"settings": USERS}),
            ("DELETE", f"instances/{INSTANCE}", None),
            ("POST", "instances/users/forget", {"dry_run": False}),
            ("GET", "stored-instances", None),
        ):
            assert daemon.ask(method, call, body, token).status == 403, call
    assert daemon.stored() == before


# --- In the console ---------------------------------------------------------------------------


def test_instance_is_added_changed_and_removed_after_a_page_that_says_what_happens(daemon: Daemon) -> None:
    url = f"http://127.0.0.1:{daemon.served.port()}"
    address: dict[str, Any] = {"daemon": url, "instance": "users"}
    text = yaml.safe_dump({"instance": "users", "settings": {**USERS, "labels": {"team": HOSTILE}}})
    with console_of(daemon.served) as browser, capture_logs() as logs:
        browser.post("/login", {"token": "a-token"})
        assert "/instances/apply" in browser.get("/fleet").text
        form = browser.get("/instances/apply", daemon=url)
        assert ("instance: shop" in form.words, "confirm" in form.text) == (True, False)
        fields = {"csrf": form.field("csrf"), "daemon": url, "text": text}
        for path in ("/instances/apply", "/instances/apply/confirm"):
            assert browser.post(path, fields | {"csrf": "x"}).status == 403
        page = browser.post("/instances/apply", fields)
        assert "Captured from now on: users" in page.words
        assert ("<script>alert" in page.text, HOSTILE in page.words) == (False, True)
        assert daemon.stored() == {}
        assert browser.post("/instances/apply/confirm", fields).status == 303
        assert list(daemon.stored()) == ["users"]
        changed = browser.get("/instances/apply", **address)
        assert f"team: {HOSTILE[:8]}" in changed.words, "the form has what is stored"
        aliases = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1},' * 9}]\n" for n in range(1, 9))
        texts = ("a: [", "source: mysql://db", "instance: x\nsettings: {source: '?'}", "[]")
        dated = "instance: x\nsettings: {source: 2026-01-01}\n"
        for wrong in (*texts, dated, f"instance: x\n{aliases}", "instance: &x [*x]", "instance: [1]"):
            refused = browser.post("/instances/apply", fields | {"text": wrong})
            assert (refused.status, "/apply/confirm" in refused.text) == (200, False), wrong
        for path, effect in (
            ("/instance/remove", "Its log and its subscriptions stay"),
            ("/instance/forget", "the settings file of each daemon decides again"),
        ):
            shown = {**address, "instance": INSTANCE}
            page = browser.get(path, **shown)
            if path == "/instance/remove":
                assert path in browser.get("/instance", **shown).text
            else:
                assert path in browser.get("/fleet").text
            assert effect in page.words
            assert browser.post(f"{path}/confirm", {**shown, "csrf": fields["csrf"]}).status == 303
        assert list(daemon.stored()) == ["users"]
        browser.post("/logout", fields)
        browser.post("/login", {"token": "reader-token"})
        csrf = browser.get("/").field("csrf")
        assert browser.post("/instances/apply", {**fields, "csrf": csrf}).status == 403
        assert browser.post("/instances/apply/confirm", {**fields, "csrf": csrf}).status == 403
    done = [(line["action"], line["outcome"]) for line in logs if "outcome" in line]
    assert done == [("set instance", "done"), ("remove instance", "done"), ("forget instance", "done")]
    assert all("repl@db2" not in str(line) for line in logs), "texts are not recorded"
