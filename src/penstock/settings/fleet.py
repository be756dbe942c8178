# SPDX-License-Identifier: Apache-2.0
"""This daemon's part in a fleet: the section `fleet` of `penstock.yaml`, which may be the same on all hosts.

fleet: {zone: a, session: 10s}
"""

import socket
from pathlib import Path

from pydantic import Field

from penstock.settings.listen import HostPort, ListenSettings, reachable_host, split_host_port
from penstock.settings.values import Seconds, Section

# The minimum session timeout. Three heartbeats are sent within it.
_SESSION_SECONDS_MIN = 1.0


class FleetSettings(Section):
    """How this daemon participates in the fleet that uses its coordination store."""

    member: str | None = Field(
        default=None, min_length=1, description="this daemon's name in the fleet; default: the host's name"
    )
    address: HostPort | None = Field(
        default=None,
        description="host:port where clients reach this daemon; default: listen.http, with the host's name if"
        " it listens on every address",
    )
    zone: str = Field(default="", description="where this daemon runs, such as a room or a data center")
    weight: float = Field(
        default=1.0, gt=0, description="how much this daemon captures relative to the other members"
    )
    session: Seconds = Field(
        default=10.0,
        ge=_SESSION_SECONDS_MIN,
        description="how long this daemon may be silent before other members capture its instances",
    )
    ssl_ca: Path | None = Field(
        default=None,
        description="the authority of the members' certificates, for copies of logs over TLS; default: those"
        " of the system",
    )

    def member_name(self) -> str:
        """Return the name of this daemon in the fleet."""
        return self.member or socket.gethostname()

    def client_address(self, listen: ListenSettings, port: int) -> str:
        """Return the address at which clients reach this daemon; `port` is the bound HTTP port."""
        if self.address is not None:
            host, port = split_host_port(self.address)
        else:
            host = reachable_host(listen.host)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
