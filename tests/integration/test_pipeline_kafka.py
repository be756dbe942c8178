# SPDX-License-Identifier: Apache-2.0
"""A pipeline on Spark into a real Kafka broker."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.integration.test_sink_kafka import broker  # noqa: F401
from tests.support.pipeline.oracle import assert_same, source_rows
from tests.support.pipeline.running import pipeline_of, run_to_end, running
from tests.support.pipeline.workload import Workload
from tests.support.sinks.kafka_reading import rows_held
from tests.support.spark.session import spark  # noqa: F401
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.nonempty import each
from tests.support.suite.patience import wait_until
from tools.kafka import Kafka
from tools.servers import Server

BINARY = {"order_lines": ["body"], "tokens": ["token"]}
# The load and the following stream overlap with these actions.
ACTIONS = 300


@pytest.mark.deep(
    guard="tests/integration/test_pipeline_spark.py::test_busy_source_and_its_target_are_equal_in_the_end"
)
def test_topics_converge_with_a_busy_source(
    spark: SparkSession,  # noqa: F811
    broker: Kafka,  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    workload = Workload(mysql_server, database, seed=21, truncates=False)
    workload.create()
    sink = {"kafka": {"servers": broker.servers, "format": "json", "tombstones": True}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, load={"chunk_rows": 60})
    with workload.busy(0.005), running(spark, settings):
        wait_until(lambda: workload.counts.total() > ACTIONS)
    run_to_end(spark, settings)
    for table in each(workload.tables):
        wanted = source_rows(mysql_server, database, table)
        actual_rows = rows_held(broker, f"{database}.{table}", BINARY.get(table, []))
        assert_same(wanted, actual_rows, key=workload.keys(table))
