# SPDX-License-Identifier: Apache-2.0
"""Loads that remove rows run in the pipeline's process if only that process can read their target."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.task_plan import COUNTS, TaskPlan
from penstock.engine.task_rows import Row
from penstock.pipeline.settings import PipelineSettings
from penstock.spark.driver import SparkDriver
from tests.support.pipeline.local_runs import notes_pipeline


class Executors(Exception):
    """Raised where a job on executors would begin."""


class Session:
    """Replaces a Spark session of two cores. It only provides settings."""

    sparkContext = SimpleNamespace(defaultParallelism=2)
    conf = SimpleNamespace(get=lambda _name: "", set=lambda _name, _value: None)

    def range(self, *_numbers: int) -> Any:
        raise Executors


@pytest.mark.parametrize(
    ("remove", "settings", "in_driver"),
    [(True, {}, True), (False, {}, False), (True, {"mode": "feed"}, False)],
    ids=["removing", "first", "feed"],
)
def test_only_a_load_that_removes_rows_of_a_mirror_runs_in_the_process_with_the_session(
    remove: bool, settings: dict[str, str], in_driver: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = Row(0, 0, 1, COUNTS, b"counts")

    def decode(*_arguments: object, **_more: object) -> Iterator[Row]:
        yield message

    monkeypatch.setattr("penstock.local.driver.decode_works", decode)
    pipeline = notes_pipeline(tmp_path, {"spark": {"staging": str(tmp_path)} | settings})
    driver = SparkDriver(Session())  # type: ignore[arg-type]
    plan = plan_of(pipeline, remove=remove)
    if in_driver:
        assert driver.run(plan) == [message]
    else:
        with pytest.raises(Executors):
            driver.run(plan)


def plan_of(pipeline: PipelineSettings, *, remove: bool) -> TaskPlan:
    """Return the plan of a batch of one chunk."""
    chunk: Any = SimpleNamespace(remove=remove)
    record: Any = SimpleNamespace(works=(chunk,), tasks=(range(1),), chunks=(chunk,), parts=1)
    sink = pipeline.sink.make()
    settings: dict[str, Any] = dict.fromkeys(TaskPlan.__dataclass_fields__) | {"steps": ()}
    return TaskPlan(
        **settings
        | {
            "record": record,
            "sink": pipeline.sink,
            "spread": sink.spread,
            "keeps_state": sink.keeps_state,
            "in_driver": False,
        }
    )
