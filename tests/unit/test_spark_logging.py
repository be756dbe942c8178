# SPDX-License-Identifier: Apache-2.0
"""The session of a pipeline: its location, and Spark's log, which contains only errors unless configured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.spark.session import session_for


class Builder:
    """A session builder that collects the settings instead of starting Spark."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}

    def appName(self, name: str) -> "Builder":
        return self

    def master(self, master: str) -> "Builder":
        return self

    def remote(self, url: str) -> "Builder":
        self.settings["spark.remote"] = url
        return self

    def config(self, *, map: Mapping[str, Any]) -> "Builder":
        self.settings |= map
        return self

    def getOrCreate(self) -> "Builder":
        return self


def java_options(monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, str]) -> str:
    """Return the JVM's options in a session with these settings."""
    builder = Builder()
    monkeypatch.setattr(SparkSession, "builder", builder)
    session_for("shop", "local[1]", settings)
    options: str = builder.settings.get("spark.driver.extraJavaOptions", "")
    return options


def test_log_configuration_is_added_to_other_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_CONF_DIR", raising=False)
    options = java_options(monkeypatch, {"spark.driver.extraJavaOptions": "-Xss4m"})
    first, _, configuration = options.partition(" ")
    assert first == "-Xss4m"
    assert Path(configuration.strip('"').removeprefix("-Dlog4j2.configurationFile=")).is_file()


def test_configuration_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = {"spark.driver.extraJavaOptions": "-Dlog4j2.configurationFile=/etc/spark.properties"}
    assert java_options(monkeypatch, own) == own["spark.driver.extraJavaOptions"]
    (tmp_path / "log4j2.properties").touch()
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert java_options(monkeypatch, {}) == ""


@pytest.mark.parametrize("in_environment", [False, True])
def test_connect_server_gets_the_settings_of_the_pipeline(
    monkeypatch: pytest.MonkeyPatch, in_environment: bool
) -> None:
    builder, url = Builder(), "sc://spark1:15002/;use_ssl=true"
    monkeypatch.setattr(SparkSession, "builder", builder)
    monkeypatch.setenv("SPARK_REMOTE", url if in_environment else "sc://another:15002")
    session_for("shop", None if in_environment else url, {"spark.sql.shuffle.partitions": "8"})
    assert builder.settings == {"spark.sql.shuffle.partitions": "8", "spark.remote": url}
