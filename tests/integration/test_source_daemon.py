# SPDX-License-Identifier: Apache-2.0
"""A daemon's log over HTTP returns the rows of its server's files, despite lost connections and daemons."""

import os
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pyarrow
import pytest

from penstock import read_binlog
from penstock.errors import (
    AuthenticationFailed,
    ConnectionLost,
    OptionInvalid,
    PenstockError,
    PositionInvalid,
    PositionPurged,
    SchemaUnknown,
    ServerBusy,
    ServerChanged,
    SourceMissing,
    StreamError,
)
from penstock.logstore.log import Log
from penstock.model import Position, Secret, TableName
from penstock.source.daemon import DaemonSource
from penstock.source.daemon_address import DaemonAddress
from penstock.source.logged_tables import LoggedTables
from penstock.source.reading import read_range
from penstock.source.source import ByteRange, Source, SourceOptions, open_source
from tests.support.daemon.process import DaemonProcess
from tests.support.logstore.folders import binlogs
from tests.support.logstore.kept_log import penstock
from tests.support.suite.fixture_types import LendServer
from tests.support.suite.patience import wait_until
from tools.servers import Proxy, Server, certificate

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")

Row = tuple[object, ...]

# Tests of differences between the families run on both; all other tests only use HTTP.
on_both = pytest.mark.parametrize("served", ["mysql", "mariadb"], indirect=True)
on_one = pytest.mark.parametrize("served", ["mysql"], indirect=True)


@dataclass
class Served:
    """A server whose log contains no column names, a daemon with the whole log, and a daemon with only the
    later part of the log.
    """

    server: Server
    whole: DaemonProcess
    later: DaemonProcess

    @property
    def url(self) -> str:
        """The URL of the first daemon alone."""
        return url_of(self.whole)

    @property
    def both(self) -> str:
        """The URLs of both daemons. The daemon with the later part of the log comes first."""
        return f"penstock://127.0.0.1:{self.later.port},127.0.0.1:{self.whole.port}/shop"


def url_of(daemon: DaemonProcess, port: int | None = None) -> str:
    return f"penstock://127.0.0.1:{port or daemon.port}/shop"


def opened(url: str, **options: str) -> DaemonSource:
    source = open_source(SourceOptions.parse(url, **options))  # type: ignore[arg-type]
    assert isinstance(source, DaemonSource)
    return source


def rows_of(
    source: Source,
    ranges: list[ByteRange] | None = None,
    schemas: Source | None = None,
    **options: int,
) -> list[Row]:
    """Return the rows of ranges in commit order, by default of the whole log."""
    read_rows: list[Row] = []
    for byte_range in source.split() if ranges is None else ranges:
        for batch in read_range(source, byte_range, None, LoggedTables(schemas or source), **options):
            for row in pyarrow.record_batch(batch).to_pylist():
                metadata = row.pop("_metadata")
                key = row["_commit_version"], metadata["row"], row["_change_type"] != "update_preimage"
                read_rows.append((*key, batch.table, metadata["gtid"], *map(str, row.items())))
    return sorted(read_rows)


def head_of(server: Server) -> tuple[str, int]:
    source = open_source(SourceOptions.parse(server.url()))
    try:
        head = source.head()
    finally:
        source.close()
    return head.file, head.offset


def daemon_of(folder: Path, server: Server, start: str = "earliest", **settings: object) -> DaemonProcess:
    instance = {"source": server.url(), "start": start}
    return DaemonProcess(folder, {"instances": {"shop": instance}, **settings})


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, lend_server: LendServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("daemons")
    for name in ("whole", "later"):
        (folder / name).mkdir()
    with lend_server(request.param, binlog_row_metadata="MINIMAL") as server:
        server.sql("CREATE DATABASE shop")
        server.sql("CREATE TABLE shop.orders (id INT PRIMARY KEY AUTO_INCREMENT, note VARCHAR(400))")
        many = (
            "INSERT INTO shop.orders (note) SELECT REPEAT('x', 300) FROM information_schema.columns LIMIT {}"
        )
        for number in range(4):
            server.sql(many.format(500 + number))
        server.sql("FLUSH BINARY LOGS")
        with daemon_of(folder / "whole", server) as whole:
            server.sql(many.format(300))
            with daemon_of(folder / "later", server, start="latest") as later:
                later.wait_for(lambda status: bool(status["state"] == "running"))
                server.sql("ALTER TABLE shop.orders ADD COLUMN total INT FIRST, CHANGE note remark TEXT")
                server.sql(many.replace("note", "remark").format(200))
                server.sql("UPDATE shop.orders SET total = 5 WHERE id < 4")
                server.sql("DROP TABLE shop.orders")
                for daemon in (whole, later):
                    daemon.wait_for_head(*head_of(server))
                yield Served(server, whole, later)


