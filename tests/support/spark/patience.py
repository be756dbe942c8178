# SPDX-License-Identifier: Apache-2.0
"""A Spark configuration folder with longer timeouts, for every Spark that a test process starts.

Spark gives the Python worker of a stream ten seconds to start, and a connection fifteen seconds to be
accepted. A machine that pauses for seconds exceeds both, without any defect in the query. The second timeout
is a setting. The first is a constant in a Spark class. The folder holds that class with a larger constant,
and it precedes Spark's own archives on the class path. `SPARK_CONF_DIR` names the folder, so programs started
by a test use it as well.
"""

import importlib.util
import struct
import zipfile
from pathlib import Path

from tests.support.suite.patience import WAIT_SECONDS_MAX

WORKERS = "org/apache/spark/api/python/PythonWorkerFactory.class"
WORKER_MILLISECONDS = 10_000

# Java Virtual Machine Specification, 4.4.5: the tag that precedes a long in the constants of a class.
_LONG = 5


def write_configuration(folder: Path, spark: Path | None = None) -> None:
    """Write a folder for `SPARK_CONF_DIR`. `spark` is the folder of a Spark distribution; by default, the
    installed Spark.
    """
    seconds = int(WAIT_SECONDS_MAX)
    (folder / "spark-defaults.conf").write_text(f"spark.python.authenticate.socketTimeout {seconds}s\n")
    workers = folder / WORKERS
    workers.parent.mkdir(parents=True)
    workers.write_bytes(
        _patient(_class_of(spark or _installed_spark(), WORKERS), WORKER_MILLISECONDS, seconds * 1000)
    )


def _installed_spark() -> Path:
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None, "pyspark is a requirement of the tests"
    assert spec.origin is not None, "pyspark is a package"
    return Path(spec.origin).parent


def _class_of(spark: Path, name: str) -> bytes:
    [archive] = (spark / "jars").glob("spark-core_*.jar")
    with zipfile.ZipFile(archive) as opened:
        return opened.read(name)


def _patient(content: bytes, before: int, after: int) -> bytes:
    """Return a class file with one constant replaced."""
    constant = struct.pack(">Bq", _LONG, before)
    assert content.count(constant) == 1, (
        f"this Spark has no {before} ms in {WORKERS}: has it a setting by now?"
    )
    return content.replace(constant, struct.pack(">Bq", _LONG, after))
