# SPDX-License-Identifier: Apache-2.0
"""Row changes as a Spark data source: `format("penstock")`, batch and streaming.

Spark discovers the source if Penstock is installed. Otherwise, `register(spark)` registers it in a session.
`decode_table` converts envelope rows into typed rows.
"""

from typing import Any

from penstock.errors import DependencyMissing

try:
    import pyspark.sql.datasource  # noqa: F401
except ImportError as problem:
    raise DependencyMissing(
        f"PySpark 4.0 or newer is needed here: {problem}", hint="pip install 'penstock[spark]'"
    ) from problem

from penstock.spark.decode import decode_table
from penstock.spark.source import PenstockDataSource

__all__ = ["PenstockDataSource", "decode_table", "register"]


def register(spark: Any) -> None:
    """Register `format("penstock")` in one Spark session, classic or Connect."""
    spark.dataSource.register(PenstockDataSource)
