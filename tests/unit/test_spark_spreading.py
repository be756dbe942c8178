# SPDX-License-Identifier: Apache-2.0
"""The shares of a comparison run in tasks of Spark, or in the process of the command."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession

from penstock.sinks.spark.sink import Settings, make
from penstock.spark import verifying


def test_targets_that_tasks_cannot_read_are_compared_in_this_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sink = make(Settings(staging="/staging"))
    share = SimpleNamespace(table=SimpleNamespace(sink=SimpleNamespace(make=lambda: sink)))
    shares: list[Any] = [share] * (verifying.SHARES_MIN + 1)
    outcomes = [(number, "suspects") for number in range(len(shares))]
    monkeypatch.setattr(verifying, "in_this_process", lambda compared, _: iter(outcomes[: len(compared)]))
    # Without a session, a task would fail.
    spreading = verifying.SparkSpreading(cast(SparkSession, None))
    assert list(spreading(shares, {})) == outcomes
