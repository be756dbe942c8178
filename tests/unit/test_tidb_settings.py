# SPDX-License-Identifier: Apache-2.0
"""The settings of an instance whose source is a TiDB cluster."""

from pathlib import Path

import pytest

from penstock.captures import start_of
from penstock.errors import OptionInvalid
from penstock.settings.daemon import InstanceSettings, load_settings
from penstock.settings.tidb import pd_addresses


def _load(folder: Path, text: str) -> InstanceSettings:
    path = folder / "penstock.yaml"
    path.write_text(text)
    return load_settings(path).instances["shop"]


def test_smallest_tidb_instance_is_its_pd_members(tmp_path: Path) -> None:
    instance = _load(tmp_path, "instances: {shop: {source: 'tidb://pd1,pd2:2380'}}")
    assert instance.is_tidb
    assert pd_addresses(instance.source) == ("pd1:2379", "pd2:2380")
    assert instance.tidb.roles == ("pump", "drainer")
    assert instance.addresses() == []


def test_sql_server_has_the_password_of_the_instance(tmp_path: Path) -> None:
    instance = _load(
        tmp_path,
        "instances: {shop: {source: 'tidb://pd1', password: secret, tidb: {sql: 'mysql://reader@db:4000'}}}",
    )
    (address,) = instance.addresses()
    assert (address.user, address.port, address.password.reveal()) == ("reader", 4000, "secret")
    assert "secret" not in repr(instance)


@pytest.mark.parametrize(
    ("start", "commit_ts"),
    [("commit_ts:470639217768660992", 470_639_217_768_660_992), ("latest", None), ("2026-11-21", None)],
)
def test_start_may_be_a_commit_timestamp(tmp_path: Path, start: str, commit_ts: int | None) -> None:
    instance = _load(tmp_path, f"instances: {{shop: {{source: 'tidb://pd1', start: '{start}'}}}}")
    assert start_of(instance).commit_ts == commit_ts


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("{source: 'tidb://'}", "write the cluster's PD members"),
        ("{source: 'tidb://pd1:99999'}", "write the cluster's PD members"),
        ("{source: 'tidb://pd1', semi_sync: true}", "semi_sync: only for a MySQL or MariaDB server"),
        ("{source: 'mysql://db1', start: 'commit_ts:5'}", "start: only a TiDB cluster has commit timestamps"),
        ("{source: 'mysql://db1', tidb: {roles: [pump]}}", "tidb: only for a tidb:// source"),
        ("{source: 'tidb://pd1', tidb: {roles: [pump, pump]}}", "name each role once"),
        ("{source: 'tidb://pd1', tidb: {sql: 'http://db'}}", "it must be a TiDB server"),
        ("{source: 'tidb://pd1', tidb: {status: 'mysql://db'}}", "it must be the status port"),
        ("{source: 'tidb://pd1', tidb: {pump: {listen: '0.0.0.0:8250'}}}", "pump.listen: 0.0.0.0"),
        ("{source: 'tidb://pd1', tidb: {pump: {decide_after: 9m}}}", "greater than or equal to 600"),
        ("{source: 'tidb://pd1', tidb: {drainer: {listen: '0.0.0.0:8249'}}}", "set tls, or insecure"),
        ("{source: 'tidb://pd1', tidb: {tls: {ca: /none, cert: /none, key: /none}}}", "/none cannot be read"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, settings: str, problem: str) -> None:
    with pytest.raises(OptionInvalid) as refused:
        _load(tmp_path, f"instances: {{shop: {settings}}}")
    assert problem in str(refused.value)


@pytest.mark.parametrize("source", ["tidb://pd1", "ticdc+file:///changes"])
def test_tidb_instance_is_refused_in_a_fleet(tmp_path: Path, source: str) -> None:
    fleet = "coordination: 'memory://fleet', fleet: {member: a}"
    with pytest.raises(OptionInvalid, match="fleet: shop is a TiDB cluster"):
        _load(tmp_path, f"{{{fleet}, instances: {{shop: {{source: '{source}'}}}}}}")
