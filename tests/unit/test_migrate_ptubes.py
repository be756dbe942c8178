# SPDX-License-Identifier: Apache-2.0
"""A Ptubes reader becomes a daemon whose logs begin before every storage point."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from penstock.errors import DependencyMissing, OptionInvalid
from penstock.migrate import ptubes
from penstock.migrate.output import Migration
from penstock.migrate.report import Outcome
from penstock.settings.daemon import Settings, load_settings
from tests.support.migrate.samples import ORIGINALS, entries_by_name


class Tree:
    """The nodes of an SDK task in ZooKeeper."""

    points: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(self, hosts: str) -> None:
        assert hosts == "zk:2181"

    def __enter__(self) -> "Tree":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def children(self, path: str) -> list[str]:
        return [*self.points, "partition-storage"] if path == "/cache/PROPERTYSTORE" else []

    def text(self, path: str) -> str:
        point = self.points[path.rpartition("/")[2]]
        return json.dumps({"id": "0", "simpleFields": {"checkpoint": json.dumps(point)}})


def migrated(tmp_path: Path, lines: str = "", **options: str) -> Migration:
    folder = tmp_path / "conf"
    shutil.copytree(ORIGINALS / "ptubes", folder)
    with (folder / "shop.properties").open("a") as file:
        file.write(lines)
    migration = Migration("ptubes")
    ptubes.migrate_ptubes(folder, migration, **options)
    migration.write(tmp_path / "new")
    return migration


def daemon_of(tmp_path: Path, lines: str = "", **options: str) -> Settings:
    migrated(tmp_path, lines, **options)
    return load_settings(tmp_path / "new/penstock.yaml")


def test_reader_becomes_a_daemon(tmp_path: Path) -> None:
    settings = daemon_of(tmp_path)
    instance = settings.instances["shop"]
    [address] = instance.addresses()
    assert (address.host, address.port, address.user) == ("db1", 3307, "ptubes")
    assert address.password.reveal() == "pa$$ word"
    assert settings.listen.ptubes == "0.0.0.0:28333"
    assert settings.listen.is_open("ptubes")
    assert not settings.listen.is_open("http")
    assert instance.shard_columns == {"shop.orders": ("customer_id",)}
    assert instance.start == "earliest"
    log = settings.log_of("shop")
    assert (log.mode, log.memory_bytes) == ("mixed", 524288000)


@pytest.mark.parametrize(
    ("points", "start"),
    [
        (
            [{"binlogFile": 12, "binlogOffset": 5}, {"binlogFile": 11, "binlogOffset": 90}],
            "mysql-bin.000011:4",
        ),
        ([{"binlogFile": 12, "binlogOffset": 5}, {"checkpointMode": "EARLIEST"}], "earliest"),
        ([{"binlogFile": 12, "binlogOffset": 5}, {"checkpointMode": "LATEST"}], "mysql-bin.000012:4"),
        ([{"checkpointMode": "LATEST"}], "latest"),
        ([{"timestamp": 1767225600000}, {"timestamp": 1767229200000}], "2026-01-01T00:00:00+00:00"),
    ],
    ids=["oldest file", "earliest", "latest beside a point", "latest alone", "times"],
)
def test_log_begins_before_the_oldest_storage_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: list[dict[str, Any]], start: str
) -> None:
    monkeypatch.setattr(Tree, "points", {f"{index}_cache": point for index, point in enumerate(points)})
    monkeypatch.setattr(ptubes, "ZooKeeperTree", Tree)
    assert daemon_of(tmp_path, zookeeper="zk:2181").instances["shop"].start == start


def test_damaged_storage_point_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tree, "points", {"0_cache": {"binlogFile": "many"}})
    monkeypatch.setattr(ptubes, "ZooKeeperTree", Tree)
    with pytest.raises(OptionInvalid, match="/cache/PROPERTYSTORE/0_cache is not a storage point"):
        migrated(tmp_path, zookeeper="zk:2181")


def test_sample_has_no_unknown_property(tmp_path: Path) -> None:
    entries = entries_by_name(migrated(tmp_path).report)
    assert [name for name, entry in entries.items() if entry.outcome is Outcome.UNKNOWN] == []
    assert [name for name, entry in entries.items() if entry.attention] == []


def test_unknown_property_needs_attention(tmp_path: Path) -> None:
    entries = entries_by_name(migrated(tmp_path, "ptubes.reader.of.tomorrow=1\n").report)
    assert entries["ptubes.reader.of.tomorrow"].outcome is Outcome.UNKNOWN


def test_reading_zookeeper_without_its_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kazoo.client", None)
    with pytest.raises(DependencyMissing, match="kazoo"):
        migrated(tmp_path, zookeeper="zk:2181")
