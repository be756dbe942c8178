# SPDX-License-Identifier: Apache-2.0
"""A TiDB cluster under load, with kills and lost commits: the merged log equals the tables."""

import json
import random
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pymysql
import pytest

import penstock
from tests.support.daemon.process import DaemonProcess
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.patience import wait_until
from tests.support.tidb.lossy_route import LossyRoute
from tools.servers.errors import PartMissing
from tools.servers.ports import free_port
from tools.tidb.peers import PeerCluster, TidbServer, programs

LOST_OF = 7
WRITERS = 6
IDS = 40
EXTRA_DEFAULT = 42

TABLES = {
    "typed": "id INT PRIMARY KEY, big BIGINT UNSIGNED, tiny TINYINT, price DECIMAL(20,5), ratio DOUBLE,"
    " flags BIT(10), made YEAR, at DATETIME(6), seen TIMESTAMP(3) NULL, day DATE, took TIME(6), code CHAR(8),"
    " name VARCHAR(50), raw VARBINARY(20), body BLOB, note TEXT, size ENUM('s','m','l'),"
    " tags SET('p','q','r'), doc JSON, KEY (name)",
    "parted": "id INT PRIMARY KEY, v INT",
    "clustered": "a VARCHAR(10), b INT, v INT, PRIMARY KEY (a, b) CLUSTERED",
    "keyless": "a INT, b VARCHAR(10)",
}
KEYS = {"typed": ("id",), "parted": ("id",), "clustered": ("a", "b")}
PARTITIONS = (
    " PARTITION BY RANGE (id) (PARTITION p0 VALUES LESS THAN (20), PARTITION p1 VALUES LESS THAN (100))"
)


@pytest.fixture
def cluster(tmp_path: Path, missing_part: MissingPart) -> Iterator[PeerCluster]:
    try:
        programs()
    except PartMissing as problem:
        missing_part("TiDB's programs", str(problem))
    with PeerCluster(tmp_path / "cluster") as started:
        yield started


class Writer:
    """A connection that changes random rows of all tables. Half of its transactions are pessimistic."""

    def __init__(self, server: TidbServer, number: int) -> None:
        self.server = server
        self._random = random.Random(number)
        self.committed = 0
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with self.server.connect("bank") as connection, connection.cursor() as cursor:
                while not self.stopping.is_set():
                    self._write(connection, cursor)
        except (pymysql.OperationalError, pymysql.InterfaceError, OSError):
            # The server was killed.
            return

    def _write(self, connection: Any, cursor: Any) -> None:
        try:
            cursor.execute(self._random.choice(("BEGIN PESSIMISTIC", "BEGIN OPTIMISTIC")))
            for _ in range(self._random.randint(1, 4)):
                cursor.execute(*self._statement())
            connection.commit()
            self.committed += 1
        except pymysql.Error as problem:
            if not self.server.process.poll() and problem.args[0] in (2006, 2013):
                raise
            # Another writer changed the rows, or a statement changed the table.
            connection.rollback()

    def _statement(self) -> tuple[str, tuple[Any, ...]]:
        pick = self._random
        row = pick.randrange(IDS)
        word = "".join(pick.choices("aäß漢x", k=pick.randint(0, 9)))
        statements: list[tuple[str, tuple[Any, ...]]] = [
            (
                "INSERT INTO typed (id, big, tiny, price, ratio, flags, made, at, seen, day, took, code,"
                " name, raw, body, note, size, tags, doc) VALUES (%s, %s, %s, %s, %s, %s, 2026,"
                " '2026-11-22 11:15:00.123456', '2026-11-22 11:15:00.123', '2026-11-22', '-12:34:56.789',"
                " 'ch', %s, x'ff00', %s, %s, 'm', 'p,r', %s)"
                " ON DUPLICATE KEY UPDATE name = VALUES(name), tiny = -tiny",
                (
                    *(row, 2**63 + row, pick.randint(-128, 127), f"-{row}.5", row / 4, pick.getrandbits(10)),
                    *(word, word.encode(), word * 20, json.dumps({"row": row, "words": [word, None, 1.5]})),
                ),
            ),
            ("UPDATE typed SET note = %s, doc = NULL, took = NULL WHERE id = %s", (word, row)),
            ("DELETE FROM typed WHERE id = %s", (row,)),
            ("INSERT INTO parted VALUES (%s, 1) ON DUPLICATE KEY UPDATE v = v + 1", (row,)),
            ("DELETE FROM parted WHERE id = %s", (row,)),
            ("REPLACE INTO clustered (a, b, v) VALUES (%s, %s, %s)", (str(row % 5), row, pick.randrange(99))),
            ("UPDATE clustered SET v = v + 1 WHERE a = %s", (str(row % 5),)),
            ("DELETE FROM clustered WHERE a = %s AND b = %s", (str(row % 5), row)),
            ("INSERT INTO keyless VALUES (%s, %s), (%s, 'x')", (row, "y", row)),
            ("DELETE FROM keyless WHERE a = %s LIMIT 1", (row,)),
        ]
        return pick.choice(statements)


