# SPDX-License-Identifier: Apache-2.0
"""Bifrost's export becomes a pipeline for each data source and target."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import OptionInvalid
from penstock.migrate.bifrost import migrate_bifrost
from penstock.migrate.output import Migration, SecretsIn
from penstock.migrate.report import Outcome
from penstock.pipeline.settings import PipelineSettings, load_pipeline
from tests.support.migrate.samples import ORIGINALS

EXPORT = ORIGINALS / "bifrost/export.json"
GTIDS = "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5"


def migrated(output: Path, change: Callable[[Any], None] = lambda _: None) -> Migration:
    document = json.loads(EXPORT.read_text())
    change(document)
    path = output.parent / "export.json"
    path.write_text(json.dumps(document))
    migration = Migration("bifrost")
    migrate_bifrost(path, migration)
    migration.write(output)
    return migration


def pipeline(output: Path, target: str) -> PipelineSettings:
    return load_pipeline(output / f"shop-{target}.yaml")


def syncs(document: Any, table: str = "shop_-orders") -> Any:
    return document["DbInfo"]["shop"]["TableMap"][table]["ToServerList"]


def test_target_of_mysql_becomes_a_mirror(tmp_path: Path) -> None:
    migrated(tmp_path / "new")
    settings = pipeline(tmp_path / "new", "warehouse")
    [source] = settings.sources
    server = source.server
    assert server is not None
    assert (server.host, server.port, server.user, server.server_id) == ("db1", 3307, "repl", 4713)
    assert server.password.reveal() == "s3cret"
    # A table whose target is complete does not delay the start; a queued table does.
    assert str(source.start) == "mysql-bin.000008:1200"
    selected = [
        table for table in ("orders", "log_1", "log_old", "lines") if source.tables.matches("shop", table)
    ]
    assert selected == ["orders", "log_1"]
    sink: Any = settings.sink.settings
    assert (settings.sink.kind, sink.url, sink.user, sink.mode) == (
        "mysql",
        "mysql://wh:3306",
        "etl",
        "mirror",
    )
    assert sink.password.reveal() == "pa$$ word"
    assert [step.verb for step in settings.steps] == ["map", "route"]
    columns: Any = settings.steps[0].settings
    assert (columns.keep, columns.rename) == (("id", "total"), {"total": "amount"})
    assert settings.steps[1].settings.to == "dw.f_orders"  # type: ignore[attr-defined]


def test_target_of_kafka_becomes_topics(tmp_path: Path) -> None:
    migrated(tmp_path / "new")
    settings = pipeline(tmp_path / "new", "queue")
    # Everything queued is in the target, so the migration uses the position of the data source.
    assert str(settings.sources[0].start) == "mysql-bin.000009:4000"
    sink: Any = settings.sink.settings
    assert (sink.servers, sink.topic, sink.format, sink.key) == (
        "broker-1:9092,broker-2:9092",
        "cdc.{database}.{table}",
        "canal_flat",
        ("id",),
    )
    assert (sink.user, sink.mechanism, sink.password.reveal()) == ("cdc", "PLAIN", "br0ker")


def test_gtid_set_of_the_oldest_position_is_the_start(tmp_path: Path) -> None:
    def use_gtids(document: Any) -> None:
        document["DbInfo"]["shop"] |= {"IsGtid": True, "Gtid": f"{GTIDS}00"}
        syncs(document)[0]["LastSuccessBinlog"]["GTID"] = GTIDS

    migrated(tmp_path / "new", use_gtids)
    assert str(pipeline(tmp_path / "new", "warehouse").sources[0].start) == f"gtid:{GTIDS}"
    assert str(pipeline(tmp_path / "new", "queue").sources[0].start) == f"gtid:{GTIDS}00"


def test_queue_without_any_success_starts_at_the_earliest_log(tmp_path: Path) -> None:
    migrated(tmp_path / "new", lambda document: syncs(document)[0].update(LastSuccessBinlog=None))
    assert pipeline(tmp_path / "new", "warehouse").sources[0].start == "earliest"


def test_deeply_nested_or_invalid_json_is_refused_by_name(tmp_path: Path) -> None:
    (path := tmp_path / "export.json").write_text('{"DbInfo":' * 100_000)
    with pytest.raises(OptionInvalid, match=r"export\.json is not JSON: it is nested too deep"):
        migrate_bifrost(path, Migration("bifrost"))
    with pytest.raises(OptionInvalid, match="FieldList is not JSON"):
        migrated(tmp_path / "new", lambda document: syncs(document)[0].update(FieldList="["))


def test_tables_with_different_parameters_of_one_target_are_refused(tmp_path: Path) -> None:
    def add_topic(document: Any) -> None:
        other = json.loads(json.dumps(syncs(document)[1]))
        other["PluginParam"]["Topic"] = "other"
        syncs(document, "shop_-log_*").append(other)

    with pytest.raises(OptionInvalid, match="different values of Topic"):
        migrated(tmp_path / "new", add_topic)


def test_differences_need_attention(tmp_path: Path) -> None:
    def change(document: Any) -> None:
        syncs(document)[0] |= {"FilterUpdate": True, "OfTomorrow": 1}
        syncs(document)[0]["PluginParam"]["SyncMode"] = "LogUpdate"
        syncs(document)[1]["PluginParam"]["OtherObjectType"] = "bifrost"
        document["ToServer"]["queue"]["Colour"] = "red"

    migration = migrated(tmp_path / "new", change)
    attention = {entry.name: entry.outcome for entry in migration.report.attention}
    assert attention == {
        "FilterUpdate": Outcome.NOT_CARRIED,
        "OfTomorrow": Outcome.UNKNOWN,
        "PluginParam.SyncMode": Outcome.NOT_CARRIED,
        "PluginParam.OtherObjectType": Outcome.CHANGED,
        "PluginParam.Key": Outcome.CHANGED,
        "Colour": Outcome.UNKNOWN,
    }


def test_sample_has_no_unknown_property_and_shows_no_secret(tmp_path: Path) -> None:
    migration = migrated(tmp_path / "new")
    assert [entry.name for entry in migration.report.entries if entry.outcome is Outcome.UNKNOWN] == []
    texts = [path.read_text() for path in (tmp_path / "new").iterdir() if path.is_file()]
    assert [secret for secret in ("s3cret", "pa$$", "br0ker") if any(secret in text for text in texts)] == []


def test_target_without_a_sink_needs_attention(tmp_path: Path) -> None:
    def use_memcache(document: Any) -> None:
        document["ToServer"]["queue"] |= {"PluginName": "memcache", "ConnUri": "cache:11211"}
        syncs(document)[1] |= {"PluginName": "memcache", "PluginParam": {"KeyConfig": "a"}}

    migration = migrated(tmp_path / "new", use_memcache)
    assert {"PluginName", "ConnUri"} <= {entry.name for entry in migration.report.attention}
    assert pipeline(tmp_path / "new", "queue").sink.kind == "stdout"


@pytest.mark.parametrize(
    ("names", "target"),
    [(("订单", "库存"), "warehouse"), (("shop-eu", "shop"), "eu-warehouse")],
    ids=["other letters", "hyphens"],
)
def test_data_sources_whose_pipelines_have_one_name_are_refused(
    tmp_path: Path, names: tuple[str, str], target: str
) -> None:
    def add_source(document: Any) -> None:
        shop = document["DbInfo"].pop("shop")
        document["ToServer"][target] = document["ToServer"]["warehouse"]
        document["DbInfo"] = {name: json.loads(json.dumps(shop)) for name in names}
        for table in document["DbInfo"][names[1]]["TableMap"].values():
            table["ToServerList"][0]["ToServerKey"] = target

    with pytest.raises(OptionInvalid, match="pipeline of the same name"):
        migrated(tmp_path / "new", add_source)


@pytest.mark.parametrize("secrets_in", ["file", "env"])
def test_source_and_target_with_one_name_and_different_secrets_are_refused(secrets_in: SecretsIn) -> None:
    migration = Migration("bifrost", secrets_in)
    first = migration.secret("password", "shop-eu.password", "one")
    assert migration.secret("password", "shop-eu.password", "one") == first
    with pytest.raises(OptionInvalid, match="two different secrets"):
        migration.secret("password", "shop-eu.password", "two")


def test_variables_of_different_secrets_with_one_name_are_refused() -> None:
    migration = Migration("canal", "env")
    migration.secret("password", "shop-1.password", "one")
    with pytest.raises(OptionInvalid, match="SHOP_1_PASSWORD"):
        migration.secret("password", "shop_1.password", "two")


def test_two_synchronisations_of_one_table_to_one_target_are_refused(tmp_path: Path) -> None:
    def add_copy(document: Any) -> None:
        second = json.loads(json.dumps(syncs(document)[0]))
        second["PluginParam"]["Table"] = "f_orders_2"
        syncs(document).append(second)

    with pytest.raises(OptionInvalid, match="some of the same tables"):
        migrated(tmp_path / "new", add_copy)


@pytest.mark.parametrize(
    ("key", "ignored", "is_refused"),
    [
        ("shop_-AllTables", "orders,log_*", True),
        ("AllDataBases_-orders", "", True),
        ("shop_-ord*", "", True),
        ("shop_-log_2*", "", True),
        ("shop_-lo*", "", True),
        ("shop_-lines", "orders", True),
        ("shop_-lines", "lines_old", False),
        ("crm_-AllTables", "orders", False),
        ("shop_-invoices*", "", False),
    ],
)
def test_entries_of_one_target_that_share_tables_are_refused(
    tmp_path: Path, key: str, ignored: str, *, is_refused: bool
) -> None:
    def add_entry(document: Any) -> None:
        entry = json.loads(json.dumps(document["DbInfo"]["shop"]["TableMap"]["shop_-log_*"]))
        document["DbInfo"]["shop"]["TableMap"][key] = entry | {"IgnoreTable": ignored}

    if is_refused:
        with pytest.raises(OptionInvalid, match="some of the same tables"):
            migrated(tmp_path / "new", add_entry)
    else:
        migrated(tmp_path / "new", add_entry)
        [source] = pipeline(tmp_path / "new", "warehouse").sources
        assert source.tables.matches("shop", "orders")


@pytest.mark.parametrize(
    ("plugin", "option", "value", "setting", "chosen"),
    [
        ("mysql", "SyncMode", "LogAppend", "mode", "feed"),
        ("clickhouse", "SyncType", "insertAll", "write", "append"),
    ],
)
def test_target_appends_only_if_all_its_tables_do(
    tmp_path: Path, plugin: str, option: str, value: str, setting: str, chosen: str
) -> None:
    def append(document: Any, *keys: str) -> None:
        uri = "tcp://wh:9000?username=etl" if plugin == "clickhouse" else "etl:secret@tcp(wh:3306)/test"
        document["ToServer"]["warehouse"] |= {"PluginName": plugin, "ConnUri": uri}
        for key in ("shop_-orders", "shop_-log_*"):
            sync = syncs(document, key)[0] | {"PluginName": plugin}
            sync["PluginParam"] = {option: value if key in keys else "Normal"}
            document["DbInfo"]["shop"]["TableMap"][key]["ToServerList"] = [sync]

    migrated(tmp_path / "all", lambda document: append(document, "shop_-orders", "shop_-log_*"))
    sink = pipeline(tmp_path / "all", "warehouse").sink.settings
    assert getattr(sink, setting) == chosen
    for key in ("shop_-orders", "shop_-log_*"):
        with pytest.raises(OptionInvalid, match=f"different values of {option}"):
            migrated(tmp_path / "new", lambda document, key=key: append(document, key))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: syncs(document)[0].update(LastQueueBinlog={"EventID": "x"}), "cannot be read"),
        (lambda document: syncs(document).insert(0, "garbage"), "cannot be read"),
        (lambda document: document["DbInfo"]["shop"].update(ServerId="x"), "server_id"),
    ],
    ids=["position", "synchronisation", "server_id"],
)
def test_garbage_in_an_export_is_refused_by_name(
    tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    with pytest.raises(OptionInvalid, match=message):
        migrated(tmp_path / "new", change)
