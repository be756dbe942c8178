# SPDX-License-Identifier: Apache-2.0
"""Converts Canal's configuration folder into the settings of a daemon for Canal clients, or into pipelines
that write to Kafka.

The folder has canal.properties, and for each destination a folder with instance.properties and, with Canal's
file mode, meta.dat. Properties of an instance that are set in canal.properties apply to every instance.
"""

import os
import re
import secrets
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from penstock.errors import OptionInvalid
from penstock.migrate.canal_cursors import CanalCursor, cursors_of_file, cursors_of_zookeeper, oldest
from penstock.migrate.canal_reference import REFERENCE
from penstock.migrate.canal_routes import Route, routes_of
from penstock.migrate.kafka_client import kafka_settings
from penstock.migrate.output import Cursor, FolderPath, Migration
from penstock.migrate.property_files import number_of, parse_properties, read_text, resolve
from penstock.migrate.report import Entry, OriginalProperties, Outcome
from penstock.migrate.table_filters import both, pattern_of, patterns_of, split_expressions
from penstock.migrate.zookeeper import ZooKeeperTree

_SERVER_FILE = "canal.properties"
_INSTANCE_FILE = "instance.properties"
# The client id under which Canal's own producers read.
_PRODUCER_CLIENT = 1001
_OF_INSTANCES = ("canal.instance.", "canal.mq.")
_KINDS = ("insert", "update", "delete")
# The offset of the first event in a binlog file.
_FILE_START = 4


def migrate_canal(
    folder: Path, migration: Migration, *, zookeeper: str | None = None, password: str | None = None
) -> None:
    """Add the daemon or the pipelines of a configuration folder.

    `zookeeper` are the hosts from which cursors are read, instead of meta.dat. `password` belongs to the
    account `canal.user`. Raises OptionInvalid, CoordinationLost.
    """
    server_values = parse_properties(read_text(folder / _SERVER_FILE))
    server = OriginalProperties(
        migration.report,
        _SERVER_FILE,
        _resolved(server_values, server_values),
        REFERENCE,
        [name for name in REFERENCE if not name.startswith(_OF_INSTANCES)],
    )
    destinations = [
        _Destination(migration, server, server_values, folder / name)
        for name in _destination_names(server, folder)
    ]
    _read_cursors(server, destinations, zookeeper)
    mode = server.get("canal.serverMode", "tcp")
    if mode.lower() == "kafka":
        server.carried("canal.serverMode", remark="sink.kafka")
        _add_pipelines(migration, server, destinations)
    else:
        if mode.lower() != "tcp":
            server.not_carried(
                "canal.serverMode",
                remark=f"no pipeline is written for {mode}: the daemon serves Canal's own protocol; the sinks"
                " rabbitmq and rocketmq write Canal's messages",
            )
        server.carried("canal.serverMode", remark="listen.canal")
        _add_daemon(migration, server, destinations, password)
    server.account_for_the_rest()
    for destination in destinations:
        destination.own.account_for_the_rest()
    _report_adapter(migration, folder)


