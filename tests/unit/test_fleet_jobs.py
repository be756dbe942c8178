# SPDX-License-Identifier: Apache-2.0
"""Jobs over a store in memory, with real processes that stand for pipelines."""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.coordinate.backends.memory import MemoryStore
from penstock.coordinate.lease import Lease
from penstock.coordinate.store import path_of
from penstock.errors import OptionInvalid, SourceMissing
from penstock.fleet.group import JOB_WORKERS
from penstock.fleet.job_tenure import JobTenure
from penstock.fleet.jobs import (
    EXITS_KEPT,
    JobSpec,
    apply_job,
    change_job,
    delete_job,
    job_path,
    job_status,
    move_job,
    read_job,
    read_run,
    run_path,
)
from penstock.fleet.member import FleetMember, Membership
from penstock.fleet.records import job_lease_path, names_below
from tests.support.suite.patience import wait_until

_numbers = itertools.count(1)

# Programs that run in place of the command line, with the verb, the file and the options as arguments.
FAILING = (
    sys.executable,
    "-c",
    "import sys; print('reads', open(sys.argv[2]).read()); sys.exit('it is broken')",
)
ENDING = (sys.executable, "-c", "print('done')")
WAITING = (sys.executable, "-c", "import signal; print('waits', flush=True); signal.pause()")
# A process that fails at once, while its child keeps running with the output open.
LEAVING = (
    sys.executable,
    "-c",
    "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); sys.exit(1)",
)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    """A store in memory."""
    store = MemoryStore(f"jobs-{next(_numbers)}")
    yield store
    store.close()


def job(text: str = "name: orders") -> JobSpec:
    """Return a job."""
    return JobSpec("orders", "run", ("--local",), text)


def tenure_of(store: MemoryStore, folder: Path, worker: str, command: tuple[str, ...]) -> JobTenure:
    """Run the job on a worker."""
    lease = Lease.acquire(store, store.session(), job_lease_path("orders"), worker)
    assert lease is not None
    return JobTenure(store, "orders", lease, folder, command)


def leave(tenure: JobTenure) -> None:
    """Stop the job on its worker."""
    tenure.leave("the test ends it", lambda: None)
    wait_until(lambda: tenure.left)


def test_job_is_restarted_after_a_failure_and_moves_with_its_lease(
    store: MemoryStore, tmp_path: Path
) -> None:
    apply_job(store, job())
    tenure = tenure_of(store, tmp_path, "a", FAILING)
    wait_until(lambda: read_run(store, "orders").starts >= 2)
    wait_until(lambda: read_run(store, "orders").exits)
    exits = read_run(store, "orders").exits
    assert (exits[0].status, exits[0].why.splitlines()[-1]) == (1, "it is broken")
    assert "reads name: orders" in (tmp_path / "orders" / "output.log").read_text()
    leave(tenure)
    assert job_status(store, "orders")["state"] == "unplaced"
    tenure = tenure_of(store, tmp_path, "b", WAITING)
    wait_until(lambda: job_status(store, "orders")["state"] == "running")
    status = job_status(store, "orders")
    assert status["worker"] == "b"
    assert status["starts"] > len(status["exits"])
    leave(tenure)
    assert not Path(f"/proc/{status['process']}").exists()


def test_job_that_ends_well_runs_again_only_when_it_is_changed(store: MemoryStore, tmp_path: Path) -> None:
    apply_job(store, job())
    tenure = tenure_of(store, tmp_path, "a", ENDING)
    wait_until(lambda: read_run(store, "orders").state == "ended")
    change_job(store, "orders", lambda spec: replace(spec, labels={"team": "orders"}))
    assert apply_job(store, job("name: orders # changed"))[0].version == 2
    wait_until(lambda: read_run(store, "orders").version == 2)
    wait_until(lambda: read_run(store, "orders").state == "ended")
    assert read_run(store, "orders").starts == 2
    leave(tenure)


