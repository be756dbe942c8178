# SPDX-License-Identifier: Apache-2.0
"""Files and live servers return the same rows, regardless of file names, range boundaries, compression and
interruptions.
"""

import gzip
import random
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard

import penstock
from penstock._native import GtidSet
from penstock.errors import OptionInvalid, PositionInvalid, PositionPurged
from penstock.model import Position, TableSchema
from penstock.source.reading import Selection, read_range
from penstock.source.source import ByteRange, Source, SourceOptions, open_source
from tests.support.capture.captured_log import rotate
from tests.support.suite.fixture_types import FreshDatabase, LendServer, StartServer
from tools.servers import Proxy, Server

ORDERS = """CREATE TABLE {0}.orders (
    id INT UNSIGNED PRIMARY KEY, customer VARCHAR(40), price DECIMAL(10,2), placed_at DATETIME(3))"""
Row = dict[str, Any]


class Written:
    """A log on a server: three files, with one table that is altered on the way, and another table."""

    def __init__(self, server: Server, database: str) -> None:
        self.server = server
        self.database = database
        rotate(server)
        self.start = end_of_log(server)
        server.sql(ORDERS.format(database))
        server.sql(f"CREATE TABLE {database}.items (id INT PRIMARY KEY, name TEXT)")
        for number in range(40):
            server.sql(
                f"INSERT INTO {database}.orders VALUES (%s, %s, %s, '2026-01-02 03:04:05.678')",
                number,
                f"Zoë {number}",
                number / 4,
            )
        self.middle = end_of_log(server)
        server.sql(f"INSERT INTO {database}.items VALUES (1, 'one'), (2, 'two')")
        rotate(server)
        server.sql(f"UPDATE {database}.orders SET price = price + 1 WHERE id < 20")
        server.sql(f"ALTER TABLE {database}.orders ADD COLUMN note TEXT AFTER customer")
        rotate(server)
        server.sql(f"UPDATE {database}.orders SET note = 'hello' WHERE id = 3")
        server.sql(f"DELETE FROM {database}.orders WHERE id >= 30")
        self.end = end_of_log(server)
        self.files = [path for path in server.binlog_files() if self.start.file <= path.name <= self.end.file]

    @property
    def orders(self) -> str:
        return f"{self.database}.orders"

    def read(self, source: Any = None, **options: Any) -> list[Row]:
        source = source or [str(path) for path in self.files]
        return rows_of(penstock.read_binlog(source, f"{self.database}.*", **options))


def end_of_log(server: Server) -> Position:
    statement = "SHOW BINARY LOG STATUS" if server.family == "mysql" else "SHOW MASTER STATUS"
    (row,) = server.sql(statement)
    return Position(0, row[0], row[1])


def gtids_of(server: Server) -> str:
    variable = "gtid_executed" if server.family == "mysql" else "gtid_binlog_pos"
    ((text,),) = server.sql(f"SELECT @@global.{variable}")
    return str(text).replace("\n", "")


def rows_of(batches: Iterator[penstock.Batch], *, instance: bool = False) -> list[Row]:
    rows: list[Row] = []
    for batch in batches:
        for row in batch.to_arrow().to_pylist():
            if not instance:
                row["_metadata"].pop("instance")
            rows.append(row)
    rows.sort(key=lambda row: (row["_commit_version"], row["_metadata"]["row"]))
    return rows


@pytest.fixture(scope="module")
def written_on(server_of: Callable[[str], Server]) -> Callable[[str], Written]:
    logs: dict[str, Written] = {}

    def get(flavor: str) -> Written:
        if flavor not in logs:
            server = server_of(flavor)
            database = f"read_binlog_{flavor}"
            server.sql(f"CREATE DATABASE {database}")
            logs[flavor] = Written(server, database)
        return logs[flavor]

    return get


@pytest.fixture(params=["mysql", "mariadb", "mariadb11"])
def written(request: pytest.FixtureRequest, written_on: Callable[[str], Written]) -> Written:
    return written_on(request.param)


@pytest.fixture
def mysql_written(written_on: Callable[[str], Written]) -> Written:
    return written_on("mysql")


# --- The rows -------------------------------------------------------------------------------


def test_every_change_is_returned_with_its_values_in_commit_order(written: Written) -> None:
    rows = [row for row in written.read() if "price" in row]
    kinds = [row["_change_type"] for row in rows]
    assert kinds[:40] == ["insert"] * 40
    assert kinds[40:80] == ["update_preimage", "update_postimage"] * 20
    assert kinds[80:] == ["update_preimage", "update_postimage"] + ["delete"] * 10
    assert rows[7]["id"] == 7
    assert rows[7]["customer"] == "Zoë 7"
    assert str(rows[7]["price"]) == "1.75"
    assert rows[7]["placed_at"] == datetime(2026, 1, 2, 3, 4, 5, 678000)
    assert str(rows[41]["price"]) == "1.00"


