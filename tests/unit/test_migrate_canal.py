# SPDX-License-Identifier: Apache-2.0
"""Canal's configuration becomes a daemon or pipelines, and every property is accounted for."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.coordinate.store import open_store
from penstock.coordinate.subscription_record import Subscriptions
from penstock.errors import OptionInvalid
from penstock.migrate.canal import migrate_canal
from penstock.migrate.output import Migration
from penstock.migrate.report import Outcome
from penstock.model import TablePatterns
from penstock.pipeline.settings import PipelineSettings, load_pipeline
from penstock.settings.daemon import Settings, load_settings
from tests.support.migrate.samples import ORIGINALS, entries_by_name

PASSWORD = "pa$$ wordé"


def copy_of_canal(folder: Path, server: str = "", instance: str = "", *, cursors: bool = True) -> Path:
    """Return a copy of Canal's folder, with lines added to its two files."""
    conf = folder / "conf"
    shutil.copytree(ORIGINALS / "canal", conf)
    for name, text in (("canal.properties", server), ("shop/instance.properties", instance)):
        with (conf / name).open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")
    if not cursors:
        (conf / "shop/meta.dat").unlink()
    return conf


def migrated(conf: Path, output: Path, **options: str) -> Migration:
    migration = Migration("canal")
    migrate_canal(conf, migration, **options)
    migration.write(output)
    return migration


def daemon_of(conf: Path, output: Path, **options: str) -> Settings:
    migrated(conf, output, **options)
    return load_settings(output / "penstock.yaml")


def pipeline_of(conf: Path, output: Path) -> PipelineSettings:
    migrated(conf, output)
    return load_pipeline(output / "shop.yaml")


def test_server_for_clients_becomes_a_daemon(tmp_path: Path) -> None:
    settings = daemon_of(copy_of_canal(tmp_path), tmp_path / "new")
    instance = settings.instances["shop"]
    addresses = instance.addresses()
    assert [(address.host, address.port) for address in addresses] == [("10.0.0.7", 3306), ("10.0.0.8", 3306)]
    assert {(address.user, address.tls.mode, address.server_id) for address in addresses} == {
        ("canal", "disabled", 4712)
    }
    assert addresses[0].password.reveal() == PASSWORD
    assert settings.listen.canal == "127.0.0.1:11111"
    assert settings.listen.is_open("canal")
    # The log begins with the file of the client that is furthest behind.
    assert instance.start == "mysql-bin.000009:4"
    assert instance.canal_filters


@pytest.mark.parametrize(
    ("database", "table", "is_selected"),
    [
        ("shop", "orders", True),
        ("Shop", "Orders", True),
        ("shop", "tmp_1", False),
        ("crm", "a", True),
        ("crm", "ab", False),
        ("other", "orders", False),
    ],
)
def test_filters_select_the_same_tables(
    tmp_path: Path, database: str, table: str, *, is_selected: bool
) -> None:
    instance = daemon_of(copy_of_canal(tmp_path), tmp_path / "new").instances["shop"]
    tables = TablePatterns(list(instance.tables), list(instance.exclude_tables))
    assert tables.matches(database, table) is is_selected


def test_cursors_become_checkpoints_of_the_clients(tmp_path: Path) -> None:
    settings = daemon_of(copy_of_canal(tmp_path), tmp_path / "new")
    store = open_store(settings.coordination_url())
    try:
        registry = Subscriptions(store)
        checkpoints = {
            subscription.name: registry.shards(subscription)[0].state.checkpoint
            for subscription in registry.list("shop")
        }
        filter_record = store.get(f"{registry.list('shop')[1].path}/filter")
    finally:
        store.close()
    positions = {name: checkpoint and checkpoint.position for name, checkpoint in checkpoints.items()}
    assert positions == {"canal-1001": "mysql-bin.000010:1542", "canal-7": "mysql-bin.000009:4711"}
    assert filter_record is not None
    assert filter_record.value == b"shop\\.orders"


