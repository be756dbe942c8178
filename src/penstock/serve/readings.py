# SPDX-License-Identifier: Apache-2.0
"""The metrics of readers and listeners.

State that belongs to the event loop is copied within the loop. Logs are queried in a thread.
"""

import heapq
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from penstock.errors import PenstockError
from penstock.limits import METRICS_READERS_MAX
from penstock.logstore.followed_log import ServedLog
from penstock.serve.connections import Connections
from penstock.serve.subscribers import Subscriber, Subscribers
from penstock.settings.daemon import LISTENERS
from penstock.telemetry.readings import Readings


def copy_readers(subscribers: Subscribers) -> list[Subscriber]:
    """Return copies of the readers that have their own metrics. Belongs to the event loop."""
    latest = heapq.nlargest(
        METRICS_READERS_MAX,
        subscribers.all(),
        key=lambda subscriber: (subscriber.requests > 0, subscriber.seen_us),
    )
    return [replace(subscriber) for subscriber in latest]


def read_readers(readings: Readings, readers: list[Subscriber], log_of: Callable[[str], ServedLog]) -> None:
    """Add the amounts sent to readers, and their lag.

    Long lists of shards are abbreviated, so several readers may have the same labels. Their amounts are
    summed, and the largest lag counts.
    """
    behind = _bytes_behind(readers, log_of)
    groups: dict[tuple[str, ...], list[Subscriber]] = {}
    for reader in readers:
        groups.setdefault((reader.instance, reader.protocol, reader.name, reader.shards), []).append(reader)
    now = time.time()
    for group in groups.values():
        labels = _labels(group[0])
        readings.add("penstock_reader_sent_bytes_total", sum(reader.bytes for reader in group), **labels)
        readings.add("penstock_reader_sent_rows_total", sum(reader.rows for reader in group), **labels)
        placed = [reader for reader in group if id(reader) in behind]
        if placed:
            size = max(behind[id(reader)] for reader in placed)
            readings.add("penstock_reader_lag_bytes", size, **labels)
        # The time of a reader's position is unknown until a transaction has been sent to it.
        timed = [reader for reader in placed if reader.time_us or not behind[id(reader)]]
        if timed:
            seconds = max(now - reader.time_us / 1e6 if behind[id(reader)] else 0.0 for reader in timed)
            readings.add("penstock_reader_lag_seconds", max(seconds, 0.0), **labels)


def _bytes_behind(readers: list[Subscriber], log_of: Callable[[str], ServedLog]) -> dict[int, int]:
    """Return how many bytes follow the position of each reader, by its `id`. Reads each log once."""
    behind: dict[int, int] = {}
    for instance in {reader.instance for reader in readers}:
        positions = {
            id(reader): reader.position
            for reader in readers
            if reader.instance == instance and reader.position is not None
        }
        # Without an open log, the lag is unknown, and the instance's state says why.
        with suppress(PenstockError):
            sizes = log_of(instance).bytes_behind_all(list(positions.values()))
            behind.update(zip(positions, sizes, strict=True))
    return behind


def read_listeners(readings: Readings, connections: Connections, listening: frozenset[str]) -> None:
    """Add the metrics of connections, requests and refusals. Belongs to the event loop."""
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
