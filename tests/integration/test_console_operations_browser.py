# SPDX-License-Identifier: Apache-2.0
"""The operations of the console in a real browser: subscriptions, instances, members, jobs, a pipeline.

Each operation is done in the browser alone, and its effect is read from the source itself.
"""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from penstock.client import Subscriber
from penstock.coordinate.store import open_store
from penstock.coordinate.subscription_record import Subscription, Subscriptions
from penstock.fleet.jobs import job_status
from penstock.fleet.records import DRAINED, JOBS, names_below
from penstock.fleet.wanted import read_wanted
from penstock.pipeline.settings import load_pipeline
from penstock.pipeline.state import PipelineState
from tests.integration.test_console_browser import browser, is_listening, save_pictures  # noqa: F401
from tests.integration.test_instance_changes import ENVIRONMENT, section_of
from tests.support.daemon.process import PENSTOCK, ROOT, DaemonProcess
from tests.support.daemon.subscribing import Running
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.chromium import Chromium
from tools.servers import Server
from tools.servers.ports import free_port

WORKERS = ("w1", "w2")


@dataclass(frozen=True)
class Operated:
    """Two daemons of a fleet, two workers with a job, and the console that runs in the first daemon."""

    daemons: dict[str, DaemonProcess]
    server: Server
    browser: Chromium
    console: str
    table: str
    coordination: str
    pipeline: Path

    def address(self, **fields: str) -> dict[str, str]:
        return {"daemon": f"http://127.0.0.1:{self.daemons['a'].port}", **fields}

    def operate(self, path: str, **fields: str) -> None:
        """Open the page of an operation, check the preview, and confirm it."""
        self.browser.open(f"{self.console}{path}?{urlencode(fields)}")
        self.confirm(path)

    def confirm(self, path: str) -> None:
        """Check the preview of an operation, and confirm it."""
        button = f"form[action='{path}/confirm'] button"
        assert self.browser.run(f'document.querySelector("{button}") !== null'), self.browser.text
        save_pictures(self.browser, f"operation{path.replace('/', '-')}")
        self.browser.click(button)
        assert self.browser.run("document.querySelector('main') !== null")

    def subscription(self) -> Subscription | None:
        with closing(open_store(self.coordination)) as store:
            return Subscriptions(store).get("shop", "orders-cache")

    def job(self) -> dict[str, Any]:
        with closing(open_store(self.coordination)) as store:
            return job_status(store, "feed")

    def names(self, path: str) -> list[str]:
        with closing(open_store(self.coordination)) as store:
            return names_below(store, path)

    def state(self) -> PipelineState:
        return PipelineState.open(load_pipeline(self.pipeline).state, "feed")

    def capturer(self) -> str | None:
        (shop,) = (
            row for row in self.daemons["a"].get("/v1/fleet")["instances"] if row["instance"] == "shop"
        )
        captured_by: str | None = shop["captured_by"]
        return captured_by


@contextmanager
def worker(name: str, folder: Path, coordination: str) -> Iterator[None]:
    """Run a worker inside the block."""
    words = ["worker", "--name", name, "--folder", str(folder / name), "--session", "2"]
    with (folder / f"{name}.output").open("ab") as output:
        process = subprocess.Popen(
            [*PENSTOCK, *words, "--coordination", coordination],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS_MAX)


