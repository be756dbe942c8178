# SPDX-License-Identifier: Apache-2.0
"""Bad input is rejected with a named error that includes the input's position and a hint, and no later row is
returned.
"""

import gzip
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

import penstock
from penstock.errors import (
    ChecksumMismatch,
    EventMalformed,
    EventUnknown,
    FileTruncated,
    IncidentLogged,
    LogEncrypted,
    MagicInvalid,
    PenstockError,
    SchemaInvalid,
    SchemaMismatch,
    SchemaUnknown,
    SequenceGap,
    SourceMissing,
    StatementLogged,
    TableMapMissing,
)
from tests.support.suite.fixture_types import LendServer, StartServer
from tools.servers import Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")

CHECKSUM_BYTES = 4
TABLE_MAP, INCIDENT = 19, 26
WRITE_ROWS = {"mysql": 30, "mariadb": 23}
UNKNOWN, IGNORABLE = 119, 0x80
ROWS_BEFORE = 3
"""Rows that were committed before the transaction that each test damages."""


@dataclass
class Event:
    """One event of a file, which can be modified before the file is written again."""

    offset: int
    content: bytearray

    @property
    def kind(self) -> int:
        return self.content[4]

    @kind.setter
    def kind(self, kind: int) -> None:
        self.content[4] = kind

    def sign(self) -> None:
        """Make the checksum valid, so that only the content is wrong."""
        body = self.content[:-CHECKSUM_BYTES]
        self.content[-CHECKSUM_BYTES:] = zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "little")


def events_of(path: Path) -> list[Event]:
    content = path.read_bytes()
    events, offset = [], 4
    while offset < len(content):
        size = int.from_bytes(content[offset + 9 : offset + 13], "little")
        events.append(Event(offset, bytearray(content[offset : offset + size])))
        offset += size
    return events


def write(path: Path, events: list[Event]) -> Path:
    path.write_bytes(b"\xfebin" + b"".join(event.content for event in events))
    return path


@dataclass(frozen=True)
class ClosedLog:
    """Two closed files that contain one table: five transactions of one row each in the first file, and one
    in the second.
    """

    first: Path
    second: Path
    flavor: str
    table: str = "shop.orders"

    def rows_events(self) -> list[int]:
        kind = WRITE_ROWS[self.flavor]
        return [index for index, event in enumerate(events_of(self.first)) if event.kind == kind]


@pytest.fixture(scope="module", params=["mysql", "mariadb"])
def closed(request: pytest.FixtureRequest, lend_server: LendServer) -> Iterator[ClosedLog]:
    flavor = request.param
    with lend_server(flavor) as server:
        server.sql("CREATE DATABASE shop; CREATE TABLE shop.orders (id INT PRIMARY KEY, name VARCHAR(20))")
        server.sql("FLUSH BINARY LOGS")
        for number in range(5):
            server.sql("INSERT INTO shop.orders VALUES (%s, 'order')", number)
        server.sql("FLUSH BINARY LOGS")
        server.sql("INSERT INTO shop.orders VALUES (5, 'order')")
        server.sql("FLUSH BINARY LOGS; FLUSH BINARY LOGS")
        _, first, second, *_ = server.binlog_files()
        yield ClosedLog(first, second, flavor)


@pytest.fixture
def copied(closed: ClosedLog, tmp_path: Path) -> ClosedLog:
    first, second = (Path(shutil.copy(path, tmp_path)) for path in (closed.first, closed.second))
    return replace(closed, first=first, second=second)


def read_until_error(
    source: Any, tables: str | None = None, **options: Any
) -> tuple[list[Any], PenstockError]:
    """Return the ids that were read before the error, and the error."""
    ids: list[Any] = []
    try:
        for batch in penstock.read_binlog(source, tables, **options):
            ids += batch.to_arrow()["id"].to_pylist()
    except PenstockError as problem:
        return ids, problem
    pytest.fail(f"no error, but rows {ids}")