class _Destination:
    """A Canal instance. Its own properties override those of canal.properties."""

    def __init__(
        self, migration: Migration, server: OriginalProperties, server_values: dict[str, str], folder: Path
    ) -> None:
        self.name = folder.name
        self.folder = folder
        self.cursors: list[CanalCursor] = []
        values = parse_properties(read_text(folder / _INSTANCE_FILE))
        context = server_values | values | {"canal.instance.destination": self.name}
        self._server = server
        self.own = OriginalProperties(
            migration.report,
            f"{self.name}/{_INSTANCE_FILE}",
            _resolved(values, context),
            REFERENCE,
            [name for name in REFERENCE if name.startswith(_OF_INSTANCES)],
        )

    def get(self, name: str, default: str = "") -> str:
        return self.own.get(name) or self._server.get(name) or default

    def flag(self, name: str) -> bool:
        return self.get(name).lower() == "true"

    def carried(self, *names: str, remark: str | None = None) -> None:
        for properties in (self.own, self._server):
            properties.carried(*names, remark=remark)

    def changed(self, *names: str, remark: str, attention: bool = False) -> None:
        for properties in (self.own, self._server):
            properties.changed(*names, remark=remark, attention=attention)

    def not_carried(self, *names: str, remark: str, attention: bool = True) -> None:
        for properties in (self.own, self._server):
            properties.not_carried(*names, remark=remark, attention=attention)

    def server(self, migration: Migration) -> dict[str, Any]:
        """Return the source's URL and account, under the setting names that instances and sources share."""
        address = self.get("canal.instance.master.address", "127.0.0.1:3306")
        user = self.get("canal.instance.dbUsername")
        mode = self.get("canal.instance.master.sslMode", "DISABLED").lower()
        url = f"mysql://{quote(user, safe='')}{'@' if user else ''}{address}?ssl_mode={mode}"
        settings: dict[str, Any] = {"source": url}
        if standby := self.get("canal.instance.standby.address"):
            settings["servers"] = [standby]
        if self.flag("canal.instance.enableDruid"):
            raise OptionInvalid(
                f"{self.name}: canal.instance.dbPassword is encrypted by Druid",
                hint="Copy the folder, write the password itself there, and set enableDruid=false",
            )
        password = self.get("canal.instance.dbPassword")
        settings |= migration.secret("password", f"{self.name}.password", password)
        server_id = self.get("canal.instance.mysql.slaveId", "0")
        if server_id != "0":
            settings["server_id"] = number_of(server_id)
        self.carried(
            *(f"canal.instance.{name}.address" for name in ("master", "standby")),
            *("canal.instance.dbUsername", "canal.instance.dbPassword", "canal.instance.mysql.slaveId"),
            *("canal.instance.master.sslMode", "canal.instance.destination"),
        )
        return settings

    def tables(self) -> tuple[list[str], list[str]]:
        """Return the patterns to read and to exclude."""
        selected, excluded = "canal.instance.filter.regex", "canal.instance.filter.black.regex"
        self.carried(selected, excluded)
        exclude = [pattern_of(expression, excluded) for expression in split_expressions(self.get(excluded))]
        return patterns_of(self.get(selected), selected), exclude

    def selection(self, route: Route) -> dict[str, Any]:
        """Return the tables of a route, within the instance's own filters."""
        tables, exclude = self.tables()
        if route.tables is not None:
            selected = split_expressions(self.get("canal.instance.filter.regex")) if tables else []
            expressions = [both(own, route.tables) for own in selected] or [route.tables]
            tables = [pattern_of(expression, "canal.mq.dynamicTopic") for expression in expressions]
        exclude += [pattern_of(expression, "canal.mq.dynamicTopic") for expression in route.earlier]
        return ({"tables": tables} if tables else {}) | ({"exclude": exclude} if exclude else {})

    def start(self, cursor: CanalCursor | None, *, whole_file: bool) -> str:
        """Return where the changes start: at a cursor, or where Canal would start without one.

        With `whole_file`, a position becomes the start of its file, so that a log contains whole
        transactions.
        """
        names = ("journal.name", "position", "timestamp", "gtid")
        of_master = [f"canal.instance.master.{name}" for name in names]
        file, position, timestamp, gtid = (self.get(name) for name in of_master)
        if cursor is not None:
            self.not_carried(*of_master, remark="the stored cursor comes first", attention=False)
            if cursor.gtid_set:
                return cursor.gtid_set
            return f"{cursor.file}:{_FILE_START if whole_file else cursor.offset}"
        self.carried(*of_master, remark="start")
        if gtid and self.flag("canal.instance.gtidon"):
            return gtid
        if file and position:
            return f"{file}:{position}"
        if timestamp:
            if not timestamp.isdecimal():
                raise OptionInvalid(
                    f"{self.name}: canal.instance.master.timestamp is not a number of milliseconds"
                )
            return datetime.fromtimestamp(int(timestamp) / 1000, UTC).isoformat()
        return f"{file}:{_FILE_START}" if file else "latest"


def _resolved(values: dict[str, str], context: dict[str, str]) -> dict[str, str]:
    """Return properties with their placeholders replaced, as Canal reads them."""
    return {name: resolve(value, context, os.environ) for name, value in values.items()}


def _destination_names(server: OriginalProperties, folder: Path) -> list[str]:
    listed = [name.strip() for name in server.get("canal.destinations").split(",") if name.strip()]
    server.carried("canal.destinations")
    scanned = []
    if server.flag("canal.auto.scan", default=True):
        scanned = sorted(path.parent.name for path in folder.glob(f"*/{_INSTANCE_FILE}"))
    names = list(dict.fromkeys([*listed, *scanned]))
    if not names:
        raise OptionInvalid(
            f"{folder} has no destinations",
            hint=f"Name Canal's conf folder, with {_SERVER_FILE} and a folder for each destination",
        )
    return names


