# SPDX-License-Identifier: Apache-2.0
"""Changes logged as statements stop the readers of the tables that they name, but no other readers."""

import struct
from pathlib import Path

import pytest
import structlog

import penstock
from penstock.errors import ChecksumMismatch, StatementLogged, StreamError
from tests.support.binlog.block_cutting import SMALL_LOGS
from tests.support.binlog.events import (
    EXECUTE_LOAD_QUERY,
    GTID,
    QUERY,
    TABLE_MAP,
    XID,
    Event,
    assemble,
    events,
    query_body,
)

FILE = "binlog.000001"
MYSQL_LOG = next(log for log in SMALL_LOGS if log.stem == "mysql-9.7-1")
FORMATS = {log.stem: next(events(log.read_bytes())) for log in SMALL_LOGS}
MYSQL, MARIADB = (
    next(event for name, event in FORMATS.items() if name.startswith(family))
    for family in ("mysql", "mariadb")
)


def event(code: int, body: bytes) -> Event:
    return Event(0, code, 1, 0, 0, body)


def log_of(folder: Path, server: Event, change: Event) -> Path:
    """Write a log of one transaction whose change was logged as a statement; return its file."""
    file = folder / FILE
    begin, end = event(QUERY, query_body("BEGIN")), event(XID, struct.pack("<Q", 1))
    file.write_bytes(assemble((server, begin, change, end)))
    return file


def why_stopped(file: Path, tables: str) -> str:
    """Return the error that stops a reader of these tables, or "" if there is none."""
    try:
        rows = list(penstock.read_binlog(file, tables))
    except StatementLogged as problem:
        return problem.message
    assert rows == []
    return ""


@pytest.mark.parametrize(
    ("server", "text"),
    [
        (MYSQL, "INSERT INTO shop.orders VALUES (1)"),
        (MARIADB, "SET STATEMENT max_statement_time=1 FOR INSERT INTO shop.orders VALUES (1)"),
        (MARIADB, "ANALYZE FORMAT=JSON UPDATE shop.orders SET n = 1"),
        (MARIADB, "/*M!100100 INSERT INTO shop.orders VALUES (1) */"),
        (MYSQL, "/*!99999 ALTER TABLE shop.other ADD n INT */ DELETE FROM shop.orders"),
        (MYSQL, "CREATE TABLE shop.orders SELECT 1 AS n"),
    ],
)
def test_change_stops_readers_of_the_tables_it_names(tmp_path: Path, server: Event, text: str) -> None:
    file = log_of(tmp_path, server, event(QUERY, query_body(text)))
    assert "a change of shop.orders was logged as a statement" in why_stopped(file, "shop.orders")
    assert why_stopped(file, "shop.nothing") == ""
    assert why_stopped(file, "crm.*") == ""


def test_error_locates_the_change_and_names_how_to_skip_it(tmp_path: Path) -> None:
    file = log_of(tmp_path, MYSQL, event(QUERY, query_body("DELETE FROM shop.orders")))
    with pytest.raises(StatementLogged) as stopped:
        list(penstock.read_binlog(file, "shop.orders"))
    change = list(events(file.read_bytes()))[2]
    assert stopped.value.position == f"{FILE}:{change.offset}"
    hint = str(stopped.value.hint)
    assert f"penstock pipelines skip PIPELINE {FILE}:{change.offset}" in hint
    assert f"penstock inspect FILE --start {FILE}:{change.offset}" in hint


def test_error_locates_the_end_of_the_transaction_if_logged(tmp_path: Path) -> None:
    logged = list(events(MYSQL_LOG.read_bytes()))
    table_map = next(index for index, each in enumerate(logged) if each.code == TABLE_MAP)
    gtid, begin, _, rows, commit = logged[table_map - 2 : table_map + 3]
    assert (gtid.code, commit.code) == (GTID, XID)
    change = event(QUERY, query_body("DELETE FROM shop.orders"))
    # The statement is as long as the original, so that the length in the GTID event stays valid.
    gap = logged[table_map].size + rows.size - change.size
    change = event(QUERY, change.body + b" " * gap)
    file = tmp_path / FILE
    file.write_bytes(assemble((logged[0], gtid, begin, change, commit)))
    with pytest.raises(StatementLogged) as stopped:
        list(penstock.read_binlog(file, "shop.orders"))
    assert f"start behind it (at {FILE}:{file.stat().st_size})" in str(stopped.value.hint)


