# SPDX-License-Identifier: Apache-2.0
"""Read one table in every way the source offers, and print the rows as JSON.

    python -m tests.support.spark.programs.reads '{"remote": "sc://127.0.0.1:15002", ...}'

Keys: `remote` (a Connect server) or `master`, `settings` of the session, `source`, `database`, `start`,
`checkpoint`, and `out`, a folder for Parquet files.
"""

import json
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from penstock.model import TableName
from penstock.source.source import SourceOptions
from penstock.spark import decode_table
from penstock.spark.schema import newest_on_server
from tests.support.spark.cluster import run_query


def _session(order: dict[str, Any]) -> SparkSession:
    builder = SparkSession.builder.config(map=order.get("settings", {}))
    if "remote" in order:
        return builder.remote(order["remote"]).getOrCreate()
    return builder.master(order["master"]).getOrCreate()


def _ids(frame: DataFrame) -> list[list[Any]]:
    rows = frame.select("_commit_version", "_metadata.row", "id", "_change_type").collect()
    return [[row["id"], row["_change_type"]] for row in sorted(rows)]


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of a batch read, an envelope read and a stream."""
    session = _session(order)
    table = f"{order['database']}.t"
    options = {"source": order["source"], "startingOffsets": order["start"]}
    batch = session.read.format("penstock").options(**options, tables=table).load()
    envelope = session.read.format("penstock").options(**options, tables=f"{order['database']}.*").load()
    address = SourceOptions.parse(order["source"]).address
    assert address is not None, "the source is a server"
    shape = newest_on_server(address, TableName(order["database"], "t"))
    stream = session.readStream.format("penstock").options(**options, tables=table).load()
    writer = stream.writeStream.format("parquet").option("checkpointLocation", order["checkpoint"])
    result = {"batch": _ids(batch), "envelope": _ids(decode_table(envelope, table, shape))}
    run_query(lambda: writer.trigger(availableNow=True).start(order["out"]))
    result["stream"] = _ids(session.read.parquet(order["out"]))
    session.stop()
    return result


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))