def test_each_row_has_the_columns_in_force_at_its_position(written: Written) -> None:
    rows = [row for row in written.read() if "price" in row]
    assert all("note" not in row for row in rows[:80])
    assert [row["note"] for row in rows[80:82]] == [None, "hello"]
    assert len({row["_metadata"]["schema_version"] for row in rows}) == 2


def test_live_server_returns_the_rows_of_its_files(written: Written) -> None:
    live = written.read(written.server.url(), start=written.start, end=written.end)
    assert live == written.read()


def test_final_state_equals_that_of_the_server(written: Written) -> None:
    state: dict[int, tuple[Any, ...]] = {}
    for row in written.read():
        if "price" not in row:
            continue
        if row["_change_type"] in ("delete", "update_preimage"):
            del state[row["id"]]
        else:
            state[row["id"]] = (row["id"], row["customer"], row.get("note"), row["price"], row["placed_at"])
    expected = written.server.sql(f"SELECT * FROM {written.orders} ORDER BY id")
    assert [state[key] for key in sorted(state)] == expected


def test_batch_names_its_table_and_its_position(written: Written) -> None:
    batches = list(penstock.read_binlog([str(path) for path in written.files], written.orders))
    assert {batch.table for batch in batches} == {written.orders}
    assert batches[-1].position == written.end
    assert sum(len(batch) for batch in batches) == sum(batch.to_arrow().num_rows for batch in batches)
    record = pyarrow.record_batch(batches[0])
    assert record.schema.names[-4:] == ["_change_type", "_commit_version", "_commit_timestamp", "_metadata"]


def test_reading_from_a_batch_position_continues_after_it(written: Written) -> None:
    paths = [str(path) for path in written.files]
    batches = list(penstock.read_binlog(paths, written.orders, batch_rows_max=16))
    half = len(batches) // 2
    first, second = batches[:half], penstock.read_binlog(paths, written.orders, batches[half - 1].position)
    assert rows_of(iter(first)) + rows_of(second) == rows_of(penstock.read_binlog(paths, written.orders))


def test_only_requested_columns_and_changes_are_decoded(written: Written) -> None:
    paths = [str(path) for path in written.files]
    batches = list(
        penstock.read_binlog(paths, written.orders, columns=["id", "_change_type"], changes=["delete"])
    )
    rows = [row for batch in batches for row in batch.to_arrow().to_pylist()]
    assert rows == [{"id": number, "_change_type": "delete"} for number in range(30, 40)]


def test_missing_column_is_named(written: Written) -> None:
    with pytest.raises(OptionInvalid, match="prise") as caught:
        list(penstock.read_binlog([str(path) for path in written.files], written.orders, columns=["prise"]))
    assert "price" in str(caught.value.hint)
    assert caught.value.position is not None


# --- Naming files ---------------------------------------------------------------------------


@pytest.fixture
def folder(written: Written, tmp_path: Path) -> Path:
    for path in written.files:
        shutil.copy(path, tmp_path)
    (tmp_path / "mysql-bin.index").write_text("\n".join(path.name for path in written.files))
    (tmp_path / "notes.txt").write_text("no binlog")
    return tmp_path


def test_folder_pattern_and_list_of_paths_name_the_same_log(written: Written, folder: Path) -> None:
    expected = written.read()
    assert written.read(folder) == expected
    assert written.read(str(folder / "mysql-bin.0*")) == expected
    assert written.read(str(folder / "*.[0-9]*")) == expected
    assert written.read(sorted(folder.glob("mysql-bin.0*"), reverse=True)) == expected


def test_compressed_files_return_the_rows_of_plain_ones(written: Written, folder: Path) -> None:
    expected = written.read()
    first, second, *_ = sorted(folder.glob("mysql-bin.0*"))
    Path(f"{first}.gz").write_bytes(gzip.compress(first.read_bytes()))
    content = second.read_bytes()
    half = len(content) // 2
    # Two frames with two compression levels, as an appending tool would write them.
    frames = [
        zstandard.ZstdCompressor(level=level).compress(part)
        for level, part in ((1, content[:half]), (19, content[half:]))
    ]
    Path(f"{second}.zst").write_bytes(b"".join(frames))
    first.unlink()
    second.unlink()
    assert written.read(folder) == expected
    assert written.read(folder, start=written.middle) == written.read(start=written.middle)
    source = open_source(SourceOptions.parse(folder))
    assert [extent.splittable for extent in source.extents()] == [False, False, True]
    assert source.head() == written.end