def test_job_that_has_ended_does_not_run_again_on_another_worker(store: MemoryStore, tmp_path: Path) -> None:
    apply_job(store, job())
    tenure = tenure_of(store, tmp_path, "a", ENDING)
    wait_until(lambda: read_run(store, "orders").state == "ended")
    leave(tenure)
    tenure = tenure_of(store, tmp_path, "b", ENDING)
    wait_until(
        lambda: read_run(store, "orders").starts == 2 or job_status(store, "orders")["state"] == "ended"
    )
    assert (read_run(store, "orders").worker, read_run(store, "orders").starts) == ("b", 1)
    change_job(store, "orders", lambda spec: replace(spec, restarts=spec.restarts + 1))
    wait_until(lambda: read_run(store, "orders").starts == 2)
    wait_until(lambda: read_run(store, "orders").state == "ended")
    leave(tenure)
    # A job is deleted, but its worker records the run afterwards.
    run = read_run(store, "orders")
    delete_job(store, "orders")
    store.put(run_path("orders"), run.encode())
    apply_job(store, job())
    change_job(store, "orders", lambda spec: replace(spec, restarts=1))
    tenure = tenure_of(store, tmp_path, "a", ENDING)
    wait_until(lambda: read_run(store, "orders").starts == 3)
    leave(tenure)


def test_job_that_is_deleted_and_applied_again_replaces_the_running_process(
    store: MemoryStore, tmp_path: Path
) -> None:
    apply_job(store, job())
    tenure = tenure_of(store, tmp_path, "a", WAITING)
    wait_until(lambda: read_run(store, "orders").state == "running")
    process = read_run(store, "orders").process
    store.away(True)
    other = MemoryStore(store._name)
    delete_job(other, "orders")
    apply_job(other, job("name: orders # changed"))
    store.away(False)
    wait_until(lambda: read_run(store, "orders").process not in (None, process))
    assert "changed" in (tmp_path / "orders" / "orders.yaml").read_text()
    leave(tenure)
    other.close()


def test_paused_job_has_no_process_until_it_is_resumed(store: MemoryStore, tmp_path: Path) -> None:
    apply_job(store, job())
    worker = FleetMember(
        lambda: MemoryStore(store._name),
        JOB_WORKERS,
        Membership("a", "", "1", "", 1.0, 10.0, None),
        lambda store, name, lease: JobTenure(store, name, lease, tmp_path, WAITING),
    )
    worker.start(failed=lambda: None)
    try:
        wait_until(lambda: job_status(store, "orders")["state"] == "running")
        process = job_status(store, "orders")["process"]
        change_job(store, "orders", lambda spec: replace(spec, paused=True))
        wait_until(lambda: job_status(store, "orders")["state"] == "paused")
        assert not Path(f"/proc/{process}").exists()
        change_job(store, "orders", lambda spec: replace(spec, paused=False))
        wait_until(lambda: job_status(store, "orders")["state"] == "running")
        delete_job(store, "orders")
        wait_until(lambda: not worker.tenures())
        with pytest.raises(SourceMissing):
            read_job(store, "orders")
    finally:
        worker.stop()


def test_failed_process_takes_with_it_what_it_has_started(store: MemoryStore, tmp_path: Path) -> None:
    apply_job(store, job())
    tenure = tenure_of(store, tmp_path, "a", LEAVING)
    try:
        wait_until(lambda: read_run(store, "orders").exits)
        started = read_run(store, "orders").exits[0].why.splitlines()[-1]
        state = Path(f"/proc/{started}/stat")
        wait_until(lambda: not state.exists() or ") Z " in state.read_text())
    finally:
        leave(tenure)


