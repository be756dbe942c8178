# SPDX-License-Identifier: Apache-2.0
"""A Debezium connector becomes a pipeline into the same topics, and every property is accounted for."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import OptionInvalid
from penstock.migrate.debezium import migrate_debezium
from penstock.migrate.output import Migration, SecretsIn
from penstock.migrate.report import Outcome
from penstock.pipeline.settings import PipelineSettings, load_pipeline
from tests.support.migrate.samples import ORIGINALS, entries_by_name

CONNECTOR = ORIGINALS / "debezium/connector.json"
OFFSETS = ORIGINALS / "debezium/offsets.json"
GTIDS = "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5"


def connector(folder: Path, **changes: str | None) -> Path:
    """Return a connector's file with changed properties; None removes one."""
    document = json.loads(CONNECTOR.read_text())
    for name, value in changes.items():
        key = name.replace("__", ".")
        document["config"].pop(key, None)
        if value is not None:
            document["config"][key] = value
    path = folder / "connector.json"
    path.write_text(json.dumps(document))
    return path


def migrated(path: Path, output: Path, secrets_in: SecretsIn = "file", **options: Any) -> Migration:
    migration = Migration("debezium", secrets_in)
    migrate_debezium(path, migration, **options)
    migration.write(output)
    return migration


def pipeline_of(path: Path, output: Path, **options: Any) -> PipelineSettings:
    migrated(path, output, **options)
    return load_pipeline(output / "pipeline.yaml")


def test_connector_becomes_a_pipeline(tmp_path: Path) -> None:
    settings = pipeline_of(CONNECTOR, tmp_path / "new")
    [source] = settings.sources
    server = source.server
    assert server is not None
    assert (server.host, server.port, server.user, server.server_id) == ("db1", 3307, "debezium", 184054)
    assert (server.password.reveal(), server.tls.mode) == ("pa$$ word", "required")
    assert (settings.name, source.name, source.start) == ("shop-connector", "shop", None)
    assert (settings.load.mode, settings.load.parallel) == ("full", 4)
    selected = {
        name: source.tables.matches(*name.split("."))
        for name in ("shop.orders", "SHOP.orders", "crm_12.a", "crm_x.a", "shop.tmp_1", "other.orders")
    }
    assert [name for name, is_selected in selected.items() if is_selected] == [
        "shop.orders",
        "SHOP.orders",
        "crm_12.a",
    ]
    sink: Any = settings.sink.settings
    assert (sink.servers, sink.topic, sink.format, sink.tombstones) == (
        "broker-1:9092",
        "cdc-{database}-{table}",
        "debezium",
        False,
    )
    assert (sink.user, sink.mechanism, sink.tls) == ("cdc", "SCRAM-SHA-512", True)
    assert sink.password is not None
    assert sink.password.reveal() == "br0ker"
    assert [step.verb for step in settings.steps] == ["only"]
    assert settings.steps[0].settings.kinds == ("insert", "update")  # type: ignore[attr-defined]


def test_offset_becomes_the_start(tmp_path: Path) -> None:
    settings = pipeline_of(CONNECTOR, tmp_path / "new", offsets=OFFSETS)
    # `event` and `row` are within the transaction at `pos`, which is sent again.
    assert str(settings.sources[0].start) == "mysql-bin.000003:1542"
    assert settings.load.mode == "none"


@pytest.mark.parametrize(
    ("offset", "start", "load"),
    [
        (
            {"gtids": f"{GTIDS},\n4e11fa47-71ca-11e1-9e33-c80aa9429562:1"},
            f"gtid:{GTIDS},4e11fa47-71ca-11e1-9e33-c80aa9429562:1",
            "none",
        ),
        ({"gtids": GTIDS, "snapshot": True}, "None", "full"),
        ({"gtids": None}, "mysql-bin.000003:4", "none"),
    ],
    ids=["gtid set", "unfinished snapshot", "position"],
)
def test_every_form_of_an_offset_is_migrated(
    tmp_path: Path, offset: dict[str, Any], start: str, load: str
) -> None:
    document = {"partition": {"server": "shop"}, "offset": {"file": "mysql-bin.000003", "pos": 4, **offset}}
    path = tmp_path / "offsets.json"
    path.write_text(json.dumps({"offsets": [document]}))
    settings = pipeline_of(CONNECTOR, tmp_path / "new", offsets=path)
    assert (str(settings.sources[0].start), settings.load.mode) == (start, load)


