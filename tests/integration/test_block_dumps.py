# SPDX-License-Identifier: Apache-2.0
"""After binlog dumps of real servers pass through the block cutter, the result equals the servers' files, and
the servers' own tools can read the segments.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock._native import segment_head
from penstock.model import Position, ServerAddress
from penstock.mysql.connection import connect
from penstock.mysql.replica import DumpStart, ReplicaName, ReplicaStream, open_stream
from tests.support.binlog.block_cutting import Cutting, Part
from tests.support.binlog.decoding import decode, decode_file
from tests.support.binlog.events import FORMAT_DESCRIPTION, PREVIOUS_GTIDS, ROTATE, events, first_event_end
from tests.support.capture.captured_log import rotate
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.nonempty import each
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers import Server

TOOLS = {"mysql": "mysqlbinlog", "mariadb": "mariadb-binlog"}


def received(stream: ReplicaStream) -> Iterator[bytes]:
    """Yield bytes from the socket as they arrive."""
    buffer = memoryview(bytearray(1 << 20))
    while True:
        yield bytes(buffer[: stream.receive_into(buffer)])


def dump(server: Server, position: Position, **options: Any) -> Cutting:
    """Cut a server's log into blocks, from a position to its end."""
    address = ServerAddress.parse(server.url())
    start = DumpStart(position=position)
    cutting = Cutting(
        live=True, file=position.file, offset=position.offset, flavor=server.family, epoch=2, **options
    )
    with open_stream(address, start, bounded=True) as stream:
        for piece in received(stream):
            cutting.packets([cutting.left + piece])
            if cutting.cutter.ended or cutting.cutter.server_error is not None:
                break
    assert cutting.cutter.ended, cutting.cutter.server_error
    return cutting.close()


def position_now(server: Server) -> Position:
    with connect(ServerAddress.parse(server.url())) as connection:
        head = connection.head()
        return Position(0, head.file, head.offset)


def write_history(server: Server, database: str) -> None:
    """Write a typical history over three files."""
    server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, text LONGTEXT)")
    server.sql(f"CREATE TABLE {database}.u (id INT PRIMARY KEY) ENGINE=MyISAM")
    with server.connect(database=database) as connection, connection.cursor() as cursor:
        for number in range(100):
            cursor.execute("INSERT INTO t VALUES (%s, REPEAT('x', %s))", (number, number * 300))
        cursor.execute("INSERT INTO u VALUES (1), (2)")
        cursor.execute("FLUSH BINARY LOGS")
        cursor.execute("BEGIN")
        for number in range(100, 140):
            cursor.execute("INSERT INTO t VALUES (%s, REPEAT('y', 40000))", (number,))
        cursor.execute("SAVEPOINT a")
        cursor.execute("UPDATE t SET text = 'changed' WHERE id < 50")
        cursor.execute("COMMIT")
        cursor.execute("XA START 'one'")
        cursor.execute("INSERT INTO t VALUES (1000, 'xa')")
        cursor.execute("XA END 'one'")
        cursor.execute("XA PREPARE 'one'")
        cursor.execute("XA COMMIT 'one'")
        cursor.execute("CREATE TABLE v AS SELECT id FROM t WHERE id < 7")
        cursor.execute("ALTER TABLE v ADD COLUMN more INT")
        cursor.execute("FLUSH BINARY LOGS")
        if server.family == "mysql":
            cursor.execute("SET SESSION binlog_transaction_compression = ON")
        cursor.execute("DELETE FROM t WHERE id < 90")
        cursor.execute("INSERT INTO t SELECT id + 5000, text FROM t")


@pytest.fixture(scope="module")
def histories() -> dict[str, list[Path]]:
    """The files of the histories written so far, by flavor."""
    return {}


