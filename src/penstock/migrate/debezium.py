# SPDX-License-Identifier: Apache-2.0
"""Converts a Debezium connector's configuration into a pipeline that writes the same topics.

The file is JSON: `{"name": .., "config": {..}}`, the configuration alone, or properties of Debezium Server.
The offsets are JSON as Kafka Connect's `GET /connectors/NAME/offsets` returns them (KIP-875).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import OptionInvalid
from penstock.migrate.debezium_converters import format_of
from penstock.migrate.debezium_forms import flat_transforms, forms_of, transforms_of
from penstock.migrate.debezium_outbox import outbox_of
from penstock.migrate.debezium_reference import REFERENCE
from penstock.migrate.debezium_topics import leave_out_topics, topics_of
from penstock.migrate.kafka_client import kafka_settings
from penstock.migrate.nested_text import parse_json
from penstock.migrate.output import Migration
from penstock.migrate.property_files import number_of, parse_properties, read_text
from penstock.migrate.report import OriginalProperties
from penstock.migrate.table_filters import both, patterns_of, split_expressions

FILE = "pipeline.yaml"

_CLASSES = {
    "io.debezium.connector.mysql.MySqlConnector": "mysql",
    "io.debezium.connector.mariadb.MariaDbConnector": "mariadb",
}
_REGEX_ROUTER = "org.apache.kafka.connect.transforms.RegexRouter"
# The expressions of Debezium's own examples for prefix, database and table.
_THREE_PARTS = ("([^.]+)\\.([^.]+)\\.([^.]+)", "([^.]*)\\.([^.]*)\\.([^.]*)", "(.*)\\.(.*)\\.(.*)")
_OPERATIONS = {"c": "insert", "u": "update", "d": "delete"}
_WITHOUT_LOAD = ("never", "no_data", "schema_only", "recovery", "schema_only_recovery")
_WITH_LOAD = ("initial", "initial_only", "always", "when_needed", "configuration_based")
_SERVER_PREFIX = "debezium.source."


def migrate_debezium(
    path: Path, migration: Migration, *, offsets: Path | None = None, kafka: str | None = None
) -> None:
    """Add the pipeline of a connector. `kafka` are the brokers, which a connector's file does not name.

    Raises OptionInvalid for a file that is not a configuration of these connectors.
    """
    name, values = _configuration(path)
    listed = [option for option in REFERENCE if "producer." not in option]
    properties = OriginalProperties(migration.report, path.name, values, REFERENCE, listed)
    scheme = _scheme(properties, path)
    prefix = properties.get("topic.prefix") or properties.get("database.server.name")
    if not prefix:
        raise OptionInvalid(
            f"{path} has no topic.prefix", hint="Name the file with the whole configuration of the connector"
        )
    properties.carried("topic.prefix", "database.server.name", "name")
    source = _source(migration, properties, scheme, prefix)
    document: dict[str, Any] = {"name": name or prefix, "source": source}
    steps = _steps(properties)
    load, start = _start(properties, None if offsets is None else _offset(offsets, prefix))
    document["load"] = _load(properties, load)
    if start is not None:
        source["start"] = start
    if steps:
        document["steps"] = steps
    document["sink"] = {"kafka": _sink(migration, properties, prefix, kafka)}
    properties.account_for_the_rest()
    migration.pipelines[FILE] = document
    if offsets is None and load != "full":
        migration.report.steps.append(
            "The pipeline starts at the end of the log. Stop the connector, save GET"
            " /connectors/NAME/offsets of Kafka Connect, and migrate again with --offsets."
        )
    migration.report.steps.append(f"Stop the connector, then run: penstock run {FILE}")


def _configuration(path: Path) -> tuple[str, dict[str, str]]:
    """Return the connector's name and its properties as text."""
    text = read_text(path)
    if path.suffix != ".json" and not text.lstrip().startswith("{"):
        values = parse_properties(text)
        server = {
            name.removeprefix(_SERVER_PREFIX): value
            for name, value in values.items()
            if name.startswith(_SERVER_PREFIX)
        }
        rest = {name: value for name, value in values.items() if not name.startswith(_SERVER_PREFIX)}
        return values.get("name", ""), server | rest
    try:
        document = parse_json(text)
    except ValueError as problem:
        raise OptionInvalid(
            f"{path} is not JSON: {problem}", hint="Name a connector's JSON file"
        ) from problem
    if not isinstance(document, dict):
        raise OptionInvalid(f"{path} is not a JSON object", hint="Name a connector's JSON file")
    config = document.get("config", document)
    if not isinstance(config, dict):
        raise OptionInvalid(f"{path}: config is not a JSON object", hint="Name a connector's JSON file")
    values = {str(key): _text(value) for key, value in config.items()}
    return str(document.get("name") or values.get("name", "")), values


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def _scheme(properties: OriginalProperties, path: Path) -> str:
    connector = properties.get("connector.class")
    if connector not in _CLASSES:
        raise OptionInvalid(
            f"{path}: connector.class is {connector or 'missing'}, and no connector for MySQL or MariaDB",
            hint=f"Penstock reads {' and '.join(_CLASSES)}",
        )
    properties.carried("connector.class")
    return _CLASSES[connector]


