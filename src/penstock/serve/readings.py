# SPDX-License-Identifier: Apache-2.0
"""The metrics of readers and listeners.

What belongs to the event loop is copied there; the log is asked in a thread.
"""

import heapq
import time
from collections.abc import Callable
from dataclasses import replace

from penstock.errors import PenstockError
from penstock.limits import METRICS_READERS_MAX
from penstock.logstore.log import Log
from penstock.serve.connections import Connections
from penstock.serve.subscribers import Subscriber, Subscribers
from penstock.settings.daemon import LISTENERS
from penstock.telemetry.readings import Readings


def copy_readers(subscribers: Subscribers) -> list[Subscriber]:
    """Return copies of the readers with metrics of their own. Belongs to the event loop."""
    latest = heapq.nlargest(
        METRICS_READERS_MAX,
        subscribers.all(),
        key=lambda subscriber: (subscriber.requests > 0, subscriber.seen_us),
    )
    return [replace(subscriber) for subscriber in latest]


def read_readers(readings: Readings, readers: list[Subscriber], log_of: Callable[[str], Log]) -> None:
    """Add what was sent to readers, and how far they are behind."""
    for subscriber in readers:
        labels = _labels(subscriber)
        readings.add("penstock_reader_sent_bytes_total", subscriber.bytes, **labels)
        readings.add("penstock_reader_sent_rows_total", subscriber.rows, **labels)
    now = time.time()
    for instance in {subscriber.instance for subscriber in readers}:
        placed = [reader for reader in readers if reader.instance == instance and reader.position is not None]
        try:
            log = log_of(instance)
            sizes = log.bytes_behind_all(
                [reader.position for reader in placed if reader.position is not None]
            )
        except PenstockError:
            # The instance's state says why its log cannot be asked now.
            continue
        for reader, size in zip(placed, sizes, strict=True):
            readings.add("penstock_reader_lag_bytes", size, **_labels(reader))
            if not size:
                readings.add("penstock_reader_lag_seconds", 0, **_labels(reader))
            elif reader.time_us:
                lag_seconds = max(now - reader.time_us / 1e6, 0.0)
                readings.add("penstock_reader_lag_seconds", lag_seconds, **_labels(reader))


def read_listeners(readings: Readings, connections: Connections, listening: frozenset[str]) -> None:
    """Add connections, requests and refusals. Belongs to the event loop."""
    for name in LISTENERS:
        if name in listening:
            readings.add("penstock_listener_sessions", connections.count(name), protocol=name)
            readings.add_histogram(
                "penstock_listener_request_seconds", connections.traffic.seconds[name], protocol=name
            )
    readings.add_counter("penstock_listener_requests_total", connections.traffic.requests)
    readings.add_counter("penstock_listener_rejected_total", connections.traffic.rejected)


def _labels(subscriber: Subscriber) -> dict[str, str]:
    return {
        "penstock_instance": subscriber.instance,
        "protocol": subscriber.protocol,
        "subscription": subscriber.name,
        "shard": subscriber.shards,
    }