def assert_stops(
    source: Any,
    kind: type[PenstockError],
    *,
    at: str | None,
    ids: list[int] | None = None,
    tables: str | None = "shop.orders",
    **options: Any,
) -> PenstockError:
    emitted, problem = read_until_error(source, tables, **options)
    assert type(problem) is kind, problem
    assert problem.position == at, problem
    assert problem.hint, problem
    assert emitted == (list(range(ROWS_BEFORE)) if ids is None else ids)
    # For any batch size, no row after the error is returned.
    if "batch_rows_max" not in options:
        assert_stops(source, kind, at=at, ids=ids, tables=tables, batch_rows_max=1, **options)
    return problem


def damaged(log: ClosedLog) -> tuple[list[Event], int]:
    """Return the events of the first file, and the index of the rows event in its fourth transaction."""
    return events_of(log.first), log.rows_events()[ROWS_BEFORE]


def test_log_is_whole_before_it_is_damaged(copied: ClosedLog) -> None:
    ids: list[int] = []
    for batch in penstock.read_binlog(copied.first.parent, copied.table):
        ids += batch.to_arrow()["id"].to_pylist()
    assert ids == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("place", [0, 4, 5, 19, 25, -5, -1])
def test_flipped_bit_anywhere_in_an_event_is_detected(copied: ClosedLog, place: int) -> None:
    events, index = damaged(copied)
    events[index].content[place] ^= 0x10
    assert_stops(
        write(copied.first, events), ChecksumMismatch, at=f"{copied.first.name}:{events[index].offset}"
    )


def test_flipped_bit_in_an_event_length_is_detected(copied: ClosedLog) -> None:
    events, index = damaged(copied)
    events[index].content[9] ^= 0x10
    ids, problem = read_until_error(write(copied.first, events), copied.table)
    assert isinstance(problem, ChecksumMismatch | EventMalformed | FileTruncated)
    assert problem.position == f"{copied.first.name}:{events[index].offset}"
    assert ids == list(range(ROWS_BEFORE))


def test_file_cut_inside_an_event_is_truncated(copied: ClosedLog) -> None:
    events, index = damaged(copied)
    offset = events[index].offset
    for size in (offset + 1, offset + 10, offset + 20, offset + len(events[index].content) - 1):
        copied.first.write_bytes(b"\xfebin" + b"".join(event.content for event in events)[: size - 4])
        assert_stops(copied.first, FileTruncated, at=f"{copied.first.name}:{offset}")


def test_file_cut_between_the_events_of_a_transaction_is_truncated(copied: ClosedLog) -> None:
    events, index = damaged(copied)
    end = events[index].offset + len(events[index].content)
    assert_stops(write(copied.first, events[: index + 1]), FileTruncated, at=f"{copied.first.name}:{end}")


def test_next_file_is_not_read_after_a_truncated_file(copied: ClosedLog) -> None:
    events, index = damaged(copied)
    end = events[index].offset + len(events[index].content)
    write(copied.first, events[: index + 1])
    assert_stops(copied.first.parent, FileTruncated, at=f"{copied.first.name}:{end}")


def test_file_that_is_not_a_binlog_is_detected_by_its_magic(copied: ClosedLog) -> None:
    copied.first.write_bytes(b"PK\x03\x04" + copied.first.read_bytes()[4:])
    assert_stops(copied.first, MagicInvalid, at=f"{copied.first.name}:0", ids=[])


def test_text_file_is_not_a_binlog(tmp_path: Path) -> None:
    path = tmp_path / "notes.000001"
    path.write_text("notes")
    assert_stops(path, MagicInvalid, at="notes.000001:0", ids=[])


def test_encrypted_file_is_detected_by_its_magic(copied: ClosedLog) -> None:
    copied.first.write_bytes(b"\xfdbin" + copied.first.read_bytes()[4:])
    assert_stops(copied.first, LogEncrypted, at=f"{copied.first.name}:0", ids=[])


def test_file_cut_inside_its_first_event_is_truncated(copied: ClosedLog) -> None:
    content = copied.first.read_bytes()
    for size in (1, 3, 4, 10, 23, 60):
        copied.first.write_bytes(content[:size])
        assert_stops(copied.first, FileTruncated, at=f"{copied.first.name}:{size}", ids=[])


