# SPDX-License-Identifier: Apache-2.0
"""Converts a Drainer's configuration into the settings of a daemon that replaces the Drainer in the cluster,
and of a pipeline that writes to the Drainer's target.

The daemon's log starts after the commit timestamp of the Drainer's checkpoint, and the pipeline reads the log
from its start. The checkpoint is the file `savepoint`, or a row of the target with the same values as JSON.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import OptionInvalid
from penstock.migrate.drainer_reference import CHECKPOINT_REFERENCE, REFERENCE
from penstock.migrate.nested_text import parse_json, parse_toml
from penstock.migrate.output import FolderPath, Migration
from penstock.migrate.property_files import read_text
from penstock.migrate.report import OriginalProperties
from penstock.migrate.table_filters import name_expression, pattern_of
from penstock.model import Secret, ServerAddress, is_loopback, quote_name
from penstock.mysql.connection import connect
from penstock.settings.listen import split_host_port

INSTANCE, FILE = "tidb", "drainer.yaml"

_DAEMON_PORT = "127.0.0.1:7070"
_DRAINER_PORT = 8249
_CONNECTIONS_MAX = 64
_SERVERS, _FILES = ("mysql", "tidb"), ("file", "pb")
# The size of the largest message that librdkafka accepts.
_MESSAGE_BYTES_MAX = 1_000_000_000
_CHECKPOINT_TABLE = ("tidb_binlog", "checkpoint")
# The database of Drainer's own tables for loop control, and Drainer's default for ignore-schemas.
_MARK_DATABASE = "retl"
_IGNORED_DEFAULT = "INFORMATION_SCHEMA,PERFORMANCE_SCHEMA,mysql"


def migrate_drainer(
    path: Path, migration: Migration, *, savepoint: Path | None = None, from_server: bool = False
) -> None:
    """Add the daemon and the pipeline of a drainer.toml.

    `savepoint` is the file of the checkpoint; with `from_server` the checkpoint is read from its table in the
    target. Raises OptionInvalid, and propagates the server's errors.
    """
    document = _parse(path)
    properties = OriginalProperties(migration.report, path.name, _flatten(document), REFERENCE)
    source: dict[str, Any] = {"url": f"penstock://{_DAEMON_PORT}/{INSTANCE}"}
    pipeline: dict[str, Any] = {
        "name": "drainer",
        "source": source | _tables(properties, document) | {"start": "earliest"},
        "load": "none",
    }
    pipeline["sink"] = _sink(migration, properties, pipeline)
    if steps := _steps(properties, document):
        pipeline["steps"] = steps
    checkpoint = _checkpoint(migration, properties, savepoint, from_server)
    instance = {"source": _cluster(properties), "start": _start(migration, properties, checkpoint)}
    migration.daemon = {
        "listen": {"http": _DAEMON_PORT},
        "log": {"folder": FolderPath("log")},
        "instances": {INSTANCE: instance | {"tidb": _drainer(properties, document)}},
    }
    migration.pipelines[FILE] = pipeline
    properties.account_for_the_rest()
    _remind(migration, properties)


def _parse(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(read_text(path))
    except ValueError as problem:
        raise OptionInvalid(
            f"{path} is not TOML: {problem}", hint="Name the configuration file of the Drainer"
        ) from problem


def _flatten(document: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the properties of a document, prefixed with the names of their sections."""
    properties: dict[str, str] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            properties |= _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, str):
            properties[prefix + name] = value
        else:
            properties[prefix + name] = json.dumps(value, default=str) if value or value == 0 else ""
    return properties


def _number(value: object, name: str) -> int:
    """Return the value of a property as a number. Raises OptionInvalid."""
    try:
        return int(str(value))
    except ValueError as problem:
        raise OptionInvalid(
            f"{name}: {value!r} is not a number", hint=f"Correct {name}, and migrate again"
        ) from problem


# --- The cluster ----------------------------------------------------------------------------


def _cluster(properties: OriginalProperties) -> str:
    urls = properties.get("pd-urls", "http://127.0.0.1:2379").split(",")
    properties.carried("pd-urls")
    return "tidb://" + ",".join(url.strip().partition("://")[2] or url.strip() for url in urls)