# --- The same rows --------------------------------------------------------------------------


@on_both
def test_daemon_returns_the_rows_of_the_servers_files(served: Served) -> None:
    source = opened(served.url)
    head, rows = source.head(), rows_of(source)
    files = binlogs(served.server)
    assert rows == rows_of(files, None, source)
    assert len(rows) == 4 * 500 + 6 + 300 + 200 + 6
    assert source.instance == "shop"
    assert [extent.file for extent in source.extents()][:2] == [extent.file for extent in files.extents()][:2]
    assert source.gtid_set(head) == files.gtid_set(head)


@on_one
def test_ranges_may_be_fetched_concurrently(served: Served) -> None:
    source = opened(served.url)
    whole = rows_of(source)
    ranges = []
    for extent in source.extents():
        step = max((extent.end - extent.start) // 5, 1)
        cuts = [*range(extent.start, extent.end - step, step), extent.end]
        ranges += [
            ByteRange(0, extent.file, start, other, start == extent.start) for start, other in pairwise(cuts)
        ]
    assert len(ranges) >= 8
    options = pickle.loads(pickle.dumps(source.options))
    with ThreadPoolExecutor(8) as threads:
        parts = list(threads.map(lambda start: rows_of(open_source(options), [start]), ranges))
    assert sorted(row for part in parts for row in part) == whole


@on_one
def test_read_binlog_and_inspect_accept_a_url(served: Served) -> None:
    batches = read_binlog(served.url, tables="shop.orders", columns=["id"], changes=["delete"])
    assert [row for batch in batches for row in pyarrow.record_batch(batch).to_pylist()] == []
    done = penstock("inspect", served.url, "--transactions", "--json")
    assert done.code == 0, done.err
    assert len(done.objects) >= 10


@on_one
def test_instance_shows_its_own_tables_by_default(served: Served, tmp_path: Path) -> None:
    instance = {"source": served.server.url(), "start": "earliest", "exclude_tables": ["shop.orders"]}
    with DaemonProcess(tmp_path, {"instances": {"shop": instance}}) as daemon:
        daemon.wait_for_head(*head_of(served.server))
        assert list(read_binlog(url_of(daemon))) == []
        assert sum(len(batch) for batch in read_binlog(url_of(daemon), tables="shop.*")) > 0


@on_both
def test_start_by_gtid_set_or_time_is_located_by_the_daemon(served: Served) -> None:
    source = opened(served.url)
    second = source.extents()[1].first
    located = source.find_gtid_set(source.gtid_set(second))
    assert located <= second
    assert source.find_gtid_set(source.gtid_set(source.head())) <= source.head()
    assert source.find_time(0) == source.earliest()
    assert source.find_time(int(time.time() * 1e6) + 10**9) <= source.head()


@on_both
def test_definitions_are_requested_from_the_daemon(served: Served) -> None:
    source, orders = opened(served.url), TableName("shop", "orders")
    second = source.extents()[1]
    early = source.schema_history(second.first, orders).schema("shop", "orders")
    assert early is not None
    assert [column.name for column in early.columns] == ["id", "note"]
    assert source.schema_history(source.head(), orders).schema("shop", "orders") is None
    position = f"{second.file}:{second.start}"
    shown = penstock("schema", "show", "shop.orders", "--url", served.url, "--at", position, "--json")
    assert [column["name"] for column in shown.one["columns"]] == ["id", "note"]


@on_one
def test_supplied_definition_applies_from_its_position(served: Served, tmp_path: Path) -> None:
    source, ghost = opened(served.url), TableName("shop", "ghost")
    second = source.extents()[1].first
    ddl = tmp_path / "ghost.sql"
    ddl.write_text("CREATE TABLE ghost (a INT UNSIGNED, b CHAR(3) CHARACTER SET latin1)")
    words = ("schema", "set", "shop.ghost", "--url", served.url, "--ddl", str(ddl), "--at")
    done = penstock(*words, str(second))
    assert done.code == 0, done.err
    supplied = source.schema_history(source.head(), ghost).schema("shop", "ghost")
    assert supplied is not None
    assert [column.type_text for column in supplied.columns] == ["int unsigned", "char(3)"]
    assert source.schema_history(source.earliest(), ghost).schema("shop", "ghost") is None
    late = penstock(*words, f"{source.head().file}:99999999")
    assert late.code != 0
    assert "has not reached that position" in late.err


# --- Refusals -------------------------------------------------------------------------------


@on_one
def test_error_of_the_daemon_is_raised_unchanged(served: Served) -> None:
    later = opened(url_of(served.later))
    earliest = opened(served.url).earliest()
    with pytest.raises(PositionPurged, match=r"begins with .*:\d+") as raised:
        later.split(earliest)
    assert raised.value.hint
    with pytest.raises(PositionPurged):
        later.find_gtid_set("")
    with pytest.raises(SourceMissing, match="no instance 'nothing'"):
        opened(served.url.replace("shop", "nothing")).head()
    with pytest.raises(OptionInvalid):
        later.find_gtid_set("this is no set")
    with pytest.raises(PositionInvalid):
        later.gtid_set(Position(0, "mysql-bin.900000", 4))
    with pytest.raises(ServerBusy, match="ends at"):
        later.split(None, replace(later.head(), offset=later.head().offset + 50))
    with pytest.raises(SchemaUnknown):
        LoggedTables(later).reread(TableName("shop", "gone"), later.head())


@on_one
def test_port_without_a_daemon_is_reported(served: Served) -> None:
    with pytest.raises(ConnectionLost, match="does not answer") as raised:
        opened("penstock://127.0.0.1:1/shop").head()
    assert "penstock serve" in str(raised.value)
    with pytest.raises((StreamError, ConnectionLost)):
        # A database server speaks first, and its greeting is not HTTP.
        opened(f"penstock://127.0.0.1:{served.server.port}/shop").head()


@on_one
def test_token_authorizes_a_reader_and_is_never_shown(served: Served, tmp_path: Path) -> None:
    listen = {"token": "s3cret/token"}
    with daemon_of(tmp_path, served.server, listen=listen) as daemon:
        daemon.token = listen["token"]
        daemon.wait_for_head(*head_of(served.server))
        with pytest.raises(AuthenticationFailed) as raised:
            opened(url_of(daemon)).head()
        assert "PENSTOCK" in str(raised.value) or "token" in str(raised.value)
        with pytest.raises(AuthenticationFailed) as raised:
            opened(url_of(daemon).replace("//", "//wr0ng@")).head()
        assert "wr0ng" not in str(raised.value)
        file = tmp_path / "token"
        file.write_text("s3cret/token\n")
        good = [
            opened(url_of(daemon), token="s3cret/token"),
            opened(url_of(daemon), token_file=str(file)),
            opened(f"{url_of(daemon)}?token_file={file}"),
            opened(url_of(daemon).replace("//", "//s3cret%2Ftoken@")),
        ]
        for source in good:
            assert source.head()
            shown = f"{source} {source!r} {source.options!r} {source.options.daemon}"
            assert "s3cret" not in shown
        os.environ["PENSTOCK_TOKEN"] = "s3cret/token"
        try:
            assert opened(url_of(daemon)).head()
        finally:
            del os.environ["PENSTOCK_TOKEN"]


@on_one
def test_tls_authenticates_the_daemon(served: Served, tmp_path: Path) -> None:
    folder = tmp_path / "certificate"
    certificate.make(folder)
    listen = {"tls": {"cert": str(folder / "server.pem"), "key": str(folder / "server-key.pem")}}
    log = tmp_path / "daemon"
    log.mkdir()
    with daemon_of(log, served.server, listen=listen) as daemon:
        encrypted = url_of(daemon).replace("penstock://", "penstocks://")
        with pytest.raises(AuthenticationFailed, match="cannot be trusted"):
            opened(encrypted).head()
        trusting = opened(f"{encrypted}?ssl_ca={folder / 'authority.pem'}")

        def has_begun() -> bool:
            try:
                return bool(trusting.head())
            except (ServerBusy, SourceMissing):
                return False

        wait_until(has_begun)
        assert opened(f"{encrypted}?ssl_mode=required").head()
        with pytest.raises(PenstockError):
            opened(url_of(daemon)).head()


@pytest.mark.parametrize(
    ("url", "hosts", "instance"),
    [
        ("penstock://a/shop", (("a", 7070),), "shop"),
        ("penstock://t@a:1,b/x%20y", (("a", 1), ("b", 7070)), "x y"),
        ("penstocks://[::1]:8/shop/", (("::1", 8),), "shop"),
    ],
)
def test_address_is_parsed(url: str, hosts: tuple[tuple[str, int], ...], instance: str) -> None:
    address = DaemonAddress.parse(url)
    assert address.hosts == hosts
    assert address.instance == instance
    assert (address.tls is not None) == url.startswith("penstocks")
    assert DaemonAddress.parse(str(address)) == replace(address, token=Secret(""))


@pytest.mark.parametrize(
    "url",
    [
        "penstock://a",
        "penstock://t0k3n@a:99999/shop",
        "penstock:///shop",
        "penstock://a/shop?colour=red",
        "penstock://a/shop/more",
        "penstocks://a/shop?ssl_mode=disabled",
    ],
)
def test_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(OptionInvalid) as raised:
        SourceOptions.parse(url)
    assert "t0k3n" not in str(raised.value)


def test_secret_for_another_service_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionInvalid, match="a token is for a daemon"):
        SourceOptions.parse(str(tmp_path), token="x")
    with pytest.raises(OptionInvalid, match="for a database server"):
        SourceOptions.parse("penstock://a/shop", password="x")