@dataclass
class Replay:
    """The tables that result from applying a log's changes. Each preimage must equal the previous row."""

    rows: dict[tuple[str, tuple[Any, ...]], dict[str, Any]] = field(default_factory=dict)
    keyless: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    changes: int = 0

    def apply(self, table: str, kind: str, image: Mapping[str, Any]) -> None:
        self.changes += 1
        if table == "keyless":
            row = tuple(image.values())
            self.keyless[row] += 1 if kind in ("insert", "update_postimage") else -1
            assert self.keyless[row] >= 0, f"{kind} of {row}, which is not there"
            return
        key = table, tuple(image[name] for name in KEYS[table])
        if kind in ("insert", "update_postimage"):
            assert key not in self.rows, f"{kind} of {key}, which is there already"
            self.rows[key] = dict(image)
            return
        before = self.rows.pop(key, None)
        assert before is not None, f"{kind} of {key}, which is not there"
        # A row from before `ALTER TABLE` has the default of the added column.
        assert {"extra": EXTRA_DEFAULT} | before == {"extra": EXTRA_DEFAULT} | dict(image), f"{kind} of {key}"


def replayed(log: Path) -> Replay:
    """Apply all changes of a log in commit order."""
    changes = []
    for batch in penstock.read_binlog(log, tables=[f"bank.{table}" for table in TABLES]):
        for row in batch.to_arrow().to_pylist():
            image = {name: shown(name, value) for name, value in row.items() if not name.startswith("_")}
            # The before image of an update precedes its after image.
            order = row["_commit_version"], row["_metadata"]["row"], row["_change_type"] == "update_postimage"
            changes.append((order, batch.table.partition(".")[2], row["_change_type"], image))
    replay = Replay()
    for _, table, kind, image in sorted(changes, key=lambda change: change[0]):
        replay.apply(table, kind, image)
    return replay


def shown(name: str, value: Any) -> Any:
    """Return a column's value from Arrow or from the client in a common form: parsed JSON, numbers, UTC."""
    if value is None:
        return None
    if name == "doc":
        return json.loads(value)
    if name == "flags" and isinstance(value, bytes):
        return int.from_bytes(value, "big")
    if isinstance(value, datetime) and value.tzinfo:
        return value.astimezone(UTC).replace(tzinfo=None)
    return value


def selected(cursor: Any, table: str) -> list[dict[str, Any]]:
    """Return the rows of a table as the server returns them."""
    cursor.execute(f"SELECT * FROM {table}")
    names = [column[0] for column in cursor.description]
    return [
        {name: shown(name, value) for name, value in zip(names, row, strict=True)}
        for row in cursor.fetchall()
    ]


def has_marker(log: Path) -> bool:
    """Return whether the last transaction of the test is in the log."""
    batches = penstock.read_binlog(log, tables="bank.marker")
    return any(len(batch.to_arrow()) for batch in batches)


