# SPDX-License-Identifier: Apache-2.0
"""The address of the daemon that a command line selects."""

from pathlib import Path
from urllib.parse import quote, urlsplit

from penstock.errors import OptionInvalid
from penstock.model import Tls
from penstock.source.daemon_address import PORT_DEFAULT, DaemonAddress

_HOST_DEFAULT = "127.0.0.1"


def daemon_address(
    instance: str, url: str | None, config: Path | None, ca: Path | None = None
) -> DaemonAddress:
    """Return the address of a daemon's instance: from `--url`, the settings file, or the default.

    A URL is `host:port`, or starts with http, https, penstock or penstocks. Its query accepts the options of
    any penstock:// URL. With `ca`, the connection uses TLS, and the daemon's certificate must name its host
    unless the URL sets `ssl_mode`. Raises OptionInvalid.
    """
    token, tls = None, None
    host, port = _HOST_DEFAULT, PORT_DEFAULT
    if config is not None:
        from penstock.settings.daemon import load_settings

        settings = load_settings(config, with_secrets=False)
        listen = settings.listen
        host = _HOST_DEFAULT if listen.host in ("0.0.0.0", "::") else listen.host
        port, token = listen.port, settings.operator_token()
        if listen.tls is not None:
            # The settings file names the certificate itself, so the certificate is trusted under any host
            # name.
            tls = Tls(mode="verify_ca", ca=str(listen.tls.cert))
    secure, netloc, query = tls is not None, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", ""
    if url is not None:
        parts = urlsplit(url if "://" in url else f"{'penstock' if ca is None else 'penstocks'}://{url}")
        if parts.scheme not in ("http", "https", "penstock", "penstocks") or not parts.netloc:
            raise OptionInvalid(f"{url!r} is no daemon", hint=f"Write http://{host}:{PORT_DEFAULT}")
        secure, netloc, query = parts.scheme in ("https", "penstocks"), parts.netloc, parts.query
        tls = tls if secure and not query else None
        if ca is not None and not secure:
            raise OptionInvalid(
                f"{parts.scheme}:// has no TLS, and --ca is for TLS", hint=f"Write https://{netloc}"
            )
    if ca is not None:
        secure, tls = True, None
        query = "&".join(filter(None, (query, f"ssl_ca={quote(str(ca), safe='')}")))
    text = f"{'penstocks' if secure else 'penstock'}://{netloc}/{quote(instance, safe='')}"
    return DaemonAddress.parse(f"{text}?{query}" if query else text, token=token, tls=tls)
