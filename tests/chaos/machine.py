# SPDX-License-Identifier: Apache-2.0
"""A fleet under random faults: three daemons, two workers, three nodes of ZooKeeper, busy writers.

Every host has its own folders and reaches the others through proxies. A seed determines the faults. Each
fault lasts for a while and may overlap with other faults. When it has ended, every reader of the log must
continue.

At the end, all copies of the log must be equal to each other and to the server's binlog. The subscriber and
Canal's own Java cluster client must have received every transaction in order. The feed must contain each
change once, the mirror must equal the tables, and every commit must have waited for its acknowledgement.
"""

import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
import structlog
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.client import Subscriber
from penstock.errors import SourceMissing
from penstock.logstore.reader import LogReader
from tests.chaos.canal import CanalFollower
from tests.chaos.hosts import INSTANCE, Member, Worker, canal_node, cut_off, freeze, restore, thaw
from tests.chaos.servers import Servers
from tests.chaos.traffic import NEWEST, Follower, Writer
from tests.support.canal.peers import peer
from tests.support.capture.captured_log import assert_equal_to_server, head_of
from tests.support.capture.replicas import gtids_executed
from tests.support.fleet.copies import assert_equal_logs
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.postgres import Postgres
from tools.servers import Server
from tools.zookeeper import Ensemble

DATABASE = "chaos"
WRITERS = 2
# Whether the daemons of a run capture in separate processes, and how they serve.
KINDS = (
    {"processes": "single", "serve": "written"},
    {"processes": "single", "serve": "durable"},
    {"processes": "per-instance", "serve": "written"},
)
# The durations of faults: some shorter and some longer than a session of the coordination store.
FAULT_SECONDS_MAX = 8.0
TOGETHER = 0.4
# After a fault, processes start again, which takes long on a busy machine.
PROGRESS_SECONDS_MAX = 300.0

_log = structlog.get_logger(__name__)

# Undoes a fault.
Undo = Callable[[], None]


