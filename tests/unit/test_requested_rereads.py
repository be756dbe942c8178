# SPDX-License-Identifier: Apache-2.0
"""How statements cause requests to read tables again."""

from pathlib import Path

import pytest

from penstock.engine.loading import Loading
from penstock.model import Position, TableName
from penstock.pipeline.settings import pipeline_of_values
from penstock.pipeline.state import PipelineState

ORDERS, USERS = TableName("shop", "orders"), TableName("shop", "users")


@pytest.mark.parametrize(
    ("asked", "requested"),
    [
        # The table is read only once, after all of the statements.
        ([(ORDERS, False)] * 3, [(ORDERS, False)]),
        ([(ORDERS, True), (ORDERS, False), (USERS, False)], [(ORDERS, True), (USERS, False)]),
        # A request that deletes no rows is not enough for a statement that deletes rows.
        ([(ORDERS, False), (ORDERS, True)], [(ORDERS, False), (ORDERS, True)]),
    ],
)
def test_statements_share_a_request_that_has_not_begun(
    tmp_path: Path, asked: list[tuple[TableName, bool]], requested: list[tuple[TableName, bool]]
) -> None:
    settings = pipeline_of_values(
        {
            "name": "one",
            "source": {"url": "mysql://root@127.0.0.1", "name": "here", "tables": ["shop.*"]},
            "sink": {"duckdb": {"path": str(tmp_path / "lake.duckdb")}},
            "state": f"sqlite:{tmp_path / 'state.db'}",
        }
    )
    state = PipelineState.open(settings.state, settings.name)
    try:
        state.take()
        loading = Loading(settings, state, settings.make_sink(), cores=1)
        for number, (table, remove) in enumerate(asked):
            loading.reread("here", table, Position(0, "binlog.000001", 1000 + number), remove=remove)
        by_time = sorted(state.requests(), key=lambda request: request.asked_us)
        assert [(request.table, request.remove) for request in by_time] == requested
        # A reload that has begun may have read rows before a later statement.
        state.note_request(by_time[0], "running")
        loading.reread("here", *asked[0][:1], Position(0, "binlog.000002", 4), remove=asked[0][1])
        assert len(state.requests()) >= len(requested)
        assert any(request.state == "asked" and request.table == asked[0][0] for request in state.requests())
    finally:
        state.close()
