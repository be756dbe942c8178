# SPDX-License-Identifier: Apache-2.0
"""The kernel's streams of small pieces have the rows that a subscriber gets through pyarrow."""

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy
import pyarrow
import pytest

from penstock.client.fetch import ROW_ORDER_HEADER, ROWS_BY_SHARD
from penstock.client.split import Cut, split
from penstock.logstore.log import Log
from penstock.model import TablePatterns
from penstock.serve.access import WHOLE
from penstock.serve.arrivals import Arrivals
from penstock.serve.http.change_frames import arrow_stream
from penstock.serve.http.changes import ROW_ORDER_HEADER as HEADER_OF_DAEMON
from penstock.serve.http.changes import ChangesAnswer
from penstock.serve.http.changes_request import ChangesRequest
from penstock.serve.pieces import Piece, PieceMemory, Pieces, View
from penstock.serve.sieve import Sieve, sieve_of
from penstock.serve.subscription import Cursor, Started
from penstock.serve.threads import Threads
from penstock.source.rows_filter import SLOT_COLUMN, ShardSet
from tests.support.daemon.served_log import INSTANCE, LogInstance, captured_log, serving

Rows = list[tuple[str, pyarrow.RecordBatch]]


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with captured_log() as log:
        yield log


def pieces_of(log: Log, view: View) -> list[Piece]:
    """Return all pieces of a log in a view."""

    async def follow() -> list[Piece]:
        pieces = Pieces(LogInstance(log), Arrivals(), PieceMemory(), Threads())
        first = log.earliest()
        assert first is not None
        cursor = Cursor(pieces, view, Started(first))
        followed = []
        while (piece := await cursor.next(0)) is not None:
            followed.append(piece)
        return followed

    return asyncio.run(follow())


def streamed(sieve: Sieve, piece: Piece, *, grouped: bool) -> Rows | None:
    streams = sieve.streams(piece, 1 << 20, grouped=grouped)
    if streams is None:
        return None
    batches = []
    for batch, rows, content in streams:
        read = pyarrow.ipc.open_stream(content).read_next_batch()
        read.validate(full=True)
        assert read.num_rows == rows
        batches.append((batch.table, read))
    return batches


def sifted(sieve: Sieve, piece: Piece, *, grouped: bool) -> Rows:
    """Return the same rows through pyarrow, as subscribers get them from large pieces."""
    batches = []
    for passed in sieve.sift(piece, {}):
        rows = passed.arrow
        if grouped and sieve.shards is not None:
            shards = rows.column(SLOT_COLUMN).to_numpy() % sieve.shards.count
            rows = rows.take(pyarrow.array(numpy.argsort(shards, kind="stable")))
        content = arrow_stream(rows, None)
        batches.append((passed.batch.table, pyarrow.ipc.open_stream(content).read_next_batch()))
    return batches


def moves_rows(piece: Piece, count: int) -> bool:
    """Return whether an update moves a row to another of `count` shards."""
    sieve = sieve_of(View("typed", TablePatterns()), shards=ShardSet(count, frozenset(range(count))))
    return any(passed.moved for passed in sieve.sift(piece, {}))


def lacks_columns(piece: Piece) -> bool:
    return any(rows.column("_metadata").field("absent").null_count < rows.num_rows for rows in piece.arrow())


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_stream_has_the_rows_that_pyarrow_selects(log: Log, seed: int, *, grouped: bool) -> None:
    seeded = random.Random(seed)
    count = seeded.randrange(2, 9)
    of = frozenset(seeded.sample(range(count), seeded.randrange(2, count + 1)))
    shards = None if seed == 0 else ShardSet(count, of)
    sieve = sieve_of(View("typed", TablePatterns()), shards=shards)
    compared = 0
    for piece in pieces_of(log, sieve.view):
        streams = streamed(sieve, piece, grouped=grouped)
        if streams is None:
            assert moves_rows(piece, count) or lacks_columns(piece)
            continue
        expected = sifted(sieve, piece, grouped=grouped)
        assert [table for table, _ in streams] == [table for table, _ in expected]
        for (_, rows), (_, others) in zip(streams, expected, strict=True):
            assert rows.equals(others, check_metadata=True)
            compared += rows.num_rows
    assert compared > 10


