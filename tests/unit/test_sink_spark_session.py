# SPDX-License-Identifier: Apache-2.0
"""The session of the spark sink."""

import pyspark.sql
import pytest

from penstock.sinks.spark.catalog import session_of_process


class Settings(dict[str, str]):
    """The settings of a session."""

    @property
    def getAll(self) -> dict[str, str]:
        return dict(self)

    def set(self, name: str, value: str) -> None:
        self[name] = value


class Session:
    """A session with settings, and without Spark."""

    sparkContext = None
    inherited: Settings

    def __init__(self) -> None:
        self.conf = Settings()

    @classmethod
    def active(cls) -> "Session":
        active = cls()
        active.conf.update(cls.inherited)
        return active

    def newSession(self) -> "Session":
        return Session()


@pytest.mark.parametrize(
    ("name", "inherited", "own"),
    [
        ("spark.sql.files.ignoreMissingFiles", "true", "false"),
        ("spark.sql.files.ignoreCorruptFiles", "true", "false"),
        ("spark.sql.parquet.datetimeRebaseModeInRead", "LEGACY", "CORRECTED"),
        ("spark.sql.parquet.datetimeRebaseModeInWrite", "LEGACY", "CORRECTED"),
        ("spark.sql.timestampType", "TIMESTAMP_NTZ", "TIMESTAMP_LTZ"),
        ("spark.sql.shuffle.partitions", "7", "7"),
    ],
)
def test_settings_that_would_change_rows_are_not_inherited(
    name: str, inherited: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Session.inherited = Settings({name: inherited})
    monkeypatch.setattr(pyspark.sql, "SparkSession", Session)
    assert session_of_process().conf[name] == own
