# SPDX-License-Identifier: Apache-2.0
"""The statements of the spark sink, and the rows that its tasks stage, without a session."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
from pydantic import ValidationError

from penstock.changes import Origin
from penstock.errors import OptionInvalid, ServerUnsupported, ValueMalformed
from penstock.sinks.sink import BatchMark, Delivery, Spread
from penstock.sinks.spark import statements
from penstock.sinks.spark.sink import Settings, SparkSink
from penstock.sinks.spark.staging import Staging
from tests.support.messages.avro_types import every_type
from tests.support.pipeline.changes_made import Made, changes_of, delete, insert, target_of, update

ORDERS = target_of({"id": "int", "na`me": "varchar(9)", "n": "tinyint"})
MARK = BatchMark("shop", "1", 7)


def sink(folder: Path, **settings: Any) -> SparkSink:
    return SparkSink(Settings(**({"staging": str(folder)} | settings)))


def test_merge_deletes_updates_and_inserts_by_key(tmp_path: Path) -> None:
    schema = sink(tmp_path).schema_of(ORDERS)
    statement = statements.merge("`shop`.`orders`", schema, ("id",), "rows", emptied=False)
    assert statement == (
        "MERGE INTO `shop`.`orders` AS t USING rows AS s ON t.`id` <=> s.`id`"
        " WHEN MATCHED AND s._penstock_deleted THEN DELETE"
        " WHEN MATCHED THEN UPDATE SET t.`id` = s.`id`, t.`na``me` = s.`na``me`, t.`n` = s.`n`"
        " WHEN NOT MATCHED AND NOT s._penstock_deleted THEN INSERT (`id`, `na``me`, `n`)"
        " VALUES (s.`id`, s.`na``me`, s.`n`)"
    )
    emptied = statements.merge("`shop`.`orders`", schema, ("id",), "rows", emptied=True)
    assert emptied == f"{statement} WHEN NOT MATCHED BY SOURCE THEN DELETE"


def test_new_table_has_the_layout_and_the_properties(tmp_path: Path) -> None:
    schema = sink(tmp_path).schema_of(ORDERS)
    partitioned = statements.create_table(
        "`t`", schema, using="iceberg", partition_by=("bucket(4, id)",), properties={"a'b": "c\\d"}
    )
    assert partitioned == (
        "CREATE TABLE IF NOT EXISTS `t` (`id` INT, `na``me` STRING, `n` INT) USING iceberg"
        " PARTITIONED BY (bucket(4, id)) TBLPROPERTIES ('a\\'b' = 'c\\\\d')"
    )
    clustered = statements.create_table(
        "`t`", schema, using="delta", cluster_by=("id", "n"), properties={"a": "b"}
    )
    assert " CLUSTER BY (`id`, `n`) " in clustered


def test_every_stored_type_has_a_type_in_sql(tmp_path: Path) -> None:
    feed = sink(tmp_path, mode="feed").schema_of(every_type().target)
    types = {field.name: statements.type_text(field.type) for field in feed}
    assert types["big"] == "DECIMAL(20,0)"
    assert (types["at"], types["logged"], types["span"]) == ("TIMESTAMP_NTZ", "TIMESTAMP", "BIGINT")
    assert types["vector"] == "ARRAY<FLOAT>"
    assert types["_metadata"].startswith("STRUCT<`")
    with pytest.raises(OptionInvalid, match="no type"):
        statements.type_text(pyarrow.time32("s"))


def test_mirror_stages_the_last_image_of_each_key(tmp_path: Path) -> None:
    new, paid = {"id": 1, "na`me": "a", "n": 1}, {"id": 1, "na`me": "b", "n": 2}
    writer = sink(tmp_path).open(MARK, 0)
    writer.write(changes_of(ORDERS, insert(1, **new), update(2, new, paid), insert(3, id=2), delete(4, id=2)))
    receipt = writer.finish()
    [staged] = receipt.staged
    assert (staged["emptied"], receipt.rows) == (False, 5)
    folder = tmp_path / "penstock/shop/1/000000000007"
    [name] = staged["files"]
    assert [path.name for path in folder.iterdir()] == [name]
    rows = parquet.read_table(folder / name).to_pylist()
    assert rows == [
        {**paid, "_penstock_deleted": False},
        {"id": 2, "na`me": None, "n": None, "_penstock_deleted": True},
    ]


def test_emptied_table_stages_only_later_rows(tmp_path: Path) -> None:
    writer = sink(tmp_path).open(MARK, 0)
    writer.write(changes_of(ORDERS, insert(1, id=1)))
    writer.empty(ORDERS, 2)
    writer.write(changes_of(ORDERS, insert(1, id=3), origin=Origin.LOAD))
    [staged] = writer.finish().staged
    assert (staged["files"], staged["emptied"]) == ([], True)


def test_aborted_writer_leaves_no_file(tmp_path: Path) -> None:
    writer = sink(tmp_path, mode="feed").open(MARK, 0)
    writer.write(changes_of(ORDERS, *(insert(number, id=number) for number in range(1000))))
    writer.abort()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_files_of_earlier_batches_are_removed_and_no_others(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path), None)
    for mark in (MARK, BatchMark("shop", "1", 8), BatchMark("shop", "2", 1), BatchMark("shop/b", "1", 1)):
        (tmp_path / staging.folder(mark).path / "file").write_text("")
    staging.remove_earlier(BatchMark("shop", "1", 8))
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("file"))
    assert left == [
        "penstock/shop/1/000000000008/file",
        "penstock/shop/2/000000000001/file",
        "penstock/shop/b/1/000000000001/file",
    ]


def test_path_of_spark_may_differ(tmp_path: Path) -> None:
    assert Staging("/a b", None).in_spark(MARK, "f") == "file:///a b/penstock/shop/1/000000000007/f"
    assert Staging("a", None).in_spark(MARK, "f") == f"file://{Path.cwd()}/a/penstock/shop/1/000000000007/f"
    staged = Staging("s3://bucket/x/", "s3a://bucket/x").in_spark(MARK, "f")
    assert staged == "s3a://bucket/x/penstock/shop/1/000000000007/f"


def test_image_without_some_columns_is_refused(tmp_path: Path) -> None:
    writer = sink(tmp_path).open(MARK, 0)
    with pytest.raises(ServerUnsupported, match="lack columns"):
        writer.write(changes_of(ORDERS, [Made("insert", 1, {"id": 1}, absent=("n",))]))


def test_key_that_the_table_cannot_hold_is_refused(tmp_path: Path) -> None:
    days = target_of({"day": "date"}, key=("day",))
    writer = sink(tmp_path).open(MARK, 0)
    writer.write(changes_of(days, [Made("insert", 1, {"day": None}, unrepresentable={"day": "2021-02-31"})]))
    with pytest.raises(ValueMalformed, match="2021-02-31"):
        writer.finish()


def test_bounds_compare_the_key_column_by_column_with_null_first() -> None:
    key = [pyarrow.field("a`", pyarrow.int32()), pyarrow.field("b", pyarrow.binary())]
    before = (
        "coalesce(`a``` < CAST('1' AS INT), true) OR (coalesce(`a``` = CAST('1' AS INT), false) AND "
        "(coalesce(`b` < X'00ff', true) OR (coalesce(`b` = X'00ff', false) AND (false))))"
    )
    bound = {"a`": 1, "b": b"\x00\xff"}
    assert statements.key_range(key, None, None) == "true"
    assert statements.key_range(key, bound, None) == f"NOT ({before})"
    assert statements.key_range(key, bound, bound) == f"NOT ({before}) AND ({before})"
    null = "(false OR (`a``` IS NULL AND (false)))"
    assert statements.key_range(key[:1], None, {"a`": None}) == null


def test_staging_folder_that_spark_would_read_as_a_pattern_is_refused() -> None:
    with pytest.raises(ValidationError, match="staging"):
        Settings(staging="/data/{a}")


@pytest.mark.parametrize(
    ("settings", "delivery", "spread"),
    [
        ({}, Delivery.EXACTLY_ONCE, Spread.TABLES),
        ({"mode": "feed"}, Delivery.EXACTLY_ONCE, Spread.RANGES),
        ({"using": "iceberg"}, Delivery.IDEMPOTENT, Spread.TABLES),
        ({"using": "iceberg", "mode": "feed"}, Delivery.EXACTLY_ONCE, Spread.RANGES),
        ({"using": "hudi"}, Delivery.IDEMPOTENT, Spread.TABLES),
        ({"using": "parquet", "mode": "feed"}, Delivery.AT_LEAST_ONCE, Spread.RANGES),
    ],
    ids=str,
)
def test_delivery_is_exactly_once_only_where_the_commit_has_the_number(
    tmp_path: Path, settings: dict[str, Any], delivery: Delivery, spread: Spread
) -> None:
    made = sink(tmp_path, **settings)
    assert (made.delivery, made.spread) == (delivery, spread)


def test_partitions_and_clustering_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="one of them"):
        sink(tmp_path, partition_by=["a"], cluster_by=["b"])