@pytest.fixture
def history(server: Server, histories: dict[str, list[Path]], fresh_database: FreshDatabase) -> list[Path]:
    """The closed files of a history on each flavor's server; written once."""
    if server.flavor not in histories:
        server.sql("FLUSH BINARY LOGS")
        before = len(server.binlog_files())
        write_history(server, fresh_database(server))
        server.sql("FLUSH BINARY LOGS")
        histories[server.flavor] = server.binlog_files()[before - 1 : -1]
    return histories[server.flavor]


def dump_of(server: Server, history: list[Path], **options: Any) -> Cutting:
    """Cut a history as its server sends it, without later writes."""
    cutting = dump(server, Position(0, history[0].name, 4), **options)
    del cutting.parts[len(history) :]
    return cutting


def transactions_of(path: Path) -> list[dict[str, Any]]:
    decoded = decode_file(path, emit="transactions")
    return [row for batches in decoded.batches.values() for batch in batches for row in batch.to_pylist()]


def test_dump_equals_the_servers_files_byte_for_byte(server: Server, history: list[Path]) -> None:
    cutting = dump_of(server, history)
    assert len(history) >= 3
    assert [part.file for part in cutting.parts] == [path.name for path in history]
    assert not cutting.holes
    for part, path in zip(cutting.parts, history, strict=True):
        content = path.read_bytes()
        assert part.offset == first_event_end(content)
        assert bytes(part.content) == content[part.offset :]
        assert part.end == len(content)
        # The server clears the in-use flag and sends the rest of the description unchanged.
        assert part.format_description[19:-4] == content[4 + 19 : part.offset - 4]


def test_block_records_agree_with_the_decoder(server: Server, history: list[Path]) -> None:
    cutting = dump_of(server, history, block_bytes=4096)
    for part, path in zip(cutting.parts, history, strict=True):
        rows = transactions_of(path)
        starts = {row["offset"]: row for row in rows}
        ends = {row["end_offset"] for row in rows}
        at = part.offset
        for record in part.records:
            assert record.start == at
            at = record.end
            inside = [row for offset, row in starts.items() if record.start <= offset < record.end]
            assert record.transactions == len([end for end in ends if record.start < end <= record.end])
            assert bool(record.flags & 1) == (record.event_index == 0)
            for row in inside:
                for table in filter(None, row["tables"].split(",")):
                    assert record.concerns(table) or row["end_offset"] > record.end
            if inside and record.event_index == 0:
                assert record.time_us == int(inside[0]["commit_timestamp"].timestamp() * 1_000_000 + 0.5)
                assert record.server_id == inside[0]["server_id"]
        assert at == part.end
        assert sum(record.changes for record in part.records) == sum(row["rows"] for row in rows)
        assert sum(record.transactions for record in part.records) == len(rows)
        assert part.boundary == decode_file(path, emit="transactions").position[1]
    assert any(record.event_index > 0 for part in cutting.parts for record in part.records)


def test_gtid_set_equals_that_of_the_server(server: Server, history: list[Path]) -> None:
    cutter = dump(server, Position(0, history[0].name, 4)).cutter
    with connect(ServerAddress.parse(server.url())) as connection:
        assert cutter.gtid_set == connection.executed().text
    files = server.binlog_files()
    rows = [row for path in files[files.index(history[0]) :] for row in transactions_of(path)]
    assert cutter.transactions == len(rows)
    assert cutter.last_gtid == rows[-1]["gtid"]


def test_statements_equal_those_of_the_decoder(server: Server, history: list[Path]) -> None:
    cutting = dump_of(server, history)
    for part, path in zip(cutting.parts, history, strict=True):
        expected = [
            (
                statement.text,
                statement.database,
                offset_of(statement.position),
                offset_of(statement.end_position),
                statement.session,
            )
            for statement in decode_file(path).statements
        ]
        assert part.statements == expected
    assert any("ALTER TABLE v" in text for part in cutting.parts for text, *_ in part.statements)


def offset_of(position: str) -> int:
    return int(position.rpartition(":")[2])


