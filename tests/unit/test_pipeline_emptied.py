# SPDX-License-Identifier: Apache-2.0
"""How a statement that empties a source table affects the targets that contain the table's rows."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from penstock.changes import Target
from penstock.engine import tables as tables_module
from penstock.engine.tables import PipelineTables
from penstock.engine.task_plan import OF_STATEMENT, OF_TARGET, Surprise, place_key
from penstock.engine.tracked_table import Learned
from penstock.errors import SchemaChanged
from penstock.model import Column, Position, TableName
from penstock.pipeline.settings import PipelineSettings, pipeline_of_values
from penstock.pipeline.state import PipelineState
from penstock.source.reading import LoggedStatement

ORDERS = Target(
    TableName("shop", "orders"),
    (Column("id", "int", None, False), Column("region", "varchar(20)", "utf8mb4", True)),
    ("id",),
)
EMPTYING = (
    "TRUNCATE orders",
    "CREATE OR REPLACE TABLE orders (id INT PRIMARY KEY)",
    "RENAME TABLE o TO orders",
)


def settings_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *steps: dict[str, Any],
    sink: str = "delta",
    mode: str = "mirror",
) -> PipelineSettings:
    """Return a pipeline whose single source has the table ORDERS."""
    monkeypatch.setattr(tables_module, "targets_of", lambda *_: [ORDERS])
    monkeypatch.setattr(tables_module, "tables_on_servers", lambda _: {})
    source: Mapping[str, Any] = {"url": "mysql://root@127.0.0.1", "name": "here", "tables": ["shop.orders"]}
    return pipeline_of_values(
        {
            "name": "one",
            "source": source,
            "sink": {sink: {"path": str(tmp_path / "lake"), "mode": mode} if sink == "delta" else {}},
            "steps": list(steps),
            "state": f"sqlite:{tmp_path / 'state.db'}",
        }
    )


def met(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    statement: str,
    *steps: dict[str, Any],
    sink: str = "delta",
    mode: str = "mirror",
) -> tuple[list[str], list[bool]]:
    """Return the emptied targets, and for each table to be reloaded, whether its extra rows are deleted."""
    settings = settings_of(tmp_path, monkeypatch, *steps, sink=sink, mode=mode)
    asked: dict[str, bool] = {}

    def reread(_: str, __: TableName, because: object, *, remove: bool = False) -> None:
        # As with a pipeline's own requests, the first request wins.
        asked.setdefault(str(because), remove)

    state = PipelineState.open(settings.state, settings.name)
    try:
        state.take()
        tables = PipelineTables(settings, state, settings.make_sink(), settings.make_steps(), reread)
        tables.open()
        at = Position(0, "binlog.000001", 1000)
        name = frozenset({ORDERS.name})
        emptied = frozenset[TableName]() if statement.upper().startswith(("RENAME", "ALTER")) else name
        unlogged = name if "PARTITION" in statement else frozenset()
        logged_statement = LoggedStatement(
            statement, "shop", at, at, name, frozenset(), emptied, unlogged=unlogged
        )
        learned = Learned()
        tables.learn([Surprise(OF_STATEMENT, 0, 0, "here", logged_statement)], learned, {})
        names = learned.statements[place_key("here", at)].values()
        return [str(name) for name in names], list(asked.values())
    finally:
        state.close()


@pytest.mark.parametrize("statement", EMPTYING)
@pytest.mark.parametrize(
    "step",
    [
        {"route": {"to": "lake.all"}},
        {"route": {"tables": "shop.*", "to": "lake.{table}"}},
        {"route": {"to": "lake.orders_{region}"}},
        {"shard": {"of": 2, "keep": 0}},
        {"soft_delete": {}},
    ],
    ids=["one name", "the table's name", "named by rows", "a shard", "soft deletes"],
)
def test_truncated_table_is_compared_if_its_target_may_hold_foreign_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, step: dict[str, Any]
) -> None:
    assert met(tmp_path, monkeypatch, statement, step) == ([], [True])


def test_truncated_table_empties_its_own_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert met(tmp_path, monkeypatch, EMPTYING[0]) == (["shop.orders"], [])


def test_archive_keeps_the_rows_of_a_truncated_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only, route = {"only": ["insert", "update"]}, {"route": {"to": "lake.all"}}
    assert met(tmp_path, monkeypatch, EMPTYING[0], only) == ([], [])
    assert met(tmp_path, monkeypatch, EMPTYING[0], route, only) == ([], [])


def test_truncated_table_with_incomparable_rows_stops_the_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = {"only": {"kinds": ["insert", "update", "delete"], "load": False}}
    assert met(tmp_path, monkeypatch, EMPTYING[0], only) == (["shop.orders"], [])
    with pytest.raises(SchemaChanged, match="may have rows that stay") as caught:
        met(tmp_path, monkeypatch, EMPTYING[0], {"route": {"to": "lake.all"}}, only)
    assert "load: true" in str(caught.value.hint)


VALUES_CHANGED = "ALTER TABLE orders ADD COLUMN v INT NOT NULL DEFAULT 7"
ROWS_CHANGED = "ALTER TABLE orders DROP PRIMARY KEY, ADD PRIMARY KEY (region)"


@pytest.mark.parametrize(
    ("statement", "emptied"),
    [
        (VALUES_CHANGED, []),
        (ROWS_CHANGED, ["shop.orders"]),
        ("RENAME TABLE o TO orders", ["shop.orders"]),
        ("RENAME TABLE orders TO _orders_old, _orders_new TO orders", ["shop.orders"]),
    ],
)
def test_history_includes_rows_that_changed_without_being_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str, emptied: list[str]
) -> None:
    """A history cannot be compared with its source, so if rows may be missing, all periods end first."""
    assert met(tmp_path, monkeypatch, statement, mode="history") == (emptied, [False])


def test_copy_that_replaces_a_table_is_compared_unless_its_tool_guarantees_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand = "RENAME TABLE orders TO _orders_del, _orders_gho TO orders"
    assert met(tmp_path, monkeypatch, by_hand) == ([], [True])
    by_tool = by_hand.replace("RENAME", "rename /* gh-ost */")
    assert met(tmp_path, monkeypatch, by_tool) == ([], [])


def test_history_of_several_tables_stops_if_one_of_them_loses_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SchemaChanged, match="its target may have rows of other tables") as caught:
        met(tmp_path, monkeypatch, "TRUNCATE orders", {"route": {"to": "lake.all"}}, mode="history")
    assert "pipelines skip one binlog.000001:1000" in str(caught.value.hint)


@pytest.mark.parametrize("statement", [ROWS_CHANGED, "ALTER TABLE orders DROP PARTITION a"])
def test_target_that_cannot_be_compared_is_emptied_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    assert met(tmp_path, monkeypatch, statement, sink="redis") == (["shop.orders"], [False])
    with pytest.raises(SchemaChanged, match="its target may have rows of other tables"):
        met(tmp_path, monkeypatch, statement, {"route": {"to": "lake.all"}}, sink="redis")


@pytest.mark.parametrize("statement", [VALUES_CHANGED, ROWS_CHANGED, "RENAME TABLE o TO orders"])
def test_feed_reports_rows_that_changed_without_being_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    with structlog.testing.capture_logs() as reported:
        assert met(tmp_path, monkeypatch, statement, mode="feed")[1] == []
    warnings = [entry for entry in reported if entry["log_level"] == "warning"]
    assert [entry["table"] for entry in warnings] == ["shop.orders"]
    assert "penstock resnapshot one shop.orders" in warnings[0]["hint"]


@pytest.mark.parametrize("resets", [1, 2])
def test_targets_named_by_rows_survive_a_reset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resets: int
) -> None:
    """Tables that no row names any more are still reloaded and emptied by their name."""
    settings = settings_of(tmp_path, monkeypatch, {"route": {"to": "lake.orders_{region}"}})
    north = replace(ORDERS, name=TableName("lake", "orders_north"))

    def opened(state: PipelineState) -> PipelineTables:
        steps = settings.make_steps()
        tables = PipelineTables(settings, state, settings.make_sink(), steps, lambda *_, **__: None)
        tables.open()
        return tables

    state = PipelineState.open(settings.state, settings.name)
    state.take()
    tables = opened(state)
    assert tables.targets == {}
    tables.learn([Surprise(OF_TARGET, 0, 0, "here", ("here/shop.orders", north))], Learned(), {})
    assert list(tables.targets) == [north.name]
    state.close()
    for _ in range(resets):
        state = PipelineState.open(settings.state, settings.name)
        state.reset()
        state.close()
    state = PipelineState.open(settings.state, settings.name)
    state.take()
    assert list(opened(state).targets) == [north.name]
    assert list(opened(state).targets) == [north.name]
    state.close()
