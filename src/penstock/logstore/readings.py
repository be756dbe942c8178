# SPDX-License-Identifier: Apache-2.0
"""The metrics of a log: its contents by storage, its holds, and the free space."""

import heapq
import time
from collections import Counter as Tally
from contextlib import suppress
from functools import partial

from penstock.errors import PenstockError
from penstock.limits import METRICS_HOLDS_MAX
from penstock.logstore.holds import Hold, Holds
from penstock.logstore.log import Log
from penstock.logstore.memory_log import MemoryLog
from penstock.logstore.records import COLD, OPEN, TIERED, SegmentRecord
from penstock.telemetry.readings import Readings

_TIERS = ("local", "cold", "tiered")


def read_log(readings: Readings, log: Log, instance: str) -> None:
    """Add the metrics of one log."""
    add = partial(readings.add, penstock_instance=instance)
    _read_segments(readings, log, instance)
    _read_holds(readings, log, instance)
    add("penstock_log_disk_reserved_bytes", log.settings.free_bytes_min)
    # If the free space cannot be read, capture stops with the same error and reports it.
    with suppress(PenstockError):
        add("penstock_log_disk_free_bytes", log.disk.free_bytes(log.folder))
    readings.add_histogram("penstock_log_fsync_seconds", log.sync_seconds, penstock_instance=instance)
    if log.memory is not None:
        add("penstock_memory_buffer_bytes", log.memory.bytes_held)
        add("penstock_memory_buffer_limit_bytes", log.memory.bytes_max)


def _read_segments(readings: Readings, log: Log, instance: str) -> None:
    status, segments = log.status(), list(log.segments)
    sizes: Tally[str] = Tally()
    numbers: Tally[str] = Tally()
    for segment in segments:
        tier = _tier_of(segment)
        numbers[tier] += 1
        if segment.state != OPEN:
            sizes[tier] += segment.stored_bytes
    # L1 does not know the size of the open segment, but the status does.
    sizes["local"] += status.bytes - sum(sizes.values())
    for tier in _TIERS:
        readings.add("penstock_log_bytes", sizes[tier], penstock_instance=instance, tier=tier)
        readings.add("penstock_log_segments", numbers[tier], penstock_instance=instance, tier=tier)
    if status.time_first_us:
        readings.add(
            "penstock_log_earliest_timestamp_seconds", status.time_first_us / 1e6, penstock_instance=instance
        )


def _read_holds(readings: Readings, log: Log, instance: str) -> None:
    holds = log.holds() if isinstance(log, MemoryLog) else Holds(log.disk, log.layout).readable(_now_us())
    readings.add("penstock_log_holds", len(holds), penstock_instance=instance)
    readings.add("penstock_log_holds_broken", len(log.broken_holds), penstock_instance=instance)
    oldest: list[Hold] = heapq.nsmallest(METRICS_HOLDS_MAX, holds, key=lambda hold: hold.position)
    for hold, size in zip(oldest, log.bytes_behind_all([hold.position for hold in oldest]), strict=True):
        readings.add("penstock_log_hold_bytes", size, penstock_instance=instance, reader=hold.name)


def _tier_of(segment: SegmentRecord) -> str:
    return {COLD: "cold", TIERED: "tiered"}.get(segment.state, "local")


def _now_us() -> int:
    return time.time_ns() // 1000