def _drainer(properties: OriginalProperties, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with which the instance replaces the Drainer: its address, its name and its
    certificates.
    """
    listen = _address(properties.get("addr", f"127.0.0.1:{_DRAINER_PORT}"))
    drainer: dict[str, Any] = {"listen": listen}
    if advertised := properties.get("advertise-addr"):
        drainer["advertise"] = _address(advertised)
    if node_id := properties.get("node-id"):
        drainer["node_id"] = node_id
    if properties.get("compressor"):
        drainer["compress"] = True
    properties.carried("addr", "advertise-addr", "node-id", "compressor")
    settings: dict[str, Any] = {"roles": ["drainer"], "drainer": drainer}
    security = {name: properties.get(f"security.ssl-{name}") for name in ("ca", "cert", "key")}
    if all(security.values()):
        names = document["security"].get("cert-allowed-cn", [])
        settings["tls"] = security | ({"allowed_names": names} if names else {})
        properties.carried(*(f"security.{name}" for name in document["security"]))
    elif not is_loopback(split_host_port(listen)[0]):
        # Allow clients without TLS: the Drainer's port was open to the network, because Pumps have to reach
        # it.
        settings["insecure"] = True
        properties.remind("The drainer listens without TLS, as before: keep its port in a private network.")
    return settings


def _address(text: str) -> str:
    """Return host:port of an address that may be a URL."""
    address = text.partition("://")[2] or text
    return address if ":" in address else f"{address}:{_DRAINER_PORT}"


# --- The tables -----------------------------------------------------------------------------


def _tables(properties: OriginalProperties, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables to read and to exclude. An exclusion wins, as with Drainer."""
    syncer = document.get("syncer", {})
    wanted = [_database_pattern(name, "replicate-do-db") for name in syncer.get("replicate-do-db", [])]
    wanted += _table_patterns(syncer, "replicate-do-table")
    schemas = properties.get("syncer.ignore-schemas", _IGNORED_DEFAULT).split(",")
    excluded = [_database_pattern(name.strip(), "ignore-schemas") for name in schemas if name.strip()]
    excluded += _table_patterns(syncer, "ignore-table")
    properties.carried(
        *(f"syncer.{name}" for name in ("replicate-do-db", "replicate-do-table")),
        *(f"syncer.{name}" for name in ("ignore-schemas", "ignore-table")),
    )
    excluded.append(f"{_MARK_DATABASE}.*")
    return ({"tables": wanted} if wanted else {}) | {"exclude": excluded}


def _table_patterns(syncer: Mapping[str, Any], name: str) -> Iterator[str]:
    for table in syncer.get(name, []):
        database, own = (str(table.get(key, "")) for key in ("db-name", "tbl-name"))
        yield pattern_of(f"{_name(database, name)}\\.{_name(own, name)}", name)


def _database_pattern(database: str, name: str) -> str:
    return pattern_of(f"{_name(database, name)}\\..*", name)


def _name(text: str, name: str) -> str:
    """Return the expression of a name. A regex after `~` may match anywhere in the name, other text matches
    the whole name.
    """
    return name_expression(text.removeprefix("~"), name, is_anchored=not text.startswith("~"))


def _steps(properties: OriginalProperties, document: Mapping[str, Any]) -> list[dict[str, Any]]:
    ignored = document.get("syncer", {}).get("ignore-txn-commit-ts", [])
    properties.carried("syncer.ignore-txn-commit-ts")
    if not ignored:
        return []
    versions = ", ".join(str(_number(commit_ts, "ignore-txn-commit-ts")) for commit_ts in ignored)
    return [{"filter": {"where": f"_commit_version NOT IN ({versions})"}}]


def _sink(migration: Migration, properties: OriginalProperties, pipeline: dict[str, Any]) -> dict[str, Any]:
    kind = properties.get("syncer.db-type", "mysql").lower()
    if kind in _SERVERS:
        properties.carried("syncer.db-type", remark="sink.mysql")
        return {"mysql": _server_sink(migration, properties, pipeline)}
    if kind == "kafka":
        properties.carried("syncer.db-type", remark="sink.kafka")
        return {"kafka": _kafka_sink(properties)}
    if kind in _FILES:
        properties.carried("syncer.db-type", remark="sink.drainer")
        properties.carried("syncer.to.dir")
        folder = properties.get("syncer.to.dir") or properties.get("data-dir", "data.drainer")
        return {"drainer": {"path": folder} | _statements(properties)}
    properties.not_carried(
        "syncer.db-type", remark=f"no sink takes the place of {kind}: changes go to standard output"
    )
    return {"stdout": {}}


def _server_sink(
    migration: Migration, properties: OriginalProperties, pipeline: dict[str, Any]
) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "url": _server_url(properties),
        "user": properties.get("syncer.to.user", "root"),
    }
    settings |= migration.secret("password", "target.password", properties.get("syncer.to.password"))
    properties.carried(*(f"syncer.to.{name}" for name in ("host", "port", "user", "password")))
    workers = properties.get("syncer.worker-count")
    if workers.isdecimal() and int(workers):
        settings["connections"] = min(int(workers), _CONNECTIONS_MAX)
        properties.changed("syncer.worker-count", remark="sink.mysql.connections, of at most 64")
    is_whole = properties.flag("syncer.disable-dispatch") or not properties.flag(
        "syncer.enable-dispatch", default=True
    )
    if is_whole:
        settings["apply"] = "serial"
    properties.changed(
        "syncer.enable-dispatch",
        "syncer.disable-dispatch",
        remark="with `apply: serial` a batch of whole source transactions is one transaction",
    )
    if not properties.flag("syncer.sync-ddl", default=True):
        pipeline["schema_changes"] = "ignore"
    properties.changed(
        "syncer.sync-ddl", remark="schema_changes: columns and keys follow the source; no statement is copied"
    )
    _loops(properties, pipeline, settings)
    return settings


