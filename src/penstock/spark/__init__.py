# SPDX-License-Identifier: Apache-2.0
"""Row changes as a Spark data source: `format("penstock")`, batch and streaming.

Spark discovers the source if Penstock is installed. Otherwise, `register(spark)` registers it in a session.
`decode_table` converts envelope rows into typed rows.

Names are imported when they are first used, because an executor imports this package but needs only
`partition`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.errors import DependencyMissing

try:
    import pyspark.sql.datasource  # noqa: F401
except ImportError as problem:
    raise DependencyMissing(
        f"PySpark 4.0 or newer is needed here: {problem}", hint="pip install 'penstock[spark]'"
    ) from problem

if TYPE_CHECKING:
    from penstock.spark.decode import decode_table
    from penstock.spark.source import PenstockDataSource

__all__ = ["PenstockDataSource", "decode_table", "register"]

_HOMES = {"PenstockDataSource": "penstock.spark.source", "decode_table": "penstock.spark.decode"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def register(spark: Any) -> None:
    """Register `format("penstock")` in one Spark session, classic or Connect."""
    from penstock.spark.source import PenstockDataSource

    spark.dataSource.register(PenstockDataSource)