def test_offsets_of_another_server_are_refused(tmp_path: Path) -> None:
    path = connector(tmp_path, topic__prefix="crm")
    with pytest.raises(OptionInvalid, match="0 offsets of the server crm"):
        migrated(path, tmp_path / "new", offsets=OFFSETS)


def test_topics_are_named_as_the_connectors(tmp_path: Path) -> None:
    path = connector(
        tmp_path,
        transforms=None,
        transforms__route__type=None,
        transforms__route__regex=None,
        transforms__route__replacement=None,
        value__converter__schemas__enable=None,
        topic__delimiter="_",
    )
    sink: Any = pipeline_of(path, tmp_path / "new").sink.settings
    assert (sink.topic, sink.format) == ("shop_{database}_{table}", "debezium_schema")


def test_connector_without_brokers_asks_for_them(tmp_path: Path) -> None:
    path = connector(tmp_path, schema__history__internal__kafka__bootstrap__servers=None)
    with pytest.raises(OptionInvalid, match="does not name its brokers"):
        migrated(path, tmp_path / "new")
    sink: Any = pipeline_of(path, tmp_path / "new", kafka="worker:9092").sink.settings
    assert sink.servers == "worker:9092"


@pytest.mark.parametrize("text", ['{"a":' * 100_000, '{"config": {"a":' + "[" * 300 + "]" * 300 + "}}"])
def test_deeply_nested_files_are_refused_by_name(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "nested.json").write_text(text)
    with pytest.raises(OptionInvalid, match=r"nested\.json is not JSON: it is nested"):
        migrate_debezium(path, Migration("debezium"))
    with pytest.raises(OptionInvalid, match=r"nested\.json is not a list of Kafka Connect offsets"):
        migrate_debezium(connector(tmp_path), Migration("debezium"), offsets=path)


def test_another_connector_is_refused(tmp_path: Path) -> None:
    path = connector(tmp_path, connector__class="io.debezium.connector.postgresql.PostgresConnector")
    with pytest.raises(OptionInvalid, match="no connector for MySQL"):
        migrated(path, tmp_path / "new")


def test_properties_of_debezium_server_are_read(tmp_path: Path) -> None:
    config = json.loads(CONNECTOR.read_text())["config"]
    path = tmp_path / "application.properties"
    lines = [f"debezium.source.{name}={value}".replace("\\", "\\\\") for name, value in config.items()]
    path.write_text("\n".join(lines))
    settings = pipeline_of(path, tmp_path / "new")
    assert settings.name == "shop"
    assert settings.sources[0].tables.matches("crm_12", "a")


def test_secrets_become_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    migration = migrated(CONNECTOR, tmp_path / "new", "env")
    assert migration.variables == ["KAFKA_PASSWORD", "SOURCE_PASSWORD"]
    assert not (tmp_path / "new/secrets").exists()
    with pytest.raises(OptionInvalid, match="SOURCE_PASSWORD"):
        load_pipeline(tmp_path / "new/pipeline.yaml", {})
    environment = {"SOURCE_PASSWORD": "pa$$ word", "KAFKA_PASSWORD": "br0ker"}
    server = load_pipeline(tmp_path / "new/pipeline.yaml", environment).sources[0].server
    assert server is not None
    assert server.password.reveal() == "pa$$ word"


def test_properties_without_an_equivalent_need_attention(tmp_path: Path) -> None:
    path = connector(
        tmp_path,
        decimal__handling__mode="exact",
        time__precision__mode="adaptive_time_microseconds",
        **{"column.mask.with.8.chars": "shop.orders.card", "of.tomorrow": "1", "poll.interval.ms": "500"},
    )
    entries = entries_by_name(migrated(path, tmp_path / "new").report)
    attention = {name: entry.outcome for name, entry in entries.items() if entry.attention}
    assert attention == {
        "decimal.handling.mode": Outcome.NOT_CARRIED,
        "column.mask.with.8.chars": Outcome.NOT_CARRIED,
        "of.tomorrow": Outcome.UNKNOWN,
    }
    assert entries["poll.interval.ms"].outcome is Outcome.NOT_CARRIED


def test_no_property_is_reported_as_carried_unless_it_is(tmp_path: Path) -> None:
    # Both prefixes name the producer. Only the first prefix is used, and the second is not reported as
    # carried over.
    path = connector(tmp_path, producer__override__security__protocol="PLAINTEXT")
    entries = entries_by_name(migrated(path, tmp_path / "new").report)
    assert entries["producer.override.security.protocol"].outcome is Outcome.CARRIED
    unused = entries["schema.history.internal.producer.security.protocol"]
    assert (unused.outcome, unused.attention) == (Outcome.NOT_CARRIED, True)