def _kafka_sink(properties: OriginalProperties) -> dict[str, Any]:
    topic = properties.get("syncer.to.topic-name")
    if not topic:
        raise OptionInvalid(
            "syncer.to.topic-name is missing, so the topic is named after the cluster's id",
            hint='Write topic-name = "7001_obinlog", with the id of your cluster, and migrate again',
        )
    options = {"client.id": "kafka-client-id", "message.max.bytes": "kafka-max-message-size"}
    own = {option: properties.get(f"syncer.to.{name}") for option, name in options.items()}
    if limit := own.get("message.max.bytes"):
        own["message.max.bytes"] = str(min(_number(limit, "kafka-max-message-size"), _MESSAGE_BYTES_MAX))
    properties.carried(*(f"syncer.to.{name}" for name in ("kafka-addrs", "topic-name", *options.values())))
    set_options = {option: value for option, value in own.items() if value}
    servers = properties.get("syncer.to.kafka-addrs", "127.0.0.1:9092")
    settings: dict[str, Any] = {"servers": servers, "topic": topic, "format": "drainer"}
    return settings | ({"options": set_options} if set_options else {}) | _statements(properties)


def _statements(properties: OriginalProperties) -> dict[str, Any]:
    """Return the setting with which a sink in Drainer's form leaves out statements; {} if statements are
    synced.
    """
    properties.carried("syncer.sync-ddl", remark="sink.statements")
    return {} if properties.flag("syncer.sync-ddl", default=True) else {"statements": False}


def _server_url(properties: OriginalProperties) -> str:
    host = properties.get("syncer.to.host", "127.0.0.1")
    port = properties.get("syncer.to.port", "3306")
    authority = properties.get("syncer.to.security.ssl-ca")
    properties.carried("syncer.to.security.ssl-ca")
    return f"mysql://{host}:{port}" + (f"?ssl_mode=verify_ca&ssl_ca={authority}" if authority else "")


def _loops(properties: OriginalProperties, pipeline: dict[str, Any], settings: dict[str, Any]) -> None:
    if not properties.flag("syncer.loopback-control"):
        properties.carried("syncer.loopback-control", "syncer.channel-id")
        return
    channel = _number(properties.get("syncer.channel-id", "0"), "channel-id")
    pipeline["loops"] = {"drainer_channels": [channel]}
    settings["drainer_channel"] = channel
    properties.carried("syncer.loopback-control", "syncer.channel-id")


# --- The checkpoint -------------------------------------------------------------------------


