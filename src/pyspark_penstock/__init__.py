# SPDX-License-Identifier: Apache-2.0
"""Where Spark finds `format("penstock")`: it takes the `DefaultSource` of every module named `pyspark_*`."""

from penstock.spark.source import PenstockDataSource as DefaultSource

__all__ = ["DefaultSource"]
