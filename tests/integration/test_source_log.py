# SPDX-License-Identifier: Apache-2.0
"""A log folder returns the rows of its source files at the same positions."""

import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pyarrow
import pyarrow.compute as compute
import pytest

from penstock import read_binlog
from penstock.commit_versions import epoch_base
from penstock.errors import (
    OptionInvalid,
    PenstockError,
    PositionInvalid,
    PositionPurged,
    SequenceGap,
    ServerChanged,
    SourceMissing,
)
from penstock.logstore.cold import make_cold
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.model import Position, TableName, TablePatterns
from penstock.source.bounds import Bounds, parse_bound
from penstock.source.bounds import locate as locate_bounds
from penstock.source.files import FileSource
from penstock.source.kept import epoch_shift
from penstock.source.kept_stream_log import KeptStreamLog
from penstock.source.log import LogSource
from penstock.source.logged_tables import LoggedTables
from penstock.source.offsets import Offset
from penstock.source.read_settings import ReadSettings
from penstock.source.reading import Selection, read_range
from penstock.source.source import ByteRange, Source, SourceOptions, open_source
from penstock.source.walk import TransactionWalk
from tests.support.logstore.folders import binlogs, keep, open_log
from tests.support.logstore.kept_log import penstock
from tests.support.suite.fixture_types import LendServer
from tests.support.suite.nonempty import each
from tools.servers import Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")

SEED = 20261121
Row = tuple[object, ...]


@dataclass
class Kept:
    """A server's closed binlog files, and the log captured from them."""

    server: Server
    files: FileSource
    folder: Path

    def log(self) -> LogSource:
        """Return the log as a separate source."""
        source = open_source(SourceOptions.parse(self.folder))
        assert isinstance(source, LogSource)
        return source


def write_changes(server: Server) -> None:
    """Change tables over several files: transactions of all sizes, altered tables, a dropped table."""
    server.sql("CREATE DATABASE shop")
    server.sql("CREATE TABLE shop.orders (id INT PRIMARY KEY AUTO_INCREMENT, note VARCHAR(400))")
    server.sql("CREATE TABLE shop.gone (id INT PRIMARY KEY, word VARCHAR(20))")
    many = "INSERT INTO shop.orders (note) SELECT REPEAT('x', 350) FROM information_schema.columns LIMIT {}"
    server.sql("INSERT INTO shop.gone VALUES (1, 'one'), (2, 'two')")
    for number in range(12):
        server.sql(many.format(40 * number + 1))
        server.sql("UPDATE shop.orders SET note = %s WHERE id = %s", f"changed {number}", number + 1)
    server.sql("FLUSH BINARY LOGS")
    server.sql("ALTER TABLE shop.orders ADD COLUMN total DECIMAL(10,2) AFTER id, CHANGE note remark TEXT")
    server.sql("DROP TABLE shop.gone")
    for number in range(8):
        server.sql("INSERT INTO shop.orders (total, remark) VALUES (%s, 'after')", number + 0.25)
    for _ in range(8):
        server.sql(many.replace("note", "remark").format(900))
    server.sql("DELETE FROM shop.orders WHERE id % 97 = 0")
    server.sql("FLUSH BINARY LOGS")
    server.sql("CREATE TABLE shop.late (id INT PRIMARY KEY)")
    server.sql("INSERT INTO shop.late VALUES (1), (2), (3)")
    server.sql("ALTER TABLE shop.orders DROP COLUMN total")
    server.sql("INSERT INTO shop.orders (remark) VALUES ('the last')")


@pytest.fixture(scope="module", params=["mysql", "mariadb"])
def kept(
    request: pytest.FixtureRequest, lend_server: LendServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kept]:
    """A server without column names in its log, and its captured log."""
    with lend_server(request.param, binlog_row_metadata="MINIMAL") as server:
        write_changes(server)
        files = binlogs(server)
        folder = tmp_path_factory.mktemp("logs") / "shop"
        with open_log(folder) as log:
            keep(log, server, files)
        yield Kept(server, files, folder)


