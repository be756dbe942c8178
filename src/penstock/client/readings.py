# SPDX-License-Identifier: Apache-2.0
"""The metrics of a member of a subscription, in the member's own process."""

import time

from penstock.client.following import FollowingStatus
from penstock.telemetry.readings import Readings


def read_member(readings: Readings, subscription: str, status: FollowingStatus, skipped: int) -> None:
    """Add the metrics of a member of a subscription."""
    labels = {"subscription": subscription, "member": status.member}
    readings.add("penstock_subscriber_connected", float(status.daemon is not None), **labels)
    readings.add("penstock_subscriber_shards", len(status.shards), **labels)
    readings.add("penstock_subscriber_lag_bytes", status.behind_bytes, **labels)
    readings.add("penstock_subscriber_skipped_batches_total", skipped, **labels)
    if status.shards:
        readings.add("penstock_subscriber_lag_seconds", _lag(status), **labels)


def _lag(status: FollowingStatus) -> float | None:
    """Return the lag in seconds, None while the time of a shard's position is unknown."""
    if status.is_consumed:
        return 0.0
    times = [status.consumed_us.get(shard, 0) for shard in status.shards]
    return max(0.0, time.time() - min(times) / 1e6) if all(times) else None