def test_dump_continues_where_another_ended(server: Server, history: list[Path]) -> None:
    whole = dump_of(server, history, block_bytes=1)
    for number, part in each(enumerate(whole.parts)):
        boundaries = [record.end for record in part.records if record.flags & 2]
        start = boundaries[len(boundaries) // 2]
        before = [record for part in whole.parts[:number] for record in part.records]
        rest = dump(
            server,
            Position(0, part.file, start),
            block_bytes=1,
            time_max_us=max((record.time_max_us for record in [*before, *upto(part, start)]), default=0),
        )
        assert (rest.parts[0].file, rest.parts[0].offset) == (part.file, start)
        assert rest.parts[0].content == part.content[start - part.offset :]
        continued = [
            (record.start, record.end, record.number, record.changes, record.time_max_us)
            for record in rest.parts[0].records
        ]
        uninterrupted = [
            (record.start, record.end, record.number, record.changes, record.time_max_us)
            for record in part.records
            if record.start >= start
        ]
        assert continued == uninterrupted
        following = whole.parts[number + 1 :]
        assert [part.content for part in rest.parts[1 : 1 + len(following)]] == [
            record.content for record in following
        ]


def upto(part: Part, end: int) -> list[Any]:
    return [record for record in part.records if record.end <= end]


def test_servers_own_tools_read_segments(server: Server, history: list[Path], tmp_path: Path) -> None:
    cutting = dump_of(server, history, block_bytes=20_000)
    for part, path in each(zip(cutting.parts, history, strict=True)):
        content = path.read_bytes()
        chosen = (part.records[0], part.records[len(part.records) // 2])
        for record in each(record for record in chosen if not record.event_index):
            gtid_set = gtid_set_before(content, record.start)
            head = segment_head(
                part.format_description, part.file, record.start, gtid_set, server.family, 5, 1_700_000_000
            )
            segment = tmp_path / "segment.binlog"
            segment.write_bytes(head + content[record.start :])
            shown = tool(server, segment)
            assert f"Rotate to {part.file}  pos: {record.start}" in shown
            assert gtid_set.partition(",")[0] in shown
            # The tool's output for the segment equals its output for the file from that offset on.
            assert statements_of(shown) == statements_of(tool(server, path, record.start))
            assert len(statements_of(shown)) > 10


def gtid_set_before(content: bytes, offset: int) -> str:
    """Return the GTIDs before an offset of a file, as the file lists them."""
    return decode(content[:offset], "binlog.000001", emit="transactions").gtid_set


def tool(server: Server, path: Path, start: int | None = None) -> str:
    words = [*server.program(TOOLS[server.family]), "--no-defaults", "--verify-binlog-checksum"]
    words += [f"--start-position={start}"] if start is not None else []
    done = subprocess.run(
        [*words, str(path)], capture_output=True, text=True, check=False, timeout=WAIT_SECONDS_MAX
    )
    assert done.returncode == 0, done.stderr
    assert "ERROR" not in done.stderr, done.stderr
    return done.stdout


def statements_of(shown: str) -> list[str]:
    """Return the statements after the format description, without comments."""
    lines = shown.split("'/*!*/;", 1)[1].splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_read_binlog_reads_a_segment_as_a_file(server: Server, history: list[Path], tmp_path: Path) -> None:
    cutting = dump(server, Position(0, history[1].name, 4))
    part = cutting.parts[0]
    content = history[1].read_bytes()
    segment = tmp_path / "1234567890123456789.binlog"
    head = segment_head(part.format_description, part.file, part.offset, "", server.family, 5, 1)
    segment.write_bytes(head + part.content)
    database = next(row["tables"] for row in transactions_of(history[1]) if row["tables"]).partition(".")[0]

    def ids(path: Path) -> list[int]:
        batches = penstock.read_binlog([str(path)], f"{database}.t", columns=["id"])
        return [id_ for batch in batches for id_ in batch.to_arrow()["id"].to_pylist()]

    assert ids(segment) == ids(history[1])
    assert len(ids(segment)) > 100
    assert content.endswith(bytes(part.content))


@pytest.mark.deep(
    guard="tests/integration/traps/test_streams.py::test_events_over_sixteen_mebibytes_return_their_rows"
)
def test_events_over_sixteen_mebibytes_are_returned_whole(start_server: StartServer) -> None:
    for flavor in ("mysql", "mariadb"):
        log = "innodb_redo_log_capacity" if flavor == "mysql" else "innodb_log_file_size"
        server = start_server(flavor, max_allowed_packet="256M", **{log: "512M"})
        server.sql("CREATE DATABASE d; CREATE TABLE d.t (a INT PRIMARY KEY, b LONGTEXT)")
        start = position_now(server)
        for number, size in enumerate((16_777_215, 40_000_000)):
            server.sql(f"INSERT INTO d.t SELECT {number}, REPEAT('z', {size})")
        (part,) = dump(server, start).parts
        path = server.data_directory / start.file
        assert bytes(part.content) == path.read_bytes()[start.offset :]
        assert sum(record.changes for record in part.records) == 2
        server.close()


@pytest.mark.deep(guard="tests/integration/test_block_dumps.py::test_read_binlog_reads_a_segment_as_a_file")
def test_logs_of_every_checksum_and_gtid_setting_are_accepted(start_server: StartServer) -> None:
    settings: list[tuple[str, dict[str, Any]]] = [
        ("mysql", {"binlog_checksum": "NONE"}),
        ("mysql", {"gtid_mode": "OFF", "enforce_gtid_consistency": "OFF", "binlog_format": "MIXED"}),
        ("mariadb", {"binlog_checksum": "NONE", "log_bin_compress": True, "log_bin_compress_min_len": 10}),
    ]
    for flavor, options in settings:
        server = start_server(flavor, **options)
        start = Position(0, server.binlog_files()[-1].name, 4)
        server.sql("CREATE DATABASE d; CREATE TABLE d.t (a INT PRIMARY KEY, b TEXT)")
        for number in range(20):
            server.sql(f"INSERT INTO d.t VALUES ({number}, REPEAT('c', 500))")
        rotate(server)
        server.sql("UPDATE d.t SET b = 'd'")
        cutting = dump(server, start)
        paths = [server.data_directory / part.file for part in cutting.parts]
        assert len(paths) == 2
        for part, path in zip(cutting.parts, paths, strict=True):
            content = path.read_bytes()
            assert bytes(part.content) == content[part.offset :]
            rows = transactions_of(path)
            assert sum(record.transactions for record in part.records) == len(rows)
            assert sum(record.changes for record in part.records) == sum(row["rows"] for row in rows)
        server.close()


def test_semi_sync_marks_are_removed(start_server: StartServer, fresh_database: FreshDatabase) -> None:
    server = start_server("mariadb")
    server.sql("SET GLOBAL rpl_semi_sync_master_enabled = ON, GLOBAL rpl_semi_sync_master_timeout = 1")
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY)")
    start = position_now(server)
    address = ServerAddress.parse(server.url())
    name = ReplicaName.choose(None)
    with open_stream(address, DumpStart(position=start), name=name, semi_sync=True) as stream:
        assert stream.semi_sync
        cutting = Cutting(live=True, file=start.file, offset=start.offset, flavor="mariadb", semi_sync=True)
        server.sql(f"INSERT INTO {database}.t VALUES (1)")
        end = position_now(server)
        wanted = []
        for piece in received(stream):
            cutting.packets([cutting.left + piece])
            if (asked := cutting.cutter.take_acknowledge()) is not None:
                wanted.append(asked)
            if cutting.cutter.boundary >= end.offset:
                break
    (part,) = cutting.close().parts
    path = server.data_directory / start.file
    assert bytes(part.content) == path.read_bytes()[start.offset : end.offset]
    assert wanted == [(start.file, end.offset)]
    assert {FORMAT_DESCRIPTION, ROTATE, PREVIOUS_GTIDS}.isdisjoint(
        event.code for event in events(b"\xfebin" + bytes(part.content))
    )