# --- Losses on the way ----------------------------------------------------------------------


@on_one
def test_connection_cut_anywhere_loses_and_duplicates_no_row(served: Served) -> None:
    whole = rows_of(opened(served.url))
    with Proxy(served.whole.port) as proxy:
        for after in (400, 5_000, 150_000, 400_000):
            proxy.cut_after(after, times=2)
            source = opened(url_of(served.whole, proxy.port))
            assert rows_of(source) == whole
            proxy.disarm()
        for sequence in ((400_000, 150_000), (400_000, 150_000, 5_000, 300_000)):
            for after in sequence:
                proxy.cut_after(after)
            # With this bound, a transaction is returned in parts, so a cut falls into a partly returned
            # transaction.
            source = opened(url_of(served.whole, proxy.port))
            assert rows_of(source, held_bytes_max=1) == whole, sequence
            proxy.disarm()


@on_one
def test_question_is_retried(served: Served) -> None:
    with Proxy(served.whole.port) as proxy:
        source = opened(url_of(served.whole, proxy.port))
        head = source.head()
        proxy.cut()
        assert source.head() == head


@on_both
def test_another_daemon_takes_over_in_the_middle_of_a_range(served: Served) -> None:
    source = opened(served.url)
    begin = opened(url_of(served.later)).earliest()
    expected = rows_of(source, source.split(begin))
    with Proxy(served.whole.port) as first:
        hosts = f"penstock://127.0.0.1:{first.port},127.0.0.1:{served.later.port}/shop"
        switching = opened(hosts)
        ranges = switching.split(begin)
        reading = read_range(switching, ranges[0], None, LoggedTables(switching), batch_rows_max=20)
        batches = [next(reading)]
        # The first daemon dies during a response, and does not return.
        assert first.cut() >= 1
        first.refuse()
        batches += list(reading)
        assert sum(batch.rows for batch in batches) == len(expected)
        assert rows_of(switching, ranges) == expected
        # Transactions missing from the other daemon are refused by name, not skipped.
        with pytest.raises(PositionPurged):
            switching.split(source.earliest())


