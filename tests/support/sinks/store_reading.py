# SPDX-License-Identifier: Apache-2.0
"""Reads the rows of the stores that sinks write to, with the stores' own clients, in the form that the oracle
compares.
"""

import base64
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import bson
import clickhouse_connect
import elasticsearch
import pymongo
import redis
from clickhouse_connect.datatypes.format import clear_all_formats, set_read_format
from elastic_transport import JsonSerializer

from tests.support.pipeline.oracle import (
    Row,
    Source,
    clickhouse_rows,
    elasticsearch_rows,
    mongodb_rows,
    redis_rows,
)
from tests.support.suite.patience import WAIT_SECONDS_MAX

Rows = Callable[[Any, str, str], list[Row]]


def clickhouse_stored(server: Any, database: str, table: str, *, is_mirror: bool) -> list[Row]:
    """Return the rows of a mirror that are not deleted, or all rows of a feed."""
    client = clickhouse_connect.get_client(host="127.0.0.1", port=server.port)
    try:
        # Some byte strings are not valid text.
        set_read_format("String", "bytes")
        rows = clickhouse_rows(client, f"`{database}`.`{table}`", final=is_mirror)
        if not is_mirror:
            return [row | {"_change_type": bytes(row["_change_type"]).decode()} for row in rows]
        return [row for row in rows if not row.pop("_is_deleted")]
    finally:
        clear_all_formats()
        client.close()


def _clickhouse(server: Any, database: str, table: str) -> list[Row]:
    return clickhouse_stored(server, database, table, is_mirror=True)


def _mongodb(server: Any, database: str, table: str) -> list[Row]:
    with pymongo.MongoClient[Any](server.url) as client:
        rows = mongodb_rows(client[database][table])
    return [
        {
            name: value.to_decimal() if isinstance(value, bson.Decimal128) else value
            for name, value in row.items()
        }
        for row in rows
    ]


class _Exact(JsonSerializer):
    """Reads numbers with all their digits."""

    mimetype = "application/vnd.elasticsearch+json"

    def json_loads(self, data: bytes | str) -> Any:
        return json.loads(data, parse_float=Decimal)


def _elasticsearch(server: Any, database: str, table: str) -> list[Row]:
    serializers = {_Exact.mimetype: _Exact()}
    with elasticsearch.Elasticsearch(
        server.url, request_timeout=WAIT_SECONDS_MAX, serializers=serializers
    ) as client:
        return elasticsearch_rows(client, f"{database}.{table}")


def _redis(server: Any, database: str, table: str) -> list[Row]:
    with redis.Redis.from_url(server.url, socket_timeout=WAIT_SECONDS_MAX) as client:
        return redis_rows(client, f"{database}:{table}:*", kind="json")


READERS: dict[str, Rows] = {
    "clickhouse": _clickhouse,
    "elasticsearch": _elasticsearch,
    "mongodb": _mongodb,
    "redis": _redis,
}


def as_source(source: Source, rows: list[Row], json: bool) -> list[Row]:
    """Keep only the source's columns, and decode binary values, which JSON holds as base64."""
    binary = [name for name, kind in source.types.items() if "binary" in kind or "blob" in kind]
    found = [{name: row.get(name) for name in source.types} for row in rows]
    for row in found if json else ():
        row |= {name: base64.b64decode(row[name]) for name in binary if row[name] is not None}
    return found
