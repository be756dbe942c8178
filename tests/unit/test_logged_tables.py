# SPDX-License-Identifier: Apache-2.0
"""Readers of a kept log wait for definitions in doubt, with a timeout, and never use the stale definition."""

from pathlib import Path
from typing import Any

import pytest

from penstock.errors import SchemaPending, SchemaUnknown
from penstock.logstore.schemas import SchemaLog, definition_line, refusal_line
from penstock.model import Column, Position, TableName, TableSchema
from penstock.schema.history import SchemaHistory
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.tokens import ServerSpelling
from penstock.schema.table_definition import TableDefinition
from penstock.source import logged_tables
from penstock.source.kept import KeptSource
from penstock.source.log import FolderLog
from penstock.source.logged_tables import LoggedTables
from penstock.source.source import SourceOptions

ORDERS = TableName("shop", "orders")
TOLD = TableDefinition(TableSchema("shop", "orders", (Column("id", "bigint"),)), "utf8mb4")


def at(offset: int) -> Position:
    return Position(0, "mysql-bin.000001", offset)


@pytest.fixture
def kept(tmp_path: Path) -> SchemaLog[SchemaHistory]:
    """The definitions of a log whose table is in doubt from 200 on."""
    log = SchemaLog(tmp_path, SchemaHistory.from_json)
    log.seed(SchemaHistory(ServerDefaults(ServerSpelling(), "utf8mb4", {}, False)), at(4))
    log.apply("CREATE TABLE orders (id INT)", "shop", at(100))
    log.apply("ALTER TABLE orders FROBNICATE", "shop", at(200))
    return log


class WatchedLog(FolderLog):
    """A log in a folder that counts requests for table definitions, and calls a function for each request."""

    def __init__(self, folder: Path) -> None:
        log = FolderLog.at(str(folder))
        super().__init__(log._folder, log._disk)
        self.asked: list[Any] = []
        self.on_ask: Any = None

    def schemas(self, position: Position, name: TableName | None, *, again: bool = False) -> dict[str, Any]:
        definitions = super().schemas(position, name, again=again)
        self.asked.append((str(name), again))
        if self.on_ask is not None:
            self.on_ask()
        return definitions


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedLog:
    log = WatchedLog(tmp_path)
    monkeypatch.setattr(KeptSource, "shift", 0)
    return log


def tables_of(log: WatchedLog) -> LoggedTables:
    return LoggedTables(KeptSource(SourceOptions(instance="shop"), log))


def test_reader_waits_for_a_definition_in_doubt(kept: SchemaLog[SchemaHistory], log: WatchedLog) -> None:
    def settle_after_the_second_look() -> None:
        if len(log.asked) == 2:
            kept.settle(at(200), [definition_line(TOLD.to_json())])

    log.on_ask = settle_after_the_second_look
    schema = tables_of(log).schema("shop", "orders", at(300))
    assert schema is not None
    assert [column.type_text for column in schema.columns] == ["bigint"]
    assert len(log.asked) == 3
    before = tables_of(log).schema("shop", "orders", at(199))
    assert before is not None
    assert [column.type_text for column in before.columns] == ["int"]


def test_reader_stops_waiting_with_a_retryable_error(
    kept: SchemaLog[SchemaHistory], log: WatchedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logged_tables, "DEFINITION_PENDING_SECONDS_MAX", 0.0)
    with pytest.raises(SchemaPending, match=r"shop\.orders is still being read") as pending:
        tables_of(log).schema("shop", "orders", at(300))
    assert "ALTER TABLE orders" in pending.value.message
    assert f"penstock schema set shop.orders --log FOLDER --at {at(200)} --ddl FILE" in str(
        pending.value.hint
    )


def test_reader_stops_at_once_if_no_server_can_settle_the_doubt(
    kept: SchemaLog[SchemaHistory], log: WatchedLog
) -> None:
    kept.settle(at(200), [refusal_line(ORDERS, "the server no longer has the table")])
    with pytest.raises(SchemaUnknown, match="the server no longer has the table") as unknown:
        tables_of(log).schema("shop", "orders", at(300))
    assert str(unknown.value.hint).endswith(
        f"penstock schema set shop.orders --log FOLDER --at {at(200)} --ddl FILE"
    )
    assert len(log.asked) == 1


def test_contradicted_definition_is_requested_again(kept: SchemaLog[SchemaHistory], log: WatchedLog) -> None:
    kept.settle(at(200), [definition_line(TOLD.to_json())])
    tables = tables_of(log)
    assert tables.schema("shop", "orders", at(300)) is not None
    with pytest.raises(SchemaUnknown, match="does not know the definition"):
        tables.reread(ORDERS, at(300))
    assert log.asked == [("shop.orders", False), ("shop.orders", True)]
    better = TableDefinition(TableSchema("shop", "orders", (Column("id", "mediumint"),)), "utf8mb4")
    kept.settle(at(300), [definition_line(better.to_json())])
    assert [column.type_text for column in tables.reread(ORDERS, at(300)).columns] == ["mediumint"]
