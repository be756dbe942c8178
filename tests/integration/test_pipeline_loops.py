# SPDX-License-Identifier: Apache-2.0
"""Pipelines copy between two servers in both directions without a loop."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from penstock.binlog import schemas_of_server
from penstock.changes import Changes
from penstock.model import Position, ServerAddress, TablePatterns
from penstock.pipeline.loops import drop_own_changes, marked_versions
from penstock.pipeline.settings_sections import LoopSettings
from penstock.sinks.mysql.connection import connect
from penstock.sinks.mysql.drainer_marks import create_drainer_marks
from penstock.sinks.sink import Evolution, Sink, make_sink, settings_of
from penstock.source.bounds import Bounds
from penstock.source.reading import Selection, read_range
from penstock.source.source import SourceOptions, open_source, shown_tables
from tests.support.pipeline.logged_changes import targets_in, write_batch
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tools.servers import Server

DATABASE = "town"
Pair = Callable[[str], tuple[Server, Server]]
TABLES = {
    "seats": "id INT PRIMARY KEY, seat INT UNIQUE, told VARCHAR(20)",
    "visits": "page VARCHAR(20), seconds INT",
}
TAG, SERVER_ID = "penstock", 4242

MANNERS = [
    ("mysql", {"gtid_tag": TAG}, {"gtid_tags": (TAG,)}),
    ("mysql", {"connections": 3}, {"mark_table": "penstock.positions"}),
    ("mariadb", {"server_id": SERVER_ID}, {"server_ids": (SERVER_ID,)}),
    ("mariadb", {}, {"mark_table": "penstock.positions"}),
    ("mysql", {"drainer_channel": 7, "connections": 3}, {"drainer_channels": (7,)}),
]


class OneWay:
    """Replicates from one server to another, batch by batch, as a pipeline does."""

    def __init__(self, source: Server, sink: Sink, loops: LoopSettings) -> None:
        self._server = source
        self._source = open_source(SourceOptions.parse(source.url()))
        self.sink = sink
        self._loops = loops
        self._start = self._source.head()
        self._number = 0

    def run(self) -> int:
        """Copy the changes logged since the last call, and return the number of written rows."""
        begin, self._start = self._start, self._source.head()
        changes = list(self._changes(begin, self._start))
        self._number += 1
        write_batch(self.sink, changes, self._number)
        return sum(map(len, changes))

    def _changes(self, begin: Position, end: Position) -> Iterator[Changes]:
        targets = targets_in(self._server, DATABASE)
        for byte_range in self._source.split(begin, end, range_bytes=1 << 40):
            known = schemas_of_server(self._source)
            marked = marked_versions(self._loops, self._source, byte_range, Bounds(), known)
            chosen = Selection(shown_tables(self._source, TablePatterns([f"{DATABASE}.*"])))
            for batch in read_range(self._source, byte_range, chosen, schemas_of_server(self._source)):
                rows = drop_own_changes(batch.to_arrow(), self._loops, marked)
                if rows.num_rows:
                    target = targets[batch.table]
                    yield Changes(target, rows, target.name)

    def close(self) -> None:
        self._source.close()


@pytest.fixture(scope="module")
def pair(server_of: Callable[[str], Server], module_server_of: StartServer) -> Pair:
    """Return two servers of a flavor, the same two for every call."""
    return lambda flavor: (server_of(flavor), module_server_of(flavor))


@pytest.mark.deep(keep=("mysql-sink_settings0", "mariadb-sink_settings2"))
@pytest.mark.parametrize(("flavor", "sink_settings", "loops"), MANNERS)
def test_two_pipelines_between_two_servers_do_not_loop(
    flavor: str, sink_settings: dict[str, Any], loops: dict[str, Any], pair: Pair
) -> None:
    first, other = pair(flavor)
    for server in (first, other):
        server.sql(f"DROP DATABASE IF EXISTS {DATABASE}; DROP DATABASE IF EXISTS penstock")
    ways = []
    for source, target in ((first, other), (other, first)):
        source.sql(f"CREATE DATABASE {DATABASE}")
        for name, columns in TABLES.items():
            source.sql(f"CREATE TABLE {DATABASE}.{name} ({columns})")
        sink = make_sink("mysql", settings_of("mysql")(url=target.url("root"), **sink_settings))
        ways.append(OneWay(source, sink, LoopSettings(**loops)))
    for server, way in ((first, ways[1]), (other, ways[0])):
        for target in targets_in(server, DATABASE).values():
            way.sink.prepare(target, Evolution.EVOLVE)
    fill(first, 0)
    fill(other, 1000)
    # Each server's own changes cross once; afterwards there is nothing to copy.
    assert [way.run() for way in ways] == [1502, 1502]
    assert [way.run() for way in ways] == [0, 0]
    first.sql(f"UPDATE {DATABASE}.seats SET told = 'again' WHERE id = 10001")
    assert [way.run() for way in ways] == [2, 0]
    assert [way.run() for way in ways] == [0, 0]
    for table in TABLES:
        rows = [sorted(server.sql(f"SELECT * FROM {DATABASE}.{table}")) for server in (first, other)]
        assert rows[0] == rows[1]
        assert len(rows[0]) == (2 if table == "visits" else 2998)
    for way in ways:
        way.close()


def fill(server: Server, first: int) -> None:
    first *= 10
    values = ",".join(f"({number}, {number}, 'x')" for number in range(first, first + 1500))
    server.sql(f"INSERT INTO {DATABASE}.seats VALUES {values}")
    server.sql(f"DELETE FROM {DATABASE}.seats WHERE id = {first + 7}")
    server.sql(f"INSERT INTO {DATABASE}.visits VALUES ('front', {first})")
    server.sql(f"UPDATE {DATABASE}.seats SET told = 'first' WHERE id = -1")


def test_mark_of_another_drainer_channel_is_no_own_change(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE seats (id INT PRIMARY KEY)", database=database)
    session = connect(ServerAddress.parse(mysql_server.url("root")))
    create_drainer_marks(session)
    session.close()
    mysql_server.sql("INSERT INTO retl._drainer_repl_mark VALUES (0, 1, 1, ''), (0, 2, 1, '')")
    with closing(open_source(SourceOptions.parse(mysql_server.url()))) as source:
        begin = source.head()
        for channel in (1, 2):
            mysql_server.sql(
                "BEGIN; UPDATE retl._drainer_repl_mark SET val = val + 1"
                f" WHERE id = 0 AND channel_id = {channel} LIMIT 1;"
                f" INSERT INTO {database}.seats VALUES ({channel}); COMMIT"
            )
        (byte_range,) = source.split(begin, source.head(), range_bytes=1 << 40)
        loops = LoopSettings(drainer_channels=(2,))
        marked = marked_versions(loops, source, byte_range, Bounds(), schemas_of_server(source))
        chosen = Selection(shown_tables(source, TablePatterns([f"{database}.*"])))
        kept = [
            drop_own_changes(batch.to_arrow(), loops, marked)
            for batch in read_range(source, byte_range, chosen, schemas_of_server(source))
        ]
    mysql_server.sql("DROP DATABASE retl")
    assert [row["id"] for rows in kept for row in rows.to_pylist()] == [1]
