# SPDX-License-Identifier: Apache-2.0
"""The metrics of a member of a subscription, in the member's own process."""

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
        readings.add("penstock_subscriber_lag_seconds", status.lag_seconds, **labels)
