# SPDX-License-Identifier: Apache-2.0
"""A BLOB full of forged transactions stays a BLOB for Spark batches and streams, pipelines and daemons."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.limits import MIB, RANGE_BYTES_MIN
from penstock.pipeline.settings import pipeline_of_values
from penstock.source.reading import read_range
from penstock.source.source import SourceOptions, open_source
from tests.support.binlog.forged_log import ACCOUNTS, NOTE_IDS, NOTES, keep_forged_log, write_forged_log
from tests.support.daemon.process import DaemonProcess
from tests.support.pipeline.running import run_to_end
from tests.support.spark.session import run_to_head, spark  # noqa: F401


@dataclass(frozen=True)
class Forged:
    """A file with forged transactions, and the log of a daemon that captured it."""

    file: Path
    folder: Path

    @property
    def log(self) -> Path:
        """The folder of the kept log."""
        return self.folder / "log" / "shop"


@pytest.fixture(scope="module")
def forged(tmp_path_factory: pytest.TempPathFactory) -> Forged:
    folder = tmp_path_factory.mktemp("forged")
    file = write_forged_log(folder / "files", 2 * RANGE_BYTES_MIN, spacing=MIB)
    keep_forged_log(folder / "log" / "shop", file.read_bytes())
    return Forged(file, folder)


@pytest.fixture
def daemon(forged: Forged) -> Iterator[DaemonProcess]:
    """A daemon without its server, which serves the kept log."""
    instance = {"source": "mysql://nobody@127.0.0.1:1", "start": "earliest"}
    with DaemonProcess(forged.folder, {"instances": {"shop": instance}}) as process:
        yield process


def tables_of(frame: DataFrame) -> dict[str, int]:
    counted = frame.groupBy("_metadata.database", "_metadata.table").count().collect()
    return {f"{row[0]}.{row[1]}": row[2] for row in counted}


GENUINE = {NOTES: len(NOTE_IDS)}


def test_batch_returns_no_row_from_inside_a_value(spark: SparkSession, forged: Forged) -> None:  # noqa: F811
    options = {"path": str(forged.file), "mode": "envelope", "minPartitions": 2}
    frame = spark.read.format("penstock").options(**options).load()
    assert frame.rdd.getNumPartitions() == 2
    assert tables_of(frame) == GENUINE


@pytest.mark.deep(
    guard="tests/integration/test_forged_values.py::test_batch_returns_no_row_from_inside_a_value"
)
def test_stream_returns_no_row_from_inside_a_value(
    spark: SparkSession,  # noqa: F811
    forged: Forged,
    tmp_path: Path,
) -> None:
    for number, source in enumerate((forged.file, forged.log)):
        found: list[dict[str, int]] = []
        options = {"path": str(source), "mode": "envelope", "minPartitions": 2}
        frame = spark.readStream.format("penstock").options(**options).load()
        run_to_head(frame, lambda rows, _, found=found: found.append(tables_of(rows)), tmp_path / str(number))
        assert found == [GENUINE]


def test_daemon_returns_no_row_from_inside_a_value(daemon: DaemonProcess) -> None:
    source = open_source(SourceOptions.parse(f"penstock://127.0.0.1:{daemon.port}/shop"))
    ranges = source.split(ranges_min=2)
    assert len(ranges) == 2
    assert all(byte_range.aligned for byte_range in ranges)
    tables = [batch.table for byte_range in ranges for batch in read_range(source, byte_range)]
    assert NOTES in tables
    assert ACCOUNTS not in tables
    start, head = source.earliest(), source.head()
    assert ranges[1].start <= source.walk(start, head, bytes_max=RANGE_BYTES_MIN).offset < MIB
    source.close()


@pytest.mark.deep(
    guard="tests/integration/test_forged_values.py::test_daemon_returns_no_row_from_inside_a_value"
)
def test_pipeline_writes_no_row_from_inside_a_value(
    spark: SparkSession,  # noqa: F811
    forged: Forged,
    tmp_path: Path,
) -> None:
    for name, source in (("file", forged.file), ("log", forged.log)):
        values = {
            "name": name,
            "source": {"path": str(source), "name": "shop", "tables": "shop.*"},
            "sink": {"files": {"path": str(tmp_path / name)}},
            "load": "none",
            "batch": {"interval": 0},
        }
        run_to_end(spark, pipeline_of_values(values, tmp_path))
        written = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        assert any("notes" in str(path) for path in written)
        assert not any("accounts" in str(path) for path in written)
