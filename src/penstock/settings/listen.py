# SPDX-License-Identifier: Apache-2.0
"""The daemon's listeners and their permissions: the sections `listen` and `access` of `penstock.yaml`.

listen: {http: 127.0.0.1:7070, canal: 127.0.0.1:11111}
access:
  - {name: cache, token_env: CACHE_TOKEN, instances: [shop], tables: [shop.orders]}
  - {name: search, user: canal, password_file: /run/secrets/canal, subscriptions: ["canal-*"]}
"""

import os
import re
import socket
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, ValidationInfo, WithJsonSchema, field_validator

from penstock.model import Secret, is_loopback
from penstock.settings.values import (
    Bytes,
    SecretEnv,
    SecretText,
    Section,
    TablePatternTexts,
    columns_by_table,
    conditions_by_table,
    one_secret,
    store_url,
)

LOOPBACK_DEFAULT = "127.0.0.1"
_UNBOUND = ("0.0.0.0", "::")
PORT_DEFAULT = 7070

# Every listener of the daemon, by its name in `listen`.
Listening = Literal["http", "canal", "ptubes", "ptubes_monitor"]
LISTENERS: tuple[Listening, ...] = ("http", "canal", "ptubes", "ptubes_monitor")


def _open_listeners(value: Any) -> bool | tuple[str, ...]:
    if isinstance(value, bool):
        return value
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(name in LISTENERS for name in names):
        raise ValueError(f"write true, false, or listeners: {', '.join(LISTENERS)}")
    return tuple(names)


OpenListeners = Annotated[
    bool | tuple[Listening, ...],
    PlainValidator(_open_listeners),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"enum": list(LISTENERS)}}]}),
]


def _check_readable(path: Path) -> Path:
    if not os.access(path, os.R_OK):
        raise ValueError(f"{path} cannot be read")
    return path


def _check_host_port(text: str) -> str:
    split_host_port(text)
    return text


ReadableFile = Annotated[Path, AfterValidator(_check_readable)]
HostPort = Annotated[str, AfterValidator(_check_host_port)]


class TlsFiles(Section):
    """The daemon's certificate and its key: PEM files."""

    cert: ReadableFile
    key: ReadableFile


