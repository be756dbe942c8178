# SPDX-License-Identifier: Apache-2.0
"""Maxwell's config.properties becomes a pipeline, and every property is accounted for."""

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import OptionInvalid
from penstock.migrate.maxwell import migrate_maxwell
from penstock.migrate.maxwell_filter import parse_filter
from penstock.migrate.output import Migration
from penstock.migrate.report import Outcome
from penstock.model import TablePatterns
from penstock.pipeline.settings import PipelineSettings, load_pipeline
from tests.support.migrate.samples import ORIGINALS, entries_by_name

CONFIG = ORIGINALS / "maxwell/config.properties"
TABLES = (
    "shop.orders",
    "shop.tmp_1",
    "shop.my_tmp_1",
    "crm.log_12",
    "crm.log_12x",
    "crm.xlog_1",
    "other.orders",
)


def migrated(output: Path, *lines: str, **options: Any) -> Migration:
    """Migrate the sample, with further lines."""
    path = output.parent / "config.properties"
    path.write_text(CONFIG.read_text() + "".join(f"{line}\n" for line in lines))
    migration = Migration("maxwell")
    migrate_maxwell(path, migration, **options)
    migration.write(output)
    return migration


def pipeline_of(output: Path, *lines: str, **options: Any) -> PipelineSettings:
    migrated(output, *lines, **options)
    return load_pipeline(output / "maxwell.yaml")


def selected(text: str) -> list[str]:
    selection = parse_filter(text)
    patterns = TablePatterns(selection.tables, selection.exclude)
    return [name for name in TABLES if patterns.matches(*name.split("."))]


def test_producer_for_kafka_becomes_a_pipeline(tmp_path: Path) -> None:
    settings = pipeline_of(tmp_path / "new", start="mysql-bin.000003:1542")
    [source] = settings.sources
    server = source.server
    assert server is not None
    assert (server.host, server.port, server.user, server.server_id) == ("db1", 3307, "maxwell", 6380)
    assert (server.password.reveal(), server.tls.mode) == ("pa$$ word", "disabled")
    assert (settings.name, settings.load.mode, str(source.start)) == ("shop", "none", "mysql-bin.000003:1542")
    assert not source.tables.matches("maxwell", "positions")
    sink: Any = settings.sink.settings
    assert (sink.servers, sink.topic, sink.format) == ("broker-1:9092", "cdc_{database}_{table}", "maxwell")
    assert (sink.compression, sink.key, sink.partition_by) == ("snappy", "primary_key", ())


@pytest.mark.parametrize(
    ("text", "tables"),
    [
        ("", list(TABLES)),
        ("exclude: shop.*", ["crm.log_12", "crm.log_12x", "crm.xlog_1", "other.orders"]),
        ("exclude: *.*, include: shop.orders", ["shop.orders"]),
        (
            "exclude: *.*, include: shop.*, exclude: shop./^tmp_/, include: crm./^log_\\d+$/",
            ["shop.orders", "shop.my_tmp_1", "crm.log_12"],
        ),
        ("exclude: shop./tmp_/, include: shop.tmp_1", ["shop.orders", "shop.tmp_1", *TABLES[3:]]),
        ("include: shop.tmp_1, exclude: shop.*", list(TABLES[3:])),
        ("exclude: *.*, include: /^.hop$/.`orders`", ["shop.orders"]),
        ("blacklist: 'crm'.*", ["shop.orders", "shop.tmp_1", "shop.my_tmp_1", "other.orders"]),
    ],
)
def test_last_rule_that_matches_decides(text: str, tables: list[str]) -> None:
    assert selected(text) == tables


@pytest.mark.parametrize(
    "text", ["exclude shop.*", "exclude: shop", "exclude: shop./a|^b/", "exclude: /[/.*"]
)
def test_unreadable_filter_is_refused(text: str) -> None:
    with pytest.raises(OptionInvalid, match="filter"):
        parse_filter(text)


def test_rules_on_values_need_attention(tmp_path: Path) -> None:
    entries = entries_by_name(migrated(tmp_path / "new", "filter=exclude: shop.orders.state = /x/").report)
    assert (entries["filter"].outcome, entries["filter"].attention) == (Outcome.CHANGED, True)


def test_pipeline_reads_the_replication_server(tmp_path: Path) -> None:
    lines = (
        "replication_host=db2",
        "replication_user=r",
        "replication_password=x",
        "replication_ssl=REQUIRED",
    )
    server = pipeline_of(tmp_path / "new", *lines).sources[0].server
    assert server is not None
    assert (server.host, server.port, server.user) == ("db2", 3306, "r")
    assert (server.password.reveal(), server.tls.mode) == ("x", "required")


def test_producer_without_a_sink_needs_attention(tmp_path: Path) -> None:
    migration = migrated(tmp_path / "new", "producer=kinesis", "kinesis_stream=shop")
    attention = {entry.name for entry in migration.report.attention}
    assert {"producer", "kinesis_stream"} <= attention
    assert load_pipeline(tmp_path / "new/maxwell.yaml").sink.kind == "stdout"


def test_sample_has_no_unknown_property(tmp_path: Path) -> None:
    migration = migrated(tmp_path / "new")
    entries = entries_by_name(migration.report)
    assert [name for name, entry in entries.items() if entry.outcome is Outcome.UNKNOWN] == []
    assert [entry.name for entry in migration.report.attention] == []
    assert "--from-server" in migration.report.steps[0]
