# SPDX-License-Identifier: Apache-2.0
"""Follow one table into a folder of Parquet, a subfolder for each batch, and optionally die while doing so.

    python -m tests.support.spark.programs.follow '{"master": "local[2]", "options": {"tables": "d.t"}, ...}'

Keys: `master`, `settings`, `options` of the source, `checkpoint`, `out`, and `die_before` or `die_after`: the
batch before or after which this process kills itself. A batch that is written again replaces its subfolder.
"""

import json
import os
import signal
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from tests.support.spark.cluster import run_query


def run(order: dict[str, Any]) -> None:
    """Run until all changes present at the start are read."""
    session = (
        SparkSession.builder.config(map=order["settings"])
        .config("spark.driver.memory", "600m")
        .master(order["master"])
        .getOrCreate()
    )

    def write(frame: DataFrame, batch: int) -> None:
        if batch == order.get("die_before"):
            os.kill(os.getpid(), signal.SIGKILL)
        frame.write.mode("overwrite").parquet(f"{order['out']}/batch={batch}")
        if batch == order.get("die_after"):
            os.kill(os.getpid(), signal.SIGKILL)

    stream = session.readStream.format("penstock").options(**order["options"]).load()
    writer = stream.writeStream.foreachBatch(write).option("checkpointLocation", order["checkpoint"])
    run_query(writer.trigger(availableNow=True).start)
    session.stop()


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