def rows_of(
    source: Source, ranges: list[ByteRange], bounds: Bounds | None = None, schemas: Source | None = None
) -> list[Row]:
    """Return the decoded rows of ranges in commit order, without the instance's name.

    `schemas` is the log that provides table definitions, by default the source itself.
    """
    read_rows: list[Row] = []
    for range_ in ranges:
        selection = Selection(bounds=bounds or Bounds())
        for batch in read_range(source, range_, selection, LoggedTables(schemas or source)):
            rows = pyarrow.record_batch(batch)
            metadata = rows.column("_metadata")
            row, *position = (
                compute.struct_field(metadata, name).to_pylist() for name in ("row", "gtid", "file", "offset")
            )
            # Compare values as text: creating Python objects would take most of the processor time of these
            # tests.
            values = rows.drop_columns(["_metadata"])
            names = tuple(values.schema.names)
            texts = [column.cast(pyarrow.string()).to_pylist() for column in values.columns]
            kinds = texts[names.index("_change_type")]
            versions = rows.column("_commit_version").to_pylist()
            last_images = [kind != "update_preimage" for kind in kinds]
            table, columns = [batch.table] * len(rows), [names] * len(rows)
            read_rows += zip(
                versions, row, last_images, table, kinds, *position, *texts, columns, strict=True
            )
    return sorted(read_rows)


def all_rows(source: Source) -> list[Row]:
    return rows_of(source, source.split())


def boundaries(files: FileSource) -> list[tuple[Position, str]]:
    """Return each end of a transaction, with the GTIDs before it according to the files."""
    actual_rows = []
    for byte_range in files.split():
        for batch in TransactionWalk(files, byte_range):
            actual_rows += [
                Position(0, file, end)
                for file, end in zip(batch["file"].to_pylist(), batch["end_offset"].to_pylist(), strict=True)
            ]
    chosen = [*random.Random(SEED).sample(actual_rows, 12), actual_rows[0], actual_rows[-1]]
    return [(position, files.gtid_set(position)) for position in chosen]


def rows_in_files(kept: Kept, start: Position | None = None, end: Position | None = None) -> list[Row]:
    """Return the rows of the files, decoded with the log's definitions."""
    return rows_of(kept.files, kept.files.split(start, end), None, kept.log())


# --- The same rows --------------------------------------------------------------------------


def test_log_returns_the_rows_of_its_files(kept: Kept) -> None:
    log = kept.log()
    segments = list(kept.folder.glob("*/*.binlog"))
    assert len(segments) > len(log.extents()) >= 3, "files lie in several segments"
    rows = all_rows(log)
    assert rows == rows_in_files(kept)
    assert {row[3] for row in rows} == {"shop.orders", "shop.gone", "shop.late"}


def test_read_binlog_accepts_a_folder_and_needs_no_schema(kept: Kept) -> None:
    batches = list(read_binlog(kept.folder, tables="shop.gone"))
    rows = [row for batch in batches for row in pyarrow.record_batch(batch).to_pylist()]
    assert [(row["id"], row["word"]) for row in rows] == [(1, "one"), (2, "two")]
    assert {row["_metadata"]["instance"] for row in rows} == {"shop"}


def test_ranges_may_be_cut_anywhere(kept: Kept) -> None:
    log = kept.log()
    whole = all_rows(log)
    chance = random.Random(SEED)
    for _ in range(3):
        ranges = []
        for extent in log.extents():
            inner = sorted(chance.sample(range(extent.start, extent.end), 6))
            for start, stop in pairwise([extent.start, *inner, extent.end]):
                aligned = start == extent.start
                ranges.append(ByteRange(extent.epoch, extent.file, start, stop, aligned))
        assert rows_of(log, ranges) == whole


def test_positions_equal_those_of_the_server(kept: Kept) -> None:
    log = kept.log()
    for position, gtid_set in each(boundaries(kept.files)):
        assert log.gtid_set(position) == gtid_set
        ranges = log.split(position)
        assert rows_of(log, ranges) == rows_in_files(kept, position)
        assert all(range_.stop is not None for range_ in ranges)


def test_gtid_set_is_located_through_the_indexes(kept: Kept) -> None:
    log = kept.log()
    for position, gtid_set in each(boundaries(kept.files)):
        bounds = locate_bounds(log, parse_bound(f"gtid:{gtid_set}"), None)
        assert rows_of(log, log.split(bounds.start), bounds) == rows_in_files(kept, position)


