# SPDX-License-Identifier: Apache-2.0
"""Converts a Ptubes reader's configuration into the settings of a daemon for Ptubes clients.

The folder has reader.conf and a file of properties for each reader task. It may also have sdk.conf and the
files of SDK tasks. The clients keep their storage points in ZooKeeper and continue to use them; the daemon's
log has to begin before the oldest storage point. Helix stores these points below /SDK_TASK/PROPERTYSTORE, in
one node per partition.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock.errors import OptionInvalid
from penstock.migrate.nested_text import parse_json
from penstock.migrate.output import FolderPath, Migration
from penstock.migrate.property_files import number_of, parse_properties, read_text
from penstock.migrate.report import OriginalProperties, Rule, carried, missing, needless
from penstock.migrate.table_filters import literal
from penstock.migrate.zookeeper import ZooKeeperTree

_READER_FILE, _SDK_FILE = "reader.conf", "sdk.conf"
_HEARTBEAT = ("buffalo_heartbeat.heartbeat", "ptubes_heartbeat.heartbeat")
_MODES = {"MEM": "memory", "FILE": "file", "MIX": "mixed"}
# Ptubes reads only binlog files of this name.
_BINLOG_PREFIX = "mysql-bin"
_FILE_START = 4

READER_REFERENCE: dict[str, Rule] = {
    "ptubes.server.tasks": carried("instances"),
    "ptubes.server.dataport": carried("listen.ptubes"),
    "ptubes.server.monitorport": carried("listen.ptubes_monitor"),
    "ptubes.server.taskconf.protocol": missing("tasks are read from files of the folder", "file"),
    "ptubes.server.taskconf.host": needless("only with taskconf.protocol"),
    "ptubes.server.taskconf.path": needless("only with taskconf.protocol"),
}
TASK_REFERENCE: dict[str, Rule] = {
    "ptubes.reader.mysql.host": carried("source"),
    "ptubes.reader.mysql.port": carried("source"),
    "ptubes.reader.mysql.user": carried("source"),
    "ptubes.reader.mysql.passwd": carried("password_file"),
    "ptubes.reader.mysql.subs": carried("tables and shard_columns"),
    "ptubes.reader.storage.mode": carried("log.mode"),
    "ptubes.reader.storage.membuffersize": carried("log.memory_bytes"),
}
SDK_REFERENCE: dict[str, Rule] = {
    "ptubes.sdk.task.set": needless("the SDK keeps its tasks"),
    "ptubes.sdk.conf.dir": needless("the SDK keeps its folder"),
    "ptubes.sdk.reader.name": needless("the SDK keeps the name: it is the instance's"),
    "ptubes.sdk.task.name": needless("the SDK keeps its tasks"),
    "ptubes.sdk.zookeeper.address": needless("the SDK keeps its storage points in ZooKeeper"),
    "ptubes.sdk.subs": needless("the SDK sends its tables"),
    "ptubes.sdk.reader.ip": carried("what to do next: the SDK needs the daemon's address"),
}


@dataclass(frozen=True)
class StoragePoint:
    """The storage point of one partition of an SDK task."""

    file: int
    offset: int
    time_ms: int
    mode: str

    @classmethod
    def of(cls, text: str, node: str) -> "StoragePoint":
        """Parse the record of a node. Raises OptionInvalid."""
        try:
            point = parse_json(parse_json(text)["simpleFields"]["checkpoint"])
            return cls(
                int(point.get("binlogFile") or 0),
                int(point.get("binlogOffset") or 0),
                int(point.get("timestamp") or 0),
                str(point.get("checkpointMode") or "NORMAL"),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            raise OptionInvalid(
                f"{node} is not a storage point of Ptubes: {type(problem).__name__}",
                hint="Remove the node if its SDK task is gone",
            ) from problem


def migrate_ptubes(folder: Path, migration: Migration, *, zookeeper: str | None = None) -> None:
    """Add the daemon of a reader. With `zookeeper` the logs begin at the oldest storage point.

    Raises OptionInvalid, CoordinationLost.
    """
    reader = OriginalProperties(
        migration.report, _READER_FILE, parse_properties(read_text(folder / _READER_FILE)), READER_REFERENCE
    )
    tasks = [name.strip() for name in reader.get("ptubes.server.tasks").split(",") if name.strip()]
    if not tasks:
        raise OptionInvalid(
            f"{folder / _READER_FILE} has no ptubes.server.tasks", hint="Name the folder of the reader"
        )
    listen = {
        "http": "127.0.0.1:7070",
        "ptubes": f"0.0.0.0:{reader.get('ptubes.server.dataport', '28332')}",
        # Ptubes ignores its property for the monitor's port, and always listens on this one.
        "ptubes_monitor": "0.0.0.0:23333",
        "insecure": ["ptubes", "ptubes_monitor"],
    }
    reader.carried("ptubes.server.tasks", "ptubes.server.dataport")
    reader.changed(
        "ptubes.server.monitorport", remark="listen.ptubes_monitor is 23333, where Ptubes really listens"
    )
    starts = _starts(folder, migration, zookeeper)
    migration.daemon = {
        "listen": listen,
        "log": {"folder": FolderPath("log")},
        "instances": {task: _instance(migration, folder, task, starts.get(task)) for task in tasks},
    }
    reader.account_for_the_rest()
    reader.remind("Ptubes has no credentials: keep the ports of listen.insecure in a private network.")
    if zookeeper is None:
        reader.remind(
            "The logs start at the earliest binlog of each server, so that no storage point is missed. With"
            " --zookeeper they start at the oldest storage point."
        )
    reader.remind("Set listen.ptubes_zone to the time zone of the reader's JVM.")
    reader.remind(
        "Stop the reader, run: penstock serve penstock.yaml, and set ptubes.sdk.reader.ip to this host."
    )


def _instance(migration: Migration, folder: Path, task: str, start: str | None) -> dict[str, Any]:
    name = f"{task}.properties"
    properties = OriginalProperties(
        migration.report, name, parse_properties(read_text(folder / name)), TASK_REFERENCE
    )
    server = "ptubes.reader.mysql."
    host, port = properties.get(f"{server}host", "127.0.0.1"), properties.get(f"{server}port", "3306")
    user = properties.get(f"{server}user")
    instance: dict[str, Any] = {"source": f"mysql://{quote(user, safe='')}{'@' if user else ''}{host}:{port}"}
    instance |= migration.secret("password", f"{task}.password", properties.get(f"{server}passwd"))
    properties.carried(*(f"{server}{name}" for name in ("host", "port", "user", "passwd")))
    shard_columns = _shard_columns(properties.get(f"{server}subs"), name)
    if shard_columns:
        instance["tables"] = [*shard_columns, *_HEARTBEAT]
        by_column = {table: columns for table, columns in shard_columns.items() if columns}
        instance |= {"shard_columns": by_column} if by_column else {}
        properties.changed(
            f"{server}subs",
            remark="tables and shard_columns; other tables, which Ptubes refuses, can be subscribed too",
        )
    instance["start"] = start or "earliest"
    log: dict[str, Any] = {}
    mode = properties.get("ptubes.reader.storage.mode").upper()
    if mode in _MODES:
        log["mode"] = _MODES[mode]
        properties.carried("ptubes.reader.storage.mode")
    if memory := properties.get("ptubes.reader.storage.membuffersize"):
        log["memory_bytes"] = number_of(memory)
        properties.carried("ptubes.reader.storage.membuffersize")
    properties.account_for_the_rest()
    return instance | ({"log": log} if log else {})


def _shard_columns(text: str, name: str) -> dict[str, list[str]]:
    """Parse `{"db.table": "a,b"}` into the columns of each table. An empty list stands for the primary
    key.
    """
    if not text:
        return {}
    try:
        tables = parse_json(text)
        return {
            ".".join(literal(part) for part in str(table).split(".", 1)): [
                column.strip() for column in str(columns).split(",") if column.strip()
            ]
            for table, columns in tables.items()
        }
    except (ValueError, AttributeError) as problem:
        raise OptionInvalid(
            f"{name}: ptubes.reader.mysql.subs is not a JSON object", hint='Write {"db.table": "column"}'
        ) from problem


# --- Storage points -------------------------------------------------------------------------


def _starts(folder: Path, migration: Migration, zookeeper: str | None) -> dict[str, str]:
    """Return where the log of each reader task begins, according to the storage points of the SDK tasks."""
    sdk_tasks = list(_sdk_tasks(folder, migration))
    if zookeeper is None:
        return {}
    points: dict[str, list[StoragePoint]] = {}
    with ZooKeeperTree(zookeeper) as tree:
        for reader_task, sdk_task in sdk_tasks:
            points.setdefault(reader_task, []).extend(_points_of(tree, sdk_task))
    return {task: _start_of(task_points) for task, task_points in points.items() if task_points}


def _sdk_tasks(folder: Path, migration: Migration) -> Iterator[tuple[str, str]]:
    """Yield the reader task and the name of each SDK task of the folder."""
    if not (folder / _SDK_FILE).exists():
        return
    sdk = OriginalProperties(
        migration.report,
        _SDK_FILE,
        parse_properties(read_text(folder / _SDK_FILE)),
        SDK_REFERENCE,
        ["ptubes.sdk.task.set"],
    )
    for task in sdk.get("ptubes.sdk.task.set").split(","):
        name = f"{task.strip()}.properties"
        if not task.strip() or not (folder / name).exists():
            continue
        properties = OriginalProperties(
            migration.report, name, parse_properties(read_text(folder / name)), SDK_REFERENCE
        )
        properties.carried("ptubes.sdk.reader.ip")
        properties.account_for_the_rest()
        reader_task = properties.get("ptubes.sdk.reader.name")
        yield reader_task, properties.get("ptubes.sdk.task.name", task.strip())
    sdk.account_for_the_rest()


def _points_of(tree: ZooKeeperTree, sdk_task: str) -> Iterator[StoragePoint]:
    root = f"/{sdk_task}/PROPERTYSTORE"
    for node in tree.children(root):
        partition, _, task = node.partition("_")
        text = tree.text(f"{root}/{node}") if partition.isdecimal() and task == sdk_task else None
        if text:
            yield StoragePoint.of(text, f"{root}/{node}")


def _start_of(points: list[StoragePoint]) -> str:
    """Return where a log begins: at the start of the file of the oldest storage point, or at the time of the
    oldest storage point.
    """
    if any(point.mode == "EARLIEST" for point in points):
        return "earliest"
    stored = [point for point in points if point.mode != "LATEST"]
    if not stored:
        return "latest"
    if all(point.file for point in stored):
        oldest = min(stored, key=lambda point: (point.file, point.offset))
        return f"{_BINLOG_PREFIX}.{oldest.file:06d}:{_FILE_START}"
    first_ms = min(point.time_ms for point in stored)
    return datetime.fromtimestamp(first_ms / 1000, UTC).isoformat() if first_ms else "earliest"
