# SPDX-License-Identifier: Apache-2.0
"""The MongoDB sink on a server that speaks its protocol: document keys, and the limits of BSON."""

from collections.abc import Callable, Iterator
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pymongo
import pytest
from bson.decimal128 import Decimal128

from penstock.changes import Target
from penstock.errors import OptionInvalid, ValueMalformed
from penstock.sinks.sink import BatchMark, Evolution, Sink, make_sink, settings_of
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update
from tests.support.sinks.backends import MongoBackend, running_backend
from tests.support.suite.fixture_types import MissingPart
from tools.mongo import Mongo
from tools.servers import Server

MARK = BatchMark("pipe", "g", 1)
ORDERS = target_of({"id": "bigint unsigned", "name": "varchar(20)"})


@pytest.fixture
def server(
    pytestconfig: pytest.Config, server_of: Callable[[str], Server], missing_part: MissingPart
) -> Mongo:
    """The shared server."""
    backend = running_backend("mongodb", pytestconfig, server_of, missing_part)
    assert isinstance(backend, MongoBackend)
    server: Mongo = backend.server
    return server


@pytest.fixture
def sink(server: Mongo, request: pytest.FixtureRequest) -> Iterator[Sink]:
    """A sink into a database for this test only."""
    sink = make_sink("mongodb", settings_of("mongodb")(url=server.url, database=request.node.name[:40]))
    yield sink
    sink.close()


def documents(server: Mongo, sink: Any, target: Target = ORDERS) -> list[dict[str, Any]]:
    database, collection = sink.location(target)
    with pymongo.MongoClient[dict[str, Any]](server.url) as client:
        return list(client[database][collection].find(sort=[("_id", 1)]))


def write(sink: Sink, target: Target, *changes: Any, mark: BatchMark = MARK) -> Any:
    sink.prepare(target, Evolution.EVOLVE)
    writer = sink.open(mark, 0)
    writer.write(changes_of(target, *changes))
    receipt = writer.finish()
    sink.commit(mark, [receipt])
    return receipt


@pytest.mark.deep(guard="tests/conformance/test_sinks.py::test_keys_change_and_swap")
def test_documents_follow_rows_and_their_keys(server: Mongo, sink: Sink) -> None:
    write(sink, ORDERS, insert(5, id=1, name="a"), insert(5, 1, id=2, name="b"), insert(5, 2, id=3, name="c"))
    for _ in range(2):
        # Writing the same batch again changes nothing.
        write(
            sink,
            ORDERS,
            update(6, {"id": 1, "name": "a"}, {"id": 1, "name": "x"}),
            delete(7, id=2, name="b"),
            update(8, {"id": 3, "name": "c"}, {"id": 2**64 - 1, "name": "c"}),
        )
    assert documents(server, sink) == [
        {"_id": 1, "id": 1, "name": "x", "_commit_version": 6},
        {
            "_id": Decimal128(str(2**64 - 1)),
            "id": Decimal128(str(2**64 - 1)),
            "name": "c",
            "_commit_version": 8,
        },
    ]


@pytest.mark.deep(guard="tests/conformance/test_sinks.py::test_text_keys_distinguish_rows")
def test_composite_key_is_a_document(server: Mongo, sink: Sink) -> None:
    target = target_of({"shop": "int", "at": "datetime(6)", "note": "text"}, ("shop", "at"))
    moment = datetime(2026, 3, 1, 1, 2, 3, 4)
    write(sink, target, insert(5, shop=1, at=moment, note="a"), insert(5, 1, shop=2, at=moment, note="b"))
    write(sink, target, delete(6, shop=1, at=moment, note="a"))
    [document] = documents(server, sink, target)
    assert document["_id"] == {"shop": 2, "at": "2026-03-01 01:02:03.000004"}
    assert document["note"] == "b"


@pytest.mark.deep(guard="tests/conformance/test_sinks.py::test_every_type_is_read_back_unchanged")
def test_values_are_read_back_unchanged(server: Mongo, sink: Sink) -> None:
    target = target_of(
        {
            "id": "bigint unsigned",
            "tiny": "tinyint",
            "price": "decimal(10,2)",
            "long": "decimal(38,10)",
            "longest": "decimal(65,30)",
            "day": "date",
            "at": "datetime(3)",
            "seen": "timestamp(6)",
            "took": "time(6)",
            "spot": "vector(2)",
            "blob": "blob",
            "real": "float",
            "doc": "json",
        }
    )
    values = {
        "id": Decimal(2**64 - 1),
        "tiny": -128,
        "price": Decimal("-1.50"),
        "long": Decimal("-1234567890123456789012345678.0123456789"),
        "longest": "-12345678901234567890123456789012345.123456789012345678901234567890",
        "day": date(1000, 1, 1),
        "at": datetime(1000, 1, 1, 23, 59, 59, 999_000),
        "seen": datetime(2026, 3, 1, 12, 0, 0, 1),
        "took": -3_020_399_000_001,
        "spot": [1.5, -2.0],
        "blob": b"\x00\xff",
        "real": 0.10000000149011612,
        "doc": '{"a": 1}',
    }
    change = changes_of(target, insert(5, id=Decimal(1)), insert(5, 1, **values))
    write(sink, target, insert(5, id=Decimal(1)), insert(5, 1, **values))
    stored = documents(server, sink, target)[1]
    assert stored["price"] == Decimal128("-1.50")
    assert stored["at"] == values["at"]
    assert stored["took"] == values["took"]
    read = [row for batch in sink.read(target) for row in batch.to_pylist()]
    assert read == change.rows.select(target.column_names).to_pylist()
    upper = [row["id"] for batch in sink.read(target, low={"id": Decimal(2)}) for row in batch.to_pylist()]
    assert upper == [Decimal(2**64 - 1)]


@pytest.mark.deep(
    guard="tests/integration/test_sink_lakes.py::test_zero_date_key_is_located_again_and_other_invalid_keys_stop"
)
def test_impossible_value_is_refused_by_name(sink: Sink) -> None:
    with pytest.raises(OptionInvalid, match="has a column _id"):
        sink.prepare(target_of({"id": "int", "_id": "int"}), Evolution.EVOLVE)
    with pytest.raises(ValueMalformed, match="its column day"):
        write(sink, target_of({"day": "date"}, ("day",)), insert(5))
