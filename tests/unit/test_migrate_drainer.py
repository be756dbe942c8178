# SPDX-License-Identifier: Apache-2.0
"""A Drainer becomes a daemon that starts after its checkpoint, and a pipeline into its target."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import OptionInvalid
from penstock.migrate import drainer
from penstock.migrate.output import Migration
from penstock.migrate.report import Outcome
from penstock.pipeline.settings import PipelineSettings, load_pipeline
from penstock.settings.daemon import InstanceSettings, load_settings
from tests.support.migrate.samples import ORIGINALS, entries_by_name

CONFIG = ORIGINALS / "drainer/drainer.toml"
SAVEPOINT = ORIGINALS / "drainer/savepoint"


def migrated(tmp_path: Path, changes: dict[str, str] | None = None, **options: Any) -> Migration:
    """Migrate the sample, with parts of its text replaced."""
    text = CONFIG.read_text()
    for before, after in (changes or {}).items():
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "drainer.toml").write_text(text)
    migration = Migration("drainer")
    drainer.migrate_drainer(tmp_path / "drainer.toml", migration, **options)
    migration.write(tmp_path / "new")
    return migration


def instance_of(tmp_path: Path, changes: dict[str, str] | None = None, **options: Any) -> InstanceSettings:
    migrated(tmp_path, changes, **options)
    return load_settings(tmp_path / "new/penstock.yaml").instances["tidb"]


def pipeline_of(tmp_path: Path, changes: dict[str, str] | None = None, **options: Any) -> PipelineSettings:
    migrated(tmp_path, changes, **options)
    return load_pipeline(tmp_path / "new/drainer.yaml")


def test_daemon_takes_the_place_of_the_drainer_after_its_checkpoint(tmp_path: Path) -> None:
    instance = instance_of(tmp_path, savepoint=SAVEPOINT)
    assert (instance.source, instance.start) == ("tidb://pd1:2379,pd2:2379", "commit_ts:437000000000000001")
    assert instance.tidb.roles == ("drainer",)
    taken = instance.tidb.drainer
    assert (taken.listen, taken.advertise, taken.node_id) == (
        "10.0.0.5:8249",
        "drainer1:8249",
        "drainer1:8249",
    )
    assert taken.compress
    assert instance.tidb.insecure, "the Drainer had no certificates"


def test_pipeline_writes_to_the_target_of_the_drainer(tmp_path: Path) -> None:
    settings = pipeline_of(tmp_path, savepoint=SAVEPOINT)
    [source] = settings.sources
    assert (settings.load.mode, str(source.start)) == ("none", "earliest")
    sink: Any = settings.sink.settings
    assert (sink.url, sink.user, sink.connections) == ("mysql://db1:3307", "copy", 16)
    assert sink.secret().reveal() == "pa$$ word"
    assert (sink.apply, settings.schema_changes) == ("parallel", "evolve")
    tables = ["shop.orders", "shopping.orders", "Crm.a", "crm2.a", "other.kept_1", "other.a", "SHOP.log"]
    tables += ["mysql.user", "shop.log2"]
    selected = [name for name in tables if source.tables.matches(*name.split("."))]
    assert selected == ["shop.orders", "shopping.orders", "Crm.a", "other.kept_1", "shop.log2"]


def test_source_transactions_stay_whole_without_dispatch(tmp_path: Path) -> None:
    changes = {"enable-dispatch = true": "enable-dispatch = false", "sync-ddl = true": "sync-ddl = false"}
    settings = pipeline_of(tmp_path, changes)
    sink: Any = settings.sink.settings
    assert (sink.apply, settings.schema_changes) == ("serial", "ignore")


def test_marks_against_loops_keep_their_channel(tmp_path: Path) -> None:
    changes = {"safe-mode = false": "loopback-control = true\nchannel-id = 7"}
    settings = pipeline_of(tmp_path, changes)
    sink: Any = settings.sink.settings
    assert (sink.drainer_channel, settings.loops.drainer_channels) == (7, (7,))
    assert not settings.sources[0].tables.matches("retl", "_drainer_repl_mark")


@pytest.mark.parametrize(
    ("initial", "start"), [("-1", "latest"), ("0", "latest"), ("437", "commit_ts:437"), ('""', "latest")]
)
def test_start_without_a_checkpoint_is_the_initial_commit_timestamp(
    tmp_path: Path, initial: str, start: str
) -> None:
    changes = {"detect-interval": f"initial-commit-ts = {initial}\ndetect-interval"}
    assert instance_of(tmp_path, changes).start == start


def test_checkpoint_table_of_the_target_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    rows: list[dict[str, Any]] = [
        {"cluster": "7001", "checkpoint": json.dumps({"consistent": False, "commitTS": 99, "ts-map": {}})}
    ]

    class Target:
        def __init__(self, address: Any) -> None:
            assert (address.host, address.port, address.user) == ("db1", 3307, "copy")
            assert address.password.reveal() == "pa$$ word"

        def __enter__(self) -> "Target":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def query(self, text: str) -> list[dict[str, Any]]:
            asked.append(text)
            return rows

    monkeypatch.setattr(drainer, "connect", Target)
    migration = migrated(tmp_path, from_server=True)
    assert load_settings(tmp_path / "new/penstock.yaml").instances["tidb"].start == "commit_ts:99"
    assert "FROM `tidb_binlog`.`checkpoint`" in asked[0]
    assert any("did not end cleanly" in step for step in migration.report.steps)
    rows.append({"cluster": "7002", "checkpoint": "{}"})
    with pytest.raises(OptionInvalid, match="7001, 7002"):
        drainer.migrate_drainer(CONFIG, Migration("drainer"), from_server=True)


NESTED = ['{"a":' * 100_000, "a = " + "[" * 100_000, "a = " + "[" * 300 + "]" * 300]


@pytest.mark.parametrize(
    "text", ["", "commitTS = 0", "{", "consistent = true", '{"commitTS": "a"}', *NESTED], ids=range(8)
)
def test_file_without_a_checkpoint_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "savepoint").write_text(text)
    with pytest.raises(OptionInvalid, match="savepoint"):
        drainer.migrate_drainer(CONFIG, Migration("drainer"), savepoint=tmp_path / "savepoint")


def test_every_property_is_accounted_for(tmp_path: Path) -> None:
    changes = {"port = 3307": 'port = 3307\nsync-mode = 2\nread-timeout = "5m"\nsurprise = 1'}
    entries = entries_by_name(migrated(tmp_path, changes, savepoint=SAVEPOINT).report)
    assert entries["syncer.to.sync-mode"].attention
    assert entries["syncer.to.surprise"].outcome is Outcome.UNKNOWN
    assert entries["commitTS"].outcome is Outcome.CARRIED
    assert entries["ts-map.primary-ts"].outcome is Outcome.NOT_CARRIED
    attention = {name for name, entry in entries.items() if entry.attention}
    assert attention == {
        "syncer.to.sync-mode",
        "syncer.to.surprise",
        "ts-map.primary-ts",
        "ts-map.secondary-ts",
    }


def test_target_in_kafka_keeps_its_messages(tmp_path: Path) -> None:
    to_kafka = {
        'db-type = "mysql"': 'db-type = "kafka"',
        "port = 3307": 'topic-name = "7001_obinlog"\nkafka-addrs = "k1:9092,k2:9092"',
        "[syncer.to.checkpoint]": 'kafka-client-id = "drainer"\n\n[syncer.to.checkpoint]',
    }
    sink: Any = pipeline_of(tmp_path, to_kafka, savepoint=SAVEPOINT).sink.settings
    assert (sink.servers, sink.topic, sink.format) == ("k1:9092,k2:9092", "7001_obinlog", "drainer")
    assert (sink.options, sink.statements) == ({"client.id": "drainer"}, True)
    del to_kafka["port = 3307"]
    with pytest.raises(OptionInvalid, match="topic-name"):
        migrated(tmp_path, to_kafka)


@pytest.mark.parametrize(("setting", "folder"), [("", "/data/drainer"), ('dir = "/data/out"', "/data/out")])
def test_target_in_files_keeps_its_format(tmp_path: Path, setting: str, folder: str) -> None:
    changes = {'db-type = "mysql"': 'db-type = "file"', "port = 3307": setting}
    sink: Any = pipeline_of(tmp_path, changes, savepoint=SAVEPOINT).sink.settings
    assert (str(sink.path), sink.statements) == (folder, True)


def test_target_without_statements_stays_without_them(tmp_path: Path) -> None:
    changes = {
        'db-type = "mysql"': 'db-type = "file"',
        "port = 3307": "",
        "sync-ddl = true": "sync-ddl = false",
    }
    sink: Any = pipeline_of(tmp_path, changes, savepoint=SAVEPOINT).sink.settings
    assert not sink.statements


def test_name_with_alternatives_is_refused(tmp_path: Path) -> None:
    changes = {'"crm"]': '"shop|crm"]'}
    with pytest.raises(OptionInvalid, match=r"replicate-do-db: /shop\|crm/ has alternatives"):
        migrated(tmp_path, changes)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ignore-txn-commit-ts", {"[435000000000000001]": '["all"]'}),
        ("channel-id", {"safe-mode = false": 'loopback-control = true\nchannel-id = "one"'}),
        (
            "kafka-max-message-size",
            {'"mysql"': '"kafka"', "port = 3307": 'topic-name = "t"\nkafka-max-message-size = "1GB"'},
        ),
    ],
)
def test_value_that_is_no_number_is_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, str]
) -> None:
    with pytest.raises(OptionInvalid, match=f"{name}: .* is not a number"):
        migrated(tmp_path, changes)


def test_target_without_a_sink_is_reported(tmp_path: Path) -> None:
    migration = migrated(tmp_path, {'db-type = "mysql"': 'db-type = "oracle"'})
    entry = entries_by_name(migration.report)["syncer.db-type"]
    assert (entry.outcome, entry.attention) == (Outcome.NOT_CARRIED, True)
