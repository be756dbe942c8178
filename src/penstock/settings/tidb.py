# SPDX-License-Identifier: Apache-2.0
"""The `tidb:` block of an instance whose source is a TiDB cluster: `tidb://pd1:2379,pd2:2379`.

shop:
  source: tidb://pd1:2379,pd2:2379
  tidb:
    roles: [pump, drainer]
    sql: mysql://reader@tidb1:4000
    drainer: {listen: 10.0.0.5:8249}
"""

import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from penstock.limits import DRAINER_BUFFER_BYTES_DEFAULT, MIB
from penstock.model import Secret, ServerAddress, is_loopback, is_server_url
from penstock.settings.listen import HostPort, ReadableFile, split_host_port
from penstock.settings.tidb_pump import PumpSettings
from penstock.settings.values import Bytes, Section, validate_option

SCHEME = "tidb://"

# The table in which a Drainer with loopback-control marks the transactions that it writes.
DRAINER_MARK_TABLE = "retl._drainer_repl_mark"

_PD_PORT_DEFAULT = 2379
_COMMIT_TS = re.compile(r"commit_ts:(\d{1,18})")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s/@,]+)(?::(\d{1,5}))?")


def is_tidb_url(text: str) -> bool:
    """Return whether a source is a TiDB cluster."""
    return text.strip().startswith(SCHEME)


def pd_addresses(source: str) -> tuple[str, ...]:
    """Return the PD members of `tidb://host:port,host:port`, each as host:port. Raises ValueError."""
    hosts = source.strip().removeprefix(SCHEME).rstrip("/")
    members = []
    for text in hosts.split(","):
        match = _HOST.fullmatch(text.strip())
        if match is None or not 0 < int(match.group(2) or 1) <= 65_535:
            raise ValueError("write the cluster's PD members: tidb://pd1:2379,pd2:2379")
        members.append(f"{match.group(1)}:{match.group(2) or _PD_PORT_DEFAULT}")
    return tuple(members)


def parse_commit_ts(start: str) -> int | None:
    """Return the commit timestamp of `start: commit_ts:N`, None for every other start."""
    match = _COMMIT_TS.fullmatch(start.strip())
    return None if match is None else int(match[1])


class TidbTlsSettings(Section):
    """TLS between this instance and its cluster, in both directions: PEM files.

    The instance's listeners require clients to present a certificate from the same authority.
    """

    ca: ReadableFile
    cert: ReadableFile
    key: ReadableFile
    allowed_names: tuple[str, ...] = Field(
        default=(), description="common names that clients' certificates may have; default: all"
    )


class DrainerSettings(Section):
    """The receiver that merges the cluster's Pumps into the instance's log."""

    listen: HostPort = Field(
        default="127.0.0.1:8249", description="host:port where Pumps announce themselves, and binlogctl"
    )
    advertise: HostPort | None = Field(
        default=None, description="host:port under which Pumps reach it; default: the address of listen"
    )
    node_id: str | None = Field(
        default=None, description="its name in the cluster's registry; default: the advertised address"
    )
    compress: bool = Field(default=False, description="ask Pumps to compress what they send, with gzip")
    buffer_bytes: Bytes = Field(
        default=DRAINER_BUFFER_BYTES_DEFAULT,
        ge=MIB,
        description="stop reading the other Pumps while this many bytes wait for a Pump that does not answer",
    )

    @property
    def advertised(self) -> str:
        """The address in the registry."""
        return self.advertise or self.listen


class TidbSettings(Section):
    """How an instance participates in its TiDB cluster."""

    roles: tuple[Literal["pump", "drainer"], ...] = Field(
        default=("pump", "drainer"),
        min_length=1,
        description="pump: TiDB servers write their binlogs to it; drainer: merges all Pumps into the log",
    )
    sql: str | None = Field(
        default=None,
        description="mysql://user@tidb:4000: reads table definitions, and rows for full loads, by SQL; the"
        " password is the instance's",
        repr=False,
    )
    status: str | None = Field(
        default=None, description="http://tidb:10080: reads table definitions from TiDB's status port"
    )
    insecure: bool = Field(
        default=False, description="listen beyond this host without TLS, as TiDB clusters often do"
    )
    tls: TidbTlsSettings | None = Field(default=None, description="TLS with the cluster")
    pump: PumpSettings = Field(default_factory=PumpSettings)
    drainer: DrainerSettings = Field(default_factory=DrainerSettings)

    @field_validator("roles")
    @classmethod
    def _each_once(cls, roles: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(roles)) < len(roles):
            raise ValueError("name each role once")
        return roles

    @field_validator("sql")
    @classmethod
    def _a_sql_server(cls, url: str | None) -> str | None:
        if url is not None:
            if not is_server_url(url):
                raise ValueError("it must be a TiDB server: mysql://user@host:4000")
            validate_option(lambda: ServerAddress.parse(url, password=Secret("-")))
        return url

    @field_validator("status")
    @classmethod
    def _a_status_port(cls, url: str | None) -> str | None:
        if url is not None and not re.fullmatch(r"https?://[^/\s]+/?", url):
            raise ValueError("it must be the status port of a TiDB server: http://host:10080")
        return url

    @model_validator(mode="after")
    def _listens_safely(self) -> Self:
        listens = {"pump": self.pump.listen, "drainer": self.drainer.listen}
        for role in self.roles:
            host = split_host_port(listens[role])[0]
            if not is_loopback(host) and self.tls is None and not self.insecure:
                raise ValueError(f"{role}.listen: {host} is open to the network: set tls, or insecure: true")
        return self