def test_single_file_without_a_number_is_read(written: Written, tmp_path: Path) -> None:
    alone = tmp_path / "orders.binlog"
    shutil.copy(written.files[0], alone)
    rows = written.read(alone)
    assert [row["_change_type"] for row in rows] == ["insert"] * 42
    assert {row["_metadata"]["file"] for row in rows} == {"orders.binlog"}


# --- Starting and ending --------------------------------------------------------------------


def test_start_and_an_end_by_position_cut_between_transactions(written: Written) -> None:
    whole = written.read()
    for source in (None, written.server.url()):
        before = written.read(source, start=written.start, end=str(written.middle))
        after = written.read(source, start=str(written.middle), end=written.end)
        assert before + after == whole
        assert len(before) == 40


def test_start_and_an_end_by_gtid_set_cut_between_transactions(written: Written) -> None:
    source = open_source(SourceOptions.parse([str(path) for path in written.files]))
    gtids = source.gtid_set(written.middle)
    whole = written.read()
    for log_position in (None, written.server.url()):
        assert written.read(log_position, end=gtids) == [row for row in whole if row in whole[:40]]
        assert written.read(log_position, start=gtids, end=gtids_of(written.server)) == whole[40:]


def test_start_and_an_end_by_time_cut_between_transactions(written: Written) -> None:
    whole = written.read()
    at = whole[40]["_commit_timestamp"]
    before = [row for row in whole if row["_commit_timestamp"] < at]
    after = [row for row in whole if row["_commit_timestamp"] >= at]
    assert written.read(end=at) == before
    assert written.read(start=at) == after
    assert written.read(start=at.isoformat()) == after
    assert written.read(written.server.url(), start=at, end=written.end) == after
    assert written.read(start=datetime(2100, 1, 1, tzinfo=UTC)) == []
    assert written.read(start="1999-01-01") == whole


def test_gtid_sets_before_a_position_equal_the_servers(written: Written) -> None:
    paths = [str(path) for path in written.files]
    files, live = (open_source(SourceOptions.parse(source)) for source in (paths, written.server.url()))
    assert files.gtid_set(written.middle) == live.gtid_set(written.middle)
    # Other tests of the server may have written with a different server id.
    assert str(GtidSet.parse(live.gtid_set(live.head())).position()) == gtids_of(written.server)
    live.close()


def test_missing_position_is_refused_by_name(written: Written) -> None:
    log = written.start.file.rpartition(".")[0]
    with pytest.raises(PositionPurged) as caught:
        written.read(start=f"{log}.000000:4")
    assert caught.value.position == f"{log}.000000:4"
    with pytest.raises(PositionInvalid):
        written.read(start=f"{log}.999999:4")
    with pytest.raises(PositionInvalid):
        written.read(start=written.end, end=written.start)


# --- Ranges ---------------------------------------------------------------------------------


def ranges_at(file: Path, cuts: list[int]) -> list[ByteRange]:
    places = [4, *cuts, None]
    return [
        ByteRange(0, file.name, start or 4, other, aligned=start == 4) for start, other in pairwise(places)
    ]


def rows_of_ranges(source: Source, ranges: list[ByteRange], selection: Selection) -> list[Row]:
    return [row for range_ in ranges for row in rows_of(read_range(source, range_, selection))]


@pytest.mark.slow
def test_every_cut_of_a_file_returns_every_row_once(written: Written) -> None:
    file = written.files[1]
    source = open_source(SourceOptions.parse(file))
    selection = Selection(penstock.TablePatterns(f"{written.database}.*"))
    whole = rows_of_ranges(source, ranges_at(file, []), selection)
    assert len(whole) == 40
    for cut in range(5, file.stat().st_size):
        assert rows_of_ranges(source, ranges_at(file, [cut]), selection) == whole, f"cut at {cut}"


def test_many_cuts_at_once_return_every_row_once(written: Written) -> None:
    file = written.files[0]
    source = open_source(SourceOptions.parse(file))
    selection = Selection(penstock.TablePatterns(f"{written.database}.*"))
    whole = rows_of_ranges(source, ranges_at(file, []), selection)
    places = random.Random(20261121)
    for _ in range(20):
        cuts = sorted(places.sample(range(5, file.stat().st_size), 8))
        assert rows_of_ranges(source, ranges_at(file, cuts), selection) == whole, f"cuts at {cuts}"


