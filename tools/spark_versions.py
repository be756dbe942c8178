# SPDX-License-Identifier: Apache-2.0
"""Older versions of PySpark, each in a separate folder, in addition to the installed version.

folder_of("4.0")    # prepend it to PYTHONPATH
runtime_of("delta")  # the jars of a table format for 4.0
"""

import subprocess
import sys
from pathlib import Path

from tools.maven import artifacts, cached
from tools.servers.errors import PartMissing

# The last release of each minor version before the installed one.
RELEASES = {"4.0": "4.0.5", "4.1": "4.1.4", "4.2": "4.2.1"}
INSTALL_SECONDS_MAX = 1_800.0

# The runtimes of table formats for Spark 4.0: their folder in the cache, and their artifact.
_RUNTIMES = {
    "delta": ("delta-spark-4.0.0", "io.delta:delta-spark_2.13:4.0.0"),
    "iceberg": ("iceberg-spark-4.0-1.10.1", "org.apache.iceberg:iceberg-spark-runtime-4.0_2.13:1.10.1"),
}


def folder_of(minor: str) -> Path:
    """Return a folder for PYTHONPATH that contains PySpark, fetched if missing. Raises PartMissing."""
    release = RELEASES[minor]

    def install(folder: Path) -> None:
        # The dependencies of PySpark are those of the installed version.
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        words += ["--target", str(folder / "built"), f"pyspark=={release}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX)
        if done.returncode != 0:
            raise PartMissing(f"PySpark {release} cannot be installed: {done.stderr.strip()[-500:]}")

    return cached(f"pyspark-{release}", install)


def runtime_of(table_format: str) -> list[Path]:
    """Return the jars of a table format for Spark 4.0, fetched if missing. Raises PartMissing."""
    name, artifact = _RUNTIMES[table_format]
    # Spark has its own Scala library.
    return [jar for jar in artifacts(name, [artifact]).glob("*.jar") if "scala-library" not in jar.name]