def test_report_names_every_property_and_no_secret(tmp_path: Path) -> None:
    migrated(CONNECTOR, tmp_path / "new")
    report = (tmp_path / "new/migration.md").read_text()
    assert [name for name in json.loads(CONNECTOR.read_text())["config"] if f"`{name}`" not in report] == []
    assert "`heartbeat.interval.ms`" in report
    assert "pa$$" not in report + (tmp_path / "new/pipeline.yaml").read_text()
    assert "br0ker" not in report + (tmp_path / "new/pipeline.yaml").read_text()


def test_handling_modes_and_flat_rows_are_carried(tmp_path: Path) -> None:
    path = connector(
        tmp_path,
        decimal__handling__mode="string",
        time__precision__mode="connect",
        transforms="unwrap,route",
        transforms__unwrap__type="io.debezium.transforms.ExtractNewRecordState",
        **{
            "bigint.unsigned.handling.mode": "precise",
            "transforms.unwrap.add.fields": "op,source.ts_ms",
            "transforms.unwrap.delete.tombstone.handling.mode": "rewrite",
        },
    )
    migration = migrated(path, tmp_path / "new")
    assert migration.report.attention == []
    sink: Any = load_pipeline(tmp_path / "new/pipeline.yaml").sink.settings
    forms = sink.debezium
    assert (forms.decimal, forms.time, forms.bigint_unsigned, forms.binary) == (
        "string",
        "connect",
        "precise",
        "bytes",
    )
    assert (forms.flat, forms.fields, forms.deletes) == (True, ("op", "source.ts_ms"), "rewrite")
    assert sink.topic == "cdc-{database}-{table}"
    assert sink.tombstones is None


def test_topics_beside_those_of_tables_are_carried(tmp_path: Path) -> None:
    path = connector(
        tmp_path,
        include__schema__changes="true",
        provide__transaction__metadata="true",
        skipped__operations="none",
        **{"heartbeat.interval.ms": "5000", "topic.transaction": "tx"},
    )
    migration = migrated(path, tmp_path / "new")
    assert migration.report.attention == []
    forms: Any = load_pipeline(tmp_path / "new/pipeline.yaml").sink.settings.debezium  # type: ignore[attr-defined]
    assert (forms.truncates, forms.schema_topic, forms.transaction_topic) == (True, "shop", "shop.tx")
    heartbeat = forms.heartbeat
    assert (heartbeat.topic, heartbeat.server, heartbeat.interval) == (
        "__debezium-heartbeat.shop",
        "shop",
        5.0,
    )


def test_topics_that_a_connector_switches_off_are_not_written(tmp_path: Path) -> None:
    path = connector(tmp_path, **{"heartbeat.interval.ms": "0", "provide.transaction.metadata": "false"})
    assert migrated(path, tmp_path / "new").report.attention == []
    assert load_pipeline(tmp_path / "new/pipeline.yaml").sink.settings.debezium is None  # type: ignore[attr-defined]


def test_topic_of_statements_by_default_is_left_to_the_user(tmp_path: Path) -> None:
    steps = migrated(connector(tmp_path, include__schema__changes=None), tmp_path / "new").report.steps
    assert [step for step in steps if "schema_topic: shop" in step]


AVRO = {
    f"{part}.converter{name}": value
    for part in ("key", "value")
    for name, value in {
        "": "io.confluent.connect.avro.AvroConverter",
        ".schema.registry.url": "https://registry:8081",
        ".basic.auth.credentials.source": "USER_INFO",
        ".basic.auth.user.info": "app:registry-secret",
        ".schemas.enable": None,
    }.items()
}


def test_avro_converter_becomes_a_registry(tmp_path: Path) -> None:
    strategy = "io.confluent.kafka.serializers.subject.RecordNameStrategy"
    path = connector(
        tmp_path,
        schema__name__adjustment__mode="avro",
        field__name__adjustment__mode="avro",
        **AVRO,
        **{f"{part}.converter.{part}.subject.name.strategy": strategy for part in ("key", "value")},
        **{f"{part}.converter.auto.register.schemas": "false" for part in ("key", "value")},
    )
    migration = migrated(path, tmp_path / "new")
    assert migration.report.attention == []
    sink: Any = load_pipeline(tmp_path / "new/pipeline.yaml").sink.settings
    registry = sink.registry
    assert (sink.format, registry.url, registry.user) == ("debezium_avro", "https://registry:8081", "app")
    assert registry.secret().reveal() == "registry-secret"
    assert (registry.subjects, registry.auto_register) == ("record", False)
    written = (tmp_path / "new/pipeline.yaml").read_text() + (tmp_path / "new/migration.md").read_text()
    assert "registry-secret" not in written


