# SPDX-License-Identifier: Apache-2.0
"""Tables that must be reloaded after a loss of log: a comparison reduces the reload to the rows that
differ.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConnectionLost
from penstock.pipeline.settings import PipelineSettings, pipeline_of_values
from penstock.pipeline.state import PipelineState
from penstock.pipeline.verify import narrowing
from penstock.pipeline.verify.comparison import TableResult, in_this_process
from penstock.pipeline.verify.differences import Difference, Kind
from penstock.pipeline.verify.narrowing import narrow_rereads
from penstock.pipeline.verify.shares import ComparedTable
from penstock.pipeline.verify.source_rows import SourceTable
from penstock.pipeline.verify.verify import Verification
from tests.support.pipeline.changes_made import target_of

ORDERS = target_of({"id": "int", "note": "varchar(20)"}, name="shop.orders")
CHANGED = Difference(Kind.CHANGED, 7, {"id": 7, "note": "a"}, {"id": 7, "note": "b"}, ("note",))
EXTRA = Difference(Kind.EXTRA, 8, None, {"id": 8, "note": "b"})
UNSETTLED = Difference(Kind.UNSETTLED, 9, {"id": 9, "note": "a"}, {"id": 9, "note": "b"})


@pytest.fixture
def settings(tmp_path: Path) -> PipelineSettings:
    source = {"url": "mysql://root@127.0.0.1:1", "name": "here", "tables": "shop.*", "on_lost": "repair"}
    values = {"name": "one", "source": source, "sink": {"delta": {"path": str(tmp_path)}}}
    return pipeline_of_values(values, tmp_path)


@pytest.fixture
def state(settings: PipelineSettings) -> Iterator[PipelineState]:
    state = PipelineState.open(settings.state, settings.name)
    state.take()
    state.request_resnapshot("here", ORDERS.name, remove=True)
    yield state
    state.close()


def compared(settings: PipelineSettings, *differing: Difference, **more: Any) -> TableResult:
    source = SourceTable(settings.source("here"), ORDERS)
    table = ComparedTable(ORDERS, (source,), (), settings.sink, ("id", "note"))
    return TableResult(table, found=list(differing), **more)


def waiting(state: PipelineState) -> list[tuple[str | None, bool]]:
    return [(wish.where, wish.remove) for wish in state.requests() if wish.state == "asked"]


@pytest.mark.parametrize(
    ("differing", "more", "wanted"),
    [
        ([], {}, []),
        ([CHANGED], {}, [("(`id`=7)", False)]),
        ([CHANGED, EXTRA], {}, [("(`id`=7) OR (`id`=8)", True)]),
        ([CHANGED, UNSETTLED], {}, [(None, True)]),
        ([CHANGED], {"beyond": 3}, [(None, True)]),
        ([], {"open": "it is not loaded"}, [(None, True)]),
    ],
)
def test_differing_rows_are_read_again_instead_of_their_table(
    settings: PipelineSettings,
    state: PipelineState,
    monkeypatch: pytest.MonkeyPatch,
    differing: list[Difference],
    more: dict[str, Any],
    wanted: list[tuple[str | None, bool]],
) -> None:
    results = [compared(settings, *differing, **more)]
    monkeypatch.setattr(narrowing, "verify", lambda *_, **__: Verification(results, {}, running=True))
    narrow_rereads(settings, state, in_this_process)
    assert waiting(state) == wanted


def test_tables_that_cannot_be_compared_are_read_whole(
    settings: PipelineSettings, state: PipelineState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Verification:
        raise ConnectionLost("the target is away")

    monkeypatch.setattr(narrowing, "verify", fail)
    narrow_rereads(settings, state, in_this_process)
    assert waiting(state) == [(None, True)]