def test_time_is_located_through_the_indexes(kept: Kept) -> None:
    log = kept.log()
    times = sorted({row["_commit_timestamp"] for row in read_rows(log, "shop.orders")})
    for moment in (times[0], times[len(times) // 2], times[-1]):
        bounds = locate_bounds(log, parse_bound(moment), None)
        assert rows_of(log, log.split(bounds.start), bounds) == rows_of(log, log.split(), bounds)
        before = locate_bounds(log, None, parse_bound(moment))
        whole = rows_of(log, log.split(None, before.end), before)
        assert len(whole) + len(rows_of(log, log.split(bounds.start), bounds)) == len(all_rows(log))


def read_rows(source: Source, table: str) -> list[dict[str, object]]:
    return [
        row
        for batch in read_binlog(source.options.paths[0], tables=table)
        for row in pyarrow.record_batch(batch).to_pylist()
    ]


def test_limits_end_at_the_same_position_as_in_the_files(kept: Kept) -> None:
    log = kept.log()
    start, end = log.earliest(), log.head()
    for limits in ({"rows_max": 1}, {"rows_max": 500}, {"bytes_max": 1}, {"bytes_max": 300_000}):
        actual = log.walk(start, end, **limits)
        assert actual == kept.files.walk(replace(start, offset=4), end, **limits)
        assert start < actual <= end


def test_first_position_of_a_file_is_accepted_despite_a_separate_head(kept: Kept) -> None:
    log = kept.log()
    second = log.extents()[1]
    assert second.start > 4
    assert rows_of(log, log.split(Position(0, second.file, 4))) == rows_of(log, log.split(second.first))
    assert rows_of(log, log.split(replace(log.earliest(), offset=4))) == all_rows(log)


def test_compressed_segments_read_the_same(kept: Kept, tmp_path: Path) -> None:
    rows = all_rows(kept.log())
    folder = copied(kept.folder, tmp_path)
    with Log.open(folder) as log:
        for segment in list(log.segments):
            if segment.source_end:
                make_cold(log.disk, log.layout, log, segment)
    assert len(list(folder.glob("*/*.binlog.zst"))) >= 3
    source = open_source(SourceOptions.parse(folder, instance="shop"))
    assert rows_of(source, source.split()) == rows


def test_copy_below_a_url_reads_the_same(kept: Kept) -> None:
    source = open_source(SourceOptions.parse(f"file://{kept.folder}"))
    assert source.instance == "shop"
    assert all_rows(source) == all_rows(kept.log())
    with pytest.raises(SourceMissing):
        open_source(SourceOptions.parse(f"file://{kept.folder}x")).head()
    with pytest.raises(OptionInvalid, match="'nowhere' is not known"):
        open_source(SourceOptions.parse("nowhere://bucket/shop")).head()


def copied(folder: Path, to: Path) -> Path:
    subprocess.run(["cp", "-r", str(folder), str(to / "shop")], check=True)
    return to / "shop"


# --- Missing data ---------------------------------------------------------------------------


def test_position_missing_from_the_log_is_refused_by_name(kept: Kept, tmp_path: Path) -> None:
    second = kept.files.extents()[1]
    begin = boundaries_in(kept.files, second.file)[3]
    with open_log(tmp_path / "shop") as log:
        keep(log, kept.server, kept.files, start=begin)
    source = open_source(SourceOptions.parse(tmp_path / "shop"))
    assert source.earliest() == begin
    with pytest.raises(PositionPurged, match=f"begins with {begin}"):
        source.split(kept.files.earliest())
    with pytest.raises(PositionPurged):
        source.split(Position(0, second.file, 4))
    with pytest.raises(PositionPurged):
        source.find_gtid_set("")
    with pytest.raises(PositionInvalid, match="ends at"):
        source.split(replace(source.head(), offset=source.head().offset + 1000))
    with pytest.raises(PositionInvalid, match="ends at"):
        source.split(None, replace(source.head(), offset=source.head().offset + 1000))
    assert rows_of(source, source.split(), None, kept.log()) == rows_in_files(kept, begin)


def boundaries_in(files: FileSource, file: str) -> list[Position]:
    """Return each end of a transaction in one file."""
    whole = ByteRange(0, file, 4, None, aligned=True)
    return [
        Position(0, file, end)
        for batch in TransactionWalk(files, whole)
        for end in batch["end_offset"].to_pylist()
    ]


def test_missing_file_is_named_as_a_gap(kept: Kept, tmp_path: Path) -> None:
    first, second, third = (extent.file for extent in kept.files.extents()[:3])
    with open_log(tmp_path / "shop") as log:
        keep(log, kept.server, kept.files, names=[first, third])
    source = open_source(SourceOptions.parse(tmp_path / "shop"))
    with pytest.raises(SequenceGap, match=rf"nothing between {first}:\d+ and {third}:\d+"):
        source.split()
    # The log can still be read before and after the gap.
    assert rows_of(source, source.split(Position(0, third, 4)), None, kept.log())
    assert rows_of(source, source.split(None, source.extents(None, Position(0, first, 500))[-1].first)) == []
    assert second not in {extent.file for extent in LogReader.open(tmp_path / "shop").extents()}


def test_gap_inside_a_file_is_refused(kept: Kept, tmp_path: Path) -> None:
    file = kept.files.extents()[0].file
    places = boundaries_in(kept.files, file)
    with open_log(tmp_path / "shop") as log:
        keep(log, kept.server, kept.files, end=places[4])
        keep(log, kept.server, kept.files, start=places[7])
    source = open_source(SourceOptions.parse(tmp_path / "shop"))
    with pytest.raises(SequenceGap, match=f"between {places[4]} and {places[7]}"):
        source.split()
    with pytest.raises(SequenceGap, match=f"between {places[4]} and {places[7]}"):
        source.split(places[5])
    assert rows_of(source, source.split(places[7]), None, kept.log()) == rows_in_files(kept, places[7])


def test_missing_end_of_a_file_is_detected_by_gtids(kept: Kept, tmp_path: Path) -> None:
    first, second = (extent.file for extent in kept.files.extents()[:2])
    boundary = boundaries_in(kept.files, first)[-3]
    with open_log(tmp_path / "shop") as log:
        keep(log, kept.server, kept.files, end=boundary)
        keep(log, kept.server, kept.files, start=Position(0, second, 4))
    source = open_source(SourceOptions.parse(tmp_path / "shop"))
    with pytest.raises(SequenceGap, match=f"between {boundary} and {second}"):
        source.split()


def test_empty_folder_and_empty_log_are_reported(kept: Kept, tmp_path: Path) -> None:
    with open_log(tmp_path / "shop") as log:
        log.begin_epoch(
            epoch=0,
            server_key="k",
            server_id=1,
            flavor="mysql",
            version="9",
            file="mysql-bin.000001",
            offset=4,
            gtid_set="",
        )
    with pytest.raises(SourceMissing, match="is empty so far"):
        open_source(SourceOptions.parse(tmp_path / "shop")).split()


# --- A growing log --------------------------------------------------------------------------


def test_reader_beside_the_writer_sees_whole_transactions_as_they_arrive(kept: Kept, tmp_path: Path) -> None:
    file = kept.files.extents()[0].file
    places = boundaries_in(kept.files, file)
    with open_log(tmp_path / "shop") as log:
        keep(log, kept.server, kept.files, end=places[5])
        source = open_source(SourceOptions.parse(tmp_path / "shop"))
        assert source.head() == places[5]
        assert rows_of(source, source.split()) == rows_in_files(kept, None, places[5])
        # At this point, the writer is inside a transaction.
        (segment,) = (tmp_path / "shop").glob("*/*.binlog")
        before = segment.stat().st_size
        torn = kept_bytes(kept, file, places[5].offset, places[6].offset)[:-7]
        with segment.open("ab") as out:
            out.write(torn)
        assert source.head() == places[5]
        assert rows_of(source, source.split()) == rows_in_files(kept, None, places[5])
        with segment.open("r+b") as out:
            out.truncate(before)
        keep(log, kept.server, kept.files, start=places[5])
        assert source.head() == log.visible
        assert rows_of(source, source.split(places[5])) == rows_in_files(kept, places[5])


def kept_bytes(kept: Kept, file: str, start: int, stop: int) -> bytes:
    content = b"".join(map(bytes, kept.files.open(ByteRange(0, file, start, stop, aligned=True))))
    return content[: stop - start]


# --- Epochs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def failed_over(lend_server: LendServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A log of two servers: the second server replayed the transactions of the first in another order, and
    continued.
    """
    folder = tmp_path_factory.mktemp("epochs") / "shop"
    with lend_server() as first, lend_server() as second:
        for statement in ("CREATE DATABASE shop", "CREATE TABLE shop.t (id INT PRIMARY KEY, who TEXT)"):
            first.sql(statement)
        for number in range(1, 9):
            first.sql("INSERT INTO shop.t VALUES (%s, 'first')", number)
        uuid = str(first.sql("SELECT @@server_uuid")[0][0])
        for number in (1, 2):
            run_as(second, uuid, number, "CREATE DATABASE shop" if number == 1 else CREATE_T)
        # A different order, as on a replica with several workers.
        for number in (3, 4, 5, 8, 6, 7, 10, 9):
            run_as(second, uuid, number, f"INSERT INTO shop.t VALUES ({number - 2}, 'first')")
        second.sql("INSERT INTO shop.t VALUES (100, 'second'), (101, 'second')")
        second.sql("UPDATE shop.t SET who = 'second' WHERE id = 1")
        files, second_log = binlogs(first), binlogs(second)
        with open_log(folder) as log:
            keep(log, first, files, end=boundaries_in(files, files.extents()[0].file)[7])
            # The log has the transactions 1 to 8; on the second server 8 comes before 6, so the range after 5
            # starts with 8.
            begin = boundaries_in(second_log, second_log.extents()[0].file)[4]
            keep(log, second, second_log, epoch=1, start=begin)
        for name, server, whole in (("first", first, files), ("second", second, second_log)):
            with open_log(folder.parent / name) as log:
                keep(log, server, whole)
        yield folder


CREATE_T = "CREATE TABLE shop.t (id INT PRIMARY KEY, who TEXT)"


def run_as(server: Server, uuid: str, number: int, statement: str) -> None:
    """Commit a statement under another server's GTID."""
    server.client(f"SET GTID_NEXT='{uuid}:{number}'; {statement}; SET GTID_NEXT='AUTOMATIC';")


def test_reading_continues_across_a_change_of_the_server(failed_over: Path) -> None:
    source = open_source(SourceOptions.parse(failed_over))
    assert isinstance(source, LogSource)
    rows = [row for row in all_rows(source) if row[3] == "shop.t"]
    inserted = [str(row[8]) for row in rows if row[4] == "insert"]
    # Transactions of both servers are returned once, and commit versions increase across the change.
    assert sorted(inserted) == sorted(str(number) for number in [*range(1, 9), 100, 101])
    versions = [int(str(row[0])) for row in rows]
    assert versions == sorted(versions)
    assert {version >> 55 for version in versions} == {0, 1}
    assert source.earliest().epoch == 0
    assert source.head().epoch == 1


def test_batch_may_start_and_end_in_different_epochs(failed_over: Path) -> None:
    source = open_source(SourceOptions.parse(failed_over))
    whole = all_rows(source)
    first, second = source.extents()
    assert [extent.epoch for extent in (first, second)] == [0, 1]
    middle = Position(1, second.file, second.start)
    parts = rows_of(source, source.split(None, middle)) + rows_of(source, source.split(middle))
    assert sorted(parts) == whole
    assert source.walk(source.earliest(), source.head(), bytes_max=10**9) == source.head()
    step, position = 0, source.earliest()
    while position != source.head():
        position, step = source.walk(position, source.head(), rows_max=1), step + 1
        assert step < 50
    assert step > 8


def test_epochs_are_numbered_as_the_reader_requests(failed_over: Path) -> None:
    source = open_source(SourceOptions.parse(failed_over))
    assert isinstance(source, LogSource)
    (_, first), (_, second) = source.epochs()
    shifted = open_source(replace(source.options, epochs=((5, second),)))
    assert isinstance(shifted, LogSource)
    assert shifted.epochs() == [(4, first), (5, second)]
    assert shifted.head() == replace(source.head(), epoch=5)
    assert len(all_rows(shifted)) == len(all_rows(source))
    with pytest.raises(ServerChanged, match="not from nobody as epoch 0"):
        open_source(replace(source.options, epochs=((0, "nobody"),))).head()


def test_stream_locates_its_batches_in_the_log_of_another_server(failed_over: Path) -> None:
    def log_of(name: str, **limits: int) -> KeptStreamLog:
        source = SourceOptions.parse(failed_over.parent / name)
        return KeptStreamLog(ReadSettings(source, TablePatterns("shop.t"), "typed", **limits))

    def planned(log: KeptStreamLog, begin: Offset, end: Offset) -> list[str]:
        source, ranges, bounds = log.plan(begin, end)
        rows = [row for row in rows_of(source, ranges, bounds) if row[4] == "insert"]
        assert all(int(str(row[0])) >> 55 == ranges[0].epoch for row in rows)
        return [str(row[8]) for row in rows]

    first, second = log_of("first"), log_of("second")
    begin = first.first()
    middle = log_of("first", rows_max=3).limited(begin, first.head_behind(begin))
    end = first.head_behind(begin)
    assert begin.server_key == middle.server_key == end.server_key != ""
    assert planned(first, begin, middle) == ["1", "2", "3"]
    # The batch was planned on a lost log; the other log has the same transactions in another order.
    assert sorted(planned(second, middle, end)) == sorted(planned(first, middle, end))
    assert len(planned(second, middle, end)) == 5
    # The next transactions are only in the second log, in the next epoch.
    moved = second.resume(end)
    assert moved.position.epoch == end.position.epoch + 1
    newest = second.head_behind(moved)
    assert planned(second, moved, newest) == ["100", "101"]
    assert planned(second, end, newest) == ["100", "101"]
    assert second.resume(newest) == newest
    lost = replace(end, gtid_set="")
    with pytest.raises(ServerChanged, match="no GTID set to go on by"):
        second.resume(lost)


@pytest.mark.parametrize(
    ("wanted", "actual", "shift"),
    [
        ([(0, "a")], [(0, "a"), (1, "b")], 0),
        ([(3, "b")], [(0, "a"), (1, "b")], 2),
        ([(0, "a"), (1, "b")], [(0, "b")], 1),
        # The log has returned to an earlier server: of the shifts without a contradiction, the one nearest to
        # 0 is chosen.
        ([(2, "a")], [(0, "a"), (1, "b"), (2, "a")], 0),
        ([(0, "a"), (1, "b"), (2, "a")], [(0, "b"), (1, "a")], 1),
        ([(0, "a")], [(0, "b")], None),
        ([(0, "a"), (1, "b")], [(0, "a"), (1, "c")], None),
    ],
)
def test_epochs_of_two_logs_are_matched_by_their_servers(
    wanted: list[tuple[int, str]], actual: list[tuple[int, str]], shift: int | None
) -> None:
    if shift is None:
        with pytest.raises(ServerChanged):
            epoch_shift(wanted, actual, "the log")
    else:
        assert epoch_shift(wanted, actual, "the log") == epoch_base(shift)


# --- Definitions ----------------------------------------------------------------------------


def test_definitions_are_those_in_force(kept: Kept) -> None:
    log = kept.log()
    first, second = log.extents()[:2]
    orders = TableName("shop", "orders")

    def columns(position: Position, name: TableName) -> list[str]:
        schema = log.schema_history(position, name).schema(name.database, name.table)
        return [] if schema is None else [column.name for column in schema.columns]

    assert columns(first.first, orders) == []
    assert columns(Position(0, first.file, first.end), orders) == ["id", "note"]
    assert columns(Position(0, second.file, second.end), orders) == ["id", "total", "remark"]
    assert columns(log.head(), orders) == ["id", "remark"]
    assert columns(Position(0, first.file, first.end), TableName("shop", "gone")) == ["id", "word"]
    assert columns(log.head(), TableName("shop", "gone")) == []


def test_inspect_accepts_a_log_folder(kept: Kept) -> None:
    done = penstock("inspect", str(kept.folder), "--rows", "--tables", "shop.gone", "--json")
    assert done.code == 0, done.err
    assert [row["word"] for row in done.objects] == ["one", "two"]


def test_schema_shows_the_definition_of_a_position(kept: Kept) -> None:
    second = kept.files.extents()[1]
    position = f"{second.file}:{second.end}"
    words = ["schema", "show", "shop.orders", "--log", str(kept.folder)]
    definition = penstock(*words, "--at", position, "--json").one
    assert [column["name"] for column in definition["columns"]] == ["id", "total", "remark"]
    assert definition["primary_key"] == ["id"]
    assert definition["position"] == position
    shown = penstock(*words)
    assert shown.code == 0, shown.err
    assert "remark" in shown.out
    assert "total" not in shown.out
    missing = penstock("schema", "show", "shop.nothing", "--log", str(kept.folder))
    assert missing.code == 3
    assert "shop.nothing" in missing.err


def test_every_error_of_a_log_has_a_hint(kept: Kept) -> None:
    source = kept.log()
    for ask in (
        lambda: source.split(Position(7, "mysql-bin.000001", 4)),
        lambda: source.split(Position(0, "mysql-bin.900000", 4)),
    ):
        with pytest.raises(PenstockError) as raised:
            ask()
        assert raised.value.hint
        assert raised.value.position
