# SPDX-License-Identifier: Apache-2.0
"""Write new rows into ClickHouse, Elasticsearch, MongoDB and Kafka, compared with the Python loader of each
store.

Each loader gets rows in its input form: Arrow and columns for ClickHouse, finished documents for
Elasticsearch and MongoDB, rows for Kafka. Penstock gets the decoded changes, encodes them, and also writes
the data that a retry of the batch requires.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from itertools import islice
from typing import Any

import bson
import clickhouse_connect
import confluent_kafka
import elasticsearch
import elasticsearch.helpers
import pyarrow
import pymongo

from bench.corpora.corpus import CountsDiffer, corpus
from bench.result import CaseResult, Line, Options, Target
from bench.written_rows import Cost, costs, decoded_changes, sink_of, write_part
from penstock.changes import Changes
from penstock.sinks.sink import Evolution
from tools.clickhouse import ClickHouse
from tools.elasticsearch import Elasticsearch
from tools.kafka import Kafka
from tools.mongo import Mongo

TITLE = "New rows into stores, decoded before, beside the best loader of each in Python"

_WORKLOAD = "purchases"
_TABLE = "bench.purchases"
_DATABASE, _NAME = _TABLE.split(".")
_TIMES_OF_LOADER = Target(2)
#: The rows of one request of a loader, and the threads of Elasticsearch's loader.
_ROWS_OF_REQUEST = 5_000
_THREADS = 2
#: The rows of a large file that are written.
_ROWS_MAX = 200_000

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Store:
    """A server, and the functions that write rows to it, through the sink and through other loaders."""

    pid: int
    penstock: Callable[[], int]
    loaders: dict[str, Callable[[], int]]
    clear: Callable[[], object]


def run(options: Options) -> CaseResult:
    """Measure each store."""
    changes = list(_first(decoded_changes(corpus(_WORKLOAD, options.size), _TABLE, ["insert"])))
    lines: list[Line] = []
    for name, running in _STORES.items():
        with running(changes) as store:
            writes = {**store.loaders, "Penstock": store.penstock}
            lines += _lines(name, costs(store.pid, writes, store.clear, options.repeat))
    packages = ("clickhouse-connect", "elasticsearch", "pymongo", "confluent-kafka")
    versions = {package: metadata.version(package) for package in packages}
    return CaseResult("rows_to_stores", TITLE, lines, versions, ratio_title="Penstock of the loader's rate")


def _lines(name: str, measured: dict[str, Cost]) -> list[Line]:
    """Return a line for each writer; all must have written the same number of rows."""
    own = measured.pop("Penstock")
    lines = [Line(_WORKLOAD, f"{name}: Penstock", own.rates)]
    for title, cost in measured.items():
        if cost.rows != own.rows:
            raise CountsDiffer(f"{name}: {title} wrote {cost.rows} rows, Penstock {own.rows}")
        ratio = cost.seconds / own.seconds
        lines.append(Line(_WORKLOAD, f"{name}: {title}", cost.rates, ratio, _TIMES_OF_LOADER))
    return lines


def _first(changes: Sequence[Changes]) -> Iterator[Changes]:
    left = _ROWS_MAX
    for part in changes:
        if left > 0:
            yield part.with_rows(part.rows.slice(0, left))
        left -= len(part)


def _columns(changes: Sequence[Changes]) -> pyarrow.Table:
    """Return the columns of the table, without the columns that describe the change."""
    rows = pyarrow.Table.from_batches([part.rows for part in changes])
    return rows.select(list(changes[0].target.column_names)).combine_chunks()


@contextmanager
def _clickhouse(changes: Sequence[Changes]) -> Iterator[Store]:
    with ClickHouse() as server:
        sink = sink_of("clickhouse", url=server.url)
        target = changes[0].target
        sink.prepare(target, Evolution.EVOLVE)
        client = clickhouse_connect.get_client(host="127.0.0.1", port=server.port, compress=False)
        rows = _columns(changes)
        columns = [column.to_pylist() for column in rows.columns]

        def insert() -> int:
            client.insert(
                _NAME, columns, column_names=rows.column_names, database=_DATABASE, column_oriented=True
            )
            return int(rows.num_rows)

        def insert_arrow() -> int:
            client.insert_arrow(_NAME, rows, database=_DATABASE)
            return int(rows.num_rows)

        def clear() -> None:
            client.command(f"TRUNCATE TABLE {_TABLE}")

        loaders = {"clickhouse-connect, columns": insert, "clickhouse-connect, Arrow": insert_arrow}
        yield Store(server.pid, partial(write_part, sink, changes), loaders, clear)
        client.close()


@contextmanager
def _elasticsearch(changes: Sequence[Changes]) -> Iterator[Store]:
    with Elasticsearch() as server:
        sink = sink_of("elasticsearch", url=server.url)
        client = elasticsearch.Elasticsearch(server.url, request_timeout=120)
        documents = [_json_document(row) for row in _columns(changes).to_pylist()]

        def parallel_bulk() -> int:
            actions = ({"_index": _TABLE, "_id": str(row["id"]), "_source": row} for row in documents)
            written = elasticsearch.helpers.parallel_bulk(
                client, actions, thread_count=_THREADS, chunk_size=_ROWS_OF_REQUEST
            )
            return sum(ok for ok, _ in written)

        def clear() -> None:
            client.indices.delete(index=_TABLE, ignore_unavailable=True)
            sink.prepare(changes[0].target, Evolution.EVOLVE)

        loaders = {f"parallel_bulk, {_THREADS} threads": parallel_bulk}
        yield Store(server.pid, partial(write_part, sink, changes), loaders, clear)
        client.close()


@contextmanager
def _mongodb(changes: Sequence[Changes]) -> Iterator[Store]:
    with Mongo() as server:
        sink = sink_of("mongodb", url=server.url)
        client: pymongo.MongoClient[Any] = pymongo.MongoClient(server.url)
        documents = [_bson_document(row) for row in _columns(changes).to_pylist()]
        collection = client[_DATABASE][_NAME]

        def bulk_write() -> int:
            left, written = iter(documents), 0
            while chunk := list(islice(left, _ROWS_OF_REQUEST)):
                operations = [pymongo.ReplaceOne({"_id": row["_id"]}, row, upsert=True) for row in chunk]
                written += collection.bulk_write(operations, ordered=False).upserted_count
            return written

        def clear() -> None:
            collection.drop()
            sink.prepare(changes[0].target, Evolution.EVOLVE)

        yield Store(server.pid, partial(write_part, sink, changes), {"bulk_write": bulk_write}, clear)
        client.close()


@contextmanager
def _kafka(changes: Sequence[Changes]) -> Iterator[Store]:
    with Kafka() as broker:
        sink = sink_of("kafka", servers=broker.servers, format="json")
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": broker.servers,
                "enable.idempotence": True,
                "compression.type": "lz4",
                "linger.ms": 20,
                "queue.buffering.max.messages": 10_000_000,
            }
        )
        rows = _columns(changes).to_pylist()

        def produce() -> int:
            for number, row in enumerate(rows):
                producer.produce(f"{_TABLE}.loader", json.dumps(row, default=str), key=str(row["id"]))
                if number % _ROWS_OF_REQUEST == 0:
                    producer.poll(0)
            return len(rows) - producer.flush()

        yield Store(broker.pid, partial(write_part, sink, changes), {"produce": produce}, lambda: None)


_STORES: dict[str, Callable[[Sequence[Changes]], AbstractContextManager[Store]]] = {
    "clickhouse": _clickhouse,
    "elasticsearch": _elasticsearch,
    "mongodb": _mongodb,
    "kafka": _kafka,
}


def _json_document(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as a document that fits the index's mapping."""
    return row | {"ordered_at": f"{row['ordered_at']:%Y-%m-%d %H:%M:%S}", "amount": str(row["amount"])}


def _bson_document(row: dict[str, Any]) -> dict[str, Any]:
    return {"_id": row["id"], **row, "amount": bson.Decimal128(row["amount"])}