def _read_cursors(
    server: OriginalProperties, destinations: list[_Destination], zookeeper: str | None
) -> None:
    if zookeeper is not None:
        with ZooKeeperTree(zookeeper) as tree:
            for destination in destinations:
                destination.cursors = cursors_of_zookeeper(tree, destination.name)
        return
    data = Path(server.get("canal.file.data.dir"))
    for destination in destinations:
        folder = data / destination.name if data.is_absolute() and data.is_dir() else destination.folder
        destination.cursors = cursors_of_file(folder / "meta.dat")
    if server.get("canal.zkServers") and not any(destination.cursors for destination in destinations):
        server.remind(
            "The cursors are in ZooKeeper. Stop Canal, and migrate again with"
            f" --zookeeper {server.get('canal.zkServers')}"
        )


def _report_adapter(migration: Migration, folder: Path) -> None:
    if (folder / "application.yml").exists():
        remark = "the client adapter's mappings are not carried: write a pipeline for each target"
        migration.report.entries.append(
            Entry("application.yml", "canal.conf", Outcome.NOT_CARRIED, remark, attention=True)
        )


# --- A daemon for Canal's clients -----------------------------------------------------------


def _add_daemon(
    migration: Migration,
    server: OriginalProperties,
    destinations: list[_Destination],
    password: str | None,
) -> None:
    address = f"{server.get('canal.ip', '0.0.0.0')}:{server.get('canal.port', '11111')}"
    listen: dict[str, Any] = {"http": "127.0.0.1:7070", "canal": address}
    server.carried("canal.ip", "canal.port")
    document: dict[str, Any] = {"listen": listen, "log": {"folder": FolderPath("log")}}
    if user := server.get("canal.user"):
        if password is None:
            raise OptionInvalid(
                "canal.passwd is a hash, from which the clients' password cannot be read",
                hint="Write the password of canal.user into a file, and add --client-password-file FILE",
            )
        server.carried("canal.user")
        server.changed("canal.passwd", remark="access: the password of --client-password-file")
        account = {"name": "canal", "user": user} | migration.secret("password", "canal.password", password)
        document["access"] = [account]
        # Add a token: with accounts, the HTTP port needs credentials too.
        listen |= migration.secret("token", "operator.token", secrets.token_urlsafe(32))
    else:
        listen["insecure"] = ["canal"]
        server.remind(
            f"Canal had no canal.user: everyone who reaches {address} may read. Add an account under access."
        )
    document["instances"] = {
        destination.name: _instance(migration, server, destination) for destination in destinations
    }
    for properties in (server, *(destination.own for destination in destinations)):
        properties.not_carried_below(
            ("kafka.", "canal.mq."), remark="only for messages of Canal's own producer"
        )
    migration.daemon = document
    migration.report.steps += [
        "Set listen.canal_zone to the time zone of Canal's JVM: clients see TIMESTAMP columns in it.",
        "Stop Canal, run: penstock serve penstock.yaml, and give the clients this host's address.",
    ]


def _instance(migration: Migration, server: OriginalProperties, destination: _Destination) -> dict[str, Any]:
    settings = destination.server(migration)
    tables, exclude = destination.tables()
    settings |= ({"tables": tables} if tables else {}) | ({"exclude_tables": exclude} if exclude else {})
    if tables or exclude:
        settings["canal_filters"] = True
    settings["start"] = destination.start(oldest(destination.cursors), whole_file=True)
    if destination.flag("canal.instance.gtidon"):
        settings["canal_gtid"] = True
    destination.carried("canal.instance.gtidon")
    if server.flag("canal.auto.reset.latest.pos.mode"):
        settings["fail_on_data_loss"] = False
    server.carried("canal.auto.reset.latest.pos.mode")
    migration.cursors += [
        Cursor(destination.name, f"canal-{cursor.client}", cursor.checkpoint(), cursor.filter)
        for cursor in destination.cursors
    ]
    return settings


# --- Pipelines into Kafka -------------------------------------------------------------------