@pytest.fixture
def operated(
    mysql_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
    browser: Chromium,  # noqa: F811
) -> Iterator[Operated]:
    table = f"{fresh_database(mysql_server)}.orders"
    mysql_server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY, status VARCHAR(80))")
    coordination, port = f"sqlite:///{tmp_path}/coordination.db", free_port()
    file = tmp_path / "feed.yaml"
    values = {
        "name": "feed",
        "state": f"sqlite:///{tmp_path}/pipelines.db",
        "source": {"url": mysql_server.url("root"), "name": "shop", "tables": table},
        "sink": {"files": {"path": str(tmp_path / "feed")}},
        "batch": {"interval": 0},
    }
    file.write_text(yaml.safe_dump(values))
    daemons: dict[str, DaemonProcess] = {}
    with ExitStack() as stack:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            settings = {
                "coordination": coordination,
                "fleet": {"member": name, "session": "2s"},
                "instances": {"shop": {**section_of(mysql_server), "start": "latest"}},
            }
            if name == "a":
                settings["console"] = {"listen": f"127.0.0.1:{port}", "pipelines": [str(file)]}
            daemons[name] = stack.enter_context(DaemonProcess(tmp_path / name, settings, ENVIRONMENT))
        for name in WORKERS:
            stack.enter_context(worker(name, tmp_path, coordination))
        words = ["apply", str(file), "--local", "--coordination", coordination]
        subprocess.run([*PENSTOCK, *words], cwd=ROOT, check=True, timeout=WAIT_SECONDS_MAX)
        wait_until(lambda: is_listening(port))
        console = f"http://127.0.0.1:{port}"
        yield Operated(daemons, mysql_server, browser, console, table, coordination, file)


@pytest.mark.deep(
    guard="tests/unit/test_fleet_control.py::test_page_says_what_an_operation_does_before_it_is_confirmed"
)
def test_each_operation_has_its_effect_where_the_truth_is(operated: Operated) -> None:
    wait_until(lambda: operated.capturer() is not None)
    wait_until(lambda: operated.job()["state"] == "running")
    operated.server.sql(f"INSERT INTO {operated.table} VALUES (1, 'new'), (2, 'paid')")
    _operate_subscription(operated)
    _operate_instances(operated)
    _drain_and_undrain(operated)
    _operate_job(operated)
    _operate_pipeline(operated)
    page = operated.browser
    page.open(f"{operated.console}/events?kind=audit")
    for action in ("delete subscription", "set instance", "drain member", "delete job", "rewind pipeline"):
        assert action in page.text, action
    for path in ("/fleet", "/subscriptions"):
        page.open(f"{operated.console}{path}?lang=zh")
        save_pictures(page, f"operated{path.replace('/', '-')}-zh")
    assert page.errors == []
    assert all(address.startswith(operated.console) for address in page.requested)


def _operate_subscription(operated: Operated) -> None:
    """A subscription gets a filter and a third shard, and one shard is assigned to a member. Then the
    subscription is deleted.
    """
    hosts = ",".join(f"127.0.0.1:{daemon.port}" for daemon in operated.daemons.values())
    subscriber = Subscriber(
        f"penstock://{hosts}/shop",
        name="orders-cache",
        tables=[operated.table],
        shards=2,
        coordination=operated.coordination,
        begin="earliest",
    )
    address = operated.address(instance="shop", subscription="orders-cache")

    def known() -> Subscription:
        subscription = operated.subscription()
        assert subscription is not None
        return subscription

    with Running(subscriber) as running:
        running.wait_owning(2)
        page = operated.browser
        page.open(f"{operated.console}/subscriptions")
        page.wait_until("document.body.innerText.includes('orders-cache')")
        save_pictures(page, "operated-subscriptions")
        operated.operate("/subscriptions/set", **address, where="status = 'paid'")
        assert known().selection.where == "status = 'paid'"
        operated.operate("/subscriptions/resize", **address, shards="3")
        assert known().shard_count == 3
        running.wait_owning(3)
        with closing(open_store(operated.coordination)) as store:
            (member,) = Subscriptions(store).members(known())
        operated.operate("/subscriptions/move", **address, shard="1", member=member)
        assert known().pins == {1: member}
    operated.operate("/subscriptions/delete", **address)
    assert operated.subscription() is None