def test_gap_in_the_sequence_of_files_is_named_before_anything_is_read(copied: ClosedLog) -> None:
    log, _, digits = copied.second.name.rpartition(".")
    far = copied.second.rename(copied.second.with_name(f"{log}.{int(digits) + 1:06d}"))
    problem = assert_stops(copied.first.parent, SequenceGap, at=f"{copied.first.name}:end", ids=[])
    assert copied.second.name in problem.message
    assert far.name in problem.message


def test_rows_without_their_table_map_are_refused(copied: ClosedLog) -> None:
    events = events_of(copied.second)
    table_map = next(event for event in events if event.kind == TABLE_MAP)
    rows = next(event for event in events if event.kind == WRITE_ROWS[copied.flavor])
    # The event keeps its place with an unknown type, so that every position stays valid.
    table_map.kind = UNKNOWN
    table_map.content[17] |= IGNORABLE
    table_map.sign()
    write(copied.second, events)
    position = f"{copied.second.name}:{rows.offset}"
    assert_stops(copied.second.parent, TableMapMissing, at=position, ids=[0, 1, 2, 3, 4])


def test_unknown_event_type_stops_unless_it_is_ignorable(copied: ClosedLog) -> None:
    events, index = damaged(copied)
    events[index].kind = UNKNOWN
    events[index].sign()
    problem = assert_stops(
        write(copied.first, events), EventUnknown, at=f"{copied.first.name}:{events[index].offset}"
    )
    assert str(UNKNOWN) in problem.message
    events[index].content[17] |= IGNORABLE
    events[index].sign()
    write(copied.first, events)
    ids = [
        id_
        for batch in penstock.read_binlog(copied.first, copied.table)
        for id_ in batch.to_arrow()["id"].to_pylist()
    ]
    assert ids == [0, 1, 2, 4]


def test_logged_incident_stops_the_reader(copied: ClosedLog) -> None:
    events, index = damaged(copied)
    event = events[index]
    event.kind = INCIDENT
    body = (1).to_bytes(2, "little") + b"\x04LOST"
    event.content[19 : 19 + len(body)] = body
    event.sign()
    assert_stops(write(copied.first, events), IncidentLogged, at=f"{copied.first.name}:{event.offset}")


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_truncated_compression_is_reported(copied: ClosedLog, compress: Any) -> None:
    suffix = ".gz" if compress is gzip.compress else ".zst"
    whole = compress(copied.first.read_bytes())
    packed = Path(f"{copied.first}{suffix}")
    copied.first.unlink()
    packed.write_bytes(whole[: len(whole) - 12])
    ids, problem = read_until_error(packed, copied.table)
    assert type(problem) is FileTruncated
    assert problem.position is not None
    assert problem.hint
    assert ids == list(range(len(ids)))


def test_invalid_compressed_file_is_refused(tmp_path: Path) -> None:
    for suffix in ("gz", "zst"):
        path = tmp_path / f"bin.000001.{suffix}"
        path.write_bytes(b"\xfebin" * 100)
        with pytest.raises(PenstockError) as caught:
            list(penstock.read_binlog(path))
        assert caught.value.position is not None
        assert caught.value.hint


def test_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceMissing, match=r"bin\.000001"):
        list(penstock.read_binlog(tmp_path / "bin.000001"))


# --- Schemas that do not fit ----------------------------------------------------------------


@pytest.fixture(scope="module")
def nameless(lend_server: LendServer) -> Iterator[Server]:
    """A server whose log has no column names."""
    with lend_server(binlog_row_metadata="MINIMAL") as server:
        server.sql("CREATE DATABASE shop; CREATE TABLE shop.orders (id INT PRIMARY KEY, name VARCHAR(20))")
        server.sql("FLUSH BINARY LOGS")
        for number in range(3):
            server.sql("INSERT INTO shop.orders VALUES (%s, 'order')", number)
        server.sql("FLUSH BINARY LOGS")
        yield server


def nameless_file(server: Server) -> Path:
    return server.binlog_files()[1]


