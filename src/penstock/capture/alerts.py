# SPDX-License-Identifier: Apache-2.0
"""The alert conditions of an instance."""

import time
from collections.abc import Iterator

from penstock.capture.run import Capture
from penstock.capture.status import CaptureStatus, State
from penstock.errors import PenstockError
from penstock.logstore.memory_log import MemoryLog
from penstock.settings.alerts import AlertSettings
from penstock.sizes import size_text
from penstock.telemetry.alerts import Alert

# A measured lag below this is ignored, because the measurement may have been taken between two packets.
_LAGGING_SECONDS = 60.0

_HINT_STATUS = "Run: penstock status"


def conditions(capture: Capture, settings: AlertSettings) -> Iterator[Alert]:
    """Yield the conditions that are true now. Never waits for the server."""
    status = capture.snapshot()
    yield from _state(capture, status, settings)
    if settings.lag is not None and (status.lag_seconds or 0.0) > settings.lag:
        yield Alert(
            "lag", capture.name, f"the log is {status.lag_seconds:.0f} s behind {status.server}", _HINT_STATUS
        )
    yield from _kept(capture, status, settings)
    yield from _log(capture, settings)
    if status.tables_in_doubt:
        tables = ", ".join(str(doubt["table"]) for doubt in status.tables_in_doubt[:5])
        yield Alert("tables in doubt", capture.name, f"the definition is not settled: {tables}", _HINT_STATUS)


def _state(capture: Capture, status: CaptureStatus, settings: AlertSettings) -> Iterator[Alert]:
    if status.state is State.STOPPED:
        hint = status.error.hint if status.error is not None else None
        yield Alert("stopped", capture.name, f"capture has stopped: {status.why}", hint or _HINT_STATUS)
    elif status.state not in (State.RUNNING, State.CLOSED):
        seconds = time.monotonic() - capture.last_running
        if seconds > settings.after:
            summary = f"capture has been {status.state} for {seconds:.0f} s: {status.why}"
            yield Alert("not running", capture.name, summary, _HINT_STATUS)


def _kept(capture: Capture, status: CaptureStatus, settings: AlertSettings) -> Iterator[Alert]:
    server = capture.server_log
    if settings.kept is None or server is None:
        return
    if server.is_purged and server.remaining_bytes is not None:
        yield Alert(
            "purged",
            capture.name,
            f"{status.server} no longer has what follows {status.position}; its oldest file is"
            f" {server.earliest_file}",
            "Read the tables again, or set instances.NAME.fail_on_data_loss: false and verify",
        )
    elif (
        server.before_bytes is not None
        and server.before_bytes < settings.kept * server.bytes
        and (status.lag_seconds or 0.0) > _LAGGING_SECONDS
    ):
        yield Alert(
            "purge near",
            capture.name,
            f"{status.server} keeps only {size_text(server.before_bytes)} before {status.position}, and the"
            f" log is {status.lag_seconds:.0f} s behind",
            "Raise binlog_expire_logs_seconds on the server",
        )


def _log(capture: Capture, settings: AlertSettings) -> Iterator[Alert]:
    try:
        log = capture.log()
        free_bytes = log.disk.free_bytes(log.folder)
    except PenstockError:
        # The capture's state already explains why the log is not available.
        return
    if settings.disk is not None and free_bytes < settings.disk and not isinstance(log, MemoryLog):
        yield Alert(
            "disk", capture.name, f"{size_text(free_bytes)} are free below {log.folder}", "Free space"
        )
    if log.broken_holds:
        readers = ", ".join(broken.hold.name for broken in log.broken_holds)
        yield Alert("hold broken", capture.name, f"readers may lose their position: {readers}", _HINT_STATUS)