def test_records_that_cannot_be_read_end_no_worker(store: MemoryStore, tmp_path: Path) -> None:
    store.put(job_path("later"), b'{"format": 99}')
    store.put(run_path("users"), b'{"format": 99}')
    apply_job(store, replace(job(), name="users"))
    later = store.session()
    later.put_ephemeral(JOB_WORKERS.members + path_of("later"), b'{"format": 99}')
    worker = FleetMember(
        lambda: MemoryStore(store._name),
        JOB_WORKERS,
        Membership("a", "", "1", "", 1.0, 10.0, None),
        lambda store, name, lease: JobTenure(store, name, lease, tmp_path, WAITING),
    )
    apply_job(store, job())
    worker.start(failed=lambda: None)
    try:
        wait_until(lambda: worker.failure or read_run(store, "orders").state == "running")
        assert worker.failure is None
        # The worker has the other job too, which may have run before.
        wait_until(lambda: "later" in worker.tenures())
        assert "users" not in worker.tenures()
    finally:
        worker.stop()
        later.close()


def test_exits_and_output_are_bounded(store: MemoryStore, tmp_path: Path) -> None:
    apply_job(store, job())
    tenure = tenure_of(store, tmp_path, "a", (sys.executable, "-c", "print('x' * 5000); raise SystemExit(3)"))
    for number in range(1, EXITS_KEPT + 3):
        wait_until(lambda number=number: read_run(store, "orders").starts >= number)  # type: ignore[misc]
        wait_until(lambda: read_run(store, "orders").state == "waiting")
        change_job(store, "orders", lambda spec: replace(spec, restarts=spec.restarts + 1))
    leave(tenure)
    run = read_run(store, "orders")
    assert len(run.exits) == EXITS_KEPT
    assert {len(line) for line in run.lines} == {500}


def test_apply_refuses_a_state_that_depends_on_the_host(tmp_path: Path) -> None:
    file = tmp_path / "orders.yaml"
    words = ["apply", str(file), "--coordination", f"sqlite://{tmp_path}/coordination.db"]
    for state in ("", "state: sqlite:state.db\n"):
        file.write_text(f"{state}source: mysql://u@h\n")
        refused = CliRunner().invoke(make_app(), words)
        assert refused.exit_code == 2, refused.output
    file.write_text("state: sqlite:///var/lib/penstock/state.db\nsource: mysql://u@h\n")
    assert CliRunner().invoke(make_app(), words).stdout == "orders: version 1\n"


@pytest.mark.parametrize("name", ["../etc", "", ".hidden", "a b", "a/b"])
def test_name_that_is_no_file_name_is_refused(store: MemoryStore, name: str) -> None:
    with pytest.raises(OptionInvalid, match="cannot name a job"):
        apply_job(store, replace(job(), name=name))


def test_new_version_of_a_paused_job_stays_paused(store: MemoryStore) -> None:
    apply_job(store, job())
    change_job(store, "orders", lambda spec: replace(spec, paused=True))
    applied, changed = apply_job(store, job("name: orders # changed"))
    assert (applied.version, applied.paused, changed) == (2, True, True)


def test_job_moves_to_the_chosen_worker_and_returns_to_it(store: MemoryStore, tmp_path: Path) -> None:
    apply_job(store, job())

    def start(name: str) -> FleetMember:
        worker = FleetMember(
            lambda: MemoryStore(store._name),
            JOB_WORKERS,
            Membership(name, "", "1", "", 1.0, 10.0, None),
            lambda store, work, lease: JobTenure(store, work, lease, tmp_path / name, WAITING),
        )
        worker.start(failed=lambda: None)
        return worker

    def runs_on(name: str) -> bool:
        status = job_status(store, "orders")
        return (status["worker"], status["state"]) == (name, "running")

    workers = {"a": start("a")}
    try:
        wait_until(lambda: runs_on("a"))
        with pytest.raises(SourceMissing, match="no worker 'b'"):
            move_job(store, "orders", "b")
        workers["b"] = start("b")
        wait_until(lambda: "b" in names_below(store, JOB_WORKERS.members))
        move_job(store, "orders", "b")
        wait_until(lambda: runs_on("b"))
        assert apply_job(store, job("name: orders # changed"))[0].worker == "b"
        workers["b"].stop()
        wait_until(lambda: runs_on("a"))
        workers["b"] = start("b")
        wait_until(lambda: runs_on("b"))
    finally:
        for worker in workers.values():
            worker.stop()