@pytest.mark.parametrize(("optional", "nullables"), [(None, "plain"), ("true", "optional")])
def test_protobuf_converter_becomes_a_registry(tmp_path: Path, optional: str | None, nullables: str) -> None:
    converter = "io.confluent.connect.protobuf.ProtobufConverter"
    protobuf = {f"{part}.converter": converter for part in ("key", "value")}
    protobuf |= {f"{part}.converter.optional.for.nullables": optional for part in ("key", "value")}
    migration = migrated(connector(tmp_path, **(AVRO | protobuf)), tmp_path / "new")
    assert migration.report.attention == []
    sink: Any = load_pipeline(tmp_path / "new/pipeline.yaml").sink.settings
    assert (sink.format, sink.registry.nullables) == ("debezium_protobuf", nullables)


def test_registry_that_differs_for_keys_needs_attention(tmp_path: Path) -> None:
    urls = {
        "key.converter.schema.registry.url": "https://other:8081",
        "value.converter.schema.registry.url": "https://one:8081,https://two:8081",
    }
    migration = migrated(connector(tmp_path, **(AVRO | urls)), tmp_path / "new")
    assert {entry.name for entry in migration.report.attention} == set(urls)


def test_avro_converter_for_messages_alone_is_not_carried(tmp_path: Path) -> None:
    path = connector(tmp_path, value__converter="io.confluent.connect.avro.AvroConverter")
    entries = entries_by_name(migrated(path, tmp_path / "new").report)
    assert (entries["value.converter"].outcome, entries["value.converter"].attention) == (
        Outcome.NOT_CARRIED,
        True,
    )


def test_event_router_becomes_an_outbox(tmp_path: Path) -> None:
    path = connector(
        tmp_path,
        transforms="outbox",
        transforms__outbox__type="io.debezium.transforms.outbox.EventRouter",
        skipped__operations=None,
        **{
            "transforms.outbox.table.field.event.key": "customer_id",
            "transforms.outbox.route.by.field": "kind",
            "transforms.outbox.route.topic.replacement": "events.${routedByValue}.v1",
            "transforms.outbox.table.fields.additional.placement": "type:header:eventType,note:envelope",
            "transforms.route.type": None,
            "transforms.route.regex": None,
            "transforms.route.replacement": None,
        },
    )
    migration = migrated(path, tmp_path / "new")
    sink: Any = load_pipeline(tmp_path / "new/pipeline.yaml").sink.settings
    assert sink.topic == "events.{kind}.v1"
    assert (sink.outbox.id, sink.outbox.key, sink.outbox.payload) == ("id", "customer_id", "payload")
    assert (sink.outbox.headers, sink.outbox.updates) == ({"eventType": "type"}, "skip")
    # An envelope field that no message field corresponds to.
    assert [entry.name for entry in migration.report.attention] == [
        "transforms.outbox.table.fields.additional.placement"
    ]


def test_incremental_snapshot_in_progress_is_refused(tmp_path: Path) -> None:
    def offsets(**keys: str) -> Path:
        offset = {"file": "mysql-bin.000003", "pos": 4, "gtids": GTIDS, **keys}
        path = tmp_path / "offsets.json"
        path.write_text(json.dumps({"offsets": [{"partition": {"server": "shop"}, "offset": offset}]}))
        return path

    running = offsets(
        incremental_snapshot_collections='[{"incremental_snapshot_collections_id":"shop.orders"}]',
        incremental_snapshot_maximum_key="aced0005",
        incremental_snapshot_primary_key="aced0005",
    )
    with pytest.raises(OptionInvalid, match="incremental snapshot in progress"):
        migrated(CONNECTOR, tmp_path / "new", offsets=running)
    # The position of the last signal says nothing about a snapshot in progress.
    ended = offsets(incremental_snapshot_signal_offset="17")
    assert pipeline_of(CONNECTOR, tmp_path / "new", offsets=ended).load.mode == "none"