@pytest.mark.parametrize("server", [MYSQL, MARIADB], ids=["mysql", "mariadb"])
@pytest.mark.parametrize("text", ["SELECT `shop`.`restock`(7)", "DO restock(7)", "MERGE INTO shop.orders"])
def test_change_of_unknown_tables_stops_every_reader(tmp_path: Path, server: Event, text: str) -> None:
    file = log_of(tmp_path, server, event(QUERY, query_body(text)))
    assert "which tables it changed is not known" in why_stopped(file, "shop.orders")


@pytest.mark.parametrize(
    ("text", "warning", "table"),
    [
        ("/* nightly */ TRUNCATE shop.orders", "emptied", "shop.orders"),
        ("SET STATEMENT a=1 FOR TRUNCATE TABLE shop.orders WAIT 5", "emptied", "shop.orders"),
        ("CREATE OR REPLACE TABLE shop.orders (id INT)", "emptied", "shop.orders"),
        ("ALTER TABLE shop.orders DROP PARTITION p0", "came or went", "shop.orders"),
        ("ALTER TABLE crm.t EXCHANGE PARTITION p0 WITH TABLE shop.orders", "came or went", "shop.orders"),
        ("ALTER TABLE shop.orders IMPORT TABLESPACE", "came or went", "shop.orders"),
        ("DROP DATABASE shop", "a database was dropped", "shop"),
    ],
)
def test_reader_is_warned_of_rows_that_were_not_logged(
    tmp_path: Path, text: str, warning: str, table: str
) -> None:
    file = log_of(tmp_path, MARIADB, event(QUERY, query_body(text)))
    with structlog.testing.capture_logs() as warnings:
        assert list(penstock.read_binlog(file, "shop.orders")) == []
    (logged,) = warnings
    assert warning in logged["event"]
    assert table in (logged.get("table"), logged.get("database"))
    with structlog.testing.capture_logs() as warnings:
        assert list(penstock.read_binlog(file, "log.*")) == []
    assert warnings == []


def test_routine_stops_readers_of_the_databases_that_it_accessed(tmp_path: Path) -> None:
    body = query_body("SELECT `crm`.`restock`(7)", accessed=("shop", "crm"))
    file = log_of(tmp_path, MYSQL, event(QUERY, body))
    assert "routines" in why_stopped(file, "shop.orders")
    assert why_stopped(file, "log.*") == ""


def test_trigger_in_another_database_stops_its_readers(tmp_path: Path) -> None:
    body = query_body("INSERT INTO t VALUES (1)", "crm", accessed=("shop", "crm"))
    file = log_of(tmp_path, MYSQL, event(QUERY, body))
    assert "it accessed the database shop" in why_stopped(file, "shop.orders")
    assert why_stopped(file, "crm.other") == ""


@pytest.mark.parametrize("table", ["`orders`", "`shop`.`orders`"])
@pytest.mark.parametrize("server", [MYSQL, MARIADB], ids=["mysql", "mariadb"])
def test_load_data_stops_readers_of_its_table(tmp_path: Path, server: Event, table: str) -> None:
    head = "LOAD DATA"
    name = " INFILE '/tmp/it's' INTO TABLE `crm`.`t` (a' INTO"
    load = struct.pack("<IIIB", 1, len(head), len(head) + len(name), 0)
    text = f"{head}{name} TABLE {table} FIELDS TERMINATED BY ',' (`id`, @n) SET `n` = @n"
    file = log_of(tmp_path, server, event(EXECUTE_LOAD_QUERY, query_body(text, "shop", load=load)))
    assert "a change of shop.orders was logged as a statement: LOAD DATA" in why_stopped(file, "shop.orders")
    assert why_stopped(file, "crm.*") == ""
    assert why_stopped(file, "shop.other") == ""


@pytest.mark.parametrize("inside", [1, 11, 19, 40])
def test_start_inside_an_event_is_named_as_the_cause(tmp_path: Path, inside: int) -> None:
    file = log_of(tmp_path, MYSQL, event(QUERY, query_body("CREATE TABLE shop.orders (id INT)")))
    change = list(events(file.read_bytes()))[2]
    with pytest.raises(StreamError) as stopped:
        list(penstock.read_binlog(file, start=f"{FILE}:{change.offset + inside}"))
    assert "No event may start here" in str(stopped.value.hint)
    damaged = bytearray(file.read_bytes())
    damaged[change.offset + 30] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(ChecksumMismatch) as stopped_by_damage:
        list(penstock.read_binlog(file))
    assert "copy the file" in str(stopped_by_damage.value.hint)
    assert "No event may start here" not in str(stopped_by_damage.value.hint)
