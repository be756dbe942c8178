# SPDX-License-Identifier: Apache-2.0
"""Which modules a Spark worker imports to plan a read. A worker plans several times for each query."""

import subprocess
import sys

_PROGRAM = """
import sys
import pyspark.sql.worker.plan_data_source_read, pyarrow.compute
before = set(sys.modules)
import penstock.spark.source
print(*sorted({name.partition(".")[0] for name in sys.modules.keys() - before}))
"""


def test_planning_a_read_imports_no_package_that_it_does_not_need() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "penstock" in imported
    assert not imported & {"structlog", "rich", "pydantic", "pymysql", "starlette"}
