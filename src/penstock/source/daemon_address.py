# SPDX-License-Identifier: Apache-2.0
"""Where daemons are and what they are asked for: `penstock://[token@]host[:port][,host...]/instance`.

Several hosts are daemons that capture the same instance: any of them may answer. `penstocks://` is the same
over TLS.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, quote, unquote

from penstock.errors import OptionInvalid
from penstock.model import Secret, Tls

TOKEN_VARIABLE = "PENSTOCK_TOKEN"
PORT_DEFAULT = 7070

PLAIN, ENCRYPTED = "penstock", "penstocks"
_HINT = "Write penstock://host:7070/instance"
_URL = re.compile(
    r"(?P<scheme>penstocks?)://(?:(?P<token>[^@/?#]*)@)?(?P<hosts>[^/?#]*)/(?P<instance>[^/?#]+)/?"
    r"(?:\?(?P<query>[^#]*))?"
)
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^:\[\],\s]+)(?::(?P<port>\d+))?")
_URL_OPTIONS = ("token_file", "ssl_mode", "ssl_ca", "ssl_cert", "ssl_key")


def is_daemon_url(text: str) -> bool:
    """Tell whether a source names an instance of a daemon."""
    return text.strip().startswith((f"{PLAIN}://", f"{ENCRYPTED}://"))


@dataclass(frozen=True)
class DaemonAddress:
    """An instance, and the daemons that may be asked for it, in order of preference. Pickles.

    `hosts` are (host, port). `tls` None is plain HTTP; its mode is never `preferred`.
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
        """Read a URL; its query may hold token_file, ssl_mode, ssl_ca, ssl_cert, ssl_key.

        The token is the first found of: the argument, the URL, the file, the environment's PENSTOCK_TOKEN.
        TLS is used for penstocks://, and where a TLS option asks for it; the daemon is then proved by name
        unless the mode says otherwise. Raises OptionInvalid, whose message never holds the token.
        """
        match = _URL.fullmatch(url.strip())
        if match is None:
            raise OptionInvalid(f"source {_without_token(url)!r} is no daemon's instance", hint=_HINT)
        options = _options(match["query"] or "")
        return cls(
            hosts=_hosts(match["hosts"], url),
            instance=unquote(match["instance"]),
            token=_find_token(token, match["token"], token_file or options.get("token_file")),
            tls=_tls(match["scheme"], tls, options),
        )

    @property
    def base_urls(self) -> tuple[str, ...]:
        """The URL of each daemon, as HTTP spells it."""
        scheme = "http" if self.tls is None else "https"
        return tuple(f"{scheme}://{_host_text(*one)}" for one in self.hosts)

    def __str__(self) -> str:
        scheme = PLAIN if self.tls is None else ENCRYPTED
        hosts = ",".join(_host_text(*one) for one in self.hosts)
        return f"{scheme}://{hosts}/{quote(self.instance)}"


def _host_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _hosts(text: str, url: str) -> tuple[tuple[str, int], ...]:
    hosts = []
    for one in text.split(","):
        match = _HOST.fullmatch(one.strip())
        port = int(match["port"] or PORT_DEFAULT) if match is not None else 0
        if match is None or not 0 < port < 1 << 16:
            raise OptionInvalid(
                f"{_without_token(url)!r}: {one.strip()!r} is no host and port",
                hint="Write penstock://a:7070,b:7070/instance",
            )
        hosts.append((match["host"].strip("[]"), port))
    return tuple(hosts)


def _options(query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in _URL_OPTIONS:
            raise OptionInvalid(
                f"source option {name!r} is unknown", hint=f"Known: {', '.join(_URL_OPTIONS)}"
            )
    return options


def _find_token(given: str | Secret | None, in_url: str | None, file: str | None) -> Secret:
    if given is not None:
        return given if isinstance(given, Secret) else Secret(given)
    if in_url:
        return Secret(unquote(in_url))
    if file is not None:
        try:
            return Secret(Path(file).read_text(encoding="utf-8").strip())
        except OSError as problem:
            raise OptionInvalid(f"token file {file} cannot be read: {problem.strerror}") from problem
    return Secret(os.environ.get(TOKEN_VARIABLE, ""))


def _tls(scheme: str, given: Tls | None, options: dict[str, str]) -> Tls | None:
    asked = given
    if asked is None and any(name.startswith("ssl_") for name in options):
        asked = Tls(
            options.get("ssl_mode", "verify_identity"),
            options.get("ssl_ca"),
            options.get("ssl_cert"),
            options.get("ssl_key"),
        )
    if scheme == PLAIN:
        # A mode that leaves encryption to chance is left as the scheme says: plain.
        return None if asked is None or asked.mode in ("disabled", "preferred") else asked
    if asked is not None and asked.mode == "disabled":
        raise OptionInvalid(f"{ENCRYPTED}:// and ssl mode disabled contradict each other", hint=_HINT)
    if asked is None or asked.mode == "preferred":
        ca, cert, key = (asked.ca, asked.cert, asked.key) if asked is not None else (None, None, None)
        return Tls("verify_identity", ca, cert, key)
    return asked


def _without_token(url: str) -> str:
    return re.sub(r"//[^@/]*@", "//********@", url)