# --- The source -----------------------------------------------------------------------------


def _source(migration: Migration, properties: OriginalProperties, scheme: str, prefix: str) -> dict[str, Any]:
    host, port = properties.get("database.hostname", "127.0.0.1"), properties.get("database.port", "3306")
    host = f"[{host}]" if ":" in host else host
    source: dict[str, Any] = {"url": f"{scheme}://{host}:{port}", "name": prefix}
    if user := properties.get("database.user"):
        source["user"] = user
    password = properties.get("database.password")
    properties.carried("database.hostname", "database.port", "database.user")
    if password.startswith("${"):
        properties.changed(
            "database.password",
            remark="it refers to a provider of Kafka Connect's: set source.password_file or password_env",
            attention=True,
        )
    else:
        source |= migration.secret("password", "source.password", password)
        properties.carried("database.password")
    if server_id := properties.get("database.server.id"):
        source["server_id"] = number_of(server_id)
        properties.carried("database.server.id")
    source["tls"] = {"mode": properties.get("database.ssl.mode", "preferred").lower()}
    properties.carried("database.ssl.mode")
    tables, exclude = _tables(properties)
    return source | ({"tables": tables} if tables else {}) | ({"exclude": exclude} if exclude else {})


def _tables(properties: OriginalProperties) -> tuple[list[str], list[str]]:
    """Return table patterns of the include and exclude lists; a table has to pass both."""
    databases = split_expressions(properties.get("database.include.list"))
    tables = split_expressions(properties.get("table.include.list"))
    of_databases = [f"(?:{database})\\..*" for database in databases]
    if tables and of_databases:
        selected = [both("|".join(of_databases), table) for table in tables]
    else:
        selected = tables or of_databases
    excluded = split_expressions(properties.get("table.exclude.list"))
    excluded += [
        f"(?:{database})\\..*" for database in split_expressions(properties.get("database.exclude.list"))
    ]
    included = [pattern for expression in selected for pattern in _pattern(expression, "table.include.list")]
    exclude = [pattern for expression in excluded for pattern in _pattern(expression, "table.exclude.list")]
    for kind in ("include", "exclude"):
        properties.carried(f"database.{kind}.list", f"table.{kind}.list")
    return included, exclude


def _pattern(expression: str, name: str) -> list[str]:
    # Treat the value as a single expression, even if its brackets contain commas at which a list would be
    # split.
    return patterns_of(f"(?:{expression})", name)


# --- Where it starts ------------------------------------------------------------------------


def _offset(path: Path, prefix: str) -> Mapping[str, Any]:
    """Return the connector's offset. Raises OptionInvalid."""
    hint = "Save the response of Kafka Connect's GET /connectors/NAME/offsets"
    try:
        entries = parse_json(read_text(path))["offsets"]
        matching = [entry["offset"] for entry in entries if entry["partition"]["server"] == prefix]
    except (ValueError, KeyError, TypeError) as problem:
        raise OptionInvalid(f"{path} is not a list of Kafka Connect offsets", hint=hint) from problem
    if len(matching) != 1 or not isinstance(matching[0], dict):
        raise OptionInvalid(f"{path} has {len(matching)} offsets of the server {prefix}", hint=hint)
    offset: Mapping[str, Any] = matching[0]
    return offset


def _start(properties: OriginalProperties, offset: Mapping[str, Any] | None) -> tuple[str, str | None]:
    """Return the load's mode, and where the changes start; None means the position at which the load
    begins.
    """
    mode = properties.get("snapshot.mode", "initial").lower()
    if mode not in (*_WITHOUT_LOAD, *_WITH_LOAD):
        properties.not_carried("snapshot.mode", remark=f"there is no load of the kind {mode}")
    if mode in ("initial_only", "always", "when_needed", "configuration_based"):
        remark = {
            "initial_only": "load: full, but changes follow: run it with --until caught-up",
            "always": "load: full reads the tables once; `penstock resnapshot` reads them again",
            "when_needed": "load: full reads the tables once; see source.on_lost for a purged log",
        }.get(mode, "load: full")
        properties.changed("snapshot.mode", remark=remark, attention=True)
    properties.carried("snapshot.mode")
    if offset is None:
        return ("none", "latest") if mode in _WITHOUT_LOAD else ("full", None)
    if offset.get("snapshot"):
        # Load all tables: the snapshot did not end, so not all of its rows are in the topics.
        return "full", None
    # Debezium writes this key only while an incremental snapshot is in progress (debezium-design-documents).
    if offset.get("incremental_snapshot_collections"):
        raise OptionInvalid(
            "the offset has an incremental snapshot in progress: rows are still missing in the topics",
            hint="Let the snapshot end, or stop it by a signal, and save the offset again",
        )
    gtids, file, position = offset.get("gtids"), offset.get("file"), offset.get("pos")
    if isinstance(gtids, str) and gtids.strip():
        return "none", "".join(gtids.split())
    if isinstance(file, str) and isinstance(position, int):
        # `event` and `row` are the numbers of events and rows that were already sent from the transaction at
        # `pos`. They are ignored: the whole transaction is sent again.
        return "none", f"{file}:{position}"
    raise OptionInvalid(
        "the connector's offset has neither gtids nor file and pos",
        hint="Save the response of Kafka Connect's GET /connectors/NAME/offsets",
    )


