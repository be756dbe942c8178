# SPDX-License-Identifier: Apache-2.0
"""Makes `format("penstock")` discoverable: Spark uses the `DefaultSource` of every module `pyspark_*`."""

from penstock.spark.source import PenstockDataSource as DefaultSource

__all__ = ["DefaultSource"]
