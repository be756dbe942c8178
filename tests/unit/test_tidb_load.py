# SPDX-License-Identifier: Apache-2.0
"""Loads from a TiDB cluster: the queries, and the commit versions of the rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.changes import Target
from penstock.errors import PositionPurged
from penstock.model import Column, ServerAddress, TableName
from penstock.mysql.connection import ServerIdentity
from penstock.pipeline.load import reader
from penstock.pipeline.load.chunks import Chunk
from penstock.pipeline.load.session import LoadSession
from penstock.pipeline.load.watermark import Watermark, watermark_of

NOW, PLANNED = 470_655_335_565_361_152, 470_655_289_235_341_313
TABLE = Target(TableName("shop", "orders"), (Column("id", "int", None, False),), ("id",), (), False)
CHUNK = Chunk(TABLE.name, ("id",), commit_ts=PLANNED)


class _Connection:
    """A session with a TiDB server that answers from memory."""

    address = ServerAddress()

    def __init__(self, statements: list[str], collected_ts: int) -> None:
        self._statements = statements
        self._collected_ts = collected_ts

    def identity(self) -> ServerIdentity:
        return ServerIdentity("mysql", (5, 7, 25), "5.7.25-TiDB-v7.1.2", 0, None, None, "OFF")

    def query(self, sql: str, args: Any = None) -> list[dict[str, Any]]:
        self._statements.append(sql)
        if "tidb_snapshot" in sql and int(sql.split("'")[1]) <= self._collected_ts:
            raise PositionPurged("snapshot is older than GC safe point")
        return [{"ts": str(NOW)}] if "tidb_current_ts" in sql else []

    def close(self) -> None:
        """Do nothing."""


Cluster = Callable[[int], list[str]]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Open sessions on a cluster that garbage-collected all versions up to a timestamp; return its
    statements.
    """

    def start(collected_ts: int) -> list[str]:
        statements: list[str] = []

        @contextmanager
        def open_session(address: ServerAddress) -> Iterator[LoadSession]:
            yield LoadSession(_Connection(statements, collected_ts))  # type: ignore[arg-type]

        monkeypatch.setattr(reader, "open_session", open_session)
        monkeypatch.setattr(LoadSession, "batches", lambda *_: iter(()))
        return statements

    return start


def _read(watermark: Watermark | None = None) -> list[Watermark]:
    watermarks: list[Watermark] = []
    list(
        reader.read_chunk(
            ServerAddress(),
            TABLE,
            CHUNK,
            instance="shop",
            watermark=watermark,
            on_watermark=watermarks.append,
        )
    )
    return watermarks


def test_rows_have_the_timestamp_as_of_which_they_are_read() -> None:
    statements: list[str] = []
    watermark = watermark_of(LoadSession(_Connection(statements, 0)))  # type: ignore[arg-type]
    assert watermark.exact
    assert (watermark.version, watermark.floor) == (NOW, NOW + 1)
    assert watermark.time_us == (NOW >> 18) * 1000
    assert Watermark.from_json(watermark.to_json()) == watermark
    assert statements == ["BEGIN", "SELECT @@tidb_current_ts AS ts", "ROLLBACK"]


def test_chunk_is_read_as_of_the_time_of_its_plan(cluster: Cluster) -> None:
    statements = cluster(0)
    (watermark,) = _read()
    assert watermark.commit_ts == PLANNED
    assert statements == [f"SET @@tidb_snapshot = '{PLANNED}'"]
    assert Chunk.from_json(CHUNK.to_json()) == CHUNK


def test_chunk_is_read_as_of_now_once_the_planned_versions_are_collected(cluster: Cluster) -> None:
    statements = cluster(PLANNED)
    (watermark,) = _read()
    assert watermark.commit_ts == NOW
    assert statements[-1] == f"SET @@tidb_snapshot = '{NOW}'"


def test_watermark_of_the_caller_is_never_replaced(cluster: Cluster) -> None:
    cluster(PLANNED)
    given = watermark_of(LoadSession(_Connection([], 0)), 0, PLANNED)  # type: ignore[arg-type]
    with pytest.raises(PositionPurged):
        _read(given)


def test_load_ends_where_even_the_present_is_collected(cluster: Cluster) -> None:
    cluster(NOW)
    with pytest.raises(PositionPurged):
        _read()