class ListenSettings(Section):
    """The addresses that the daemon listens on, and the credentials that clients need."""

    http: str = Field(
        default=f"{LOOPBACK_DEFAULT}:{PORT_DEFAULT}", description="host:port; [::1]:7070 for IPv6"
    )
    canal: str | None = Field(
        default=None, description="host:port for Canal clients, such as 127.0.0.1:11111; null: disabled"
    )
    ptubes: str | None = Field(
        default=None, description="host:port for Ptubes clients, such as 127.0.0.1:28332; null: disabled"
    )
    ptubes_monitor: str | None = Field(
        default=None,
        description="host:port for Ptubes monitors, such as 127.0.0.1:23333; null: disabled",
    )
    canal_cluster: str | None = Field(
        default=None,
        description="the ensemble in which Canal's cluster clients find this daemon, such as"
        " zookeeper://zk1:2181,zk2:2181; null: none",
        repr=False,
    )
    canal_address: str | None = Field(
        default=None,
        description="host:port where Canal's cluster clients reach this daemon; default: listen.canal, with"
        " the host's name if it listens on every address",
    )
    canal_accept_plain: bool = Field(
        default=False, description="accept plain-text passwords from Canal clients that do not hash them"
    )
    canal_start: Literal["earliest", "latest"] = Field(
        default="earliest", description="where a new Canal client starts"
    )
    canal_zone: str = Field(
        default="+00:00",
        description="the time zone in which Canal clients see TIMESTAMP columns, such as +08:00",
    )
    ptubes_zone: str = Field(
        default="+00:00",
        description="the time zone in which Ptubes clients interpret DATE, TIME and DATETIME, such as +08:00",
    )
    token: SecretText | None = Field(default=None, description="the bearer token of clients")
    token_file: Path | None = Field(default=None, description="a file with the token")
    token_env: str | None = Field(default=None, description="an environment variable with the token")
    tls: TlsFiles | None = Field(default=None, description="TLS for every listener")
    insecure: OpenListeners = Field(
        default=False,
        description="true: allow access from the network without credentials; or a list of listeners that"
        " need none",
        validate_default=True,
    )

    @field_validator("http", "canal", "canal_address", "ptubes", "ptubes_monitor")
    @classmethod
    def _address(cls, text: str | None) -> str | None:
        if text is not None and text.isdecimal():
            raise ValueError(f"write host:port: 127.0.0.1:{text} for this host alone, or 0.0.0.0:{text}")
        if text is not None:
            split_host_port(text)
        return text

    @field_validator("canal_cluster")
    @classmethod
    def _an_ensemble(cls, url: str | None, validation: ValidationInfo) -> str | None:
        if url is not None and not url.startswith("zookeeper://"):
            raise ValueError("write zookeeper://host:2181,host:2181")
        if url is not None and validation.data.get("canal") is None:
            raise ValueError("set canal: clients would be sent to a port that is not open")
        if url is not None and "@" in url:
            raise ValueError("leave out user and password: clients have none, and could not read the nodes")
        return None if url is None else store_url(url)

    @field_validator("canal_zone", "ptubes_zone")
    @classmethod
    def _zone(cls, text: str) -> str:
        zone_seconds_of(text)
        return text

    @field_validator("insecure")
    @classmethod
    def _requires_credentials(cls, insecure: Any, validation: ValidationInfo) -> Any:
        # Validate here, after the required fields, so that a problem is reported with the section's other
        # problems.
        fields = validation.data
        if not {*LISTENERS, "token", "token_file", "token_env"} <= fields.keys():
            return insecure
        token = one_secret(fields["token"], fields["token_file"], fields["token_env"], "token")
        # Accounts are in another section, so the context of the validation says whether there are any.
        if insecure is True or token is not None or (validation.context or {}).get("accounts"):
            return insecure
        open_to_all = [
            f"{name}: {fields[name]}"
            for name in LISTENERS
            if fields[name] is not None
            and not is_loopback(split_host_port(fields[name])[0])
            and name not in (insecure or ())
        ]
        if open_to_all:
            raise ValueError(
                f"{', '.join(open_to_all)} can be reached from elsewhere: set token, token_file or token_env,"
                f" accounts under access, or insecure: true or [{open_to_all[0].partition(':')[0]}]"
            )
        return insecure

    @property
    def host(self) -> str:
        """The host or address to bind for HTTP."""
        return split_host_port(self.http)[0]

    @property
    def port(self) -> int:
        """The port to bind for HTTP; 0 lets the system choose one."""
        return split_host_port(self.http)[1]

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the daemon, on all of its ports."""
        return all(is_loopback(host) for host, _ in self.addresses().values())

    def addresses(self) -> dict[Listening, tuple[str, int]]:
        """Return the host and port of every enabled listener by name, HTTP first."""
        configured: dict[Listening, str | None] = {
            "http": self.http,
            "canal": self.canal,
            "ptubes": self.ptubes,
            "ptubes_monitor": self.ptubes_monitor,
        }
        return {name: split_host_port(text) for name, text in configured.items() if text is not None}

    def canal_client_address(self, port: int) -> str:
        """Return the address at which Canal's cluster clients reach this daemon; `port` is the bound port."""
        if self.canal_address is not None:
            return self.canal_address
        assert self.canal is not None, "there is a listener for Canal"
        return f"{reachable_host(split_host_port(self.canal)[0])}:{port}"

    def is_open(self, name: Listening) -> bool:
        """Return whether a listener lets in every client, even if credentials are configured."""
        return not isinstance(self.insecure, bool) and name in self.insecure

    @property
    def canal_zone_seconds(self) -> int:
        """The offset from UTC, in seconds to the east, in which Canal clients see TIMESTAMP columns."""
        return zone_seconds_of(self.canal_zone)

    @property
    def ptubes_zone_seconds(self) -> int:
        """The offset from UTC, in seconds to the east, for converting the times that Ptubes clients receive
        as instants.
        """
        return zone_seconds_of(self.ptubes_zone)

    def secret(self) -> Secret | None:
        """Read and return the token; None if none is set. Raises ValueError."""
        return one_secret(self.token, self.token_file, self.token_env, "token")


