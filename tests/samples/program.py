# SPDX-License-Identifier: Apache-2.0
"""The programs that write samples, each in a separate process and on a host with a neutral name.

python -m tests.samples.program penstock WORDS...             the product's command line
python -m tests.samples.program follow URL COORDINATION       a subscriber, until it is killed
python -m tests.samples.program stream FOLDER OPTIONS         a Spark stream up to the log's end
"""

import json
import os
import socket
import sys
from pathlib import Path

HOST = "reader.example"
MEMBER = "reader-1"
SUBSCRIPTION = "cache"
SESSION_SECONDS = 60.0


def main() -> None:
    """Run one of the programs."""
    # A sample contains nothing about the machine on which it was written.
    socket.gethostname = lambda: HOST
    program, *words = sys.argv[1:]
    {"penstock": run_penstock, "follow": follow, "stream": stream}[program](words)


def run_penstock(words: list[str]) -> None:
    """Run the command line."""
    from penstock.cli.app import main as run

    sys.argv[1:] = words
    run()


def follow(words: list[str]) -> None:
    """Consume orders in two shards, from the first change on."""
    from penstock.client import Subscriber

    url, coordination = words
    Subscriber(
        url,
        name=SUBSCRIPTION,
        member=MEMBER,
        tables=["shop.orders"],
        shards=2,
        begin="earliest",
        coordination=coordination,
        session_seconds=SESSION_SECONDS,
        checkpoint_seconds=0.1,
    ).run(lambda batch: None)


def stream(words: list[str]) -> None:
    """Run a stream with its checkpoint in FOLDER/checkpoint, and discard its rows."""
    from pyspark.sql import DataFrame, SparkSession

    from tests.support.spark.session import session_settings

    folder, options = Path(words[0]), json.loads(words[1])
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    session = SparkSession.builder.master("local[2]").config(map=session_settings()).getOrCreate()

    def count(frame: DataFrame, batch: int) -> None:
        print(batch, frame.count(), flush=True)

    frame = session.readStream.format("penstock").options(**options).load()
    writer = frame.writeStream.foreachBatch(count).option("checkpointLocation", str(folder / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    session.stop()


if __name__ == "__main__":
    main()
