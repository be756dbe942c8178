# SPDX-License-Identifier: Apache-2.0
"""The web console that runs beside the daemon: the section `console` of `penstock.yaml`.

console: {listen: 127.0.0.1:7080, pipelines: [orders.yaml]}
"""

from pydantic import Field, field_validator

from penstock.settings.listen import LOOPBACK_DEFAULT, HostPort
from penstock.settings.values import Seconds, Section

# The default is short, because a browser that was left open must not stay logged in as an administrator.
IDLE_SECONDS_DEFAULT = 1800.0
CONSOLE_LISTEN_DEFAULT = f"{LOOPBACK_DEFAULT}:7080"


class ConsoleSection(Section):
    """What the console shows besides this daemon, and where it listens."""

    listen: HostPort = Field(default=CONSOLE_LISTEN_DEFAULT, description="host:port of the console")
    # The URL of a state store may contain a password.
    pipelines: tuple[str, ...] = Field(
        default=(),
        description="pipeline files, or state stores of pipelines, sqlite:///path or"
        " zookeeper://host:port/path; dead letters and comparisons need the file",
        repr=False,
    )
    daemons: tuple[str, ...] = Field(
        default=(), description="further daemons, such as the other members of the fleet: http://host:7070"
    )
    base_path: str = Field(default="", description="the path behind a reverse proxy, such as /penstock")
    hosts: tuple[str, ...] = Field(
        default=(), description="names under which browsers reach the console through a reverse proxy"
    )

    idle: Seconds = Field(
        default=IDLE_SECONDS_DEFAULT,
        gt=0,
        description="end a session without a click for this long; the refreshes of an open page do not count",
    )

    @field_validator("base_path")
    @classmethod
    def _path(cls, text: str) -> str:
        if text and (not text.startswith("/") or text.endswith("/")):
            raise ValueError("write it as /penstock")
        return text
