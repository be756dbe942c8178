# SPDX-License-Identifier: Apache-2.0
"""The common part of captures whose log Penstock generates: merges, TiDB clusters, and TiCDC output."""

from dataclasses import replace

from penstock.capture.generated_log import EPOCH, SERVER_ID
from penstock.capture.receive import Receiver
from penstock.capture.run import Capture
from penstock.capture.status import CaptureStatus, State
from penstock.limits import CAPTURE_CHUNK_BYTES
from penstock.logstore.log import Log


class GeneratedCapture(Capture):
    """A capture that generates the events of its log."""

    @property
    def _origin(self) -> str:
        """Return what is captured, as shown in the status."""
        return self._settings.source

    def snapshot(self) -> CaptureStatus:
        """Return the state of the capture. Never waits."""
        return replace(super().snapshot(), server=self._origin)

    # --- The thread -------------------------------------------------------------------------

    def _connecting_log(self) -> Log:
        """Return the opened log, and set the status to connecting to the source."""
        log = self._opened_log()
        self._set_state(State.CONNECTING, f"reading {self._origin}")
        return log

    def _begin_running(self) -> None:
        """Show that the source answers."""
        self._connects += 1
        self._set_state(State.RUNNING)

    def _receiver(self, log: Log, flavor: str) -> Receiver:
        """Return the receiver that stores generated events."""
        return Receiver(
            log,
            self._progress,
            self._stopping,
            epoch=EPOCH,
            server_id=SERVER_ID,
            flavor=flavor,
            chunk_bytes=CAPTURE_CHUNK_BYTES,
            schemas=None,
            hold=self._hold,
            arrived=self._handle_arrival,
        )
