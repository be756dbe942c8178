# SPDX-License-Identifier: Apache-2.0
"""The metrics of a capture, its server and its log."""

from collections import Counter as Tally
from functools import partial

from penstock.capture.run import Capture
from penstock.capture.status import State
from penstock.errors import PenstockError
from penstock.logstore.readings import read_log
from penstock.model import Position
from penstock.telemetry.readings import Readings

_OPERATIONS = ("insert", "update", "delete")
# The label for all tables above the limit.
_OTHER = "other"


def read_capture(readings: Readings, capture: Capture, *, by_table: bool = False) -> None:
    """Add the metrics of one instance. With `by_table`, rows carry the table; see `metrics.tables`."""
    status, progress, counts = capture.snapshot(), capture.progress, capture.counts
    add = partial(readings.add, penstock_instance=capture.name)
    readings.add_states(
        "penstock_capture_state",
        status.state,
        [state.value for state in State],
        penstock_instance=capture.name,
    )
    add("penstock_capture_lag_seconds", status.lag_seconds)
    add("penstock_capture_lag_bytes", status.lag_bytes)
    add("penstock_capture_last_event_timestamp_seconds", _seconds(status.time_us))
    add("penstock_capture_last_heard_timestamp_seconds", progress.heard_at)
    add("penstock_capture_epoch", status.epoch)
    add("penstock_capture_tables_in_doubt", len(status.tables_in_doubt))
    add("penstock_capture_received_bytes_total", progress.bytes)
    add("penstock_capture_transactions_total", progress.counts.transactions)
    add("penstock_capture_large_transactions_total", progress.counts.large_transactions)
    add("penstock_capture_connects_total", status.connects)
    add("penstock_capture_failovers_total", counts.failovers)
    errors = counts.errors.counts()
    add("penstock_capture_checksum_failures_total", errors.get(("ChecksumMismatch",), 0))
    for name, counter in (
        ("penstock_capture_errors_total", counts.errors),
        ("penstock_capture_disconnects_total", counts.disconnects),
        ("penstock_capture_statements_total", progress.statements),
    ):
        readings.add_counter(name, counter, penstock_instance=capture.name)
    readings.add_histogram(
        "penstock_capture_event_lag_seconds", progress.event_lags, penstock_instance=capture.name
    )
    readings.add_histogram(
        "penstock_semisync_ack_seconds", progress.acknowledgements, penstock_instance=capture.name
    )
    _read_counts(readings, capture, by_table=by_table)
    _read_server(readings, capture)
    try:
        log = capture.log()
    except PenstockError:
        # The state metric already explains why there is no log.
        return
    add_position(readings, "penstock_capture_binlog", log.visible, capture.name)
    add_position(readings, "penstock_log_durable_binlog", log.durable, capture.name)
    read_log(readings, log, capture.name)


def add_position(readings: Readings, name: str, position: Position | None, instance: str) -> None:
    """Add a position as two gauges: the number of its file, and the offset."""
    if position is not None:
        readings.add(f"{name}_file", position.file_number, penstock_instance=instance)
        readings.add(f"{name}_position", position.offset, penstock_instance=instance)


def _read_counts(readings: Readings, capture: Capture, *, by_table: bool) -> None:
    counts = capture.progress.counts
    events: Tally[str] = Tally()
    for kind, number in counts.events():
        events[kind] += number
    for kind, number in events.items():
        readings.add("penstock_capture_events_total", number, penstock_instance=capture.name, type=kind)
    for table, rows in counts.rows():
        labels = {"table": table or _OTHER} if by_table else {}
        for operation, number in zip(_OPERATIONS, rows, strict=True):
            readings.add(
                "penstock_capture_rows_total",
                number,
                penstock_instance=capture.name,
                operation=operation,
                **labels,
            )


def _read_server(readings: Readings, capture: Capture) -> None:
    server = capture.server_log
    if server is None:
        return
    add = partial(readings.add, penstock_instance=capture.name)
    add("penstock_server_binlog_file", server.file_number)
    add("penstock_server_binlog_position", server.file_bytes)
    add("penstock_server_binlog_bytes", server.bytes)
    add("penstock_server_kept_bytes_before_capture", server.before_bytes)
    add("penstock_server_earliest_timestamp_seconds", server.earliest_seconds or None)
    add("penstock_server_retention_seconds", server.retention_seconds)


def _seconds(time_us: int | None) -> float | None:
    return time_us / 1e6 if time_us else None