@on_one
def test_first_of_several_daemons_may_be_down(served: Served) -> None:
    hosts = f"penstock://127.0.0.1:1,127.0.0.1:{served.whole.port}/shop"
    assert rows_of(opened(hosts)) == rows_of(opened(served.url))


@on_one
def test_lagging_daemon_is_waited_for_and_then_reported(served: Served) -> None:
    whole = opened(served.url)
    source = open_source(replace(whole.options, reconnect_tries=2))
    last = source.extents()[-1]
    planned = ByteRange(0, last.file, last.start, last.end + 500, aligned=True)
    with pytest.raises(ServerBusy, match="was planned"):
        list(read_range(source, planned, None, LoggedTables(source)))


# --- Epochs ---------------------------------------------------------------------------------


@on_one
def test_daemons_with_different_epoch_numbers_are_interchangeable(served: Served, tmp_path: Path) -> None:
    head = opened(served.url).head()
    gtid_set = opened(served.url).gtid_set(head)
    folder = tmp_path / "log"
    with Log.open(folder / "shop") as log:
        # This daemon's log once followed another server, whose segments are gone.
        log.begin_epoch(
            epoch=0,
            server_key="another",
            server_id=7,
            flavor="mysql" if ":" in gtid_set else "mariadb",
            version="1",
            file=head.file,
            offset=head.offset,
            gtid_set=gtid_set,
        )
    with daemon_of(tmp_path, served.server) as daemon:
        daemon.wait_for(lambda status: bool(status["state"] == "running"))
        served.server.sql("CREATE TABLE shop.fresh (id INT PRIMARY KEY)")
        served.server.sql("INSERT INTO shop.fresh VALUES (1), (2), (3)")
        for running in (served.whole, served.later, daemon):
            running.wait_for_head(*head_of(served.server))
        first, other = opened(served.url), opened(url_of(daemon))
        assert first.epochs()[0][1] == other.epochs()[1][1]
        assert (first.head().epoch, other.head().epoch) == (0, 1)
        begin = replace(other.earliest(), epoch=0)
        expected = rows_of(first, first.split(begin))
        assert len(expected) == 3
        # The ranges are planned at one daemon and read from the other daemon, with the epoch numbers of the
        # first.
        hosts = f"penstock://127.0.0.1:1,127.0.0.1:{daemon.port}/shop"
        moved = open_source(replace(SourceOptions.parse(hosts), epochs=tuple(first.epochs())))
        assert rows_of(moved, first.split(begin)) == expected
        with pytest.raises(ServerChanged, match="start by GTID set"):
            open_source(replace(SourceOptions.parse(hosts), epochs=((0, "a third"),))).head()
