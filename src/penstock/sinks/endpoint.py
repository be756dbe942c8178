# SPDX-License-Identifier: Apache-2.0
"""Address and credentials of a target: the settings that all sinks with a server share."""

import re
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pydantic import Field, ValidationInfo, field_validator, model_validator

from penstock.errors import ConnectionLost, PenstockError, TlsFailed
from penstock.model import Secret
from penstock.settings.values import SecretText, Section, one_secret

# The account in a URL, which may name several hosts behind it.
_ACCOUNT = re.compile(r"^([a-z][a-z0-9+.-]*://)([^/?#]*)@", re.IGNORECASE)


def lost(what: str, problem: BaseException, place: str | None = None) -> PenstockError:
    """Return the error for a connection that failed: one to be tried again, but not where TLS failed."""
    cause: BaseException | None = problem
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return TlsFailed(
                f"no TLS with {what}: {cause}", hint="Set ca to the file of the authority, and check the URL"
            )
        cause = cause.__cause__ or cause.__context__
    return ConnectionLost(f"{what} does not answer: {problem}", position=place)


class Endpoint(Section):
    """A server by its URL. An account in the URL is taken out of it, so that no message has it."""

    url: str = Field(description="the target's URL")
    user: str | None = Field(
        default=None, description="the account; also accepted as user:password@ in the URL"
    )
    password: SecretText | None = None
    password_file: Path | None = Field(default=None, description="a file with the password")
    password_env: str | None = Field(default=None, description="an environment variable with the password")
    ca: Path | None = Field(default=None, description="a PEM file with the certificate authorities to trust")

    @model_validator(mode="before")
    @classmethod
    def _account_of_url(cls, given: Any) -> Any:
        url = given.get("url") if isinstance(given, dict) else None
        if not isinstance(url, str) or (found := _ACCOUNT.match(url)) is None:
            return given
        user, _, password = found[2].partition(":")
        taken = {"url": f"{found[1]}{url[found.end() :]}"}
        if user:
            taken["user"] = given.get("user") or unquote(user)
        if password and not any(given.get(f"password{more}") for more in ("", "_file", "_env")):
            taken["password"] = unquote(password)
        return given | taken

    @field_validator("password_env")
    @classmethod
    def _one_password(cls, variable: str | None, others: ValidationInfo) -> str | None:
        one_secret(others.data.get("password"), others.data.get("password_file"), variable, "password")
        return variable

    def secret(self) -> Secret | None:
        """Return the password, read now, None where there is none. Raises ValueError."""
        return one_secret(self.password, self.password_file, self.password_env, "password")
