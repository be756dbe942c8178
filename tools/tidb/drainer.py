# SPDX-License-Identifier: Apache-2.0
"""A drainer in this process, for tests and benchmarks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.capture.run import CaptureParts
from penstock.logstore.log import Log
from penstock.mysql.start import StartAt
from penstock.settings.daemon import InstanceSettings, LogSettings
from penstock.tidb.drainer import TidbCapture

_END_SECONDS_MAX = 30.0


@contextmanager
def running_capture(
    pd_address: str, folder: Path, *, start: StartAt | None = None, **drainer: Any
) -> Iterator[TidbCapture]:
    """Run a drainer with its log in a folder until the end of the block; it starts at the earliest binlog."""
    settings = InstanceSettings.model_validate(
        {
            "source": f"tidb://{pd_address}",
            "tidb": {
                "roles": ["drainer"],
                "drainer": {"listen": "127.0.0.1:0", "node_id": "drainer", **drainer},
            },
        }
    )
    log_settings = LogSettings(folder=folder)

    def no_lookup(*_: object) -> Any:
        raise AssertionError("a cluster has no server's log")

    parts = CaptureParts(
        open_log=lambda: Log.open(folder, log_settings, instance="shop"),
        open_lookup=no_lookup,
        arrived=lambda name: None,
    )
    capture = TidbCapture("shop", settings, log_settings, start or StartAt(earliest=True), parts)
    capture.start()
    try:
        yield capture
    finally:
        capture.stop()
        assert capture.join(_END_SECONDS_MAX), capture.status()
