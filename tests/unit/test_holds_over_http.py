# SPDX-License-Identifier: Apache-2.0
"""Holds as readers and operators see them, over HTTP and with `penstock holds`."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.logstore.extent import Extent
from penstock.logstore.holds import BrokenHold, Hold, Holds
from penstock.logstore.locate import Located
from penstock.logstore.memory_log import MemoryLog
from penstock.logstore.prepared import HOLD_NAME
from penstock.model import Position
from penstock.settings.daemon import LogSettings
from tests.support.daemon.served_log import INSTANCE, Answered, ServedLog, captured_log, serving
from tests.support.logstore.kept_log import penstock
from tests.support.logstore.source import Captured

TOKEN = "a-token"
ACCOUNTS: list[dict[str, Any]] = [
    {"name": "orders", "token": "orders-token"},
    {"name": "search", "token": "search-token"},
    {"name": "named", "token": "named-token", "subscriptions": ["named-*"]},
]
HOLDS = f"/v1/instances/{INSTANCE}/holds"


@pytest.fixture(params=["files", "memory"])
def daemon(request: pytest.FixtureRequest) -> Iterator[ServedLog]:
    if request.param == "files":
        with captured_log() as log, serving(log, {"token": TOKEN}, ACCOUNTS) as daemon:
            yield daemon
        return
    with MemoryLog.open_memory(LogSettings(), instance=INSTANCE) as log:
        Captured(log).run()
        with serving(log, {"token": TOKEN}, ACCOUNTS) as daemon:
            yield daemon


def hold(daemon: ServedLog, reader: str, account: str, seconds: int = 3600) -> Answered:
    position = daemon.log.earliest()
    path = f"/v1/instances/{INSTANCE}/position?reader={reader}&position={position}&seconds={seconds}"
    return daemon.ask("POST", path, token=f"{account}-token")


def readers(daemon: ServedLog, account: str | None = None) -> list[str]:
    answer = daemon.ask("GET", HOLDS, token=f"{account}-token" if account else TOKEN)
    assert answer.status == 200
    return [hold["reader"] for hold in answer.json["holds"]]


def remove(daemon: ServedLog, reader: str, account: str | None = None) -> Answered:
    return daemon.ask("DELETE", f"{HOLDS}/{reader}", token=f"{account}-token" if account else TOKEN)


def test_holds_are_listed_for_their_account_and_for_admins(daemon: ServedLog) -> None:
    for reader, account in (("cache", "orders"), ("index", "search")):
        assert hold(daemon, reader, account).status == 200
    assert readers(daemon, "orders") == ["cache"]
    assert readers(daemon, "search") == ["index"]
    assert sorted(readers(daemon)) == ["cache", "index"]
    (shown,) = daemon.ask("GET", HOLDS, token="orders-token").json["holds"]
    assert shown["account"] == "orders"
    assert shown["position"] == str(daemon.log.earliest())
    assert shown["expires_us"] is not None
    assert shown["behind_bytes"] == sum(extent.end - extent.start for extent in daemon.log.extents())


def test_holds_are_measured_off_the_event_loop_with_one_read_of_the_log(
    daemon: ServedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    for reader in ("cache", "index"):
        assert hold(daemon, reader, "orders").status == 200
    threads, extents = [], daemon.log.extents

    def watched() -> list[Extent]:
        threads.append(threading.current_thread().name)
        return extents()

    monkeypatch.setattr(daemon.log, "extents", watched)
    assert sorted(readers(daemon)) == ["cache", "index"]
    (thread,) = threads
    assert thread.startswith("search")


def test_hold_is_removed_only_by_its_account_or_an_admin(daemon: ServedLog) -> None:
    for reader in ("first", "second"):
        assert hold(daemon, reader, "orders").status == 200
    refused = remove(daemon, "first", "search")
    assert (refused.status, refused.json["type"]) == (403, "AccessDenied")
    # A forbidden account cannot even use the names of other accounts' holds.
    assert remove(daemon, "first", "named").status == 403
    assert remove(daemon, "first", "orders").status == 200
    assert readers(daemon) == ["second"]
    assert remove(daemon, "second").status == 200
    assert readers(daemon) == []
    missing = remove(daemon, "second")
    assert (missing.status, missing.json["type"]) == (404, "SourceMissing")
    # The name can be used again.
    assert hold(daemon, "first", "search").status == 200


def test_broken_hold_is_shown_to_its_account_and_to_admins(
    daemon: ServedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(daemon, "cache", "orders")
    start = daemon.log.earliest()
    assert start is not None
    daemon.log.broken_holds = (BrokenHold(Hold("cache", start, account="orders"), "it is too far back"),)
    broken_hold = {"reader": "cache", "position": str(start), "why": "it is too far back"}
    for account, broken in (("orders", [broken_hold]), ("search", []), (None, [broken_hold])):
        token = f"{account}-token" if account else TOKEN
        (status,) = daemon.ask("GET", "/v1/status", token=token).json["instances"]
        assert status["broken_holds"] == broken
    (shown,) = daemon.ask("GET", HOLDS).json["holds"]
    assert shown["broken"] == "it is too far back"
    monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN)
    listed = penstock("holds", "list", INSTANCE, "--url", f"http://127.0.0.1:{daemon.port()}")
    assert listed.lines[1].endswith("broken: it is too far back")


def test_hold_of_the_daemon_itself_cannot_be_set_or_removed() -> None:
    with captured_log() as log, serving(log, {"token": TOKEN}, ACCOUNTS) as daemon:
        start = log.earliest()
        assert start is not None
        kept = Hold(HOLD_NAME, start)
        Holds(log.disk, log.layout).put(kept)
        assert hold(daemon, HOLD_NAME, "orders").status == 403
        assert remove(daemon, HOLD_NAME, "orders").status == 403
        assert remove(daemon, HOLD_NAME).status == 403
        assert Holds(log.disk, log.layout).all() == [kept]


def test_expired_hold_is_removed(daemon: ServedLog) -> None:
    assert hold(daemon, "gone", "orders", seconds=0).status == 200
    assert readers(daemon) == []


def test_command_line_lists_and_removes_holds(daemon: ServedLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", TOKEN)
    url = f"http://127.0.0.1:{daemon.port()}"
    hold(daemon, "cache", "orders")
    shown = penstock("holds", "list", INSTANCE, "--url", url)
    assert shown.code == 0
    assert shown.lines[0].split() == ["reader", "account", "keeps", "expires", "position", "remark"]
    assert shown.lines[1].split()[:2] == ["cache", "orders"]
    assert penstock("holds", "list", INSTANCE, "--url", url, "--json").one["reader"] == "cache"
    assert "holds nothing any longer" in penstock("holds", "remove", INSTANCE, "cache", "--url", url).out
    again = penstock("holds", "remove", INSTANCE, "cache", "--url", url)
    assert (again.code, "there is no hold cache" in again.err) == (2, True)


def test_memory_log_writer_continues_during_a_hold_lookup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with MemoryLog.open_memory(LogSettings(), instance=INSTANCE) as log:
        Captured(log).run()
        position, locate, rooms = log.earliest(), log.locate_position, []
        assert position is not None

        def watched(position: Position) -> Located:
            rooms.append(not log._writing.locked())
            return locate(position)

        monkeypatch.setattr(log, "locate_position", watched)
        monkeypatch.setattr(log, "_writing", threading.Lock())
        log.hold(Hold("reader", position))
        assert rooms == [True]