@pytest.mark.parametrize(
    ("instance", "start"),
    [
        ("", "latest"),
        (
            "canal.instance.master.journal.name=mysql-bin.000003\ncanal.instance.master.position=120",
            "mysql-bin.000003:120",
        ),
        ("canal.instance.master.timestamp=1767225600000", "2026-01-01T00:00:00+00:00"),
        (
            "canal.instance.gtidon=true\ncanal.instance.master.gtid=3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5",
            "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5",
        ),
    ],
)
def test_instance_without_cursors_starts_as_configured(tmp_path: Path, instance: str, start: str) -> None:
    conf = copy_of_canal(tmp_path, instance=instance, cursors=False)
    assert daemon_of(conf, tmp_path / "new").instances["shop"].start == start


def test_account_gets_the_password_from_its_file(tmp_path: Path) -> None:
    conf = copy_of_canal(
        tmp_path, server="canal.user=app\ncanal.passwd=E3619321C1A937C46A0D8BD1DAC39F93B27D4458"
    )
    with pytest.raises(OptionInvalid, match="is a hash"):
        migrated(conf, tmp_path / "new")
    settings = daemon_of(conf, tmp_path / "new", password="secret")
    [account] = settings.access
    password = account.password_secret()
    assert (account.user, password and password.reveal()) == ("app", "secret")
    assert not settings.listen.is_open("canal")
    assert settings.operator_token() is not None


def test_producer_for_kafka_becomes_a_pipeline(tmp_path: Path) -> None:
    conf = copy_of_canal(tmp_path, server="canal.serverMode=kafka")
    settings = pipeline_of(conf, tmp_path / "new")
    [source] = settings.sources
    # The pipeline starts at the position of the producer's own client, not at the earliest position of a
    # client.
    assert str(source.start) == "mysql-bin.000010:1542"
    assert source.name == "shop"
    assert source.tables.matches("shop", "orders")
    assert settings.load.mode == "none"
    sink: Any = settings.sink.settings
    values = {
        name: getattr(sink, name) for name in ("servers", "topic", "format", "key", "order", "compression")
    }
    assert values == {
        "servers": "broker-1:9092,broker-2:9092",
        "topic": "example",
        "format": "canal_flat",
        "key": "none",
        "order": "commit",
        "compression": "none",
    }
    assert sink.options == {"linger.ms": "1", "message.max.bytes": "1048576"}


def test_each_pair_of_rules_becomes_a_pipeline(tmp_path: Path) -> None:
    instance = (
        "canal.mq.dynamicTopic=shop.orders;crm:crm\\\\..*,shop\n"
        "canal.mq.partitionHash=shop.orders:id^customer,.*\\\\..*:$pk$\n"
        "canal.instance.filter.regex=shop\\\\..*,crm\\\\..*,other\\\\..*\n"
    )
    conf = copy_of_canal(tmp_path, server="canal.serverMode=kafka", instance=instance)
    migration = migrated(conf, tmp_path / "new")
    pipelines = [load_pipeline(tmp_path / "new" / name) for name in migration.pipelines]

    def routes_of_table(database: str, table: str) -> list[tuple[str, object]]:
        sinks: list[Any] = [
            pipeline.sink.settings
            for pipeline in pipelines
            if pipeline.sources[0].tables.matches(database, table)
        ]
        return [(sink.topic, sink.partition_by or sink.key) for sink in sinks]

    assert routes_of_table("shop", "orders") == [("{database}_{table}", ("id", "customer"))]
    assert routes_of_table("crm", "a") == [("crm", "primary_key")]
    assert routes_of_table("shop", "lines") == [("{database}", "primary_key")]
    assert routes_of_table("other", "t") == [("example", "primary_key")]
    assert routes_of_table("shop", "tmp_1") == []
    assert routes_of_table("unselected", "t") == []


