# SPDX-License-Identifier: Apache-2.0
"""Pieces of a log equal the output of a reader of the whole log, wherever the boundaries between pieces
are.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from penstock import read_binlog
from penstock.errors import (
    LimitExceeded,
    PenstockError,
    PositionPurged,
    SequenceGap,
    ServerBusy,
    ServerChanged,
    StatementLogged,
)
from penstock.logstore.log import Log
from penstock.model import Position, TablePatterns
from penstock.serve import piece as piece_module
from penstock.serve import pieces as pieces_module
from penstock.serve.access import WHOLE
from penstock.serve.arrivals import Arrivals
from penstock.serve.http.changes import ChangesAnswer
from penstock.serve.http.changes_request import ChangesRequest
from penstock.serve.pieces import Piece, PieceMemory, Pieces, View
from penstock.serve.ptubes.messages import CheckpointMode, FetchRequest, PtubesCheckpoint, PtubesSubscription
from penstock.serve.ptubes.session import Session
from penstock.serve.sieve import sieve_of
from penstock.serve.subscribers import Subscriber, Subscribers
from penstock.serve.subscription import Cursor, Start, Started, resolve_start
from penstock.serve.threads import Threads
from penstock.source.files import FileSource
from penstock.source.rows_filter import ShardSet
from tests.support.binlog.xa_log import XA_STATEMENTS
from tests.support.logstore.folders import binlogs, keep, open_log
from tests.support.ptubes.packet import RdsEnvelope, shards_of
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers import Server

Row = tuple[object, ...]
_Found = TypeVar("_Found")

VIEW = View("typed", TablePatterns("shop.*"))
# The cuts are close together, so that a log of a few hundred kilobytes has many pieces.
GRID = 8 * 1024

# With two other readers at the same position, a piece is kept for a third reader.
FOLLOWING: list[Cursor] = []


class Instance:
    """The parts of an instance that decoding of its log needs."""

    name = "shop"

    def __init__(self, log: Log) -> None:
        self._log = log
        self.arrivals = Arrivals()

    def status(self) -> dict[str, Any]:
        return {"lag_seconds": 0.0}

    def log(self) -> Log:
        return self._log


@dataclass
class Recording:
    """Two binlog files of a server, with small transactions, DDL between them, and a large transaction."""

    server: Server
    files: FileSource
    first: Position
    middle: Position
    end: Position


@pytest.fixture(scope="module")
def recording(server_of: Callable[[str], Server]) -> Iterator[Recording]:
    server = server_of("mysql")
    server.sql("FLUSH BINARY LOGS")
    name = server.sql("SHOW BINARY LOG STATUS")[0][0]
    many = (
        "INSERT INTO shop.orders (note, paid) WITH RECURSIVE n (i) AS"
        " (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 900) SELECT REPEAT('x', 100), i FROM n"
    )
    statements = [
        "DROP DATABASE IF EXISTS shop",
        "CREATE DATABASE shop",
        "CREATE TABLE shop.orders (id INT PRIMARY KEY AUTO_INCREMENT, note VARCHAR(300), paid INT)",
        "CREATE TABLE shop.items (id INT PRIMARY KEY, name VARCHAR(40))",
    ]
    for number in range(150):
        statements.append(f"INSERT INTO shop.orders (note, paid) VALUES (REPEAT('n', {number}), {number})")
        statements.append(f"INSERT INTO shop.items VALUES ({number}, 'item {number}')")
        statements += XA_STATEMENTS.get(number, [])
    statements += [
        "ALTER TABLE shop.orders ADD COLUMN extra DECIMAL(10, 2) DEFAULT 1.5",
        "UPDATE shop.orders SET paid = paid + 1 WHERE id % 3 = 0",
        many,
    ]
    more = [f"UPDATE shop.orders SET note = 'second file' WHERE id = {number}" for number in range(1, 61)]
    with server.connect() as connection, connection.cursor() as cursor:
        connection.autocommit(True)
        for statement in statements:
            cursor.execute(statement)
        middle = server.sql("SHOW BINARY LOG STATUS")[0]
        cursor.execute("FLUSH BINARY LOGS")
        for statement in [*more, "XA COMMIT '9040'", "DELETE FROM shop.items WHERE id < 70"]:
            cursor.execute(statement)
    files = binlogs(server)
    extents = files.extents()
    first = next(Position(0, extent.file, extent.start) for extent in extents if extent.file == name)
    last = Position(0, extents[-1].file, extents[-1].end)
    yield Recording(server, files, first, Position(0, middle[0], middle[1]), last)
    server.sql("DROP DATABASE shop")


@pytest.fixture
def log(recording: Recording, tmp_path: Path) -> Iterator[Log]:
    with open_log(tmp_path / "log") as log:
        keep(log, recording.server, recording.files, start=recording.first)
        yield log


@pytest.fixture(autouse=True)
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    FOLLOWING.clear()
    for module in (piece_module, pieces_module):
        monkeypatch.setattr(module, "PIECE_BYTES", GRID)


def first_of(log: Log) -> Position:
    first = log.earliest()
    assert first is not None
    return first


def pieces_of(log: Log, memory: PieceMemory | None = None) -> Pieces:
    instance = Instance(log)
    memory = PieceMemory() if memory is None else memory
    return Pieces(instance, instance.arrivals, memory, Threads())


def run(question: Awaitable[_Found]) -> _Found:
    return asyncio.run(asyncio.wait_for(question, WAIT_SECONDS_MAX))


async def until_it_fails(
    pieces: Pieces, start: Position, kind: type[PenstockError]
) -> tuple[list[Piece], PenstockError]:
    """Return the pieces up to an error of a type, and the error."""
    found: list[Piece] = []
    try:
        while (piece := await pieces.at(VIEW, found[-1].end if found else start)) is not None:
            found.append(piece)
    except kind as problem:
        return found, problem
    raise AssertionError("nothing failed")


async def chain(pieces: Pieces, start: Position, view: View = VIEW) -> list[Piece]:
    """Return the pieces from a position to the end of the log, with two idle cursors, so that the pieces are
    kept.
    """
    found: list[Piece] = []
    FOLLOWING.extend(Cursor(pieces, view, Started(start)) for _ in range(2))
    while (piece := await pieces.at(view, found[-1].end if found else start)) is not None:
        found.append(piece)
    return found


def rows(batches: list[Any]) -> list[Row]:
    """Return rows in commit order, those of each table in order of arrival."""
    return [
        (row["_commit_version"], batch.table, *map(str, row.values()))
        for batch in batches
        for row in batch.to_arrow().to_pylist()
    ]


def rows_of(found: list[Piece]) -> list[Row]:
    return sorted(rows([batch for piece in found for batch in piece.batches]))


def rows_of_log(folder: Path, **bounds: Any) -> list[Row]:
    return sorted(rows(list(read_binlog(folder, "shop.*", instance="shop", **bounds))))


def test_chain_holds_the_bytes_of_a_log_reader_and_reports_its_position(log: Log) -> None:
    pieces = pieces_of(log)
    output = run(chain(pieces, first_of(log)))
    assert len(output) > 10
    assert rows_of(output) == rows_of_log(log.folder)
    assert output[-1].end == log.visible
    for before, piece in itertools.pairwise(output):
        assert piece.start == before.end
        assert piece.gtid_set == log.gtid_set(piece.end)
    assert [follow_to_end.time_us for follow_to_end in output] == sorted(
        follow_to_end.time_us for follow_to_end in output
    )
    assert pieces.decodes == len(output)


def test_reader_of_a_growing_log_receives_the_same(recording: Recording, tmp_path: Path) -> None:
    ends = transaction_ends(recording)

    async def follow(log: Log) -> list[Piece]:
        pieces = pieces_of(log)
        received: list[Piece] = []
        position = recording.first
        for end in [*ends[::9], recording.end]:
            await asyncio.to_thread(keep, log, recording.server, recording.files, start=position, end=end)
            position = end
            received += await chain(pieces, received[-1].end if received else first_of(log))
        return received

    with open_log(tmp_path / "log") as log:
        output = run(follow(log))
        assert rows_of(output) == rows_of_log(log.folder)
        assert [status.gtid_set for status in output] == [
            log.gtid_set(follow_to_end.end) for follow_to_end in output
        ]


def transaction_ends(recording: Recording) -> list[Position]:
    """Return the ends of the transactions in the first file."""
    return [
        Position(0, recording.first.file, end)
        for _, _, kind, _, end, _ in recording.server.sql(f"SHOW BINLOG EVENTS IN '{recording.first.file}'")
        if kind == "Xid"
    ]


def test_reader_that_joins_between_two_pieces_soon_shares_the_chain(recording: Recording, log: Log) -> None:
    async def join() -> None:
        pieces = pieces_of(log)
        known = {piece.start for piece in await chain(pieces, first_of(log))}
        inside = [end for end in transaction_ends(recording) if end not in known]
        assert len(inside) > 100
        for place in inside[:: len(inside) // 10]:
            decoded = pieces.decodes
            joined = await chain(pieces, place)
            assert rows_of(joined) == rows_of_log(log.folder, start=place)
            assert joined[0].end in known or joined[0].end == log.visible
            assert pieces.decodes == decoded + 1

    run(join())


def test_fifty_followers_cost_one_decoding(log: Log) -> None:
    async def follow() -> tuple[Pieces, list[list[Position]]]:
        pieces = pieces_of(log)

        async def follow_to_end() -> list[Position]:
            cursor = Cursor(pieces, VIEW, Started(first_of(log)))
            ends = []
            while (piece := await cursor.next(0)) is not None:
                ends.append(piece.end)
                # Each follower has its own speed.
                await asyncio.sleep(0)
            return ends

        return pieces, await asyncio.gather(*(follow_to_end() for _ in range(50)))

    pieces, ends = run(follow())
    assert all(end == ends[0] for end in ends)
    assert pieces.decodes == len(ends[0])


def test_memory_stays_within_its_bound(log: Log) -> None:
    memory = PieceMemory(300 * 1024)

    async def follow() -> None:
        pieces = pieces_of(log, memory)
        cursors = [Cursor(pieces, VIEW, Started(first_of(log))) for _ in range(2)]
        while True:
            received = [await cursor.next(0) for cursor in cursors]
            assert memory.bytes <= memory.bytes_max
            if received == [None, None]:
                return

    run(follow())
    assert 0 < len(memory) < 15


def test_memory_counts_the_copies_for_each_number_of_shards(log: Log) -> None:
    memory = PieceMemory()
    asked = ChangesRequest.parse(b'{"subscriber": "cache", "start": "earliest", "wait_seconds": 0}')
    following = partial(Subscribers().following, "changes", "shop", "cache")

    async def follow() -> list[int]:
        pieces, held = pieces_of(log, memory), []
        for count in (2, 3):
            sieve = sieve_of(VIEW, shards=ShardSet(count, frozenset({1})))
            cursor, _ = (Cursor(pieces, sieve.view, Started(first_of(log))) for _ in range(2))
            answer = ChangesAnswer(asked, cursor, sieve, None, following, WHOLE)
            await answer({}, asyncio.Future, lambda _: asyncio.sleep(0))
            held.append(memory.bytes)
        return held

    two, three = run(follow())
    assert three - two > sum(piece.bytes for piece in run(chain(pieces_of(log), first_of(log)))) / 2


def test_large_transaction_is_one_piece_and_an_oversized_one_is_refused_after_whole_pieces(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = run(chain(pieces_of(log), first_of(log)))
    large = max(output, key=lambda changes: changes.rows)
    assert large.rows >= 900
    assert large.end.offset - large.start.offset > 5 * GRID

    monkeypatch.setattr(piece_module, "PIECE_BYTES_MAX", 200 * 1024)

    passed, refused = run(until_it_fails(pieces_of(log), first_of(log), LimitExceeded))
    assert refused.position == str(passed[-1].end)
    assert rows_of(passed) == rows_of_log(log.folder, end=passed[-1].end)


def test_large_transaction_is_delivered_in_parts_to_readers_that_accept_them(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece_module, "PIECE_PART_BYTES", 32 * 1024)
    monkeypatch.setattr(piece_module, "PIECE_BYTES_MAX", 200 * 1024)

    async def follow(started: Position, count: int) -> tuple[Pieces, list[list[Piece]]]:
        pieces = pieces_of(log)
        cursors = [Cursor(pieces, VIEW, Started(started), in_parts=True) for _ in range(count)]
        received: list[list[Piece]] = [[] for _ in cursors]
        for at, cursor in enumerate(cursors):
            # The readers run one after the other, so that a later reader shares neither decoder nor memory.
            while (piece := await cursor.next(0)) is not None:
                received[at].append(piece)
        return pieces, received

    _, (alone,) = run(follow(first_of(log), 1))
    parts = [piece for piece in alone if not piece.is_whole]
    assert len(parts) > 3
    assert [part.part for part in parts] == list(range(len(parts)))
    assert all(part.end == part.start and part.bytes < 100 * 1024 for part in parts)
    assert rows_of(alone) == rows_of_log(log.folder)
    _, both = run(follow(first_of(log), 2))
    assert [rows_of(piece) for piece in both] == [rows_of(alone)] * 2

    async def from_a_part() -> Piece | None:
        return await pieces_of(log).at(VIEW, parts[2].start, part=2)

    again = run(from_a_part())
    assert again is not None
    assert rows_of([again]) == rows_of([parts[2]])


def test_parts_stay_the_same_while_their_piece_grows(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(piece_module, "PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(piece_module, "PIECE_PART_BYTES", 24 * 1024)

    async def parts(log: Log) -> list[list[Row]]:
        cursor, part_rows = Cursor(pieces_of(log), VIEW, Started(first_of(log)), in_parts=True), []
        while (piece := await cursor.next(0)) is not None and not piece.is_whole:
            part_rows.append(rows_of([piece]))
        return part_rows

    grown = []
    with open_log(tmp_path / "log") as log:
        for start, end in itertools.pairwise([recording.first, *transaction_ends(recording)[40:300:5]]):
            keep(log, recording.server, recording.files, start=start, end=end)
            grown.append(run(parts(log)))
    assert len(grown[-1]) > 1
    assert all(part == grown[-1][: len(part)] for part in grown)


def test_ptubes_session_reads_a_large_transaction_in_parts(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    async def events_from(checkpoint: PtubesCheckpoint) -> list[Any]:
        wanted = PtubesSubscription("shop", "t", (), 1, (0,), checkpoint)
        shown = Subscriber("ptubes", "shop", "t", "", "", 0)
        pieces = pieces_of(log)
        session = await Session.open(pieces, wanted, WHOLE, View("ptubes", VIEW.tables), shown)
        shards: list[Any] = []
        while True:
            content = await session.fetch(FetchRequest(100, 1 << 20, 0.1), asyncio.Event())
            answer = RdsEnvelope.FromString(content)
            assert not shards or answer.HasField("latestCheckpoint")
            # If the timeout ends a response without events, the next response continues.
            if not answer.totalEventCount and shown.position == log.visible:
                return shards
            shards += shards_of(answer).get(0, [])

    def behind(event: Any) -> PtubesCheckpoint:
        return PtubesCheckpoint.decode(event.header.checkpoint.SerializeToString())

    whole = run(events_from(PtubesCheckpoint(CheckpointMode.EARLIEST)))
    monkeypatch.setattr(piece_module, "PIECE_PART_BYTES", 32 * 1024)
    monkeypatch.setattr(piece_module, "PIECE_BYTES_MAX", 200 * 1024)
    assert run(events_from(PtubesCheckpoint(CheckpointMode.EARLIEST))) == whole
    last = max(range(len(whole)), key=lambda at: whole[at].header.checkpoint.eventIndex)
    for at in (last - 800, last - 1, last):
        assert run(events_from(behind(whole[at]))) == whole[at + 1 :], at


def test_missing_positions_are_reported(recording: Recording, tmp_path: Path) -> None:
    names = [extent.file for extent in recording.files.extents(recording.first)]
    assert len(names) >= 2
    recording.server.sql("FLUSH BINARY LOGS")
    recording.server.sql("INSERT INTO shop.orders (paid) VALUES (1)")
    files = binlogs(recording.server)
    with open_log(tmp_path / "log") as log:
        keep(log, recording.server, files, start=recording.first, names=[names[0]])
        last = files.extents()[-1]
        keep(log, recording.server, files, start=Position(0, last.file, last.start), names=[last.file])

        async def follow() -> None:
            pieces = pieces_of(log)
            with pytest.raises(SequenceGap):
                await chain(pieces, first_of(log))
            whole = Position(0, names[0], files.extents(recording.first)[0].end)
            with pytest.raises(SequenceGap):
                await pieces.at(VIEW, whole)
            with pytest.raises(PositionPurged):
                await pieces.at(VIEW, Position(0, "binlog.000000", 4))
            with pytest.raises(ServerBusy):
                await resolve_start(pieces, Start(position=Position(0, last.file, last.end + 100)))

        run(follow())


def test_whole_transactions_come_before_an_error(recording: Recording, log: Log, tmp_path: Path) -> None:
    server = recording.server
    server.sql("FLUSH BINARY LOGS")
    start = Position(0, server.sql("SHOW BINARY LOG STATUS")[0][0], 4)
    with server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("INSERT INTO shop.orders (paid) VALUES (5)")
        cursor.execute("INSERT INTO shop.orders (paid) VALUES (6)")
        connection.commit()
        cursor.execute("SET SESSION binlog_format = STATEMENT")
        cursor.execute("INSERT INTO shop.orders (paid) VALUES (7)")
        connection.commit()
    files = binlogs(server)
    first = next(
        Position(0, extent.file, extent.start) for extent in files.extents() if extent.file == start.file
    )
    with open_log(tmp_path / "other") as other:
        keep(other, server, files, start=first)

        received, stopped = run(until_it_fails(pieces_of(other), first_of(other), StatementLogged))
    assert sum(changes.rows for changes in received) == 2
    assert stopped.position is not None
    assert Position.parse(stopped.position) > received[-1].end


def test_log_of_two_epochs_is_one_chain(recording: Recording, tmp_path: Path) -> None:
    with open_log(tmp_path / "log") as log:
        keep(log, recording.server, recording.files, start=recording.first, end=recording.middle)
        keep(log, recording.server, recording.files, epoch=1, start=recording.middle)
        pieces = pieces_of(log)
        output = run(chain(pieces, first_of(log)))
        assert {row.end.epoch for row in output} == {0, 1}
        assert rows_of(output) == rows_of_log(log.folder)

        async def starts() -> None:
            key = pieces.source.server_key(1)
            # This is how another daemon numbers the epoch of the same server.
            for position, epoch in ((transaction_ends(recording)[5], 0), (recording.end, 1)):
                position_of_reader = Position(7, position.file, position.offset)
                started = await resolve_start(pieces, Start(position=position_of_reader, server_key=key))
                assert started.position == Position(epoch, position.file, position.offset)
            with pytest.raises(ServerChanged):
                await resolve_start(pieces, Start(position=recording.first, server_key="mysql:nobody"))

        run(starts())


def test_start_is_the_first_requested_transaction(recording: Recording, log: Log) -> None:
    ends = transaction_ends(recording)
    whole = rows_of_log(log.folder)

    async def starts() -> None:
        pieces = pieces_of(log)
        for end in ends[20:200:45]:
            by_set = await resolve_start(pieces, Start(gtid_set=log.gtid_set(end)))
            assert (by_set.position, by_set.gtid_after) == (end, "")
            first = (await chain(pieces, end))[0]
            time_us = first.batches[0].to_arrow()["_commit_timestamp"][0].value
            by_time = await resolve_start(pieces, Start(time_us=time_us))
            assert by_time.position <= end
            after = await chain(pieces, by_time.position)
            times = [commit_time for piece in after for commit_time in commit_times(piece)]
            assert min(times) == time_us
        latest = await resolve_start(pieces, Start(edge="latest"))
        assert latest.position == log.visible
        earliest = await resolve_start(pieces, Start(edge="earliest"))
        assert rows_of(await chain(pieces, earliest.position)) == whole

    run(starts())


def commit_times(piece: Piece) -> list[int]:
    return [commit_time.value for arrow in piece.arrow() for commit_time in arrow["_commit_timestamp"]]


def test_gtid_set_logged_in_another_order_excludes_its_transactions(recording: Recording, log: Log) -> None:
    whole = rows_of_log(log.folder)
    # Earlier tests have added tagged transactions of other servers to the shared server.
    sets = dict(gtid_range.strip().split(":", 1) for gtid_range in log.gtid_set(log.head()).split(","))
    numbers, *tagged = sets[uuid := recording.server.sql("SELECT @@server_uuid")[0][0]].split(":")
    last = int(numbers.rpartition("-")[2])
    sets[uuid] = ":".join([f"1-{last - 100}", f"{last - 50}-{last - 40}", *tagged])
    start = Start(gtid_set=",".join(f"{source}:{intervals}" for source, intervals in sets.items()))

    async def follow() -> list[Piece]:
        cursor = Cursor(pieces := pieces_of(log), VIEW, await resolve_start(pieces, start))
        received = []
        while (piece := await cursor.next(0)) is not None:
            received.append(piece)
        assert cursor.view == VIEW, "it shares with others again"
        return received

    wanted = {number for number in range(last - 99, last + 1) if not last - 50 <= number <= last - 40}
    text = [
        gtid_range for gtid_range in whole if any(f"{uuid}:{number}'" in str(gtid_range) for number in wanted)
    ]
    assert rows_of(run(follow())) == sorted(text)


@pytest.mark.parametrize("kind", ["position", "gtid_set", "time"])
def test_cursor_ends_at_its_bound(recording: Recording, log: Log, kind: str) -> None:
    end = transaction_ends(recording)[77]
    following = run(chain(pieces_of(log), end))[0]
    until = {
        "position": Start(position=end),
        "gtid_set": Start(gtid_set=log.gtid_set(end)),
        "time": Start(time_us=min(commit_times(following))),
    }[kind]

    async def follow(start: Position) -> list[Piece]:
        cursor = Cursor(pieces_of(log), VIEW, Started(start), until)
        received = []
        while (piece := await cursor.next(5)) is not None:
            received.append(piece)
        assert cursor.ended
        return received

    assert rows_of(run(follow(first_of(log)))) == rows_of_log(log.folder, end=end)
    assert run(follow(transaction_ends(recording)[90])) == run(follow(recording.end)) == []


def test_shards_of_any_number_hold_every_row_once(log: Log) -> None:
    async def sharded(count: int) -> list[Row]:
        pieces = pieces_of(log)
        actual_rows: list[Row] = []
        for shard in range(count):
            sieve = sieve_of(VIEW, shards=ShardSet(count, frozenset({shard})))
            for piece in await chain(pieces, first_of(log), sieve.view):
                for sifted in sieve.sift(piece, await sieve.passing(pieces, piece)):
                    assert set((sifted.arrow["_shard_slot"].to_numpy() % count).tolist()) == {shard}
                    kinds = sifted.arrow["_change_type"].to_pylist()
                    assert kinds.count("update_preimage") == kinds.count("update_postimage")
                    arrow = sifted.arrow.drop_columns(["_shard_slot"])
                    actual_rows += [
                        (row["_commit_version"], sifted.batch.table, *map(str, row.values()))
                        for row in arrow.to_pylist()
                    ]
        assert pieces.decodes == len(await chain(pieces, first_of(log), sieve.view)), "once for all shards"
        return sorted(actual_rows)

    assert run(sharded(3)) == rows_of_log(log.folder)


def test_disconnecting_reader_affects_no_other(log: Log) -> None:
    async def follow() -> None:
        pieces = pieces_of(log)
        start = [asyncio.create_task(pieces.at(VIEW, first_of(log))) for _ in range(3)]
        await asyncio.sleep(0)
        start[0].cancel()
        start[1].cancel()
        piece = await start[2]
        assert piece is not None
        # If its only waiter is cancelled, the task ends too. A later reader still gets its piece.
        position = piece.end
        alone = asyncio.create_task(pieces.at(VIEW, position))
        await asyncio.sleep(0)
        alone.cancel()
        await asyncio.sleep(0)
        again = await pieces.at(VIEW, position)
        assert again is not None
        assert again.start == position

    run(follow())
