# SPDX-License-Identifier: Apache-2.0
"""The Elasticsearch sink on a real node: row versions, searches, and refused values."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import elasticsearch
import pytest

from penstock.changes import Target
from penstock.errors import OptionInvalid, SchemaChanged, ValueMalformed
from penstock.model import Column, TableName
from penstock.sinks.sink import BatchMark, Evolution, Receipt, Sink, make_sink, settings_of
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update
from tests.support.sinks.backends import ElasticsearchBackend, running_backend
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.elasticsearch import Elasticsearch
from tools.servers import Server

MARK = BatchMark("pipe", "g", 1)


@pytest.fixture
def server(
    pytestconfig: pytest.Config, server_of: Callable[[str], Server], missing_part: MissingPart
) -> Elasticsearch:
    """The shared node."""
    backend = running_backend("elasticsearch", pytestconfig, server_of, missing_part)
    assert isinstance(backend, ElasticsearchBackend)
    server: Elasticsearch = backend.server
    return server


@pytest.fixture
def sink(server: Elasticsearch) -> Iterator[Sink]:
    sink = make_sink("elasticsearch", settings_of("elasticsearch")(url=server.url, refresh="now"))
    yield sink
    sink.close()


@pytest.fixture
def orders(request: pytest.FixtureRequest) -> Target:
    """A table for this test only."""
    return target_of({"id": "bigint unsigned", "name": "varchar(20)"}, name=f"shop.{request.node.name}")


def documents(server: Elasticsearch, target: Target, **query: Any) -> dict[str, Any]:
    with elasticsearch.Elasticsearch(server.url, request_timeout=WAIT_SECONDS_MAX) as client:
        answer = client.search(index=str(target.name).lower(), query=query or None, size=100)
        return {hit["_id"]: hit["_source"] for hit in answer["hits"]["hits"]}


def write(sink: Sink, target: Target, *changes: Any) -> Receipt:
    sink.prepare(target, Evolution.EVOLVE)
    writer = sink.open(MARK, 0)
    writer.write(changes_of(target, *changes))
    receipt = writer.finish()
    sink.commit(MARK, [receipt])
    return receipt


def rows(sink: Sink, target: Target, **bounds: Any) -> list[dict[str, Any]]:
    actual_rows = [row for batch in sink.read(target, **bounds) for row in batch.to_pylist()]
    return sorted(actual_rows, key=lambda row: tuple(row[name] for name in target.primary_key))


@pytest.mark.deep(guard="tests/conformance/test_sinks.py::test_keys_change_and_swap")
def test_documents_follow_rows_and_their_keys(server: Elasticsearch, sink: Sink, orders: Target) -> None:
    write(
        sink, orders, insert(5, id=1, name='a"\n'), insert(5, 1, id=2, name="b"), insert(5, 2, id=3, name="c")
    )
    late = [
        update(6, {"id": 1, "name": 'a"\n'}, {"id": 1, "name": "x"}),
        delete(7, id=2, name="b"),
        update(8, {"id": 3, "name": "c"}, {"id": 2**64 - 1, "name": "c"}),
    ]
    for _ in range(2):
        write(sink, orders, *late)
    # A retried earlier row is stale.
    write(sink, orders, insert(5, id=1, name='a"\n'), insert(5, 2, id=3, name="c"))
    wanted = {
        "1": {"_commit_version": 6, "id": 1, "name": "x"},
        str(2**64 - 1): {"_commit_version": 8, "id": 2**64 - 1, "name": "c"},
    }
    assert documents(server, orders) == wanted
    assert list(documents(server, orders, term={"id": str(2**64 - 1)})) == [str(2**64 - 1)]


@pytest.mark.deep(guard="tests/conformance/test_sinks.py::test_text_keys_distinguish_rows")
def test_composite_keys_differ_if_their_values_do(server: Elasticsearch, sink: Sink, orders: Target) -> None:
    target = replace(
        orders, columns=target_of({"a": "varchar(9)", "b": "varchar(9)"}).columns, primary_key=("a", "b")
    )
    write(sink, target, insert(5, a="x:y", b="z"), insert(5, 1, a="x", b="y:z"), insert(5, 2, a="50%", b=""))
    assert sorted(documents(server, target)) == ["50%25:", "x%3Ay:z", "x:y%3Az"]
    write(sink, target, delete(6, a="x:y", b="z"))
    assert sorted(documents(server, target)) == ["50%25:", "x:y%3Az"]


@pytest.mark.deep(guard="tests/conformance/test_sinks.py::test_every_type_is_read_back_unchanged")
def test_values_are_searchable_and_read_back_unchanged(server: Elasticsearch, sink: Sink) -> None:
    target = target_of(
        {
            "id": "bigint",
            "price": "decimal(10,2)",
            "long": "decimal(65,30)",
            "day": "date",
            "at": "datetime(3)",
            "seen": "timestamp(6)",
            "took": "time(6)",
            "spot": "vector(2)",
            "blob": "blob",
            "real": "float",
            "doc": "json",
            "kind": "enum('a','b')",
            "note": "text",
        },
        name="shop.Typed Values",
    )
    values = {
        "id": -(2**63),
        "price": Decimal("-1.50"),
        "long": "-12345678901234567890123456789012345.123456789012345678901234567890",
        "day": date(1000, 1, 1),
        "at": datetime(1000, 1, 1, 23, 59, 59, 999_000),
        "seen": datetime(2026, 3, 1, 12, 0, 0, 1, UTC),
        "took": -3_020_399_000_001,
        "spot": [1.5, -2.0],
        "blob": b"\x00\xff",
        "real": 0.10000000149011612,
        "doc": '{"a": [1.50, 12345678901234567890, "ä\\n", null, {}]}',
        "kind": "b",
        "note": "Quick brown foxes",
    }
    write(sink, target, insert(5, **values), insert(5, 1, id=7))
    wanted = changes_of(target, insert(5, **values), insert(5, 1, id=7)).rows.select(target.column_names)
    assert rows(sink, target) == wanted.to_pylist()
    assert [row["id"] for row in rows(sink, target, low={"id": 7})] == [7]
    assert [row["id"] for row in rows(sink, target, high={"id": 7})] == [-(2**63)]
    index = replace(target, name=TableName("shop", "typed_values"))
    for query in (
        {"match": {"note": "brown"}},
        {"term": {"kind": "b"}},
        {"range": {"price": {"lt": 0}}},
        {"range": {"at": {"lt": "1500-01-01 00:00:00.000"}}},
        {"term": {"long": values["long"]}},
    ):
        assert list(documents(server, index, **query)) == [str(-(2**63))], query


@pytest.mark.deep(guard="tests/conformance/test_sinks.py::test_columns_are_added_widened_and_dropped")
def test_mapping_follows_the_columns_of_its_source(server: Elasticsearch, sink: Sink, orders: Target) -> None:
    write(sink, orders, insert(5, id=1, name="a"))
    more = replace(orders, columns=(*orders.columns, Column("price", "int")))
    with pytest.raises(SchemaChanged, match="price"):
        sink.prepare(more, Evolution.STOP)
    sink.prepare(more, Evolution.IGNORE)
    writer = sink.open(MARK, 0)
    writer.write(changes_of(more, insert(6, id=1, name="b", price=7)))
    writer.finish()
    assert documents(server, orders)["1"] == {"_commit_version": 6, "id": 1, "name": "b"}
    write(sink, more, insert(7, id=1, name="b", price=7))
    wider = replace(orders, columns=(*orders.columns, Column("price", "bigint")))
    assert sink.plan(wider, Evolution.STOP) == []
    write(sink, wider, insert(8, id=2, name="c", price=2**40))
    assert rows(sink, wider) == [{"id": 1, "name": "b", "price": 7}, {"id": 2, "name": "c", "price": 2**40}]
    with pytest.raises(SchemaChanged, match="price"):
        sink.prepare(replace(orders, columns=(*orders.columns, Column("price", "date"))), Evolution.EVOLVE)


@pytest.mark.deep(
    guard="tests/conformance/test_sinks_sql.py::test_value_out_of_the_range_of_its_column_stops_the_batch"
)
def test_impossible_mapping_is_refused_by_name(server: Elasticsearch, sink: Sink, orders: Target) -> None:
    with pytest.raises(OptionInvalid, match="has a column _id"):
        sink.prepare(target_of({"id": "int", "_id": "int"}), Evolution.EVOLVE)
    with elasticsearch.Elasticsearch(server.url, request_timeout=WAIT_SECONDS_MAX) as client:
        client.indices.create(index=str(orders.name), mappings={"properties": {"name": {"type": "long"}}})
    with pytest.raises(SchemaChanged, match="name"):
        sink.prepare(orders, Evolution.EVOLVE)
    sink.prepare(orders, Evolution.IGNORE)
    writer = sink.open(MARK, 0)
    writer.write(changes_of(orders, insert(5, id=1, name="no number")))
    with pytest.raises(ValueMalformed, match="name"):
        writer.finish()
    writer.abort()
