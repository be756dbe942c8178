# SPDX-License-Identifier: Apache-2.0
"""Converts Maxwell's config.properties into a pipeline.

The properties are those of maxwells-daemon.io/config. `read_position` reads the position from the table
`positions` of Maxwell's own database.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.errors import OptionInvalid
from penstock.migrate.kafka_client import kafka_settings, options_below
from penstock.migrate.maxwell_filter import parse_filter
from penstock.migrate.output import Migration
from penstock.migrate.property_files import number_of, parse_properties, read_text
from penstock.migrate.report import OriginalProperties, Rule, carried, changed, missing, needless
from penstock.model import Secret, ServerAddress, Tls, quote_name
from penstock.mysql.connection import connect

FILE = "maxwell.yaml"

_NO_SUCH_SINK = missing("no sink writes there")
_METRICS = needless("`penstock run --metrics` reports metrics")

REFERENCE: dict[str, Rule] = {
    "config": needless("the file itself"),
    "log_level": needless("log lines have one level"),
    "daemon": needless("see the systemd unit of the guide for operating"),
    "env_config_prefix": missing(
        "properties in environment variables are not read: write them into the file"
    ),
    "host": carried("source.url"),
    "port": carried("source.url"),
    "user": carried("source.url"),
    "password": carried("source.password_file"),
    "ssl": carried("source.tls.mode"),
    "jdbc_options": missing("options of a JDBC driver"),
    "schema_database": needless("Penstock writes no tables into the source"),
    "client_id": carried("name"),
    "replica_server_id": carried("source.server_id"),
    "master_recovery": needless("another server of the cluster is followed by GTID set"),
    "gtid_mode": needless("GTIDs are used if the log has them"),
    "recapture_schema": needless("`penstock schema set` corrects definitions"),
    "max_schemas": needless("definitions are kept by position"),
    "binlog_heartbeat": needless("a silent connection is always detected"),
    "replication_host": carried("source.url"),
    "replication_port": carried("source.url"),
    "replication_user": carried("source.url"),
    "replication_password": carried("source.password_file"),
    "replication_ssl": carried("source.tls.mode"),
    "replication_jdbc_options": missing("options of a JDBC driver"),
    "replication_reconnection_retries": needless("see errors.retry_for"),
    "schema_host": missing("definitions come from the log itself and from its server"),
    "schema_port": needless("only with schema_host"),
    "schema_user": needless("only with schema_host"),
    "schema_password": needless("only with schema_host"),
    "schema_ssl": needless("only with schema_host"),
    "schema_jdbc_options": needless("only with schema_host"),
    "producer": carried("sink"),
    "custom_producer.factory": missing("a program of its own: read the changes with penstock.read_binlog"),
    "custom_producer.*": missing("a program of its own: read the changes with penstock.read_binlog"),
    "custom_health.factory": missing("`penstock check` and /readyz report health"),
    "producer_ack_timeout": needless("see errors.retry_for"),
    "producer_partition_by": carried("sink.kafka.partition_by"),
    "producer_partition_columns": carried("sink.kafka.partition_by"),
    "producer_partition_by_fallback": missing("a table without the column stops the pipeline"),
    "ignore_producer_error": missing("an error of the target is retried, then the pipeline stops", "false"),
    "output_file": missing("redirect standard output into the file"),
    "javascript": missing("write a `python` or `filter` step"),
    "kafka_topic": carried("sink.kafka.topic"),
    "dead_letter_topic": missing("rows that fail go to dead_letter, with errors.rows: dead_letter"),
    "kafka_version": needless("librdkafka speaks with every broker since 0.8"),
    "kafka_partition_hash": missing("the sink uses the hash of Kafka's own producers"),
    "kafka_key_format": missing("keys have Maxwell's form hash", "hash"),
    "ddl_kafka_topic": missing("the sink writes no definitions"),
    **options_below("kafka."),
    "kinesis_*": _NO_SUCH_SINK,
    "kinesis_stream": _NO_SUCH_SINK,
    "sqs_*": _NO_SUCH_SINK,
    "sqs_queue_uri": _NO_SUCH_SINK,
    "sns_*": _NO_SUCH_SINK,
    "sns_topic": _NO_SUCH_SINK,
    "sns_attrs": _NO_SUCH_SINK,
    "nats_*": _NO_SUCH_SINK,
    "nats_url": _NO_SUCH_SINK,
    "nats_subject": _NO_SUCH_SINK,
    "pubsub_*": _NO_SUCH_SINK,
    "ddl_pubsub_topic": _NO_SUCH_SINK,
    "bigquery_*": _NO_SUCH_SINK,
    "rabbitmq_*": missing("the rabbitmq sink has settings of its own: see its guide"),
    "redis_*": missing("the redis sink writes rows, and no messages of Maxwell's: see its guide"),
    "output_binlog_position": changed("position is always in the message"),
    "output_gtid_position": changed("gtid is in the message whenever the log has it"),
    "output_commit_info": missing("the sink writes no xid and commit", "false"),
    "output_xoffset": missing("the sink writes no xoffset", "false"),
    "output_push_timestamp": missing("messages have the time of the commit", "false"),
    "output_nulls": missing("columns that are null are always in the message", "true"),
    "output_server_id": changed("server_id is always in the message"),
    "output_thread_id": changed("thread_id is in the message whenever the log has it"),
    "output_schema_id": missing("definitions have no number", "false"),
    "output_row_query": missing("messages do not have the statement", "false"),
    "row_query_max_length": needless("only with output_row_query"),
    "output_primary_keys": missing("the key of the message has the primary key", "false"),
    "output_primary_key_columns": missing("the key of the message has the primary key", "false"),
    "output_ddl": missing("the sink writes no definitions", "false"),
    "output_null_zerodates": missing("zero dates stay as they are", "false"),
    "output_naming_strategy": missing("columns keep their names: rename them with a `map` step", "none"),
    "exclude_columns": missing("drop columns with a `map` step"),
    "ignore_missing_schema": missing("a table without a definition stops the reader", "false"),
    "filter": carried("source.tables and source.exclude"),
    "encrypt": missing("messages are not encrypted: use TLS", "none"),
    "secret_key": needless("only with encrypt"),
    "ha": needless("several `penstock run` of one pipeline stand by for each other"),
    "jgroups_config": needless("only with ha"),
    "raft_member_id": needless("only with ha"),
    "metrics_*": _METRICS,
    "metrics_type": _METRICS,
    "metrics_prefix": _METRICS,
    "http_port": _METRICS,
    "http_path_prefix": _METRICS,
    "http_bind_address": _METRICS,
    "http_diagnostic": _METRICS,
    "http_diagnostic_timeout": _METRICS,
    "bootstrapper": needless("load: full, or `penstock resnapshot`"),
    "init_position": carried("source.start"),
    "replay": needless("a new state, or `penstock pipelines reset`, replays"),
    "buffer_memory_usage": needless("memory is bounded by batch.bytes"),
    "http_config": needless("restart the pipeline after a change of its file"),
    "binlog_event_queue_size": needless("memory is bounded by batch.bytes"),
}

_FLAGS = ("output_binlog_position", "output_gtid_position", "output_server_id", "output_thread_id")


def migrate_maxwell(
    path: Path, migration: Migration, *, start: str | None = None, from_server: bool = False
) -> None:
    """Add the pipeline of a config.properties. `start` overrides where its changes begin.

    With `from_server` the position is read from Maxwell's own table. Raises OptionInvalid, and propagates the
    server's errors.
    """
    values = parse_properties(read_text(path))
    # Maxwell's names are lower case on the command line, and kafka.* options are passed on unchanged.
    properties = OriginalProperties(migration.report, path.name, values, REFERENCE)
    source, address = _source(migration, properties)
    if start is None and from_server:
        start = read_position(address, properties)
    name = properties.get("client_id", "maxwell")
    document: dict[str, Any] = {"name": name, "source": source}
    properties.carried("client_id")
    if start is None:
        start = ":".join(properties.get("init_position").split(":")[:2]) or None
    properties.carried("init_position")
    source["start"] = start or "latest"
    if start is None:
        migration.report.steps.append(
            "The pipeline starts at the end of the log. Stop Maxwell, and migrate again with"
            " --from-server, or set source.start to its row in maxwell.positions."
        )
    document |= {"load": "none", "sink": _sink(migration, properties)}
    properties.changed(*_FLAGS, remark="it is in the message whenever the log has it")
    properties.account_for_the_rest()
    migration.pipelines[FILE] = document
    migration.report.steps += [f"Stop Maxwell, then run: penstock run {FILE}"]


def _source(migration: Migration, properties: OriginalProperties) -> tuple[dict[str, Any], ServerAddress]:
    """Return the pipeline's source, and the server that has Maxwell's own tables."""

    def setting(name: str, default: str = "") -> str:
        return properties.get(f"replication_{name}", "") if separate else properties.get(name, default)

    separate = "replication_host" in properties
    host = setting("host", "localhost")
    port, user, password = setting("port") or "3306", setting("user"), setting("password")
    host = "127.0.0.1" if host == "localhost" else host
    source: dict[str, Any] = {"url": f"mysql://{host}:{port}"} | ({"user": user} if user else {})
    source |= migration.secret("password", "maxwell.password", password)
    mode = (setting("ssl") or properties.get("ssl", "DISABLED")).lower()
    source["tls"] = {"mode": mode}
    prefix = "replication_" if separate else ""
    properties.carried(*(f"{prefix}{name}" for name in ("host", "port", "user", "password", "ssl")))
    if separate:
        properties.not_carried(
            *("host", "port", "user", "password", "ssl"),
            remark="the server of Maxwell's own tables, which Penstock does not need",
            attention=False,
        )
    if server_id := properties.get("replica_server_id"):
        source["server_id"] = number_of(server_id)
        properties.carried("replica_server_id")
    _filter(properties, source)
    own_mode = properties.get("ssl", "DISABLED").lower()
    store = ServerAddress.parse(
        f"mysql://{properties.get('host', '127.0.0.1')}:{properties.get('port', '3306')}",
        user=properties.get("user") or None,
        password=Secret(properties.get("password")),
    )
    return source, replace(store, tls=Tls(own_mode))


def _filter(properties: OriginalProperties, source: dict[str, Any]) -> None:
    selection = parse_filter(properties.get("filter"))
    schema_database = properties.get("schema_database", "maxwell")
    if selection.tables:
        source["tables"] = selection.tables
    # Maxwell never sends the changes of its own tables.
    source["exclude"] = [*selection.exclude, f"{quote_name(schema_database)}.*"]
    if selection.column_rules:
        properties.changed(
            "filter",
            remark=f"source.tables and source.exclude, without {selection.column_rules} rules on column"
            " values: write `filter` steps",
            attention=True,
        )
    properties.carried("filter")


def read_position(address: ServerAddress, properties: OriginalProperties) -> str:
    """Return where Maxwell stopped, from its own table: a GTID set in GTID mode, or a position.

    Raises OptionInvalid if the table has no row of this client, and propagates the server's errors.
    """
    database = properties.get("schema_database", "maxwell")
    client = properties.get("client_id", "maxwell")
    with connect(address) as connection:
        rows = connection.query(
            "SELECT binlog_file, binlog_position, gtid_set FROM"
            f" {quote_name(database)}.positions WHERE client_id = %s ORDER BY last_heartbeat_read DESC",
            [client],
        )
    if not rows:
        raise OptionInvalid(
            f"{database}.positions has no row of the client {client}",
            hint="Check client_id and schema_database, or give the position with --start",
        )
    if len(rows) > 1:
        raise OptionInvalid(
            f"{database}.positions has {len(rows)} servers for the client {client}",
            hint="Give the position on the server that is followed now, with --start",
        )
    row = rows[0]
    if properties.flag("gtid_mode") and row["gtid_set"]:
        return str(row["gtid_set"])
    return f"{row['binlog_file']}:{row['binlog_position']}"


# --- The sink -------------------------------------------------------------------------------


def _sink(migration: Migration, properties: OriginalProperties) -> dict[str, Any]:
    producer = properties.get("producer", "stdout").lower()
    if producer != "kafka":
        if producer != "stdout":
            properties.not_carried(
                "producer",
                remark=f"no sink takes the place of {producer}: the messages go to standard output",
            )
        properties.carried("producer", remark="sink.stdout")
        return {"stdout": {"format": "maxwell"}}
    properties.carried("producer", remark="sink.kafka")
    settings = kafka_settings(migration, properties, "kafka.", "kafka.password")
    topic = properties.get("kafka_topic", "maxwell")
    topic = topic.replace("{", "{{").replace("}", "}}") if "%{" not in topic else topic
    settings["topic"] = topic.replace("%{database}", "{database}").replace("%{table}", "{table}")
    settings["format"] = "maxwell"
    properties.carried("kafka_topic")
    _partitions(properties, settings)
    return {"kafka": settings}


def _partitions(properties: OriginalProperties, settings: dict[str, Any]) -> None:
    """Choose what determines the partition of a message, and thereby the order of messages."""
    partition_by = properties.get("producer_partition_by", "database").lower()
    if partition_by == "primary_key":
        properties.changed(
            "producer_partition_by", remark="the key of the message, by the hash of Kafka's own producers"
        )
    elif partition_by == "column":
        columns = properties.get("producer_partition_columns").split(",")
        settings["partition_by"] = [column.strip() for column in columns if column.strip()]
        properties.changed(
            *("producer_partition_by", "producer_partition_columns"),
            remark="sink.kafka.partition_by, by the hash of Kafka's own producers",
        )
    else:
        remark = (
            "messages of one key are in one partition: the order of changes across keys is that of the log"
            f" only in a topic with one partition, and not per {partition_by}"
        )
        properties.changed("producer_partition_by", remark=remark, attention=partition_by != "random")
        if "producer_partition_by" not in properties:
            properties.remind(f"Maxwell partitions by database by default. Here {remark}.")