class AccountSettings(Section):
    """An account with read access, with its credentials, permissions and quotas."""

    name: str = Field(description="the account's name in messages and logs", min_length=1)
    token: SecretText | None = Field(default=None, description="the account's bearer token")
    token_file: Path | None = None
    token_env: SecretEnv = Field(default=None, validate_default=True)
    user: str | None = Field(
        default=None, description="the user name for Canal's handshake and HTTP Basic authentication"
    )
    password: SecretText | None = None
    password_file: Path | None = None
    password_env: str | None = Field(default=None, validate_default=True)
    instances: tuple[str, ...] = Field(default=("*",), description="permitted names; * is a wildcard")
    subscriptions: tuple[str, ...] = Field(default=("*",), description="permitted names; * is a wildcard")
    tables: TablePatternTexts = Field(
        default=(), description="permitted tables; none: all tables and the raw log"
    )
    masked: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="table pattern to the columns whose values the account never sees;"
        " it may read typed changes, histories and transactions, and nothing that shows whole rows",
    )
    columns: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        description="table pattern to the only columns whose values the account sees; all others are masked",
    )
    where: dict[str, str] = Field(
        default_factory=dict,
        description="table pattern to the condition of the rows that the account sees; it may read typed"
        " changes, and nothing else that shows rows, statements or raw bytes",
    )
    admin: bool = Field(
        default=False, description="whether the account may reset, move, resize and delete subscriptions"
    )
    metrics: bool = Field(
        default=False, description="whether the account may read /metrics, which covers every instance"
    )
    bytes_per_second: Bytes | None = Field(
        default=None, gt=0, description="quota: maximum bytes per second sent to the account"
    )
    requests_max: int | None = Field(default=None, ge=1, description="quota: maximum concurrent requests")

    @field_validator("masked", "columns")
    @classmethod
    def _one_table_pattern_each(cls, columns: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        return columns_by_table(columns)

    @field_validator("where")
    @classmethod
    def _one_condition_each(cls, where: dict[str, str]) -> dict[str, str]:
        return conditions_by_table(where)

    @field_validator("password_env")
    @classmethod
    def _has_credentials(cls, variable: str | None, validation: ValidationInfo) -> str | None:
        fields = validation.data
        if not {"token", "token_file", "token_env", "user", "password", "password_file"} <= fields.keys():
            return variable
        password = one_secret(fields["password"], fields["password_file"], variable, "password")
        if (password is None) != (fields["user"] is None):
            raise ValueError("user and password go together: password, password_file or password_env")
        tokens = (fields["token"], fields["token_file"], fields["token_env"])
        if password is None and not any(token is not None for token in tokens):
            raise ValueError("nothing tells who this is: set a token, or user and password")
        return variable

    @field_validator("instances", "subscriptions", mode="before")
    @classmethod
    def _one_or_more(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    def token_secret(self) -> Secret | None:
        """Read and return the token; None if none is set. Raises ValueError."""
        return one_secret(self.token, self.token_file, self.token_env, "token")

    def password_secret(self) -> Secret | None:
        """Read and return the password; None if none is set. Raises ValueError."""
        return one_secret(self.password, self.password_file, self.password_env, "password")


def reachable_host(host: str) -> str:
    """Return the name under which other hosts reach a listener's host: the host's own name if it listens on
    all addresses.
    """
    return socket.gethostname() if host in _UNBOUND else host


def split_host_port(text: str) -> tuple[str, int]:
    """Return the host and port of `host:port`, `[address]:port` or `host`. Raises ValueError."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s]+)(?::(\d{1,5}))?", text.strip())
    if match is None or int(match.group(2) or 0) > 65_535:
        raise ValueError(f"{text!r} is no host:port: write 127.0.0.1:{PORT_DEFAULT}")
    return match.group(1).strip("[]"), PORT_DEFAULT if match.group(2) is None else int(match.group(2))


def zone_seconds_of(text: str) -> int:
    """Return the offset `+08:00` as seconds east of UTC. Raises ValueError."""
    match = re.fullmatch(r"([+-])(\d\d):([0-5]\d)", text.strip())
    if match is None or int(match[2]) > 14:
        raise ValueError(f"{text!r} is no offset from UTC: write +08:00")
    seconds = int(match[2]) * 3600 + int(match[3]) * 60
    return -seconds if match[1] == "-" else seconds
