# SPDX-License-Identifier: Apache-2.0
"""The ClickHouse sink on ClickHouse's own engine: row versions, and the limits of its types."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import clickhouse_connect
import pytest

from penstock.changes import Changes, Origin, Target
from penstock.errors import OptionInvalid, SchemaChanged, ServerUnsupported, ValueMalformed
from penstock.model import Column, TableName
from penstock.sinks.sink import BatchMark, Evolution, Receipt, Sink, make_sink, settings_of
from tests.support.pipeline.changes_made import Made, changes_of, delete, insert, target_of, update
from tests.support.sinks.backends import ClickHouseBackend, running_backend
from tests.support.suite.fixture_types import MissingPart
from tools.clickhouse import ClickHouse
from tools.servers import Server

ORDERS = target_of({"id": "bigint unsigned", "name": "varchar(20)"})


@pytest.fixture
def server(
    pytestconfig: pytest.Config, server_of: Callable[[str], Server], missing_part: MissingPart
) -> ClickHouse:
    """The shared server."""
    backend = running_backend("clickhouse", pytestconfig, server_of, missing_part)
    assert isinstance(backend, ClickHouseBackend)
    server: ClickHouse = backend.server
    return server


@pytest.fixture
def database(server: ClickHouse, request: pytest.FixtureRequest) -> Iterator[str]:
    """A database for one test, named after it."""
    yield request.node.name
    client = clickhouse_connect.get_client(host="127.0.0.1", port=server.port)
    client.command(f"DROP DATABASE IF EXISTS `{request.node.name}`")
    client.close()


def sink_of(server: ClickHouse, database: str, **more: Any) -> Sink:
    return make_sink("clickhouse", settings_of("clickhouse")(url=server.url, database=database, **more))


def rows_of(server: ClickHouse, statement: str) -> list[tuple[Any, ...]]:
    client = clickhouse_connect.get_client(host="127.0.0.1", port=server.port)
    try:
        return [tuple(row) for row in client.query(statement).result_rows]
    finally:
        client.close()


def written(sink: Sink, *changes: Changes, number: int = 1) -> list[Receipt]:
    """Write each of the given changes in a separate task of one batch."""
    mark = BatchMark("pipe", "g", number)
    receipts = []
    for part, change in enumerate(changes):
        sink.prepare(change.target, Evolution.EVOLVE)
        writer = sink.open(mark, part)
        writer.write(change)
        receipts.append(writer.finish())
    sink.commit(mark, receipts)
    return receipts


def read(sink: Sink, target: Target, **bounds: Any) -> list[dict[str, Any]]:
    rows = [row for batch in sink.read(target, **bounds) for row in batch.to_pylist()]
    return sorted(rows, key=lambda row: tuple(row[name] for name in target.primary_key))


@pytest.mark.deep(
    guard="tests/unit/test_sink_images.py::test_commit_version_decides_instead_of_arrival_order"
)
def test_order_of_writing_tasks_does_not_matter(server: ClickHouse, database: str) -> None:
    sink = sink_of(server, database)
    late = changes_of(
        ORDERS,
        update(9, {"id": 1, "name": "a"}, {"id": 1, "name": "b"}),
        delete(9, 1, id=2, name="x"),
        # A key change deletes the old key.
        update(9, {"id": 3, "name": "c"}, {"id": 4, "name": "c"}, 2),
    )
    early = changes_of(
        ORDERS, insert(5, id=1, name="a"), insert(5, 1, id=2, name="x"), insert(5, 2, id=3, name="c")
    )
    written(sink, late, early)
    assert read(sink, ORDERS) == [{"id": 1, "name": "b"}, {"id": 4, "name": "c"}]


@pytest.mark.deep(guard="tests/conformance/test_sinks.py::test_loaded_rows_yield_to_the_log")
def test_loaded_row_yields_to_a_change_of_its_own_version(server: ClickHouse, database: str) -> None:
    sink = sink_of(server, database)
    change = changes_of(ORDERS, delete(7, id=1, name="a"), insert(7, 1, id=2, name="new"))
    loaded = changes_of(ORDERS, insert(7, id=1, name="a"), insert(7, id=2, name="old"), origin=Origin.LOAD)
    written(sink, change, loaded)
    assert read(sink, ORDERS) == [{"id": 2, "name": "new"}]


@pytest.mark.deep(guard="tests/conformance/test_sinks.py::test_truncated_table_keeps_later_rows")
def test_truncated_table_loses_earlier_rows_of_any_task(server: ClickHouse, database: str) -> None:
    sink = sink_of(server, database)
    sink.prepare(ORDERS, Evolution.EVOLVE)
    mark = BatchMark("pipe", "g", 1)
    first, second = sink.open(mark, 0), sink.open(mark, 1)
    second.empty(ORDERS, 6)
    second.write(changes_of(ORDERS, insert(7, id=2, name="after")))
    receipts = [second.finish()]
    first.write(changes_of(ORDERS, insert(5, id=1, name="before")))
    receipts = [first.finish(), *receipts]
    sink.commit(mark, receipts)
    sink.commit(mark, receipts)
    assert read(sink, ORDERS) == [{"id": 2, "name": "after"}]


@pytest.mark.deep(guard="tests/conformance/test_sink_feeds.py::test_every_change_is_a_row")
def test_feed_cannot_be_compared(server: ClickHouse, database: str) -> None:
    sink = sink_of(server, database, write="append")
    with pytest.raises(OptionInvalid, match="no table that can be compared"):
        next(iter(sink.read(ORDERS)))


@pytest.mark.deep(guard="tests/unit/test_sink_history.py::test_partial_image_is_refused")
def test_feed_refuses_a_partial_image(server: ClickHouse, database: str) -> None:
    images = [
        Made("update_preimage", 5, {"id": 1}, absent=("name",)),
        Made("update_postimage", 5, {"name": "b"}, absent=("id",)),
    ]
    with pytest.raises(ServerUnsupported, match="lack columns"):
        written(sink_of(server, database, write="append"), changes_of(ORDERS, images))


@pytest.mark.deep(guard="tests/conformance/test_sink_feeds.py::test_repeated_batch_may_be_split_differently")
def test_repartitioned_part_with_other_rows_is_not_deduplicated(server: ClickHouse, database: str) -> None:
    sink = sink_of(server, database, write="append")
    written(sink, changes_of(ORDERS, insert(5, id=1, name="a")))
    written(sink, changes_of(ORDERS, insert(6, id=2, name="b")))
    assert rows_of(server, f"SELECT id FROM {database}.orders ORDER BY id") == [(1,), (2,)]


@pytest.mark.deep(
    guard="tests/integration/test_sink_http.py::test_retried_batch_without_a_table_keeps_the_idempotency_keys_of_the_others"
)
def test_repeated_part_without_a_table_duplicates_no_row_of_the_others(
    server: ClickHouse, database: str
) -> None:
    sink = sink_of(server, database, write="append")
    other = replace(ORDERS, name=TableName("shop", "aside"))
    for tables in ((other, ORDERS), (ORDERS,)):
        for target in tables:
            sink.prepare(target, Evolution.EVOLVE)
        writer = sink.open(BatchMark("pipe", "g", 1), 0)
        for target in tables:
            writer.write(changes_of(target, insert(5, id=1, name="a")))
        writer.finish()
    assert rows_of(server, f"SELECT id FROM {database}.orders") == [(1,)]


@pytest.mark.deep(guard="tests/conformance/test_sinks.py::test_every_type_is_read_back_unchanged")
def test_values_are_stored_in_clickhouse_types(server: ClickHouse, database: str) -> None:
    target = target_of(
        {
            "id": "bigint unsigned",
            "tiny": "tinyint unsigned",
            "bits": "bit(64)",
            "long": "decimal(65,30)",
            "short": Column("short", "decimal(5,2)", None, False),
            "day": "date",
            "at": "datetime(3)",
            "seen": "timestamp(6)",
            "took": "time",
            "made": "year",
            "spot": "vector(2)",
            "blob": "blob",
        }
    )
    values = {
        "id": Decimal(2**64 - 1),
        "tiny": 255,
        "bits": Decimal(2**64 - 1),
        "long": "-12345678901234567890123456789012345.123456789012345678901234567890",
        "short": Decimal("-999.99"),
        "day": date(1900, 1, 1),
        "at": datetime(2299, 12, 31, 23, 59, 59, 999_000),
        "seen": datetime(2026, 3, 1, 12, 0, 0, 1),
        "took": -3_020_399_000_000,
        "made": 2155,
        "spot": [1.5, -2.0],
        "blob": b"\x00\xff",
    }
    sink = sink_of(server, database)
    outside = {"id": Decimal(1), "short": Decimal(0), "day": date(1899, 12, 31), "at": datetime(1000, 1, 1)}
    receipt = written(sink, changes_of(target, insert(5, **values), insert(5, 1, **outside)))[0]
    types = dict(
        rows_of(
            server,
            f"SELECT name, type FROM system.columns WHERE database = '{database}' AND table = 'orders'",
        )
    )
    assert types["id"] == "UInt64"
    assert types["tiny"] == "Nullable(UInt8)"
    assert types["long"] == "Nullable(Decimal(65, 30))"
    assert types["short"] == "Decimal(5, 2)"
    assert types["at"] == "Nullable(DateTime64(3, 'UTC'))"
    assert types["spot"] == "Array(Float32)"
    assert receipt.unrepresentable == {"shop.orders.day": 1, "shop.orders.at": 1}
    wanted = changes_of(target, insert(5, 1, **(outside | {"day": None, "at": None})), insert(5, **values))
    assert read(sink, target) == wanted.rows.select(target.column_names).to_pylist()
    assert [row["id"] for row in read(sink, target, low={"id": Decimal(2)})] == [Decimal(2**64 - 1)]
    assert [row["id"] for row in read(sink, target, high={"id": Decimal(2)})] == [Decimal(1)]


@pytest.mark.deep(guard="tests/conformance/test_sinks.py::test_columns_are_added_widened_and_dropped")
def test_table_follows_the_columns_of_its_source(server: ClickHouse, database: str) -> None:
    sink = sink_of(server, database)
    written(sink, changes_of(ORDERS, insert(5, id=1, name="a")))
    wider = target_of({"id": "bigint unsigned", "price": "int", "name": "varchar(20)"})
    written(sink, changes_of(wider, insert(6, id=2, name="b", price=7)))
    widest = target_of({"id": "bigint unsigned", "price": "bigint"})
    assert sink.plan(widest, Evolution.EVOLVE) == [
        f"ALTER TABLE `{database}`.`orders` MODIFY COLUMN `price` Nullable(Int64), DROP COLUMN `name`"
    ]
    assert sink.plan(widest, Evolution.IGNORE) == []
    with pytest.raises(SchemaChanged, match="MODIFY COLUMN"):
        sink.prepare(widest, Evolution.ADD_ONLY)
    with pytest.raises(SchemaChanged, match="price"):
        sink.prepare(widest, Evolution.STOP)
    written(sink, changes_of(widest, insert(7, id=3, price=2**40)))
    rows = [{"id": 1, "price": None}, {"id": 2, "price": 7}, {"id": 3, "price": 2**40}]
    assert read(sink, widest) == rows
    with pytest.raises(SchemaChanged, match="cannot become"):
        sink.prepare(target_of({"id": "bigint unsigned", "price": "date"}), Evolution.EVOLVE)
    with pytest.raises(SchemaChanged, match="sorted by"):
        sink.prepare(target_of({"id": "bigint unsigned", "price": "bigint"}, ("price",)), Evolution.EVOLVE)


@pytest.mark.deep(guard="tests/conformance/test_sinks_sql.py::test_existing_table_keeps_its_own_columns")
def test_table_created_by_a_user_keeps_its_types_and_columns(server: ClickHouse, database: str) -> None:
    client = clickhouse_connect.get_client(host="127.0.0.1", port=server.port)
    client.command(f"CREATE DATABASE `{database}`")
    client.command(
        f"CREATE TABLE `{database}`.orders (id UInt64, name LowCardinality(String), note String DEFAULT 'o',"
        " _version UInt64, _is_deleted UInt8) ENGINE = ReplacingMergeTree(_version, _is_deleted) ORDER BY id"
    )
    client.close()
    sink = sink_of(server, database)
    lenient = replace(ORDERS, columns=(ORDERS.columns[0], replace(ORDERS.columns[1], nullable=False)))
    assert [line for line in sink.plan(lenient, Evolution.EVOLVE) if "DROP" in line] == []
    sink.prepare(ORDERS, Evolution.IGNORE)
    writer = sink.open(BatchMark("pipe", "g", 1), 0)
    writer.write(changes_of(ORDERS, insert(5, id=1, name="a")))
    writer.finish()
    assert rows_of(server, f"SELECT name, note FROM `{database}`.orders") == [("a", "o")]


@pytest.mark.deep(
    guard="tests/integration/test_sink_lakes.py::test_zero_date_key_is_located_again_and_other_invalid_keys_stop"
)
def test_key_out_of_range_stops_the_batch(server: ClickHouse, database: str) -> None:
    sink = sink_of(server, database)
    dated = target_of({"id": "date"})
    sink.prepare(dated, Evolution.EVOLVE)
    writer = sink.open(BatchMark("pipe", "g", 1), 0)
    writer.write(changes_of(dated, insert(5, id=date(1000, 1, 1))))
    with pytest.raises(ValueMalformed, match=r"key of shop\.orders"):
        writer.finish()
    writer.abort()


@pytest.mark.deep(
    guard="tests/conformance/test_sinks_sql.py::test_table_created_by_another_pipeline_is_altered_only_if_permitted"
)
def test_table_of_another_pipeline_is_taken_over_only_if_permitted(server: ClickHouse, database: str) -> None:
    narrow = target_of({"id": "int", "seat": "int"})
    wide = target_of({"id": "int", "seat": "int", "label": "varchar(20)"})
    first, second = sink_of(server, database), sink_of(server, database)
    taking = sink_of(server, database, take_over=True)
    first.pipeline, second.pipeline, taking.pipeline = "it's first", "second", "second"
    first.prepare(narrow, Evolution.EVOLVE)
    with pytest.raises(OptionInvalid, match="made by the pipeline it's first"):
        second.prepare(wide, Evolution.EVOLVE)
    taking.prepare(wide, Evolution.EVOLVE)
    second.prepare(narrow, Evolution.EVOLVE)
    with pytest.raises(OptionInvalid, match="made by the pipeline second"):
        first.prepare(wide, Evolution.EVOLVE)
