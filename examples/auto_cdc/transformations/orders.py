# SPDX-License-Identifier: Apache-2.0
"""The changes of one table, applied to a table of its present rows and to one of its history."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr

spark = SparkSession.active()

# Several changes of a row may share a transaction, so the version alone does not order them. AUTO CDC makes
# nulls of the sequence's type, so its fields must be nullable, and `nullif` with what no change has makes
# them so.
SEQUENCE = "struct(nullif(_commit_version, -1) AS version, nullif(_metadata.row, -1) AS row)"
SYSTEM_COLUMNS = ["_change_type", "_commit_version", "_commit_timestamp", "_metadata"]


@dp.temporary_view
def order_changes() -> DataFrame:
    """Every change since the beginning of the server's log; what a row was before an update is not needed."""
    changes = spark.readStream.format("penstock").options(
        source=spark.conf.get("orders.source"),
        tables=spark.conf.get("orders.table"),
        startingOffsets="earliest",
    )
    return changes.load().where("_change_type <> 'update_preimage'")


for target, scd_type in (("orders", 1), ("orders_history", 2)):
    dp.create_streaming_table(target, format="iceberg")
    dp.create_auto_cdc_flow(
        target=target,
        source="order_changes",
        keys=spark.conf.get("orders.keys").split(","),
        sequence_by=expr(SEQUENCE),
        apply_as_deletes=expr("_change_type = 'delete'"),
        except_column_list=SYSTEM_COLUMNS,
        stored_as_scd_type=scd_type,
    )