def test_walk_ends_at_the_last_transaction_within_the_limit(written: Written) -> None:
    paths = [str(path) for path in written.files]
    for log_position in (paths, written.server.url()):
        source = open_source(SourceOptions.parse(log_position))
        at = source.walk(written.start, written.end, rows_max=40)
        assert at == written.middle
        assert source.walk(written.start, written.end, bytes_max=10**9) == written.end
        # A step covers at least one transaction, however small the limit is.
        step = source.walk(written.middle, written.end, bytes_max=1)
        assert written.middle < step < written.end
        assert len(written.read(start=written.middle, end=step)) == 2
        source.close()


def test_walking_in_steps_visits_every_row_once(written: Written) -> None:
    source = open_source(SourceOptions.parse([str(path) for path in written.files]))
    at, rows = written.start, []
    while at != written.end:
        step = source.walk(at, written.end, bytes_max=700)
        assert step > at
        rows += written.read(start=at, end=step)
        at = step
    assert rows == written.read()


# --- Files that grow ------------------------------------------------------------------------


def test_file_in_use_ends_at_its_last_whole_transaction(mysql_written: Written, tmp_path: Path) -> None:
    last = mysql_written.files[-1]
    content = last.read_bytes()
    assert content[4 + 17] & 1, "the server has its last file in use"
    expected = mysql_written.read(last)
    source = open_source(SourceOptions.parse(last))
    (whole,) = (
        batch
        for byte_range in source.split()
        for batch in read_range(source, byte_range, emit="transactions")
    )
    ends = whole.to_arrow()["end_offset"].to_pylist()
    growing = tmp_path / last.name
    for size in range(len(source.head_bytes(last.name)), len(content), 7):
        growing.write_bytes(content[:size])
        copied = open_source(SourceOptions.parse(growing))
        head = copied.head()
        assert head.offset <= size
        assert head.offset == max([end for end in ends if end <= size], default=head.offset)
        rows = mysql_written.read(growing)
        assert rows == expected[: len(rows)]
        assert rows == mysql_written.read(last, end=head)


def test_head_advances_as_a_file_grows(mysql_written: Written, tmp_path: Path) -> None:
    last = mysql_written.files[-1]
    growing = tmp_path / last.name
    content = last.read_bytes()
    source = open_source(SourceOptions.parse(growing))
    heads = []
    for size in (200, 600, 1000, len(content)):
        growing.write_bytes(content[:size])
        heads.append(source.head())
    assert heads == sorted(heads)
    assert heads[-1] == mysql_written.end


# --- Schemas from elsewhere -----------------------------------------------------------------


@pytest.fixture(scope="module")
def minimal(lend_server: LendServer) -> Iterator[Server]:
    with lend_server(binlog_row_metadata="MINIMAL") as server:
        server.sql("CREATE DATABASE shop")
        server.sql(ORDERS.format("shop"))
        server.sql("INSERT INTO shop.orders VALUES (1, 'a', 2.5, NULL)")
        server.sql("ALTER TABLE shop.orders ADD COLUMN note TEXT AFTER customer")
        server.sql("INSERT INTO shop.orders VALUES (2, 'b', 'n', 3.5, NULL)")
        yield server


EXPECTED = [("a", None, "2.50"), ("b", "n", "3.50")]


def seen(rows: list[Row]) -> list[tuple[Any, ...]]:
    return [(row["customer"], row.get("note"), str(row["price"])) for row in rows]


def test_sql_file_provides_the_definitions_and_ddl_updates_them(minimal: Server, tmp_path: Path) -> None:
    schemas = tmp_path / "schema.sql"
    schemas.write_text("CREATE DATABASE shop CHARACTER SET utf8mb4; USE shop;" + ORDERS.format("shop"))
    rows = rows_of(penstock.read_binlog(minimal.binlog_files(), "shop.orders", schemas=schemas))
    assert seen(rows) == EXPECTED
    assert len({row["_metadata"]["schema_version"] for row in rows}) == 2


def test_log_with_its_create_table_needs_only_an_empty_mapping(minimal: Server) -> None:
    rows = rows_of(penstock.read_binlog(minimal.binlog_files(), "shop.orders", schemas={}))
    assert seen(rows) == EXPECTED


