# SPDX-License-Identifier: Apache-2.0
"""Tables that cannot share a target, or cannot keep their names in it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.changes import Target
from penstock.errors import OptionInvalid
from penstock.model import Column, ServerAddress, TableName
from penstock.sinks.endpoint import encryption_findings
from penstock.sinks.sink import BatchMark, Sink, make_sink, settings_of


def table(name: str, database: str = "shop") -> Target:
    return Target(TableName(database, name), (Column("id", "int", None, False),), ("id",))


def redis(**options: Any) -> Sink:
    return make_sink("redis", settings_of("redis").model_validate(options))


def spark(folder: Path, **options: Any) -> Sink:
    return make_sink("spark", settings_of("spark").model_validate({"staging": str(folder)} | options))


def test_keys_that_two_tables_could_share_are_refused() -> None:
    tables = [table("orders"), table("items"), table("orders:lines")]
    with pytest.raises(
        OptionInvalid,
        match=r"shop\.orders would delete shop:orders:\*, and keys of .* are shop:orders:lines:\*",
    ):
        redis().check_together(tables)
    redis().check_together(tables[:2])
    with pytest.raises(OptionInvalid, match=r"a TRUNCATE of shop\.orders"):
        redis(key="item:{id}").check_together(tables[:2])
    redis(key="{table}:{id}").check_together(tables[:2])
    # These settings delete nothing by a pattern, or only values that a cache reloads.
    redis(key="item:{id}", deletes="keep").check_together(tables)
    redis(key="item:{id}", write="invalidate").check_together(tables)
    redis(key="item:{id}", write="list").check_together(tables)


def test_many_tables_are_checked_once_each() -> None:
    redis().check_together([table(f"orders_{number}") for number in range(5000)])


@pytest.mark.parametrize(
    ("database", "name"), [("..", "t"), ("a/b", "t"), ("shop", ".."), ("shop", "a/../b")]
)
def test_name_that_escapes_the_catalog_folder_is_refused(tmp_path: Path, database: str, name: str) -> None:
    sink = make_sink("iceberg", settings_of("iceberg").model_validate({"path": str(tmp_path / "lake")}))
    with pytest.raises(OptionInvalid, match="would be the folder"):
        sink.plan(table(name, database), "evolve")  # type: ignore[arg-type]
    elsewhere = {"path": str(tmp_path / "lake"), "namespace": "n", "table": "t"}
    make_sink("iceberg", settings_of("iceberg").model_validate(elsewhere)).plan(
        table(name, database), "evolve"
    )  # type: ignore[arg-type]


def test_remote_server_without_verification_is_reported() -> None:
    address = ServerAddress.parse("mysql://repl@db1:3306")
    (finding,) = encryption_findings(address)
    assert not finding.fatal
    assert "ssl_mode is preferred" in finding.what
    for proved in ("mysql://repl@127.0.0.1", "mysql://repl@db1?ssl_mode=verify_identity"):
        assert encryption_findings(ServerAddress.parse(proved)) == []
    assert encryption_findings(replace(address, unix_socket="/run/mysqld.sock")) == []


@pytest.mark.parametrize("name", ["Orders", "orders"])
def test_targets_that_are_one_table_of_a_spark_catalog_are_refused(name: str, tmp_path: Path) -> None:
    sink = spark(tmp_path, table="main.{table}")
    both = [table("orders"), table(name, "archive")]
    with pytest.raises(OptionInvalid, match=rf"shop\.orders and archive\.{name} are both `main`\.`{name}`"):
        sink.check_together(both)
    sink.check_together(both[:1] * 2)
    spark(tmp_path, table="{database}.{table}").check_together(both)


def test_spark_commits_no_batch_of_two_targets_in_one_table(tmp_path: Path) -> None:
    sink, receipts = spark(tmp_path, table="main.{table}"), []
    for part, database in enumerate(("shop", "archive")):
        writer = sink.open(BatchMark("shop", "1", 1), part)
        writer.empty(table("orders", database), 1)
        receipts.append(writer.finish())
    with pytest.raises(OptionInvalid, match="are both"):
        sink.commit(BatchMark("shop", "1", 1), receipts)
