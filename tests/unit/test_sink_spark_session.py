# SPDX-License-Identifier: Apache-2.0
"""The session of the spark sink, and the staged rows that it refuses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pyarrow
import pyspark.sql
import pytest
from pyspark.errors import PySparkException

from penstock.errors import OptionInvalid, PenstockError, ServerBusy, ValueMalformed
from penstock.sinks.sink import BatchMark
from penstock.sinks.spark.catalog import CatalogTable, session_of_process, translate_errors
from penstock.sinks.spark.sink import Settings, SparkSink
from tests.support.pipeline.changes_made import target_of


class SessionSettings(dict[str, str]):
    """The settings of a session."""

    @property
    def getAll(self) -> dict[str, str]:
        return dict(self)

    def set(self, name: str, value: str) -> None:
        self[name] = value


class Session:
    """A simulated session with settings, without Spark."""

    sparkContext = None
    inherited: SessionSettings

    def __init__(self) -> None:
        self.conf = SessionSettings()

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
    Session.inherited = SessionSettings({name: inherited})
    monkeypatch.setattr(pyspark.sql, "SparkSession", Session)
    assert session_of_process().conf[name] == own


class Rows:
    """Staged rows that stop at the first condition by which they are filtered."""

    def __init__(self) -> None:
        self.conditions: list[str] = []

    def where(self, condition: str) -> "Rows":
        self.conditions.append(condition)
        return self

    def isEmpty(self) -> bool:
        return False


def test_value_that_a_narrower_column_would_round_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = {"id": pyarrow.int32(), "price": pyarrow.decimal128(10, 2), "n": pyarrow.int64()}
    monkeypatch.setattr(CatalogTable, "exists", lambda _table: True)
    monkeypatch.setattr(CatalogTable, "column_types", lambda _table: types)
    sink, rows = SparkSink(Settings(staging=str(tmp_path))), Rows()
    sink._own_session = SimpleNamespace(createDataFrame=lambda _rows, _columns: rows)
    mark = BatchMark("shop", "1", 1)
    writer = sink.open(mark, 0)
    target = target_of({"id": "int", "price": "decimal(10,4)", "n": "int"})
    writer.empty(target, 1)
    with pytest.raises(ValueMalformed, match="price"):
        sink.commit(mark, [writer.finish()])
    assert rows.conditions == ["NOT (CAST(try_cast(`price` AS DECIMAL(10,2)) AS DECIMAL(10,4)) <=> `price`)"]


@pytest.mark.parametrize(
    ("using", "mode", "last"),
    [("delta", "mirror", 6), ("delta", "feed", 6), ("iceberg", "feed", 6), ("iceberg", "mirror", None)],
)
def test_last_number_is_the_highest_of_the_tables_that_can_be_read(
    using: str,
    mode: Literal["mirror", "feed"],
    last: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = {"`shop`.`a`": 4, "`shop`.`b`": 6, "`shop`.`new`": None}

    def exists(table: CatalogTable) -> bool:
        if table.name == "`shop`.`other`":
            raise OptionInvalid("it has another format")
        return table.name in numbers

    monkeypatch.setattr(CatalogTable, "exists", exists)
    monkeypatch.setattr(CatalogTable, "number", lambda table, _application: numbers[table.name])
    sink = SparkSink(Settings(staging=str(tmp_path), using=using, mode=mode))
    sink._own_session = SimpleNamespace()
    names = ("a", "b", "new", "missing", "other")
    targets = [target_of({"id": "int"}, name=f"shop.{name}") for name in names]
    assert sink.last_number(BatchMark("shop", "1", 3), targets) == last


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("org.apache.spark.sql.delta.schema.DeltaInvariantViolationException", ValueMalformed),
        ("org.apache.spark.sql.delta.schema.InvariantViolationException", ValueMalformed),
        ("org.apache.spark.sql.delta.DeltaUnsupportedOperationException", ValueMalformed),
        ("io.delta.exceptions.ConcurrentAppendException", ServerBusy),
        ("java.lang.UnsupportedOperationException", ServerBusy),
    ],
)
def test_only_errors_that_pass_by_themselves_are_retried(name: str, error: type[PenstockError]) -> None:
    java_class = SimpleNamespace(getName=lambda: name, getSuperclass=lambda: None)
    refused = PySparkException("refused")
    refused._origin = SimpleNamespace(getClass=lambda: java_class, getCause=lambda: None)  # type: ignore[attr-defined]
    with pytest.raises(error), translate_errors("commit"):
        raise refused
