# SPDX-License-Identifier: Apache-2.0
"""Transactions that a MySQL server has logged, but neither synced nor added to gtid_executed.

A delay between the write of a transaction and its sync holds the server in that state.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from penstock.model import Position, ServerAddress
from penstock.mysql.connection import connect
from penstock.mysql.start import StartAt, begin_after, begin_empty
from penstock.source.files import FileSource
from penstock.source.server import ServerSource
from penstock.source.source import SourceOptions
from penstock.source.walk import TransactionWalk
from tests.support.suite.fixture_types import StartServer
from tests.support.suite.patience import wait_until
from tools.servers import Server

DELAY_US = 200_000
# Commits do not finish in the order in which they are logged, and each is synced before it is added to
# gtid_executed.
SLOW = {"sync_binlog": "1", "binlog_order_commits": "OFF", "binlog_group_commit_sync_delay": str(DELAY_US)}


@pytest.fixture
def slow_server(start_server: StartServer) -> Server:
    """A server with an empty table `d.t` and a delay between the write of each commit and its sync."""
    server = start_server()
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (a INT)")
    for name, value in SLOW.items():
        server.sql(f"SET GLOBAL {name} = {value}")
    return server


@contextmanager
def slow_commit(server: Server, source: ServerSource) -> Iterator[tuple[Position, Future[object]]]:
    """Yield the end of the log before a commit, while the commit is logged but not synced."""
    with ThreadPoolExecutor() as pool:
        before = source.head()
        commit: Future[object] = pool.submit(server.sql, "INSERT INTO d.t VALUES (1)")
        wait_until(lambda: source.head() != before)
        yield before, commit


def test_positions_are_paired_with_the_transactions_logged_before_them(slow_server: Server) -> None:
    address = ServerAddress.parse(slow_server.url("root"))
    source = ServerSource(SourceOptions(address=address, instance="shop"))
    with connect(address) as connection, slow_commit(slow_server, source) as (before, commit):
        executed = connection.executed()
        latest = begin_empty(connection, StartAt(), source, 0)
        assert not executed.contains(latest.gtid_set), "every logged transaction was counted already"
        assert latest.position > before
        # The set lacks a transaction that is in the log, so the range after the set starts before that
        # transaction.
        after = begin_after(connection, executed.text, source, 0)
        assert after.position == before
        assert executed.contains(after.gtid_set)
        commit.result()
    files = FileSource(SourceOptions(paths=(str(slow_server.binlog_files()[0].parent / "*-bin.*[0-9]"),)))
    for beginning in (latest, after):
        assert files.gtid_set(beginning.position) == beginning.gtid_set


def test_range_to_the_end_of_the_log_holds_an_unsynced_transaction(
    slow_server: Server,
) -> None:
    source = ServerSource(SourceOptions(address=ServerAddress.parse(slow_server.url()), instance="shop"))
    with slow_commit(slow_server, source) as (before, _):
        (byte_range,) = source.split(before, source.head())
        assert sum(batch.num_rows for batch in TransactionWalk(source, byte_range)) == 1
