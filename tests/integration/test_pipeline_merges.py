# SPDX-License-Identifier: Apache-2.0
"""Many tables merged into one: only the right rows are deleted when one of them is emptied or read again."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.verify import EXIT_INCOMPLETE
from penstock.local.driver import LocalDriver
from penstock.model import TableName
from penstock.pipeline.settings import load_pipeline
from penstock.pipeline.state import PipelineState
from penstock.pipeline.verify.differences import Kind
from penstock.pipeline.verify.verify import verify
from tests.support.logstore.kept_log import penstock
from tests.support.pipeline.oracle import delta_rows
from tests.support.pipeline.running import opened, run_to_end
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server


class Shards:
    """Three tables of one server that a pipeline merges. The keys of `a` start at 1, those of `b` at 11, and
    those of `c` at 21.
    """

    def __init__(self, server: Server, database: str, folder: Path, shard_column: str | None) -> None:
        self.server, self.database = server, database
        self._lake = folder / "lake"
        for first, name in enumerate("abc"):
            rows = ", ".join(f"({first * 10 + number}, '{number}')" for number in (1, 2, 3))
            server.sql(
                f"CREATE TABLE orders_{name} (id INT PRIMARY KEY, n VARCHAR(9));"
                f" INSERT INTO orders_{name} VALUES {rows}",
                database=database,
            )
        route = {"tables": f"{database}.orders_*", "to": f"{database}.orders", "shard_column": shard_column}
        steps: list[dict[str, Any]] = [{"map": {"add": {"n": "cast(n AS int)"}}}, {"route": route}]
        written = {
            "source": {"url": server.url("root"), "name": "shop", "tables": f"{database}.*"},
            "sink": {"delta": {"path": str(self._lake)}},
            "batch": {"interval": 0},
            "steps": steps,
            "errors": {"table": "skip_table"},
        }
        self.file = folder / "shop.yaml"
        self.file.write_text(json.dumps(written), encoding="utf-8")
        self.settings = load_pipeline(self.file)

    def keys(self) -> list[int]:
        return sorted(int(row["id"]) for row in delta_rows(f"{self._lake}/{self.database}/orders"))

    def stopped(self) -> list[str]:
        with opened(self.settings) as state:
            progress = state.checkpoint()
        assert progress is not None
        return sorted(progress.stopped)

    def table(self, name: str) -> TableName:
        return TableName(self.database, f"orders_{name}")

    def ask(self, *names: str) -> None:
        with closing(PipelineState.open(self.settings.state, self.settings.name)) as state:
            for name in names:
                state.request_resnapshot("shop", self.table(name))


@pytest.fixture
def shards(
    mysql_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Shards:
    return Shards(mysql_server, fresh_database(mysql_server), tmp_path, request.param)


@pytest.mark.deep(
    guard="tests/unit/test_merged_tables.py::test_shard_column_identifies_the_rows_of_each_table"
)
@pytest.mark.parametrize("shards", ["shard"], indirect=True)
def test_truncated_shard_loses_only_its_own_rows(
    shards: Shards,
) -> None:
    run_to_end(LocalDriver(2), shards.settings)
    assert shards.keys() == [1, 2, 3, 11, 12, 13, 21, 22, 23]
    # A row that no step can process makes the pipeline skip `b`; `c` is dropped, and its rows remain.
    shards.server.sql(
        "INSERT INTO orders_b VALUES (14, 'none'); DELETE FROM orders_b WHERE id = 11; DROP TABLE orders_c",
        database=shards.database,
    )
    run_to_end(LocalDriver(2), shards.settings)
    assert shards.stopped() == [f"shop/{shards.table('b')}"]
    shards.server.sql("TRUNCATE orders_a; INSERT INTO orders_a VALUES (4, '4')", database=shards.database)
    run_to_end(LocalDriver(2), shards.settings)
    assert shards.keys() == [4, 11, 12, 13, 21, 22, 23]
    assert shards.stopped() == [f"shop/{shards.table('b')}"]
    # The rows of `b` are not compared; the rows of `c` belong to no source.
    (result,) = verify(shards.settings, mend=True).results
    assert {(difference.row["id"], difference.kind) for difference in result.found} == {
        (key, Kind.EXTRA) for key in (21, 22, 23)
    }
    assert [table.name for table in result.table.left_out] == [str(shards.table("b"))]
    assert shards.keys() == [4, 11, 12, 13]
    ran = penstock("verify", shards.file)
    assert ran.code == EXIT_INCOMPLETE, ran
    assert f"the rows of {shards.table('b')} were left out" in ran.out
    assert "not everything was compared" in ran.out


@pytest.mark.deep(
    guard="tests/unit/test_merged_tables.py::test_shard_column_identifies_the_rows_of_each_table"
)
@pytest.mark.parametrize("shards", [None], indirect=True)
def test_rows_stay_if_they_may_belong_to_an_abandoned_shard(
    shards: Shards,
) -> None:
    run_to_end(LocalDriver(2), shards.settings)
    shards.server.sql(
        "INSERT INTO orders_b VALUES (14, 'none'); DELETE FROM orders_b WHERE id = 11",
        database=shards.database,
    )
    run_to_end(LocalDriver(2), shards.settings)
    shards.server.sql("TRUNCATE orders_a; INSERT INTO orders_a VALUES (4, '4')", database=shards.database)
    run_to_end(LocalDriver(2), shards.settings)
    # The rows that `a` lost cannot be told from those of `b`, so the error names `a`, and `a` is skipped as
    # well.
    assert shards.stopped() == [f"shop/{shards.table(name)}" for name in "ab"]
    assert set(shards.keys()) >= {11, 12, 13, 21, 22, 23}
    (result,) = verify(shards.settings, mend=True).results
    assert not result.found
    assert "the pipeline goes on without it" in result.open
    (line,) = map(json.loads, penstock("verify", shards.file, "--json").out.splitlines())
    assert (line["equal"], line["complete"], line["open"]) == (False, False, result.open)
    # Both tables are read again at once. The rows of a table that was dropped in the meantime are deleted,
    # and do not stop the pipeline.
    shards.server.sql(
        "UPDATE orders_b SET n = 14 WHERE id = 14; DROP TABLE orders_c", database=shards.database
    )
    shards.ask("a", "b")
    run_to_end(LocalDriver(2), shards.settings)
    assert shards.stopped() == []
    assert shards.keys() == [4, 12, 13, 14]