class Chaos:
    """A fleet, and the faults injected into it. As a context manager, it runs all processes inside the
    block.
    """

    def __init__(self, folder: Path, seed: int, only: str = "") -> None:
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self.journal: list[str] = []
        self._random = random.Random(seed)
        self._only = only
        self._seed = seed
        self._started_at = time.monotonic()
        self._stack = ExitStack()
        # The current faults, by the name of their host.
        self._current: dict[str, Fault] = {}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            enter = stack.enter_context
            self.servers = enter(Servers())
            self.ensemble = enter(Ensemble())
            self.target = enter(Postgres())
            self.servers.primary.sql(f"CREATE DATABASE {DATABASE}")
            tables = [f"{DATABASE}.t{number}" for number in range(WRITERS)]
            self.writers = [Writer(self.servers, table, f"{self._seed} {table}") for table in tables]
            root = f"chaos-{self._seed}"
            self.coordination = f"zookeeper://{self.ensemble.hosts}/{root}"
            kind = self._random.choice(KINDS)
            self._note(f"{kind}")
            self.members = {
                name: enter(Member(name, self.folder / name, self.ensemble, root, self.servers.all, kind))
                for name in "abc"
            }
            self.workers = {
                name: enter(Worker(name, self.folder / name, self.ensemble, root)) for name in ("w1", "w2")
            }
            self.holders()
            for writer in self.writers:
                enter(writer)
            self.follower = enter(Follower(partial(self._subscriber, tables)))
            canal_hosts = f"{self.ensemble.hosts}/{canal_node(root)}"
            self.canal = enter(
                CanalFollower(self.folder, peer("java"), canal_hosts, INSTANCE, f"{DATABASE}\\..*")
            )
            self._apply_job(tables)
            self._faults = [fault for fault in self._all_faults() if re.search(self._only, fault.name)]
            self._wait_for_progress()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note("\n".join(self.journal))
        self._stack.close()

    @property
    def url(self) -> str:
        """The address of the instance at all members."""
        hosts = ",".join(member.address for member in self.members.values())
        return f"penstock://{hosts}/{INSTANCE}"

    def play(self, seconds: float) -> None:
        """Begin and end faults for a given time. After each fault, the fleet must continue."""
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            undos = [self._begin_fault()]
            while self._random.random() < TOGETHER and any(map(self._free_hosts, self._faults)):
                time.sleep(self._random.uniform(0.0, FAULT_SECONDS_MAX / 4))
                undos.append(self._begin_fault())
            # Let the faults last for a random time before undoing them.
            time.sleep(self._random.uniform(0.1, FAULT_SECONDS_MAX))
            self._random.shuffle(undos)
            for undo in undos:
                undo()
            self._wait_for_progress()

    def prove(self) -> None:
        """Prove that nothing was lost, repeated or changed. Call it after the writers have ended."""
        for writer in self.writers:
            writer.__exit__()
            if writer.failure is not None:
                raise writer.failure
        self._wait_for_progress()
        self._note(f"Canal's client was started {self.canal.starts} times")
        self._prove_copies()
        for writer in self.writers:
            assert writer.step, "nothing was committed"
            rows, steps = writer.rows(), list(range(writer.step + 1))
            assert rows[NEWEST][0] == writer.step
            assert list(dict.fromkeys(self.follower.steps[writer.table])) == steps
            assert list(dict.fromkeys(self.canal.steps[writer.table])) == steps
            assert self.follower.rows[writer.table] == rows
            fed = self._target(
                "feed",
                f"SELECT step FROM {writer.table} WHERE id = {NEWEST}"
                " AND _change_type IN ('insert', 'update_postimage') ORDER BY step",
            )
            assert [step for (step,) in fed] == steps
            ((changes,),) = self._target(
                "feed", f"SELECT count(*) FROM {writer.table} WHERE _change_type <> 'update_preimage'"
            )
            assert changes == writer.changes
            mirrored = self._target("mirror", f"SELECT id, step, note FROM {writer.table}")
            assert {id_: (step, note) for id_, step, note in mirrored} == rows
        for name, member in self.members.items():
            assert "Traceback" not in member.daemon.said(), f"a defect of {name}: {member.daemon.output}"
        for name, worker in self.workers.items():
            assert "Traceback" not in worker.said(), f"a defect of {name}"

    def _prove_copies(self) -> None:
        wait_until(lambda: gtids_executed(self.servers.replica) == gtids_executed(self.servers.primary))
        servers = self.servers.by_key()
        wait_until(self._are_copies_equal, PROGRESS_SECONDS_MAX)
        first, second = self.holders()
        epochs = self._log(first).epochs.epochs
        self._note(f"epochs: {[(epoch.epoch, str(epoch.position)) for epoch in epochs]}")
        latest = servers[epochs[-1].server_key]
        head = head_of(latest)
        self.members[first].daemon.wait_for_head(head.file, head.offset)
        wait_until(self._are_copies_equal)
        for name in (first, second):
            # If both members with a copy were unavailable at the same time, the current logs may begin later
            # than the first log did.
            assert_equal_to_server(self.members[name].log_folder, latest)
        assert_equal_logs(self._log(first), self._log(second))
        for name, member in self.members.items():
            if member.log_folder.exists():
                _assert_equal_to_servers(self._log(name), servers)

    def _are_copies_equal(self) -> bool:
        first, second = self.holders()
        try:
            return self._log(first).visible == self._log(second).visible
        except SourceMissing:
            # A dead host counts as a copy until its session has ended.
            return False

    def _log(self, name: str) -> LogReader:
        return LogReader.open(self.members[name].log_folder)

    # --- The fleet --------------------------------------------------------------------------

    def holders(self) -> tuple[str, str]:
        """Wait until one member captures and another has a copy in step; return both."""
        found: list[tuple[str, str]] = []

        def are_known() -> bool:
            row = next(iter(self.members.values())).fleet_row()
            copies = [copy["member"] for copy in row["copies"] if copy["state"] == "in step"]
            if row["captured_by"] in self.members and copies:
                found.append((row["captured_by"], copies[0]))
            return bool(found)

        wait_until(are_known)
        return found[0]

    def run_command(self, *words: str, text: str | None = None) -> str:
        """Run a command about the fleet, and return its output."""
        done = CliRunner().invoke(make_app(), [*words, "--coordination", self.coordination], input=text)
        assert done.exit_code == 0, done.output
        return done.stdout

    def _subscriber(self, tables: list[str]) -> Subscriber:
        return Subscriber(
            self.url,
            name="cache",
            tables=tables,
            coordination=self.coordination,
            begin="earliest",
            session_seconds=WAIT_SECONDS_MAX,
        )

    def _apply_job(self, tables: list[str]) -> None:
        """Make the fleet run a pipeline with a feed and a mirror of the tables."""
        for database in ("feed", "mirror"):
            self._target("postgres", f"CREATE DATABASE {database}")
        values: dict[str, Any] = {
            "name": "orders",
            "state": f"zookeeper://{self.ensemble.hosts}/pipelines-{self._seed}",
            "source": {"url": self.url, "name": INSTANCE, "tables": tables, "start": "earliest"},
            "load": "none",
            "batch": {"interval": 0},
            "sinks": {
                mode: {"postgres": {"url": f"{self.target.url.rpartition('/')[0]}/{mode}", "mode": mode}}
                for mode in ("feed", "mirror")
            },
        }
        file = self.folder / "orders.yaml"
        file.write_text(json.dumps(values), encoding="utf-8")
        self.run_command("apply", str(file), "--local")

    def _target(self, database: str, statement: str) -> list[tuple[Any, ...]]:
        url = f"{self.target.url.rpartition('/')[0]}/{database}"
        with psycopg.connect(url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def _wait_for_progress(self) -> None:
        """Wait until everything committed so far has arrived everywhere."""
        self.servers.prove_acknowledgements()
        begun_at = time.monotonic()
        steps = {writer.table: writer.step for writer in self.writers}
        wait_until(
            lambda: all(self.follower.newest(table) >= step for table, step in steps.items()),
            PROGRESS_SECONDS_MAX,
        )
        self._note(f"the subscriber has everything after {time.monotonic() - begun_at:.1f} s")
        wait_until(
            lambda: all(self.canal.newest(table) >= step for table, step in steps.items()),
            PROGRESS_SECONDS_MAX,
        )
        self._note(f"Canal's client has everything after {time.monotonic() - begun_at:.1f} s")
        for mode in ("feed", "mirror"):
            wait_until(partial(self._has_arrived, mode, steps), PROGRESS_SECONDS_MAX)
        self._note(f"the pipeline has everything after {time.monotonic() - begun_at:.1f} s")

    def _has_arrived(self, database: str, steps: Mapping[str, int]) -> bool:
        try:
            return all(
                (self._target(database, f"SELECT max(step) FROM {table}")[0][0] or 0) >= step
                for table, step in steps.items()
            )
        except psycopg.errors.UndefinedTable:
            return False

    def _note(self, what: str) -> None:
        _log.info(what)
        self.journal.append(f"{time.monotonic() - self._started_at:7.1f} s  {what}")

    # --- Faults -----------------------------------------------------------------------------

    def _begin_fault(self) -> Undo:
        """Begin a fault on a host that has none, and return the function that ends it."""
        free = [fault for fault in self._faults if self._free_hosts(fault)]
        (fault,) = self._random.choices(free, [fault.weight for fault in free])
        name = self._random.choice(self._free_hosts(fault))
        host = fault.hosts[name]
        self.counts[fault.name] += 1
        self._note(f"{fault.name}: {name}")
        self._current[name] = fault
        fault.begin(host)

        def undo() -> None:
            self._note(f"ends: {fault.name}: {name}")
            fault.end(host)
            del self._current[name]

        return undo

    def _free_hosts(self, fault: "Fault") -> list[str]:
        """Return the hosts on which a fault may begin now."""
        current = self._current.values()
        if (fault.alone and current) or any(present.alone for present in current):
            return []
        return [name for name in sorted(fault.hosts) if name not in self._current]

    def _all_faults(self) -> list["Fault"]:
        members, workers, ensemble = self.members, self.workers, {"zookeeper": self.ensemble}
        servers = dict(zip(("first server", "second server"), self.servers.all, strict=True))
        with_disk = {name: member for name, member in members.items() if member.has_disk}
        return [
            Fault("fill the disk", 2, with_disk, Member.fill_disk, Member.free_disk),
            Fault("kill", 4, members, lambda host: host.daemon.kill(), lambda host: host.daemon.start()),
            Fault("freeze", 4, members, freeze, thaw),
            Fault("kill", 2, workers, lambda host: host.kill(), lambda host: host.start()),
            Fault("freeze", 2, workers, freeze, thaw),
            Fault("kill the jobs", 2, workers, lambda host: host.kill_jobs(), lambda host: None),
            Fault(
                "restart", 2, members, lambda host: host.daemon.terminate(), lambda host: host.daemon.start()
            ),
            Fault("restart", 1, workers, lambda host: host.stop(), lambda host: host.start()),
            Fault("cut off", 3, members, partial(cut_off, ""), restore),
            Fault("cut off the store", 2, members, partial(cut_off, "store"), restore),
            Fault("cut off the servers", 2, members, partial(cut_off, "servers"), restore),
            Fault("cut off the clients", 2, members, partial(cut_off, "clients"), restore),
            Fault("cut off", 2, workers, partial(cut_off, ""), restore),
            Fault("lose the host", 3, members, self._lose_host, lambda host: host.daemon.start(), alone=True),
            Fault("tear the log", 2, members, self._tear_log, lambda host: host.daemon.start(), alone=True),
            Fault("add", 2, {"an instance": "users"}, self._add_instance, self._remove_instance),
            Fault("drain", 2, members, self._drain, self._undrain),
            Fault("upgrade", 2, members, self._begin_upgrade, self._end_upgrade),
            Fault("kill a node", 2, ensemble, partial(self._kill_nodes, 1), lambda host: host.start()),
            Fault("freeze a node", 2, ensemble, self._freeze_node, self._thaw_nodes),
            Fault("kill two nodes", 1, ensemble, partial(self._kill_nodes, 2), Ensemble.start, alone=True),
            Fault("kill a server", 2, servers, self.servers.kill, Server.start),
            Fault("promote", 2, {"the replica": self.servers}, self._promote, Servers.rejoin, alone=True),
            Fault("kill", 1, {"Canal's client": self.canal}, CanalFollower.kill, lambda host: None),
            Fault("restart", 1, {"subscriber": self.follower}, Follower.stop, Follower.start),
        ]

    def _promote(self, servers: Servers) -> None:
        servers.promote(self._prove_acknowledged)

    def _prove_acknowledged(self, promoted: Server) -> None:
        """Assert that every commit acknowledged by the dead server is in its replica, or that readers of the
        fleet received it.
        """
        for writer in self.writers:
            ((newest,),) = promoted.sql(f"SELECT step FROM {writer.table} WHERE id = {NEWEST}")
            if newest < writer.step:
                self._note(
                    f"the fleet alone has transactions {newest + 1} to {writer.step} of {writer.table}"
                )
                wait_until(partial(self._has_reached, writer.table, writer.step))

    def _has_reached(self, table: str, step: int) -> bool:
        return self.follower.newest(table) >= step

    def _add_instance(self, name: str) -> None:
        settings = {"source": self.servers.primary.url("root"), "start": "earliest"}
        text = json.dumps({"instance": name, "settings": settings})
        self.run_command("apply", text=text)

    def _remove_instance(self, name: str) -> None:
        self.run_command("instances", "remove", name)

    def _lose_host(self, member: Member) -> None:
        # Wait until there is a second copy. Otherwise, data that only the lost disk contained would have to
        # be fetched from the server again, and the log would begin later.
        self.holders()
        member.lose()

    def _tear_log(self, member: Member) -> None:
        self.holders()
        member.tear()

    def _drain(self, member: Member) -> None:
        # The member hands over only once a copy is in step, which may take a while.
        CliRunner().invoke(
            make_app(),
            ["fleet", "drain", member.name, "--timeout", "5", "--coordination", self.coordination],
        )

    def _undrain(self, member: Member) -> None:
        # A member that has just rejoined is not drained.
        words = ["fleet", "undrain", member.name, "--coordination", self.coordination]
        done = CliRunner().invoke(make_app(), words)
        assert done.exit_code == 0 or "is not drained" in done.output, done.output

    def _begin_upgrade(self, member: Member) -> None:
        self._drain(member)
        member.daemon.terminate()

    def _end_upgrade(self, member: Member) -> None:
        member.daemon.start()
        self._undrain(member)

    def _kill_nodes(self, count: int, ensemble: Ensemble) -> None:
        for node in self._random.sample(ensemble.nodes, count):
            node.kill()

    def _freeze_node(self, ensemble: Ensemble) -> None:
        os.kill(self._random.choice(ensemble.nodes).pid, signal.SIGSTOP)

    def _thaw_nodes(self, ensemble: Ensemble) -> None:
        for node in ensemble.nodes:
            os.kill(node.pid, signal.SIGCONT)


@dataclass(frozen=True)
class Fault:
    """A fault that may begin on one of several hosts, and how it ends.

    `weight` is the fault's relative frequency. A fault that is `alone` does not overlap with any other fault.
    """

    name: str
    weight: float
    hosts: Mapping[str, Any]
    begin: Callable[[Any], object]
    end: Callable[[Any], object]
    alone: bool = False


def _assert_equal_to_servers(log: LogReader, servers: Mapping[str, Server]) -> None:
    """Assert that all bytes of a log, in every epoch, equal those of the epoch's server."""
    for extent in log.extents():
        epoch = log.epochs.get(extent.epoch)
        assert epoch is not None
        files = {path.name: path for path in servers[epoch.server_key].binlog_files()}
        own = files[extent.file].read_bytes()[extent.start : extent.end]
        assert b"".join(log.read(extent.epoch, extent.file, extent.start, extent.end)) == own, extent