# --- Steps and sink -------------------------------------------------------------------------


def _steps(properties: OriginalProperties) -> list[dict[str, Any]]:
    skipped = [name.strip() for name in properties.get("skipped.operations", "t").split(",")]
    properties.carried("skipped.operations")
    kinds = [kind for letter, kind in _OPERATIONS.items() if letter not in skipped]
    if len(kinds) == len(_OPERATIONS) or "none" in skipped:
        return []
    return [{"only": {"kinds": kinds}}]


def _sink(
    migration: Migration, properties: OriginalProperties, prefix: str, kafka: str | None
) -> dict[str, Any]:
    override = "producer.override."
    prefix_of_options = override if properties.below(override) else "schema.history.internal.producer."
    sink = kafka_settings(migration, properties, prefix_of_options, "kafka.password")
    servers = properties.get("schema.history.internal.kafka.bootstrap.servers")
    if not (kafka or servers):
        raise OptionInvalid(
            "a connector's configuration does not name its brokers",
            hint="Give those of Kafka Connect's worker: --kafka broker-1:9092,broker-2:9092",
        )
    sink["servers"] = kafka or servers
    properties.carried("schema.history.internal.kafka.bootstrap.servers")
    if kafka is None:
        properties.remind(f"The topics are written to {servers}, the brokers of the schema history.")
    if (outbox := outbox_of(properties)) is not None:
        formats = [
            f"{part}.converter{suffix}" for part in ("key", "value") for suffix in ("", ".schemas.enable")
        ]
        remark = "the outbox says what its messages are"
        properties.not_carried(*formats, "tombstones.on.delete", remark=remark, attention=False)
        leave_out_topics(properties)
        return sink | outbox
    sink["topic"] = _topic(properties, prefix)
    sink |= format_of(migration, properties)
    forms = forms_of(properties)
    forms |= topics_of(properties, prefix, flat=bool(forms.get("flat")))
    if forms:
        sink["debezium"] = forms
    if forms.get("flat"):
        properties.not_carried(
            "tombstones.on.delete", remark="debezium.deletes says what flat rows have", attention=False
        )
    elif "tombstones.on.delete" in properties:
        sink["tombstones"] = properties.flag("tombstones.on.delete", default=True)
        properties.carried("tombstones.on.delete")
    for option, setting in (("partitions", "partitions"), ("replication.factor", "replicas")):
        value = properties.get(f"topic.creation.default.{option}")
        if value.isdecimal() and int(value):
            sink[setting] = int(value)
        properties.carried(f"topic.creation.default.{option}")
    return sink


def _topic(properties: OriginalProperties, prefix: str) -> str:
    """Return the topic's template: prefix.database.table, or what a RegexRouter turns these parts into."""
    delimiter = properties.get("topic.delimiter", ".")
    properties.carried("topic.delimiter")
    literal = prefix.replace("{", "{{").replace("}", "}}")
    transforms = transforms_of(properties)
    routers = [name for name in transforms if properties.get(f"transforms.{name}.type") == _REGEX_ROUTER]
    if len(routers) == 1 and delimiter == ".":
        [router] = routers
        options = [f"transforms.{router}.{name}" for name in ("type", "regex", "replacement")]
        _, regex, replacement = (properties.get(option) for option in options)
        if regex in _THREE_PARTS and re.fullmatch(r"(\$[123]|[\w.-])+", replacement):
            properties.carried(*options, remark="sink.kafka.topic")
            if not set(transforms) - {router} - flat_transforms(properties):
                properties.carried("transforms", remark="sink.kafka")
            parts = {"$1": literal, "$2": "{database}", "$3": "{table}"}
            return re.sub(r"\$[123]", lambda part: parts[part[0]], replacement)
    return f"{literal}{delimiter}{{database}}{delimiter}{{table}}"


def _load(properties: OriginalProperties, mode: str) -> str | dict[str, Any]:
    """Return the load's settings."""
    threads, chunk_rows = (
        properties.get("snapshot.max.threads"),
        properties.get("incremental.snapshot.chunk.size"),
    )
    properties.carried("snapshot.max.threads", "incremental.snapshot.chunk.size")
    settings = {
        name: int(value)
        for name, value in (("parallel", threads), ("chunk_rows", chunk_rows))
        if value.isdecimal() and int(value)
    }
    return {"mode": mode, **settings} if settings and mode == "full" else mode
