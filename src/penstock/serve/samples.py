# SPDX-License-Identifier: Apache-2.0
"""Samples of each instance's status for charts of the last 24 hours."""

import threading
from collections.abc import Mapping
from typing import Any

from penstock.serve.served import Served
from penstock.telemetry.ring import Ring

# The fields of the status that charts show.
SERIES = (
    "lag_seconds",
    "lag_bytes",
    "bytes_per_second",
    "transactions_per_second",
    "rows_per_second",
    "log_bytes",
)


class Samples:
    """The ring buffers of samples, one for each instance that this daemon captures. Thread-safe; samples are
    taken in a thread.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self._lock = threading.Lock()
        self._rings: dict[str, Ring] = {}

    def take(self) -> None:
        """Take a sample of each instance that this daemon captures."""
        instances = self._served.instances
        with self._lock:
            self._rings = {name: ring for name, ring in self._rings.items() if name in instances}
        for name, instance in instances.items():
            if not self._served.is_here(name):
                continue
            status = instance.status()
            with self._lock:
                if name not in self._rings:
                    self._rings[name] = Ring(SERIES)
                self._rings[name].add(_sample(status))

    def read(self, instance: str, seconds: int, points: int) -> dict[str, list[float | None]]:
        """Return the series of an instance; they are empty if no sample was taken yet."""
        with self._lock:
            ring = self._rings.get(instance)
            return {name: [] for name in SERIES} if ring is None else ring.read(seconds, points)


def _sample(status: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: status.get(name) for name in SERIES}
