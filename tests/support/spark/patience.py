# SPDX-License-Identifier: Apache-2.0
"""Spark as patient as the tests are: a configuration folder for every Spark that a test process starts.

Spark gives the Python worker of a stream ten seconds to start, and a connection fifteen to be taken up. On a
machine that stands still for seconds a query fails of that, and nothing of the query is wrong. The second is
a setting. The first is a number in a class of Spark's; the folder, which comes before Spark's own archives
where classes are looked for, holds that class with another number. `SPARK_CONF_DIR` names the folder, so it
holds for programs that a test starts as well.
"""

import importlib.util
import struct
import zipfile
from pathlib import Path

from tests.support.suite.patience import WAIT_SECONDS_MAX

WORKERS = "org/apache/spark/api/python/PythonWorkerFactory.class"
WORKER_MILLISECONDS = 10_000

# Java Virtual Machine Specification, 4.4.5: the tag of a long in a class's constants, which stands before it.
_LONG = 5


def write_configuration(folder: Path) -> None:
    """Write the folder that `SPARK_CONF_DIR` is to name."""
    seconds = int(WAIT_SECONDS_MAX)
    (folder / "spark-defaults.conf").write_text(f"spark.python.authenticate.socketTimeout {seconds}s\n")
    workers = folder / WORKERS
    workers.parent.mkdir(parents=True)
    workers.write_bytes(_patient(_class_of_spark(WORKERS), WORKER_MILLISECONDS, seconds * 1000))


def _class_of_spark(name: str) -> bytes:
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None, "pyspark is a requirement of the tests"
    assert spec.origin is not None, "pyspark is a package"
    [archive] = (Path(spec.origin).parent / "jars").glob("spark-core_*.jar")
    with zipfile.ZipFile(archive) as opened:
        return opened.read(name)


def _patient(content: bytes, before: int, after: int) -> bytes:
    """Return a class with another number in place of one of its constants."""
    constant = struct.pack(">Bq", _LONG, before)
    assert content.count(constant) == 1, (
        f"this Spark has no {before} ms in {WORKERS}: has it a setting by now?"
    )
    return content.replace(constant, struct.pack(">Bq", _LONG, after))