def _checkpoint(
    migration: Migration, properties: OriginalProperties, savepoint: Path | None, from_server: bool
) -> OriginalProperties | None:
    """Return the Drainer's checkpoint, None if it was not requested."""
    if savepoint is not None:
        values, location = _parse_checkpoint(read_text(savepoint), str(savepoint)), savepoint.name
    elif from_server:
        values, location = _read_checkpoint(properties), ".".join(_checkpoint_table(properties))
    else:
        return None
    return OriginalProperties(migration.report, location, values, CHECKPOINT_REFERENCE)


def _parse_checkpoint(text: str, location: str) -> dict[str, str]:
    """Return a checkpoint's values, from TOML or from JSON. Raises OptionInvalid."""
    try:
        values = _flatten(parse_json(text) if text.lstrip().startswith("{") else parse_toml(text))
    except ValueError as problem:
        raise OptionInvalid(f"{location} is no checkpoint of a Drainer: {problem}") from problem
    if not values.get("commitTS", "").isdecimal() or not int(values["commitTS"]):
        raise OptionInvalid(
            f"{location} has no commitTS", hint="Name the file savepoint in the Drainer's data-dir"
        )
    return values


def _checkpoint_table(properties: OriginalProperties) -> tuple[str, str]:
    database, table = _CHECKPOINT_TABLE
    return (
        properties.get("syncer.to.checkpoint.schema", database),
        properties.get("syncer.to.checkpoint.table", table),
    )


def _read_checkpoint(properties: OriginalProperties) -> dict[str, str]:
    """Read the checkpoint from its table, by default in the target. Raises OptionInvalid."""

    def setting(name: str, default: str = "") -> str:
        return properties.get(f"syncer.to.checkpoint.{name}", properties.get(f"syncer.to.{name}", default))

    address = ServerAddress.parse(
        f"mysql://{setting('host', '127.0.0.1')}:{setting('port', '3306')}",
        user=setting("user", "root"),
        password=Secret(setting("password")),
    )
    database, table = _checkpoint_table(properties)
    with connect(address) as connection:
        rows = connection.query(
            f"SELECT CAST(clusterID AS CHAR) AS cluster, checkPoint AS checkpoint"
            f" FROM {quote_name(database)}.{quote_name(table)}"
        )
    if len(rows) != 1:
        clusters = ", ".join(sorted(str(row["cluster"]) for row in rows)) or "none"
        raise OptionInvalid(
            f"{database}.{table} has checkpoints of these clusters: {clusters}",
            hint="Write the checkPoint of the Drainer's cluster into a file, and name it with --savepoint",
        )
    return _parse_checkpoint(str(rows[0]["checkpoint"]), f"{database}.{table}")


def _start(
    migration: Migration, properties: OriginalProperties, checkpoint: OriginalProperties | None
) -> str:
    """Return where the log starts: after the checkpoint, or after initial-commit-ts as in a new Drainer."""
    if checkpoint is not None:
        commit_ts = checkpoint.get("commitTS")
        checkpoint.carried("commitTS")
        if not checkpoint.flag("consistent"):
            migration.report.steps.append(
                "The Drainer did not end cleanly, so some transactions after its checkpoint are in the target"
                " already. They are written again. Rows of tables without a key may be there twice: compare"
                " the tables with penstock verify."
            )
        checkpoint.account_for_the_rest()
        properties.not_carried(
            "initial-commit-ts", remark="a checkpoint replaces it, as with Drainer", attention=False
        )
        return f"commit_ts:{commit_ts}"
    initial = properties.get("initial-commit-ts")
    properties.carried("initial-commit-ts")
    if initial.isdecimal() and int(initial):
        return f"commit_ts:{int(initial)}"
    migration.report.steps.append(
        "The log starts at the cluster's present. Stop the Drainer, and migrate again with --savepoint or"
        " --from-server, so that it starts at the Drainer's checkpoint."
    )
    return "latest"


def _remind(migration: Migration, properties: OriginalProperties) -> None:
    steps = migration.report.steps
    if "node-id" not in properties:
        steps.append(
            "The Drainer had a node id from its host's name. Remove it from the registry, because Pumps wait"
            " for it: binlogctl -cmd update-drainer -node-id ID -state offline"
        )
    steps += [
        "Pumps keep binlogs for their gc time only. Start the daemon before the checkpoint is older.",
        "Stop the Drainer with binlogctl -cmd pause-drainer, then run: penstock serve penstock.yaml",
        f"Run: penstock run {FILE}",
    ]