def first_table_map(path: Path) -> str:
    offset = next(event.offset for event in events_of(path) if event.kind == TABLE_MAP)
    return f"{path.name}:{offset}"


def test_missing_schema_is_never_guessed(nameless: Server) -> None:
    file = nameless_file(nameless)
    problem = assert_stops(file, SchemaUnknown, at=first_table_map(file), ids=[])
    assert "binlog_row_metadata" in str(problem.hint)


@pytest.mark.parametrize(
    "columns",
    [
        "id INT PRIMARY KEY",
        "id INT PRIMARY KEY, name VARCHAR(20), more INT",
        "id BIGINT PRIMARY KEY, name VARCHAR(20)",
        "id INT PRIMARY KEY, name BLOB",
        "name VARCHAR(20), id INT PRIMARY KEY",
        "id INT PRIMARY KEY, name VARCHAR(200)",
    ],
)
def test_schema_file_that_does_not_match_is_refused(nameless: Server, tmp_path: Path, columns: str) -> None:
    file = nameless_file(nameless)
    schemas = tmp_path / "shop.sql"
    schemas.write_text(f"USE shop; CREATE TABLE orders ({columns}) CHARACTER SET utf8mb4;")
    problem = assert_stops(file, SchemaMismatch, at=first_table_map(file), ids=[], schemas=schemas)
    assert "orders" in problem.message


def test_schema_file_that_matches_is_accepted(nameless: Server, tmp_path: Path) -> None:
    schemas = tmp_path / "shop.sql"
    schemas.write_text(
        "USE shop; CREATE TABLE orders (id INT PRIMARY KEY, name VARCHAR(20)) CHARACTER SET utf8mb4;"
    )
    batches = penstock.read_binlog(nameless_file(nameless), "shop.orders", schemas=schemas)
    assert [id_ for batch in batches for id_ in batch.to_arrow()["id"].to_pylist()] == [0, 1, 2]


@pytest.mark.parametrize("text", ["{", "[]x", '{"format": 99}', '[{"database": "shop"}]'])
def test_invalid_schema_file_is_refused(nameless: Server, tmp_path: Path, text: str) -> None:
    schemas = tmp_path / "schemas.json"
    schemas.write_text(text)
    with pytest.raises(SchemaInvalid):
        penstock.read_binlog(nameless_file(nameless), schemas=schemas)


# --- Statement format -----------------------------------------------------------------------


@pytest.fixture(scope="module", params=["mysql", "mariadb"])
def in_statement_format(request: pytest.FixtureRequest, lend_server: LendServer) -> Iterator[Server]:
    """A server that logs three changes as rows, two as statements, and one as a row."""
    with lend_server(request.param) as server:
        server.sql(
            "CREATE DATABASE shop; CREATE TABLE shop.orders (id INT PRIMARY KEY, name VARCHAR(20));"
            "CREATE TABLE shop.other (id INT PRIMARY KEY)"
        )
        for number in range(3):
            server.sql("INSERT INTO shop.orders VALUES (%s, 'order')", number)
        server.sql("SET SESSION binlog_format = STATEMENT; USE shop; INSERT INTO other VALUES (1)")
        server.sql("SET SESSION binlog_format = STATEMENT; UPDATE shop.orders SET name = 'changed'")
        server.sql("INSERT INTO shop.orders VALUES (3, 'order')")
        yield server


def test_change_logged_as_a_statement_stops_the_reader(in_statement_format: Server) -> None:
    server = in_statement_format
    for source in (server.binlog_files(), server.url()):
        ids, problem = read_until_error(source, "shop.orders")
        assert ids == [0, 1, 2]
        assert type(problem) is StatementLogged
        assert "UPDATE shop.orders" in problem.message
        assert problem.position is not None
        assert "binlog_format" in str(problem.hint)


def test_statement_that_changes_another_table_stops_no_reader(in_statement_format: Server) -> None:
    server = in_statement_format
    with pytest.raises(StatementLogged, match=r"shop\.other"):
        list(penstock.read_binlog(server.binlog_files(), "shop.other"))
    assert list(penstock.read_binlog(server.binlog_files(), "shop.nothing")) == []


