# SPDX-License-Identifier: Apache-2.0
"""Changes that were logged as statements stop the readers of the tables they name, and no others."""

import struct
from pathlib import Path

import pytest

import penstock
from penstock.errors import StatementLogged
from tests.binlog_bytes import EXECUTE_LOAD_QUERY, QUERY, XID, Event, assemble, events, query_body
from tests.block_cutting import SMALL_LOGS

FILE = "binlog.000001"
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
    """Return what stops a reader of these tables, "" for nothing."""
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


def test_error_says_where_the_change_is_and_how_to_pass_over_it(tmp_path: Path) -> None:
    file = log_of(tmp_path, MYSQL, event(QUERY, query_body("DELETE FROM shop.orders")))
    with pytest.raises(StatementLogged) as stopped:
        list(penstock.read_binlog(file, "shop.orders"))
    change = list(events(file.read_bytes()))[2]
    assert stopped.value.position == f"{FILE}:{change.offset}"
    assert "penstock pipelines skip" in str(stopped.value.hint)


@pytest.mark.parametrize("server", [MYSQL, MARIADB], ids=["mysql", "mariadb"])
@pytest.mark.parametrize("text", ["SELECT `shop`.`restock`(7)", "DO restock(7)", "MERGE INTO shop.orders"])
def test_change_of_unknown_tables_stops_every_reader(tmp_path: Path, server: Event, text: str) -> None:
    file = log_of(tmp_path, server, event(QUERY, query_body(text)))
    assert "which tables it changed is not known" in why_stopped(file, "shop.orders")


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
