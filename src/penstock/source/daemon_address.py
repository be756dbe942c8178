# SPDX-License-Identifier: Apache-2.0
"""Addresses of daemons: `penstock://[token@]host[:port][,host...]/instance`.

Several hosts are daemons that capture the same instance; any of them may answer. `penstocks://` uses TLS.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote

from penstock.errors import OptionInvalid
from penstock.model import Secret, Tls, url_options

TOKEN_VARIABLE = "PENSTOCK_TOKEN"
PORT_DEFAULT = 7070

PLAIN, ENCRYPTED = "penstock", "penstocks"
_HINT = "Write penstock://host:7070/instance"
_URL = re.compile(
    r"(?P<scheme>penstocks?)://(?:(?P<token>[^@/?#]*)@)?(?P<hosts>[^/?#]*)/(?P<instance>[^/?#]+)/?"
    r"(?:\?(?P<query>[^#]*))?"
)
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^:\[\],\s]+)(?::(?P<port>\d+))?")
_PLAIN_HOST = re.compile(r"\[[0-9A-Fa-f:.%]+\]|[0-9A-Za-z._-]+")
_URL_OPTIONS = ("token_file", "ssl_mode", "ssl_ca", "ssl_cert", "ssl_key")


def is_daemon_url(text: str) -> bool:
    """Return whether a source is an instance of a daemon."""
    return text.strip().startswith((f"{PLAIN}://", f"{ENCRYPTED}://"))


def is_host_port(text: str) -> bool:
    """Return whether a text is a host and a port, and nothing else."""
    match = _HOST.fullmatch(text)
    if match is None or match["port"] is None or not _PLAIN_HOST.fullmatch(match["host"]):
        return False
    return 0 < int(match["port"]) < 1 << 16


@dataclass(frozen=True)
class DaemonAddress:
    """An instance and the daemons that serve it, in order of preference. Can be pickled.

    `hosts` contains (host, port) pairs. If `tls` is None, the daemons are reached over plain HTTP. The mode
    of `tls` is never `preferred`.
    """

    hosts: tuple[tuple[str, int], ...]
    instance: str
    token: Secret = field(default_factory=lambda: Secret(""))
    tls: Tls | None = None

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        token: str | Secret | None = None,
        token_file: str | None = None,
        tls: Tls | None = None,
    ) -> Self:
        """Parse a URL; its query may contain token_file, ssl_mode, ssl_ca, ssl_cert, ssl_key.

        The token comes from the first of: the argument, the URL, the file, the environment variable
        PENSTOCK_TOKEN. TLS is used for penstocks://, and if a TLS option requests it. The daemon's host name
        is then verified unless the mode says otherwise. Raises OptionInvalid; its message never contains the
        token.
        """
        match = _URL.fullmatch(url.strip())
        if match is None:
            raise OptionInvalid(f"source {_without_token(url)!r} is no daemon's instance", hint=_HINT)
        options = url_options(match["query"] or "", _URL_OPTIONS)
        return cls(
            hosts=_hosts(match["hosts"], url),
            instance=unquote(match["instance"]),
            token=_find_token(token, match["token"], token_file or options.get("token_file")),
            tls=_tls(match["scheme"], tls, options),
        )

    @property
    def base_urls(self) -> tuple[str, ...]:
        """The HTTP URL of each daemon."""
        scheme = "http" if self.tls is None else "https"
        return tuple(f"{scheme}://{_host_text(*host)}" for host in self.hosts)

    def __str__(self) -> str:
        scheme = PLAIN if self.tls is None else ENCRYPTED
        hosts = ",".join(_host_text(*host) for host in self.hosts)
        return f"{scheme}://{hosts}/{quote(self.instance)}"


def _host_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _hosts(text: str, url: str) -> tuple[tuple[str, int], ...]:
    hosts = []
    for host in text.split(","):
        match = _HOST.fullmatch(host.strip())
        port = int(match["port"] or PORT_DEFAULT) if match is not None else 0
        if match is None or not 0 < port < 1 << 16:
            raise OptionInvalid(
                f"{_without_token(url)!r}: {host.strip()!r} is no host and port",
                hint="Write penstock://a:7070,b:7070/instance",
            )
        hosts.append((match["host"].strip("[]"), port))
    return tuple(hosts)


def _find_token(argument: str | Secret | None, in_url: str | None, file: str | None) -> Secret:
    if argument is not None:
        return argument if isinstance(argument, Secret) else Secret(argument)
    if in_url:
        return Secret(unquote(in_url))
    if file is not None:
        try:
            return Secret(Path(file).read_text(encoding="utf-8").strip())
        except OSError as problem:
            raise OptionInvalid(f"token file {file} cannot be read: {problem.strerror}") from problem
    return Secret(os.environ.get(TOKEN_VARIABLE, ""))


def _tls(scheme: str, argument: Tls | None, options: dict[str, str]) -> Tls | None:
    tls = argument
    if tls is None and any(name.startswith("ssl_") for name in options):
        tls = Tls(
            options.get("ssl_mode", "verify_identity"),
            options.get("ssl_ca"),
            options.get("ssl_cert"),
            options.get("ssl_key"),
        )
    if scheme == PLAIN:
        # The modes `disabled` and `preferred` allow an unencrypted connection, which this URL scheme
        # requests.
        return None if tls is None or tls.mode in ("disabled", "preferred") else tls
    if tls is not None and tls.mode == "disabled":
        raise OptionInvalid(f"{ENCRYPTED}:// and ssl mode disabled contradict each other", hint=_HINT)
    if tls is None or tls.mode == "preferred":
        ca, cert, key = (tls.ca, tls.cert, tls.key) if tls is not None else (None, None, None)
        return Tls("verify_identity", ca, cert, key)
    return tls


def _without_token(url: str) -> str:
    return re.sub(r"//[^@/]*@", "//********@", url)
