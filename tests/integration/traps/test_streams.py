# SPDX-License-Identifier: Apache-2.0
"""Special cases of live streams: packets end at 16 MiB, MariaDB omits events, another reader has the same
server id.
"""

from collections.abc import Callable
from typing import Any

import pytest

import penstock
from penstock._native import Framer
from penstock.errors import DumpReplaced
from penstock.model import Position, ServerAddress
from penstock.mysql import replica
from penstock.mysql.replica import DumpStart, ReplicaName, open_stream
from tests.support.binlog.decoding import decode, decode_file, run_logged
from tests.support.binlog.events import ANNOTATE, MARIADB_GTID, events
from tests.support.capture.captured_log import head_of
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tools.servers import Server


@pytest.mark.deep(keep=("mysql",))
@pytest.mark.parametrize("flavor", ["mysql", "mariadb", "mariadb11"])
def test_events_over_sixteen_mebibytes_return_their_rows(flavor: str, start_server: StartServer) -> None:
    log = "innodb_redo_log_capacity" if flavor == "mysql" else "innodb_log_file_size"
    server = start_server(flavor, max_allowed_packet="256M", **{log: "512M"})
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (id INT PRIMARY KEY, text LONGTEXT)")
    # Events of the middle sizes end near a packet boundary: a packet has 2^24 - 1 bytes, one of them before
    # the event.
    sizes = [1, 20_000_000, *range(16_777_130, 16_777_180, 10), 40_000_000]
    for number, size in enumerate(sizes):
        server.sql(f"INSERT INTO d.t SELECT {number}, REPEAT('z', {size})")
    for source in ([str(path) for path in server.binlog_files()], server.url()):
        actual_rows = [
            (number, text.as_buffer().size)
            for batch in penstock.read_binlog(source, "d.t")
            for number, text in zip(
                batch.to_arrow().column("id").to_pylist(), batch.to_arrow().column("text"), strict=True
            )
        ]
        assert actual_rows == list(enumerate(sizes))


def test_packet_of_any_length_around_the_limit_returns_its_event() -> None:
    limit = 0xFFFFFF
    for size in (limit - 2, limit - 1, limit, limit + 1, 2 * limit - 1, 2 * limit):
        event = bytes(range(256)) * (size // 256) + bytes(size % 256)
        payload = b"\x00" + event
        pieces = [payload[start : start + limit] for start in range(0, len(payload), limit)]
        if len(payload) % limit == 0:
            pieces.append(b"")
        pieces.append(b"\x00next")
        wire = b"".join(
            len(piece).to_bytes(3, "little") + bytes([number % 256]) + piece
            for number, piece in enumerate(pieces)
        )
        framer = Framer()
        assert framer.feed(wire) == len(wire)
        assert framer.take() == event + b"next"


@pytest.mark.parametrize("flavor", ["mariadb", "mariadb11"])
def test_stream_without_annotations_has_gaps_and_correct_positions(
    flavor: str,
    server_of: Callable[[str], Server],
    fresh_database: FreshDatabase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = server_of(flavor)
    database = fresh_database(server)
    path = run_logged(
        server,
        "CREATE TABLE t (id INT PRIMARY KEY, text VARCHAR(2000))",
        *(f"INSERT INTO t VALUES ({number}, REPEAT('x', {number * 100}))" for number in range(1, 8)),
        "BEGIN",
        "INSERT INTO t VALUES (10, 'a')",
        "UPDATE t SET text = 'short' WHERE id < 5",
        "COMMIT",
        database=database,
    )
    whole = decode_file(path)
    start = DumpStart(position=Position(0, path.name, 4))
    address = ServerAddress.parse(server.url())
    monkeypatch.setattr(replica, "FLAG_MARIADB_ANNOTATE", 0)
    with open_stream(address, start, bounded=True) as stream:
        sent = b"".join(map(bytes, stream.event_chunks()))
    codes = [event.code for event in events(sent, offset=0)]
    assert ANNOTATE not in codes
    assert MARIADB_GTID in codes
    live = decode(sent, path.name, offset=4, live=True, stop=(int(path.suffix[1:]) + 1, 0))
    table = f"{database}.t"
    assert live.values(table) == whole.values(table)
    versions = [row["_commit_version"] for row in whole.rows(table)]
    assert [row["_commit_version"] for row in live.rows(table)] == versions
    stop = (int(path.suffix[1:]) + 1, 0)
    assert ends(sent, path.name, offset=4, live=True, stop=stop) == ends(path.read_bytes(), path.name)
    if flavor == "mariadb":
        # MariaDB 11.8 logs no positions inside a transaction, so after a gap only the positions of
        # transactions are known.
        assert live.rows(table) == whole.rows(table)


def ends(data: bytes, file: str, **options: Any) -> list[tuple[int, int]]:
    """Return the start and end of each transaction."""
    rows = [
        row
        for batch in decode(data, file, emit="transactions", **options).batches[""]
        for row in batch.to_pylist()
    ]
    return [(row["offset"], row["end_offset"]) for row in rows]


def test_duplicate_replica_identity_takes_over_the_stream_and_is_reported(server: Server) -> None:
    address = ServerAddress.parse(server.url())
    name = ReplicaName.choose(None)
    # At the end of its log, a server that is blocked in a send does not end the dump until its write timeout.
    start = DumpStart(position=head_of(server))
    with open_stream(address, start, name=name) as first:
        chunks = first.event_chunks()
        next(chunks)
        with open_stream(address, start, name=ReplicaName(name.server_id, name.uuid)) as second:
            next(second.event_chunks())
            with pytest.raises(DumpReplaced) as raised:
                for _ in chunks:
                    pass
    assert raised.value.hint is not None