def _operate_instances(operated: Operated) -> None:
    """Another instance is captured, then removed, and then forgotten."""
    daemon, page = operated.daemons["a"], operated.browser

    def captured() -> list[str]:
        return [instance["instance"] for instance in daemon.get("/v1/instances")["instances"]]

    page.open(f"{operated.console}/instances/apply?{urlencode(operated.address())}")
    document = yaml.safe_dump({"instance": "users", "settings": section_of(operated.server)})
    page.run(f"document.querySelector('textarea').value = {document!r}")
    page.click("form.search button")
    assert "Captured from now on: users" in page.text
    assert captured() == ["shop"]
    operated.confirm("/instances/apply")
    wait_until(lambda: captured() == ["shop", "users"])
    page.open(f"{operated.console}/fleet")
    page.wait_until("document.body.innerText.includes('users')")
    save_pictures(page, "fleet")
    operated.operate("/instance/remove", **operated.address(instance="users"))
    wait_until(lambda: captured() == ["shop"])
    operated.operate("/instance/forget", **operated.address(instance="users"))
    with closing(open_store(operated.coordination)) as store:
        assert read_wanted(store) == {}


def _drain_and_undrain(operated: Operated) -> None:
    """The member that captures hands over to the other member, and receives work again."""
    member = operated.capturer()
    assert member is not None
    operated.operate("/fleet/drain", **operated.address(member=member), at_once="1")
    assert operated.names(DRAINED) == [member]
    wait_until(lambda: operated.capturer() not in (None, member))
    operated.operate("/fleet/undrain", **operated.address(member=member))
    assert operated.names(DRAINED) == []


def _operate_job(operated: Operated) -> None:
    """A job is paused, resumed, restarted, moved and deleted. Each operation has its effect on a worker."""
    page, address = operated.browser, operated.address(job="feed")
    page.open(f"{operated.console}/job?{urlencode(address)}")
    assert "penstock run feed.yaml --local" in page.text
    save_pictures(page, "job")
    operated.operate("/job/pause", **address)
    wait_until(lambda: operated.job()["state"] == "paused")
    operated.operate("/job/resume", **address)
    wait_until(lambda: operated.job()["state"] == "running")
    before = operated.job()
    other = next(name for name in WORKERS if name != before["worker"])
    operated.operate("/job/move", **address, worker=other)
    wait_until(lambda: (operated.job()["worker"], operated.job()["state"]) == (other, "running"))
    starts = operated.job()["starts"]
    operated.operate("/job/restart", **address)
    wait_until(lambda: operated.job()["starts"] > starts and operated.job()["state"] == "running")
    table = {"store": "0", "name": "feed", "sink": "", "source": "shop", "table": operated.table}
    page.open(f"{operated.console}/tables/resnapshot?{urlencode(table)}")
    for condition in ("no such (", "id > 1"):
        page.run(f"document.querySelector('input[name=where]').value = '{condition}'")
        page.click("form.search button")
        assert ("is refused" in page.text) == (condition != "id > 1")
    operated.confirm("/tables/resnapshot")
    with closing(operated.state()) as state:
        assert [request.where for request in state.requests()] == ["id > 1"]
    operated.operate("/job/delete", **address)
    assert operated.names(JOBS) == []


def _operate_pipeline(operated: Operated) -> None:
    """The pipeline of the deleted job skips a transaction, is rewound, and is reset."""
    with closing(operated.state()) as state:
        wait_until(lambda: state.runner() is None)
        checkpoint = state.checkpoint()
        assert checkpoint is not None
        before = checkpoint.offsets["shop"]
        operated.server.sql(f"DELETE FROM {operated.table} WHERE id = 2")
        head = operated.server.sql("SHOW BINARY LOGS")[-1]
        assert head[0] == before["file"]
        address = {"store": "0", "name": "feed"}
        operated.operate("/pipelines/skip", **address, position=f"{head[0]}:{int(head[1]) - 40}")
        skipped = state.checkpoint()
        assert skipped is not None
        assert len(skipped.skips["shop"]) == 1
        position = f"{before['file']}:{before['offset']}"
        operated.operate("/pipelines/rewind", **address, to=position)
        rewound = state.checkpoint()
        assert rewound is not None
        assert rewound.offsets["shop"]["offset"] == before["offset"]
        operated.operate("/pipelines/reset", **address)
        assert state.checkpoint() is None