def _add_pipelines(
    migration: Migration, server: OriginalProperties, destinations: list[_Destination]
) -> None:
    kafka = kafka_settings(migration, server, "kafka.", "kafka.password")
    kafka["servers"] = kafka["servers"] or server.get("canal.mq.servers")
    kafka["format"] = "canal_flat" if server.flag("canal.mq.flatMessage", default=True) else "canal"
    server.carried("canal.mq.flatMessage", "canal.mq.servers")
    server.not_carried(
        *("canal.ip", "canal.port", "canal.user", "canal.passwd"),
        remark="there are no Canal clients with this serverMode",
        attention=False,
    )
    for destination in destinations:
        _add_routes(migration, server, destination, kafka)
    files = " and ".join(migration.pipelines)
    migration.report.steps.append(f"Stop Canal, then run penstock run with each of {files}.")


def _add_routes(
    migration: Migration, server: OriginalProperties, destination: _Destination, kafka: dict[str, Any]
) -> None:
    """Add a pipeline for each route, because two sinks of one pipeline never share a target."""
    settings = destination.server(migration)
    producer = next(
        (cursor for cursor in destination.cursors if cursor.client == _PRODUCER_CLIENT),
        oldest(destination.cursors),
    )
    source = {
        "url": settings.pop("source"),
        "name": destination.name,
        **settings,
        "start": destination.start(producer, whole_file=False),
    }
    if server.flag("canal.auto.reset.latest.pos.mode"):
        source["fail_on_data_loss"] = False
    server.carried("canal.auto.reset.latest.pos.mode", remark="source.fail_on_data_loss")
    destination.not_carried("canal.instance.gtidon", remark="GTIDs are in every message", attention=False)
    partitions = destination.get("canal.mq.partitionsNum")
    if partitions.isdecimal():
        kafka = kafka | {"partitions": int(partitions)}
    steps = _steps(destination)
    routes = _routes(destination)
    for number, route in enumerate(routes, 1):
        name = destination.name if len(routes) == 1 else f"{destination.name}-{number}"
        document: dict[str, Any] = {
            "name": name,
            "source": source | destination.selection(route),
            "load": "none",
        }
        if steps:
            document["steps"] = steps
        migration.pipelines[f"{name}.yaml"] = document | {"sink": {"kafka": {**kafka, **route.settings}}}
    if len(routes) > 1:
        migration.report.steps.append(
            f"{destination.name} has {len(routes)} pairs of rules for topic and partition, each of which is a"
            " pipeline. Each pipeline reads the server's log: a daemon between them reads it once."
        )


def _steps(destination: _Destination) -> list[dict[str, Any]]:
    """Return the steps that drop kinds of changes and columns."""
    dropped = [kind for kind in _KINDS if destination.flag(f"canal.instance.filter.dml.{kind}")]
    destination.carried(*(f"canal.instance.filter.dml.{kind}" for kind in _KINDS), remark="step `only`")
    steps: list[dict[str, Any]] = []
    if dropped:
        steps.append({"only": {"kinds": [kind for kind in _KINDS if kind not in dropped]}})
    for name, verb in (("field", "keep"), ("black.field", "drop")):
        full_name = f"canal.instance.filter.{name}"
        for rule in filter(None, (part.strip() for part in destination.get(full_name).split(","))):
            table, colon, columns = rule.partition(":")
            if not colon or not re.fullmatch(r"[^.]+\.[^.]+", table):
                raise OptionInvalid(
                    f"{destination.name}: {full_name}: {rule!r} is not database.table:column/column"
                )
            names = [column.strip() for column in columns.split("/") if column.strip()]
            steps.append({"map": {"tables": table, verb: names}})
        destination.carried(full_name, remark=f"step `map` with {verb}")
    return steps


def _routes(destination: _Destination) -> list[Route]:
    destination.carried("canal.mq.partitionsNum", "canal.mq.topic")
    destination.changed(
        "canal.mq.dynamicTopic",
        remark="a pipeline for each topic; topics keep the case of databases and tables",
        attention=True,
    )
    partition_hash = destination.get("canal.mq.partitionHash")
    destination.changed(
        "canal.mq.partitionHash", remark="a pipeline for each rule, by the hash of Kafka's own producers"
    )
    if partition_hash:
        destination.not_carried("canal.mq.partition", remark="partitionHash comes first", attention=False)
    else:
        remark = (
            "the changes of a table without partitionHash are in one partition, which may be another for each"
            " table: their order across tables is kept in a topic with one partition"
        )
        destination.changed("canal.mq.partition", remark=remark, attention=True)
    return routes_of(
        destination.get("canal.mq.topic"), destination.get("canal.mq.dynamicTopic"), partition_hash
    )
