# SPDX-License-Identifier: Apache-2.0
"""Row changes as a Spark data source: `format("penstock")`, batch and streaming.

Spark finds the source by itself where Penstock is installed; `register(spark)` names it in a session whose
driver came by the package another way. `decode_table` makes envelope rows typed.
"""

from typing import Any

from penstock.errors import DependencyMissing

try:
    import pyspark.sql.datasource  # noqa: F401
except ImportError as problem:
    raise DependencyMissing(
        f"PySpark 4.2 or newer is needed here: {problem}", hint="pip install 'penstock[spark]'"
    ) from problem

from penstock.spark.decode import decode_table
from penstock.spark.source import PenstockDataSource

__all__ = ["PenstockDataSource", "decode_table", "register"]


def register(spark: Any) -> None:
    """Make `format("penstock")` known to one Spark session, classic or Connect."""
    spark.dataSource.register(PenstockDataSource)