@pytest.mark.timing
@pytest.mark.deep(guard="tests/unit/test_tidb_drainer.py::test_transactions_of_several_pumps_are_one_log")
def test_merged_log_equals_the_cluster_whatever_is_killed_and_lost(
    tmp_path: Path, cluster: PeerCluster
) -> None:
    with ExitStack() as stack:
        # Clients reach the killed Pump directly, and notice its death. The route to the other Pump loses
        # commits.
        killed_at, other_at = (f"127.0.0.1:{free_port()}" for _ in range(2))
        route = stack.enter_context(LossyRoute(other_at, LOST_OF))
        killed = {"listen": killed_at, "node_id": "pump-1"}
        other = {"listen": other_at, "advertise": route.address, "node_id": "pump-2"}
        pumps = [daemon(tmp_path / node["node_id"], cluster, "pump", node) for node in (killed, other)]
        for pump in pumps:
            stack.callback(pump.kill)
            pump.start()
            wait_until(lambda pump=pump: "the Pump is online" in pump.said())
        drainer = {"listen": f"127.0.0.1:{free_port()}", "node_id": "drainer"}
        merging = daemon(tmp_path / "drainer", cluster, "drainer", drainer)
        stack.callback(merging.kill)
        merging.start()
        first, second = cluster.start_server("range"), cluster.start_server("hash")
        load(first, second, pumps[0], merging)
        log = tmp_path / "drainer" / "log" / "shop"
        with second.connect("bank") as connection, connection.cursor() as cursor:
            cursor.execute("SET time_zone = '+00:00'")
            # Reading rows resolves the locks of the killed server's transactions, and thereby decides these
            # transactions.
            tables = {table: selected(cursor, table) for table in TABLES}
            connection.commit()
            cursor.execute("CREATE TABLE marker (id INT PRIMARY KEY)")
            cursor.execute("INSERT INTO marker VALUES (1)")
            connection.commit()
        wait_until(lambda: has_marker(log))
        replay = replayed(log)
    assert len(route.lost) > 20
    assert replay.changes > 500
    for table, key in KEYS.items():
        kept = {row_key[1]: row for row_key, row in replay.rows.items() if row_key[0] == table}
        assert kept.keys() == {tuple(row[name] for name in key) for row in tables[table]}
        for row in tables[table]:
            image = kept[tuple(row[name] for name in key)]
            if table == "clustered":
                image = {"extra": EXTRA_DEFAULT} | image
            assert {name: image[name] for name in row} == row
    assert +replay.keyless == Counter(tuple(row.values()) for row in tables["keyless"])


def daemon(folder: Path, cluster: PeerCluster, role: str, node: dict[str, Any]) -> DaemonProcess:
    folder.mkdir()
    tidb = {"roles": [role], role: node}
    instance = {"source": f"tidb://{cluster.address}", "start": "earliest", "tidb": tidb}
    return DaemonProcess(folder, {"instances": {"shop": instance}})


def load(first: TidbServer, second: TidbServer, pump: DaemonProcess, merging: DaemonProcess) -> None:
    """Write to both servers while a Pump, the drainer and the first server are killed, and tables are
    altered.
    """
    with second.connect() as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE bank")
        cursor.execute("USE bank")
        for table, columns in TABLES.items():
            cursor.execute(f"CREATE TABLE {table} ({columns}){PARTITIONS if table == 'parted' else ''}")
    writers = [Writer((first, second)[number % 2], number) for number in range(WRITERS)]
    for writer in writers:
        writer.thread.start()

    def write_more(count: int) -> None:
        alive = [writer for writer in writers if writer.thread.is_alive()]
        target = sum(writer.committed for writer in alive) + count
        wait_until(lambda: sum(writer.committed for writer in alive) >= target)

    write_more(60)
    pump.kill()
    pump.start()
    write_more(60)
    with second.connect("bank") as connection, connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE clustered ADD COLUMN extra INT NOT NULL DEFAULT {EXTRA_DEFAULT}")
        cursor.execute("ALTER TABLE parted ADD INDEX by_v (v)")
    write_more(30)
    merging.kill()
    merging.start()
    first.kill()
    write_more(60)
    for writer in writers:
        writer.stopping.set()
        writer.thread.join()
