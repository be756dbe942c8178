# SPDX-License-Identifier: Apache-2.0
"""The table format of the example: Iceberg's jar, and the adapter that lets Spark 4.3 use it.

    python -m examples.auto_cdc.lake /tmp/auto_cdc/jars       # fetches and compiles, prints the jars

Needs a JDK (javac, jar) and Maven (mvn).
"""

import shutil
import subprocess
from pathlib import Path

ICEBERG = "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0"
CATALOG_CLASS = "penstock.lake.LakeCatalog"
TOOLS = ("mvn", "javac", "jar")


def missing_tools() -> list[str]:
    """Return the programs this needs and the machine does not have."""
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def jars(directory: Path) -> list[Path]:
    """Fetch Iceberg's runtime and compile the adapter into a folder; return both jars, adapter first."""
    import pyspark

    directory.mkdir(parents=True, exist_ok=True)
    words = ["mvn", "--quiet", "--batch-mode", "dependency:copy"]
    subprocess.run([*words, f"-Dartifact={ICEBERG}", f"-DoutputDirectory={directory}"], check=True)
    _, name, version = ICEBERG.split(":")
    runtime = directory / f"{name}-{version}.jar"
    classes, adapter = directory / "classes", directory / "lake.jar"
    class_path = f"{Path(pyspark.__file__).parent}/jars/*:{runtime}"
    source = Path(__file__).parent / "LakeCatalog.java"
    subprocess.run(
        ["javac", "--release", "17", "-nowarn", "-cp", class_path, "-d", str(classes), str(source)],
        check=True,
    )
    subprocess.run(["jar", "--create", "--file", str(adapter), "-C", str(classes), "."], check=True)
    return [adapter, runtime]


def catalog_settings(warehouse: Path) -> dict[str, str]:
    """Return the Spark settings that name the catalog `lake`, kept in a folder."""
    return {
        "spark.sql.catalog.lake": CATALOG_CLASS,
        "spark.sql.catalog.lake.warehouse": str(warehouse),
    }