def test_statement_changes_logged_by_servers_stop_the_readers_of_their_tables(
    in_statement_format: Server,
) -> None:
    server = in_statement_format
    mariadb = server.flavor.startswith("mariadb")
    loaded = Path(str(server.sql("SELECT @@datadir")[0][0])) / "it's.csv"
    loaded.write_text("11\n12\n")
    server.sql(
        "SET GLOBAL log_bin_trust_function_creators = 1; CREATE DATABASE crm;"
        "CREATE TABLE crm.logins (id INT PRIMARY KEY); CREATE TABLE shop.stock (id INT PRIMARY KEY);"
        "CREATE TABLE shop.parts (id INT PRIMARY KEY);"
        "CREATE FUNCTION shop.restock(n INT) RETURNS INT DETERMINISTIC"
        " BEGIN INSERT INTO shop.stock VALUES (n); RETURN n; END;"
        "CREATE TRIGGER shop.parts_stocked AFTER INSERT ON shop.parts FOR EACH ROW"
        " INSERT INTO crm.logins VALUES (NEW.id)",
    )
    in_statements = "SET SESSION binlog_format = STATEMENT; USE shop;"

    def why_stopped(statement: str, tables: str) -> str:
        if statement:
            server.sql("FLUSH BINARY LOGS")
            server.sql(f"{in_statements} {statement}")
        try:
            assert list(penstock.read_binlog(server.binlog_files()[-1:], tables)) == []
        except StatementLogged as problem:
            return problem.message
        return ""

    load = f"LOAD DATA INFILE '{str(loaded).replace(chr(39), chr(92) + chr(39))}' INTO TABLE other"
    assert "a change of shop.other" in why_stopped(load, "shop.other")
    assert why_stopped("", "shop.orders") == ""
    assert "routines" in why_stopped("DO restock(1)", "shop.orders")
    assert bool(why_stopped("", "crm.*")) == mariadb, "MySQL logs that the function accessed shop alone"
    assert "calls restock()" in why_stopped("INSERT INTO parts VALUES (restock(2))", "shop.stock")
    # MySQL logs that the trigger accessed crm. MariaDB does not, so the function call stops the reader.
    assert why_stopped("", "crm.*") != ""
    hidden = why_stopped("INSERT INTO parts VALUES (3)", "crm.*")
    assert ("it accessed the database crm" in hidden) != mariadb
    copy = "CREATE TABLE shop.copy AS SELECT * FROM shop.orders"
    assert "a change of shop.copy" in why_stopped(copy, "shop.copy")
    assert why_stopped("", "shop.orders") == ""
    if mariadb:
        assert "a change of shop.other" in why_stopped("ANALYZE UPDATE other SET id = id + 50", "shop.other")
        prefixed = "SET STATEMENT max_statement_time = 9 FOR DELETE FROM other"
        assert "a change of shop.other" in why_stopped(prefixed, "shop.other")
        assert why_stopped("", "shop.orders") == ""


# --- Live servers ---------------------------------------------------------------------------


def test_damage_on_the_disk_of_a_server_is_detected_in_the_stream(start_server: StartServer) -> None:
    server = start_server("mysql", source_verify_checksum=False)
    server.sql("CREATE DATABASE shop; CREATE TABLE shop.orders (id INT PRIMARY KEY, name VARCHAR(20))")
    server.sql("FLUSH BINARY LOGS")
    for number in range(5):
        server.sql("INSERT INTO shop.orders VALUES (%s, 'order')", number)
    server.sql("FLUSH BINARY LOGS")
    _, file, _ = server.binlog_files()
    events = events_of(file)
    rows = [event for event in events if event.kind == WRITE_ROWS["mysql"]]
    rows[ROWS_BEFORE].content[25] ^= 0x10
    with open(file, "r+b") as raw:
        raw.seek(rows[ROWS_BEFORE].offset)
        raw.write(rows[ROWS_BEFORE].content)
    position = f"{file.name}:{rows[ROWS_BEFORE].offset}"
    assert_stops(server.url(), ChecksumMismatch, at=position)
