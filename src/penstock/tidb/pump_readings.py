# SPDX-License-Identifier: Apache-2.0
"""The metrics of a Pump."""

from functools import partial

from penstock.telemetry.readings import Readings
from penstock.tidb.messages import physical_us
from penstock.tidb.pump import Pump
from penstock.tidb.registry import NodeState


def read_pump(pump: Pump, readings: Readings) -> None:
    """Add the metrics of a Pump."""
    status = pump.status()
    add = partial(readings.add, penstock_instance=pump.instance)
    readings.add_states(
        "penstock_pump_state",
        str(pump.state),
        [str(state) for state in NodeState],
        penstock_instance=pump.instance,
    )
    add("penstock_pump_stored_total", status["stored"])
    add("penstock_pump_stored_bytes_total", status["stored_bytes"])
    add("penstock_pump_released_total", status["released"])
    for reason, count in status["refused"].items():
        add("penstock_pump_refused_total", count, reason=reason)
    add("penstock_pump_open_transactions", status.get("open"))
    add("penstock_pump_stalled_seconds", status.get("stalled_by", {}).get("seconds", 0))
    released_ts = status.get("released_ts")
    add("penstock_pump_released_timestamp_seconds", physical_us(released_ts) / 1e6 if released_ts else None)
