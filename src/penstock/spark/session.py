# SPDX-License-Identifier: Apache-2.0
"""The Spark session a pipeline runs on, where nobody brings one."""

import os
import sys
from collections.abc import Mapping
from typing import Any

from pyspark.sql import SparkSession

# A runner is no notebook: no page of its own, no bar on the terminal.
_SETTINGS = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}


def session_for(name: str, master: str | None, settings: Mapping[str, str]) -> SparkSession:
    """Return the session of this process, or make one.

    `master` is `local[*]`, `spark://host:7077` and the like, or `sc://host:15002` of a Connect server.
    Without one it is what spark-submit or the settings say, else this host's own cores.
    """
    builder = SparkSession.builder.appName(f"penstock {name}")
    if master is not None and master.startswith("sc://"):
        return builder.remote(master).getOrCreate()
    # Workers start with this Python, where the package is, unless somebody says otherwise.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    options: dict[str, Any] = {**_SETTINGS, **settings}
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ or "spark.master" in settings
    if master is not None:
        builder = builder.master(master)
    elif not submitted and "MASTER" not in os.environ and "SPARK_REMOTE" not in os.environ:
        builder = builder.master("local[*]")
    return builder.config(map=options).getOrCreate()
