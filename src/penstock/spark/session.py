# SPDX-License-Identifier: Apache-2.0
"""Creates the Spark session of a pipeline if the caller does not provide a session."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

# A pipeline run is not interactive, so it has no web UI and no progress bar.
_SETTINGS = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}
_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_LOGGING = Path(__file__).with_name("log4j2.properties")


def session_for(name: str, master: str | None, settings: Mapping[str, str]) -> SparkSession:
    """Return the session of this process, or create one.

    `master` is `local[*]`, `spark://host:7077` or similar, or `sc://host:15002` for a Connect server. Without
    it, spark-submit, SPARK_REMOTE or the settings decide, and by default the cores of this host. A Connect
    server accepts only session settings, and Spark logs a warning for every other setting.
    """
    builder = SparkSession.builder.appName(f"penstock {name}")
    remote = os.environ.get("SPARK_REMOTE", "") if master is None else master
    if remote.startswith("sc://"):
        return builder.config(map=dict(settings)).remote(remote).getOrCreate()
    # By default, workers start with this Python, in which the package is installed.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    options: dict[str, Any] = {**_SETTINGS, **settings}
    if not _has_own_logging(settings):
        java_options = settings.get(_JAVA_OPTIONS, "")
        options[_JAVA_OPTIONS] = f'{java_options} "-Dlog4j2.configurationFile={_LOGGING}"'.lstrip()
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ or "spark.master" in settings
    if master is not None:
        builder = builder.master(master)
    elif not submitted and "MASTER" not in os.environ and "SPARK_REMOTE" not in os.environ:
        builder = builder.master("local[*]")
    return builder.config(map=options).getOrCreate()


def _has_own_logging(settings: Mapping[str, str]) -> bool:
    """Return whether the user has configured Spark's log, in its settings or its configuration folder."""
    folder = os.environ.get("SPARK_CONF_DIR")
    return "log4j" in settings.get(_JAVA_OPTIONS, "") or (
        folder is not None and (Path(folder) / "log4j2.properties").exists()
    )
