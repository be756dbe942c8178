# SPDX-License-Identifier: Apache-2.0
"""Run SQL statements on a Connect server and print the rows of each as JSON.

python -m tests.support.spark.programs.sql '{"remote": "sc://127.0.0.1:15002", "sql": ["SELECT 1"]}'
"""

import json
import sys

from pyspark.sql import SparkSession

if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    session = SparkSession.builder.remote(order["remote"]).getOrCreate()
    answers = [[list(row) for row in session.sql(text).collect()] for text in order["sql"]]
    print(json.dumps(answers, default=str))
