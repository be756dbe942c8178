# SPDX-License-Identifier: Apache-2.0
"""The address and credentials of a target, shared by all sinks that connect to a server."""

import re
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote

from pydantic import Field, field_validator, model_validator

from penstock.errors import ConnectionLost, PenstockError, TlsFailed
from penstock.model import Secret, ServerAddress, is_loopback
from penstock.settings.values import SecretEnv, SecretText, Section, one_secret, validate_option
from penstock.sinks.sink import Finding

# The account in a URL, which may contain several hosts.
_ACCOUNT = re.compile(r"^([a-z][a-z0-9+.-]*://)([^/?#]*)@", re.IGNORECASE)
# The accounts in further URLs of a list.
_FURTHER_ACCOUNT = re.compile(r"(,\s*[a-z][a-z0-9+.-]*://)([^/?#]*)@", re.IGNORECASE)

# The beginnings of URLs of connections without TLS.
_UNENCRYPTED = ("http://", "redis://", "amqp://")


def connection_error(what: str, problem: BaseException, position: str | None = None) -> PenstockError:
    """Return the error for a failed connection: retryable, unless TLS failed."""
    cause: BaseException | None = problem
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return TlsFailed(
                f"no TLS with {what}: {cause}", hint="Set ca to the file of the authority, and check the URL"
            )
        cause = cause.__cause__ or cause.__context__
    return ConnectionLost(f"{what} does not answer: {problem}", position=position)


def encryption_findings(address: ServerAddress) -> list[Finding]:
    """Return a finding if the identity of a remote server is not verified."""
    local = address.unix_socket is not None or is_loopback(address.host)
    if local or address.tls.mode != "preferred":
        return []
    return [
        Finding(
            str(address),
            "ssl_mode is preferred: encrypted where the server offers it, and no proof of which one answers",
            fatal=False,
            mend="Add ?ssl_mode=verify_identity to the URL, and ssl_ca where the authority is your own",
        )
    ]


class Endpoint(Section):
    """A server, given by its URL. An account in the URL is removed from the URL, so that no message contains
    it.
    """

    url: str = Field(description="the target's URL")
    user: str | None = Field(
        default=None, description="the account; also accepted as user:password@ in the URL"
    )
    password: SecretText | None = None
    password_file: Path | None = Field(default=None, description="a file with the password")
    password_env: SecretEnv = Field(default=None, description="an environment variable with the password")
    ca: Path | None = Field(default=None, description="a PEM file with the certificate authorities to trust")

    @model_validator(mode="before")
    @classmethod
    def _account_of_url(cls, values: Any) -> Any:
        url = values.get("url") if isinstance(values, dict) else None
        if not isinstance(url, str):
            return values
        match = _ACCOUNT.match(url) or _FURTHER_ACCOUNT.search(url)
        if match is None:
            return values
        user, _, password = match[2].partition(":")
        extracted = {"url": _FURTHER_ACCOUNT.sub(r"\1", _ACCOUNT.sub(r"\1", url))}
        if user:
            extracted["user"] = values.get("user") or unquote(user)
        if password and not any(values.get(f"password{suffix}") for suffix in ("", "_file", "_env")):
            extracted["password"] = unquote(password)
        return values | extracted

    @model_validator(mode="after")
    def _refuse_unused_ca(self) -> Self:
        plain = [url for url in self.url.split(",") if url.strip().lower().startswith(_UNENCRYPTED)]
        if self.ca is not None and plain:
            scheme = plain[0].strip().partition(":")[0]
            raise ValueError(f"ca is for TLS, and the url is without: write {scheme}s://, or leave ca out")
        return self

    def secret(self) -> Secret | None:
        """Read and return the password, None if none is set. Raises ValueError."""
        return one_secret(self.password, self.password_file, self.password_env, "password")


class MysqlEndpoint(Endpoint):
    """A server that speaks MySQL's protocol. TLS options may be in the URL."""

    @field_validator("url")
    @classmethod
    def _valid_address(cls, url: str) -> str:
        validate_option(lambda: ServerAddress.parse(url))
        return url

    def address(self) -> ServerAddress:
        """Return the server's address. With `ca`, the server's certificate is verified. Raises
        OptionInvalid.
        """
        address = ServerAddress.parse(self.url, user=self.user, password=self.secret())
        if self.ca is None:
            return address
        mode = address.tls.mode if address.tls.mode == "verify_ca" else "verify_identity"
        return replace(address, tls=replace(address.tls, mode=mode, ca=str(self.ca)))