def test_filters_of_kinds_and_columns_become_steps(tmp_path: Path) -> None:
    instance = (
        "canal.instance.filter.dml.delete=true\ncanal.instance.filter.black.field=shop.orders:note/body"
    )
    conf = copy_of_canal(tmp_path, server="canal.serverMode=kafka", instance=instance)
    settings = pipeline_of(conf, tmp_path / "new")
    assert [step.verb for step in settings.steps] == ["only", "map"]
    assert settings.steps[0].settings.kinds == ("insert", "update")  # type: ignore[attr-defined]
    assert settings.steps[1].settings.drop == ("note", "body")  # type: ignore[attr-defined]


def test_sample_has_no_unknown_property_and_no_secret_in_its_report(tmp_path: Path) -> None:
    migration = migrated(copy_of_canal(tmp_path), tmp_path / "new")
    entries = entries_by_name(migration.report)
    assert [name for name, entry in entries.items() if entry.outcome is Outcome.UNKNOWN] == []
    assert migration.report.attention == []
    text = (tmp_path / "new/migration.md").read_text() + (tmp_path / "new/penstock.yaml").read_text()
    assert PASSWORD not in text
    assert (tmp_path / "new/secrets/shop.password").stat().st_mode & 0o077 == 0


def test_unknown_and_missing_properties_need_attention(tmp_path: Path) -> None:
    conf = copy_of_canal(
        tmp_path, server="canal.of.tomorrow=1", instance="canal.instance.filter.query.ddl=true"
    )
    done = CliRunner().invoke(make_app(), ["migrate", "canal", str(conf), "--output", str(tmp_path / "new")])
    assert done.exit_code == 1, done.output
    assert "canal.of.tomorrow" in done.stdout
    assert "canal.instance.filter.query.ddl" in done.stdout


def test_encrypted_password_is_refused_by_name(tmp_path: Path) -> None:
    conf = copy_of_canal(tmp_path, instance="canal.instance.enableDruid=true")
    with pytest.raises(OptionInvalid, match="encrypted by Druid"):
        migrated(conf, tmp_path / "new")


def test_existing_folder_is_never_changed(tmp_path: Path) -> None:
    output = tmp_path / "new"
    output.mkdir()
    (output / "penstock.yaml").write_text("mine")
    with pytest.raises(OptionInvalid, match="not empty"):
        migrated(copy_of_canal(tmp_path), output)
    assert (output / "penstock.yaml").read_text() == "mine"


def test_refused_settings_leave_nothing_behind(tmp_path: Path) -> None:
    conf = copy_of_canal(tmp_path, instance="canal.instance.mysql.slaveId=many")
    with pytest.raises(OptionInvalid, match="server_id"):
        migrated(conf, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conf"]


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    conf = copy_of_canal(tmp_path)
    arguments = ["migrate", "canal", str(conf), "--output", str(tmp_path / "new"), "--dry-run"]
    done = CliRunner().invoke(make_app(), arguments)
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "new").exists()


def test_filter_that_excludes_all_tables_is_kept(tmp_path: Path) -> None:
    conf = copy_of_canal(tmp_path, instance="canal.instance.filter.black.regex=.*\\\\..*")
    instance = daemon_of(conf, tmp_path / "new").instances["shop"]
    tables = TablePatterns(list(instance.tables), list(instance.exclude_tables))
    assert not tables.matches("shop", "orders")


@pytest.mark.parametrize(
    ("dynamic_topic", "topics"),
    [("", ["cdc.shop"]), ("crm.orders:shop\\\\..*", ["crm_orders", "cdc_shop"])],
    ids=["one topic", "rules"],
)
def test_topics_have_underscores_for_dots_only_beside_rules(
    tmp_path: Path, dynamic_topic: str, topics: list[str]
) -> None:
    instance = f"canal.mq.topic=cdc.shop\ncanal.mq.dynamicTopic={dynamic_topic}"
    conf = copy_of_canal(tmp_path, server="canal.serverMode=kafka", instance=instance)
    migration = migrated(conf, tmp_path / "new")
    sinks: list[Any] = [load_pipeline(tmp_path / "new" / name).sink.settings for name in migration.pipelines]
    assert [sink.topic for sink in sinks] == topics
