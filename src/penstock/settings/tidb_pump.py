# SPDX-License-Identifier: Apache-2.0
"""The `tidb.pump` block: how an instance receives binlogs from TiDB servers."""

from pydantic import Field

from penstock.limits import PUMP_DECIDE_SECONDS_MIN
from penstock.settings.listen import HostPort
from penstock.settings.values import Seconds, Section


class PumpSettings(Section):
    """The Pump: TiDB servers write their binlogs to it, and Drainers pull them in commit order."""

    listen: HostPort = Field(
        default="127.0.0.1:8250", description="host:port for TiDB servers, Drainers and binlogctl"
    )
    advertise: HostPort | None = Field(
        default=None, description="host:port under which they reach it; default: the address of listen"
    )
    node_id: str | None = Field(
        default=None, description="its name in the cluster's registry; default: the advertised address"
    )
    socket: str | None = Field(
        default=None,
        description="a path of a socket for TiDB servers on this host that use the strategy local-unix",
    )
    compress: bool = Field(
        default=False, description="compress what Drainers pull with gzip, which each of them must understand"
    )
    decide_after: Seconds | None = Field(
        default=None,
        ge=PUMP_DECIDE_SECONDS_MIN,
        description="roll back a transaction in the cluster whose outcome is unknown for this long, 10m or"
        " more; default: never, it is held and reported",
    )

    @property
    def advertised(self) -> str:
        """The address in the registry."""
        return self.advertise or self.listen