def test_rows_are_selected_through_pyarrow_where_the_kernel_cannot(log: Log) -> None:
    view = View("typed", TablePatterns())
    piece = max(pieces_of(log, view), key=lambda piece: piece.rows)
    two = ShardSet(3, frozenset([0, 1]))
    assert sieve_of(view, shards=two).streams(piece, 1 << 20, grouped=True) is not None
    assert sieve_of(view, shards=two).streams(piece, 1, grouped=True) is None
    assert sieve_of(view, shards=ShardSet(3, frozenset([1]))).streams(piece, 1 << 20, grouped=True) is None
    columns = View("typed", TablePatterns(), columns=("_change_type",))
    assert sieve_of(columns, shards=two).streams(piece, 1 << 20, grouped=True) is None


def test_daemon_groups_rows_by_shard_only_on_request(log: Log) -> None:
    def answers(**headers: str) -> bytes:
        body = {
            "start": "earliest",
            "wait_seconds": 0,
            "shards": {"count": 4, "of": [0, 1, 2, 3]},
            "subscriber": "",
        }
        with serving(log) as daemon:
            return daemon.ask("POST", f"/v1/instances/{INSTANCE}/changes", body, **headers).body

    plain, grouped = (batches_in(answers(**more)) for more in ({}, {"Penstock_Row_Order": ROWS_BY_SHARD}))
    assert ROW_ORDER_HEADER == HEADER_OF_DAEMON == "Penstock-Row-Order"
    assert any(not is_grouped(rows) for rows in plain)
    assert all(is_sorted(rows.column("_commit_version").to_numpy()) for rows in plain)
    cuts = {shard: Cut(0) for shard in range(4)}
    for rows, others in zip(plain, grouped, strict=True):
        split_rows, split_others = (dict(split(batch, 4, cuts)) for batch in (rows, others))
        assert split_rows.keys() == split_others.keys()
        assert all(split_rows[shard].equals(split_others[shard]) for shard in split_rows)


def batches_in(content: bytes) -> list[pyarrow.RecordBatch]:
    """Return the rows in the frames of a response."""
    batches, at = [], 0
    while at < len(content):
        size = int.from_bytes(content[at : at + 4], "big")
        header = json.loads(content[at + 4 : at + 4 + size])
        at += 4 + size
        if header["kind"] == "batch":
            batches.append(pyarrow.ipc.open_stream(content[at : at + header["bytes"]]).read_next_batch())
        at += header["bytes"]
    return batches


def is_grouped(rows: pyarrow.RecordBatch) -> bool:
    return is_sorted(rows.column(SLOT_COLUMN).to_numpy() % 4)


def is_sorted(values: numpy.ndarray) -> bool:
    return bool((values[1:] >= values[:-1]).all())


def test_piece_of_few_bytes_of_the_log_is_encoded_without_a_thread(log: Log) -> None:
    """A batch counts the memory of constant columns that it shares with a longer batch before it."""
    body = {"start": "earliest", "shards": {"count": 4, "of": [0, 1, 2, 3]}}
    view = View("typed", TablePatterns())
    sieve = sieve_of(view, shards=ShardSet(4, frozenset(range(4))))
    piece = replace(pieces_of(log, sieve.view)[0], bytes=300_000)

    class Refusing(Pieces):
        async def in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
            raise AssertionError("a thread takes longer than encoding")

    async def sent() -> bytes:
        pieces = Refusing(LogInstance(log), Arrivals(), PieceMemory(), Threads())
        cursor = Cursor(pieces, sieve.view, Started(piece.start))
        answer = ChangesAnswer(
            ChangesRequest.parse(json.dumps(body).encode()), cursor, sieve, None, cast(Any, None), WHOLE
        )
        content = b""

        async def send(message: Any) -> None:
            nonlocal content
            content += message["body"]

        await answer._send_piece(send, piece)
        return content

    assert sum(rows.num_rows for rows in batches_in(asyncio.run(sent()))) == piece.rows
