# SPDX-License-Identifier: Apache-2.0
"""Run a capture of TiCDC's topics, and return the changes that readers of its log get."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import penstock
from penstock.capture.run import CaptureParts
from penstock.capture.status import State
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.mysql.start import StartAt
from penstock.settings.daemon import InstanceSettings, LogSettings
from penstock.ticdc.kafka_capture import TicdcKafkaCapture
from penstock.tidb.merged_capture import MergedCapture
from penstock.tidb.merged_log import end_of_merged_log
from tests.support.binlog.decoding import decode
from tests.support.suite.patience import wait_until


def changes(folder: Path) -> list[tuple[Any, ...]]:
    """Return the changes that a reader of the log gets."""
    rows = []
    for batch in penstock.read_binlog(folder, tables="shop.*"):
        for row in batch.to_arrow().to_pylist():
            values = [value for name, value in row.items() if not name.startswith("_")]
            rows.append((row["_commit_version"], row["_change_type"], str(batch.table), *values))
    return sorted(rows, key=lambda row: row[0])


def statements(folder: Path) -> list[str]:
    """Return the statements of a log, in log order."""
    log = LogReader.open(folder)
    (extent,) = log.extents()
    events = log.head_bytes(extent.epoch, extent.file)
    events += b"".join(log.read(extent.epoch, extent.file, len(events), extent.end))
    return [statement.text for statement in decode(events, file=extent.file).statements]


@contextmanager
def running_topic_capture(source: str, folder: Path, start: StartAt | None = None) -> Iterator[MergedCapture]:
    """Run the capture of a topic with its log in a folder until the end of the block."""
    with running_capture(TicdcKafkaCapture, {"source": source}, folder, start) as capture:
        yield capture


@contextmanager
def running_capture(
    kind: type[MergedCapture], settings: Mapping[str, Any], folder: Path, start: StartAt | None = None
) -> Iterator[MergedCapture]:
    """Run the capture of an instance with its log in a folder until the end of the block."""
    log_settings = LogSettings(folder=folder)

    def no_lookup(*_: object) -> Any:
        raise AssertionError("TiCDC's output has no server's log")

    parts = CaptureParts(
        open_log=lambda: Log.open(folder, log_settings, instance="shop"),
        open_lookup=no_lookup,
        arrived=lambda name: None,
    )
    instance = InstanceSettings.model_validate(settings)
    capture = kind("shop", instance, log_settings, start or StartAt(earliest=True), parts)
    capture.start()
    try:
        yield capture
    finally:
        capture.stop()
        assert capture.join(30.0), capture.status()


def wait_for_ts(capture: MergedCapture, commit_ts: int) -> None:
    """Wait until a transaction is in the log."""

    def has_it() -> bool:
        log = capture._log
        assert capture.snapshot().state is not State.STOPPED, capture.status()
        return log is not None and log.visible is not None and end_of_merged_log(log).commit_ts >= commit_ts

    wait_until(has_it)
