# SPDX-License-Identifier: Apache-2.0
"""The engines that run a pipeline in a test: one process, or Spark."""

from typing import TYPE_CHECKING

import pytest

from penstock.local.driver import LocalDriver

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(params=["local", "spark"])
def engine(request: pytest.FixtureRequest) -> "SparkSession | LocalDriver":
    """Run a test once in this process, and once on the Spark session of the module's fixture `spark`.

    If a test is about rules that both engines share, mark it with `deep(keep=("local",))`, so that it runs on
    Spark only in the deep tier.
    """
    return LocalDriver() if request.param == "local" else request.getfixturevalue("spark")
