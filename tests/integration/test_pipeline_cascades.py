# SPDX-License-Identifier: Apache-2.0
"""Rows changed by foreign keys but not logged: a pipeline refuses such keys, or reloads the children."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import OptionInvalid
from penstock.local.driver import LocalDriver
from penstock.model import TableName
from penstock.pipeline.cascades import CascadeWatch, may_cascade
from penstock.pipeline.preview import preview
from penstock.pipeline.settings import PipelineSettings
from tests.support.pipeline.changes_made import Made, changes_of, delete, insert, target_of, update
from tests.support.pipeline.oracle import differences, mysql_rows, source_rows
from tests.support.pipeline.running import pipeline_of, run_to_end
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

_TABLES = """
    CREATE TABLE parent (id INT PRIMARY KEY, code INT UNIQUE, name VARCHAR(9));
    CREATE TABLE child (id INT PRIMARY KEY, parent INT, UNIQUE (id, parent),
        CONSTRAINT of_parent FOREIGN KEY (parent) REFERENCES parent (id) ON DELETE CASCADE ON UPDATE CASCADE);
    CREATE TABLE grandchild (id INT PRIMARY KEY, child INT,
        CONSTRAINT of_child FOREIGN KEY (child) REFERENCES child (id) ON DELETE SET NULL);
    INSERT INTO parent VALUES (1, 1, 'a'), (2, 2, 'b'), (3, 3, 'c');
    INSERT INTO child VALUES (10, 1), (20, 2), (30, 3);
    INSERT INTO grandchild VALUES (100, 10), (200, 20), (300, 30)"""


def settings_of(
    server: Server, database: str, folder: Path, sink: Mapping[str, Any] | None = None, **more: Any
) -> PipelineSettings:
    lake = {"delta": {"path": str(folder / "lake")}}
    return pipeline_of(server, database, sink or lake, folder, **more)


def partial_update(absent: str) -> list[Made]:
    """Return an update whose images lack a column."""
    return [replace(image, absent=[absent]) for image in update(1, {"id": 1}, {"id": 1})]


@pytest.mark.parametrize(
    ("changes", "cascades"),
    [
        (insert(1, id=1, code=1), False),
        (delete(1, id=1, code=1), True),
        (update(1, {"id": 1, "code": 1}, {"id": 1, "code": 1, "name": "b"}), False),
        (update(1, {"id": 1, "code": 1}, {"id": 2, "code": 1}), True),
        (update(1, {"id": 1, "code": 1}, {"id": 1, "code": None}), True),
        (partial_update("code"), True),
        (partial_update("name"), False),
    ],
)
def test_changes_of_referenced_columns_may_cascade(changes: Any, cascades: bool) -> None:
    parent = target_of({"id": "int", "code": "int", "name": "varchar(9)"})
    assert may_cascade(changes_of(parent, changes).rows, {"ID", "code"}) == cascades


def test_unlogged_foreign_key_is_refused_by_name(
    mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mariadb_server)
    mariadb_server.sql(_TABLES, database=database)
    settings = settings_of(mariadb_server, database, tmp_path)
    fatal = [finding["what"] for finding in preview(settings)["findings"] if finding["fatal"]]
    assert len(fatal) == 2
    assert f"{database}.child: foreign key of_parent (ON DELETE CASCADE ON UPDATE CASCADE)" in fatal[0]
    with pytest.raises(OptionInvalid, match=r"of_parent.*of_child") as raised:
        CascadeWatch(settings, settings.make_sink()).look("binlog.000001:4")
    assert "DROP FOREIGN KEY `of_parent`" in str(raised.value)
    assert raised.value.position == "binlog.000001:4"


def test_children_and_grandchildren_are_reloaded_if_configured(
    mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mariadb_server)
    mariadb_server.sql(_TABLES, database=database)
    settings = settings_of(mariadb_server, database, tmp_path, on_cascade="reread")
    assert not any(finding["fatal"] for finding in preview(settings)["findings"])
    watch = CascadeWatch(settings, settings.make_sink())
    watch.look()
    assert watch.parents == {f"shop/{database}.parent": {"id"}, f"shop/{database}.child": {"id"}}
    children = watch.children("shop", [f"shop/{database}.parent"])
    assert children == [TableName(database, "child"), TableName(database, "grandchild")]
    # A feed cannot be compared, and changes of an unread parent are invisible.
    feed = settings_of(
        mariadb_server, database, tmp_path, {"files": {"path": str(tmp_path)}}, on_cascade="reread"
    )
    with pytest.raises(OptionInvalid, match="cannot be compared"):
        CascadeWatch(feed, feed.make_sink()).look()
    source = {"url": mariadb_server.url("root"), "name": "shop", "tables": f"{database}.*child"}
    alone = settings_of(mariadb_server, database, tmp_path, on_cascade="reread", source=source)
    with pytest.raises(OptionInvalid, match=rf"changes of {database}\.parent.*are not among"):
        CascadeWatch(alone, alone.make_sink()).look()
    ignoring = settings_of(mariadb_server, database, tmp_path, on_cascade="ignore")
    watch = CascadeWatch(ignoring, ignoring.make_sink())
    watch.look()
    assert not watch.parents


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_cascades.py::"
    "test_children_and_grandchildren_are_reloaded_if_configured"
)
def test_pipeline_follows_changes_made_by_foreign_keys(
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mariadb_server)
    mariadb_server.sql(_TABLES, database=database)
    sink = {"mysql": {"url": mysql_server.url("root")}}
    with pytest.raises(OptionInvalid, match="of_parent"):
        run_to_end(LocalDriver(2), settings_of(mariadb_server, database, tmp_path, sink))
    settings = settings_of(mariadb_server, database, tmp_path, sink, on_cascade="reread")
    run_to_end(LocalDriver(2), settings)
    mariadb_server.sql(
        "UPDATE parent SET name = 'x'; DELETE FROM parent WHERE id = 1;"
        "UPDATE parent SET id = 4 WHERE id = 3; INSERT INTO child VALUES (40, 4)",
        database=database,
    )
    run_to_end(LocalDriver(2), settings)
    for table in ("parent", "child", "grandchild"):
        wanted = source_rows(mariadb_server, database, table)
        assert not differences(wanted, mysql_rows(mysql_server, database, table), key=("id",)), table
    mysql_server.sql(f"DROP DATABASE {database}")
