# SPDX-License-Identifier: Apache-2.0
"""Jobs and members of a fleet over HTTP and in the console: with a preview, for full administrators, and
audited.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.console import fleet_pages
from penstock.coordinate.backends.memory import MemoryStore
from penstock.coordinate.store import path_of
from penstock.fleet.control import FleetControl
from penstock.fleet.group import JOB_WORKERS
from penstock.fleet.jobs import JobExit, JobRun, JobSpec, apply_job, change_job, read_job, run_path
from penstock.fleet.records import DRAINED, JOBS, MemberRecord, names_below
from penstock.fleet.status import fleet_status
from penstock.logstore.log import Log
from tests.support.daemon.console import console_of
from tests.support.daemon.served_log import Answered, ServedLog, captured_log, serving
from tests.support.suite.nonempty import each

HOSTILE = "<script>alert(1)</script>\"'&{{1234567*9}}"
ACCOUNTS: list[dict[str, Any]] = [
    {"name": "reader", "token": "reader-token"},
    {"name": "limited", "token": "limited-token", "admin": True, "tables": ["shop.*"]},
]
WORKERS = ("w1", f"w2/{HOSTILE}")
JOB_WORDS = ("pause", "resume", "restart", "delete", "move")

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Fleet:
    """A daemon whose store has two workers and a job, which has failed once."""

    daemon: ServedLog
    store: MemoryStore

    def post(self, call: str, token: str | None = None, **body: Any) -> Answered:
        return self.daemon.ask("POST", f"/v1/{call}", body, token=token)

    def job(self) -> JobSpec | None:
        return read_job(self.store, "orders") if names_below(self.store, JOBS) else None

    def drained(self) -> list[str]:
        return names_below(self.store, DRAINED)

    def member_call(self, member: str, word: str) -> str:
        return f"fleet/members{path_of(member)}/{word}"


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with captured_log() as log:
        yield log


@pytest.fixture
def fleet(log: Log) -> Iterator[Fleet]:
    name = f"fleet-control-{next(_numbers)}"
    store = MemoryStore(name)
    session = store.session()
    for worker in WORKERS:
        record = MemberRecord(worker, "", "1").encode()
        session.put_ephemeral(JOB_WORKERS.members + path_of(worker), record)
    apply_job(store, JobSpec("orders", "run", ("--local",), f"name: orders # {HOSTILE}"))
    run = JobRun(exits=(JobExit(1, f"it is broken {HOSTILE}", 1),), lines=("started", HOSTILE), starts=1)
    store.put(run_path("orders"), run.encode())
    control = FleetControl(lambda: MemoryStore(name))
    with (
        serving(
            log,
            {"token": "a-token"},
            ACCOUNTS,
            control=control,
            fleet_status=lambda: fleet_status(store),
        ) as daemon,
        closing(store),
    ):
        yield Fleet(daemon, store)


def audit_of(logs: Any) -> list[tuple[str, str]]:
    return [(line["action"], line["account"]) for line in logs if line["event"] == "audit"]


def test_jobs_are_shown_without_the_text_of_their_pipelines(fleet: Fleet) -> None:
    (shown,) = fleet.daemon.ask("GET", "/v1/jobs").json["jobs"]
    job = fleet.daemon.ask("GET", "/v1/jobs/orders").json
    assert (shown["name"], shown["starts"], "text" in shown, "text" in job) == ("orders", 1, False, False)
    assert (job["command"], job["lines"]) == (
        ["penstock", "run", "orders.yaml", "--local"],
        ["started", HOSTILE],
    )
    assert fleet.daemon.ask("GET", "/v1/jobs/nothing").status == 404


def test_jobs_and_members_are_for_full_administrators(fleet: Fleet) -> None:
    calls = [f"jobs/orders/{word}" for word in JOB_WORDS]
    calls += [fleet.member_call("w1", word) for word in ("drain", "undrain")]
    before = fleet.job()
    for token in ("reader-token", "limited-token"):
        for call in each(calls):
            assert fleet.post(call, token, dry_run=False).status == 403, call
        for path in ("/v1/jobs", "/v1/jobs/orders"):
            assert fleet.daemon.ask("GET", path, token=token).status == 403
    assert (fleet.job(), fleet.drained()) == (before, [])


def test_dry_run_of_a_change_is_the_default_and_changes_nothing(fleet: Fleet) -> None:
    before = fleet.job()
    with capture_logs() as logs:
        for word in each(JOB_WORDS):
            answer = fleet.post(f"jobs/orders/{word}").json
            assert (answer["before"]["name"], answer["dry_run"]) == ("orders", True)
        assert fleet.post(fleet.member_call("w1", "drain")).json["before"] == []
    assert (fleet.job(), fleet.drained(), audit_of(logs)) == (before, [], [])


def test_job_is_paused_resumed_restarted_moved_and_deleted(fleet: Fleet) -> None:
    with capture_logs() as logs:
        for word in ("pause", "restart", "resume"):
            assert fleet.post(f"jobs/orders/{word}", dry_run=False).status == 200
            job = fleet.job()
            assert job is not None
            assert (job.paused, job.restarts) == (word != "resume", int(word != "pause"))
        assert fleet.post("jobs/orders/move", worker=WORKERS[1], dry_run=False).status == 200
        moved = fleet.job()
        assert moved is not None
        assert moved.worker == WORKERS[1]
        assert fleet.post("jobs/orders/move", worker="nobody").status == 404
        assert fleet.post("jobs/orders/delete", dry_run=False).status == 200
        assert fleet.job() is None
        assert fleet.post("jobs/orders/pause", dry_run=False).status == 404
    actions = [action for action, _ in audit_of(logs)]
    assert actions == ["pause job", "restart job", "resume job", "move job", "delete job"]


def test_member_is_drained_and_undrained(fleet: Fleet) -> None:
    drain, undrain = (fleet.member_call(WORKERS[1], word) for word in ("drain", "undrain"))
    assert fleet.post(undrain).status == 404
    with capture_logs() as logs:
        assert fleet.post(drain, at_once=True, dry_run=False).status == 200
        assert fleet.drained() == [WORKERS[1]]
        last = fleet.post(fleet.member_call("w1", "drain"))
        assert (last.status, "no other member runs" in last.json["detail"]) == (400, True)
        assert fleet.post(undrain, dry_run=False).status == 200
    assert fleet.drained() == []
    assert audit_of(logs) == [("drain member", "everything"), ("undrain member", "everything")]


def test_daemon_without_a_store_has_no_jobs(log: Log) -> None:
    with serving(log) as daemon:
        assert daemon.ask("GET", "/v1/jobs").json == {"coordination": False, "jobs": [], "workers": []}
        assert daemon.ask("POST", "/v1/jobs/orders/pause", {}).status == 404


# --- In the console ---------------------------------------------------------------------------


def _has(paused: bool, restarts: int = 0, worker: str | None = None) -> Callable[[Fleet], bool]:
    def has(fleet: Fleet) -> bool:
        job = fleet.job()
        return job is not None and (job.paused, job.restarts, job.worker) == (paused, restarts, worker)

    return has


OPERATIONS: dict[str, tuple[dict[str, Any], str, Callable[[Fleet], bool]]] = {
    "/job/pause": ({}, "does not start again before the job is resumed", _has(True)),
    "/job/restart": ({}, "A job that has ended is started too", _has(False, 1)),
    "/job/move": ({"worker": WORKERS[1]}, f"{WORKERS[1]} starts it", _has(False, 0, WORKERS[1])),
    "/job/delete": ({}, "Its target and the pipeline's state stay", lambda fleet: fleet.job() is None),
    "/fleet/drain": (
        {"at_once": "1"},
        "gets no work until it is undrained",
        lambda fleet: fleet.drained() == [WORKERS[1]],
    ),
}


@pytest.mark.parametrize("path", OPERATIONS)
def test_page_says_what_an_operation_does_before_it_is_confirmed(fleet: Fleet, path: str) -> None:
    values, effect, is_done = OPERATIONS[path]
    address: dict[str, Any] = {"daemon": f"http://127.0.0.1:{fleet.daemon.port()}"}
    address |= {"job": "orders"} if path.startswith("/job") else {"member": WORKERS[1]}
    with console_of(fleet.daemon) as browser, capture_logs() as logs:
        browser.post("/login", {"token": "a-token"})
        source = browser.get("/job", **address) if path.startswith("/job") else browser.get("/fleet")
        assert path in source.text
        page = browser.get(path, **address, **values)
        assert (page.status, effect in page.words, "<script>alert" in page.text) == (200, True, False)
        fields = {**address, **values, "csrf": page.field("csrf")}
        assert browser.post(f"{path}/confirm", fields | {"csrf": "x"}).status == 403
        assert not is_done(fleet)
        assert browser.post(f"{path}/confirm", fields).status == 303
        assert is_done(fleet)
        browser.post("/logout", fields)
        for token in ("reader-token", "limited-token"):
            browser.post("/login", {"token": token})
            fields["csrf"] = browser.get("/").field("csrf")
            assert f"{path}/confirm" not in browser.get(path, **address, **values).text
            assert browser.post(f"{path}/confirm", fields).status == 403
            browser.post("/logout", fields)
    done = [(line["action"], line["outcome"]) for line in logs if "outcome" in line]
    action = OPERATIONS[path] and next(
        line["action"] for line in logs if line.get("action", "login") != "login"
    )
    assert done == [(action, "done"), (action, "failed")]


def test_resumed_job_and_undrained_member_are_done_once(fleet: Fleet) -> None:
    url = f"http://127.0.0.1:{fleet.daemon.port()}"
    with console_of(fleet.daemon) as browser:
        browser.post("/login", {"token": "a-token"})
        nothing = browser.get("/job/resume", daemon=url, job="orders")
        assert ("There is nothing to do." in nothing.words, "confirm" in nothing.text) == (True, False)
        fleet.post("jobs/orders/pause", dry_run=False)
        fleet.post(fleet.member_call("w1", "drain"), dry_run=False)
        assert "/job/resume" in browser.get("/job", daemon=url, job="orders").text
        assert "/fleet/undrain" in browser.get("/fleet").text
        csrf = browser.get("/job/resume", daemon=url, job="orders").field("csrf")
        fields = {"csrf": csrf, "daemon": url, "job": "orders", "member": "w1"}
        for path in ("/job/resume", "/fleet/undrain"):
            assert browser.post(f"{path}/confirm", fields).status == 303
    assert (_has(False)(fleet), fleet.drained()) == (True, [])


def test_pages_of_the_fleet_show_its_workers_jobs_and_output(fleet: Fleet) -> None:
    url = f"http://127.0.0.1:{fleet.daemon.port()}"
    with console_of(fleet.daemon) as browser:
        browser.post("/login", {"token": "a-token"})
        shown, job = browser.get("/fleet"), browser.get("/job", daemon=url, job="orders")
        for page in (shown, job):
            assert (page.status, "<script>alert" in page.text) == (200, False)
        assert WORKERS[1] in shown.words
        assert "orders unplaced" in shown.words
        assert f"started {HOSTILE}" in job.words
        assert f"it is broken {HOSTILE}" in job.words
        assert "no job 'nothing'" in browser.get("/job", daemon=url, job="nothing").words
        browser.post("/logout", {"csrf": shown.field("csrf")})
        browser.post("/login", {"token": "reader-token"})
        limited = browser.get("/fleet")
        assert (WORKERS[1] in limited.words, "orders" in limited.words) == (True, False)
        assert browser.get("/job", daemon=url, job="orders").status == 403


def test_list_of_many_jobs_asks_the_store_once_and_shows_the_most_urgent(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_pages, "_ROWS_MAX", 2)
    for number in range(3):
        apply_job(fleet.store, JobSpec(f"users-{number}", "run", (), ""))
        change_job(fleet.store, f"users-{number}", lambda job: replace(job, paused=True))
    fleet.store.put(JOBS + path_of("broken"), b"what is this")
    asked: list[str] = []
    monkeypatch.setattr(MemoryStore, "get", lambda store, path, latest=False: asked.append(path))
    jobs = {job["name"]: job for job in fleet.daemon.ask("GET", "/v1/jobs").json["jobs"]}
    assert (asked, jobs["broken"]["state"], jobs["orders"]["failures"]) == ([], "unreadable", 1)
    monkeypatch.undo()
    monkeypatch.setattr(fleet_pages, "_ROWS_MAX", 2)
    with console_of(fleet.daemon) as browser:
        browser.post("/login", {"token": "a-token"})
        shown = browser.get("/fleet")
        assert "The 2 most urgent of 5 jobs are shown" in shown.words
        assert [name in shown.words for name in ("orders", "broken", "users-0")] == [True, True, False]
        assert "users-2" in browser.get("/fleet", find="s-2").words
        assert "No job has this name or state" in browser.get("/fleet", find="<script>").words


def test_workers_of_daemons_that_are_in_no_fleet_are_shown(fleet: Fleet) -> None:
    control = FleetControl(lambda: MemoryStore(fleet.store._name))
    with serving(fleet.daemon.log, control=control) as alone, console_of(alone) as browser:
        url = f"http://127.0.0.1:{alone.port()}"
        assert [worker["member"] for worker in alone.ask("GET", "/v1/jobs").json["workers"]] == list(WORKERS)
        shown = browser.get("/fleet")
        assert (WORKERS[1] in shown.words, "/fleet/drain" in shown.text) == (True, True)
        form = browser.get("/job/move", daemon=url, job="orders")
        assert ("<datalist" in form.text, "any worker may run it" in form.words) == (True, True)