def test_mapping_provides_the_definitions(minimal: Server) -> None:
    columns = {
        "id": "int unsigned",
        "customer": "varchar(40)",
        "price": "decimal(10,2)",
        "placed_at": "datetime(3)",
    }
    for schema in (
        columns,
        TableSchema.from_json(
            {
                "database": "shop",
                "table": "orders",
                "columns": [
                    [name, text, "utf8mb4" if "char" in text else None, True]
                    for name, text in columns.items()
                ],
            }
        ),
    ):
        rows = rows_of(
            penstock.read_binlog(minimal.binlog_files(), "shop.orders", schemas={"shop.orders": schema})
        )
        assert seen(rows) == EXPECTED


def test_live_server_provides_earlier_definitions_of_altered_tables(minimal: Server) -> None:
    assert seen(rows_of(penstock.read_binlog(minimal.url(), "shop.orders"))) == EXPECTED


def test_live_server_is_asked_for_the_definitions(minimal: Server) -> None:
    minimal.sql("FLUSH BINARY LOGS")
    minimal.sql("INSERT INTO shop.orders VALUES (3, 'c', 'm', 4.5, NULL)")
    start = Position(0, minimal.binlog_files()[-1].name, 4)
    rows = rows_of(penstock.read_binlog(minimal.url(), "shop.orders", start=start))
    assert seen(rows) == [("c", "m", "4.50")]
    minimal.sql("DELETE FROM shop.orders WHERE id = 3")


# --- Lost connections -----------------------------------------------------------------------


@pytest.fixture
def large(server: Server, fresh_database: FreshDatabase) -> tuple[Server, str, Position]:
    """A log with one large transaction between small ones."""
    database = fresh_database(server)
    server.sql("FLUSH BINARY LOGS")
    start = end_of_log(server)
    server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, filler CHAR(200)) ")
    for number in range(5):
        server.sql(f"INSERT INTO {database}.t VALUES (%s, 'small')", -1 - number)
    numbers = ",".join(f"({number}, REPEAT('x', 200))" for number in range(4000))
    server.sql(f"INSERT INTO {database}.t VALUES {numbers}")
    server.sql(f"DELETE FROM {database}.t WHERE id % 2 = 0")
    return server, database, start


def read_live(url: str, database: str, start: Position, **options: Any) -> list[Row]:
    source = open_source(SourceOptions.parse(url))
    try:
        selection = Selection(penstock.TablePatterns(f"{database}.t"))
        return [
            row
            for byte_range in source.split(start)
            for batch in read_range(source, byte_range, selection, **options)
            for row in batch.to_arrow().drop_columns(["_metadata"]).to_pylist()
        ]
    finally:
        source.close()


@pytest.mark.deep(keep=("mysql-reset", "mariadb-close"))
@pytest.mark.parametrize("how", ["reset", "close"])
def test_connection_lost_anywhere_loses_and_duplicates_no_row(
    large: tuple[Server, str, Position], how: Any
) -> None:
    server, database, start = large
    # Batches this small are returned inside the transaction, so a cut falls into a partly returned
    # transaction.
    small = {"batch_rows_max": 100, "batch_bytes_max": 16_384, "held_bytes_max": 65_536}
    expected = read_live(server.url(), database, start, **small)
    assert len(expected) == 5 + 4000 + 2002
    with Proxy(server.port) as proxy:
        for bytes_down in (3_000, 60_000, 300_000, 700_000, 900_000):
            proxy.cut_after(bytes_down, how, in_packet=bytes_down % 200_000 == 0)
            assert read_live(proxy.through(server.url()), database, start, **small) == expected
            proxy.disarm()
        cuts = proxy.cut_count
        # The connection is lost several times inside one transaction: at increasing offsets, repeatedly at
        # the same offset, and at decreasing offsets.
        sequences = (
            (150_000, 300_000, 500_000),
            (500_000, 500_000, 500_000),
            (700_000, 300_000),
            (800_000, 400_000, 100_000, 600_000),
        )
        for number, sequence in enumerate(sequences):
            for bytes_down in sequence:
                proxy.cut_after(bytes_down, how, in_packet=bytes_down == 300_000)
            assert read_live(proxy.through(server.url()), database, start, **small) == expected, sequence
            assert proxy.cut_count > cuts + number
            proxy.disarm()


def test_purged_start_is_named(start_server: StartServer) -> None:
    server = start_server("mysql")
    server.sql("FLUSH BINARY LOGS; FLUSH BINARY LOGS")
    first, *_, last = server.binlog_files()
    server.sql(f"PURGE BINARY LOGS TO '{last.name}'")
    with pytest.raises(PositionPurged) as caught:
        list(penstock.read_binlog(server.url(), start=f"{first.name}:4"))
    assert caught.value.position == f"{first.name}:4"
    assert last.name in str(caught.value)
