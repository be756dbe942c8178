# SPDX-License-Identifier: Apache-2.0
"""The parameters of an HTTP request: the instance in its path, and its query."""

from typing import Any

from starlette.requests import Request

from penstock.errors import OptionInvalid
from penstock.logstore.followed_log import ServedLog
from penstock.model import Position
from penstock.serve.access import account_of
from penstock.serve.durable import stored_log_of
from penstock.serve.served import Served, ServedInstance
from penstock.source.daemon_client import MEMBER_HEADER

# Intermediaries close connections that are idle for a minute, so a reader that waits longer must send another
# request.
HEAD_SECONDS_MAX = 55.0

# The maximum number of digits of a 64-bit number.
_DIGITS_MAX = 20


class Query:
    """The query parameters of a request. Each method raises OptionInvalid."""

    def __init__(self, request: Request) -> None:
        self._query = request.query_params

    def has(self, name: str) -> bool:
        """Return whether the query has a non-empty value."""
        return bool(self._query.get(name))

    def text(self, name: str) -> str:
        """Return a required value; it may be empty."""
        value = self._query.get(name)
        if value is None:
            raise OptionInvalid(f"the query parameter {name} is missing", hint=f"Add {name}=...")
        return value

    def number(self, name: str, default: Any = ...) -> Any:
        """Return an integer of 0 or more, the default if it is missing."""
        if not self.has(name) and default is not ...:
            return default
        text = self.text(name)
        if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS_MAX:
            raise OptionInvalid(f"{name}={text[:64]!r} is no number of 0 or more that there can be")
        return int(text)

    def seconds(self, name: str) -> float:
        """Return a bounded duration, 0 if it is missing."""
        text = self._query.get(name) or "0"
        try:
            value = float(text)
        except ValueError as problem:
            raise OptionInvalid(f"{name}={text!r} is no number of seconds") from problem
        return min(max(value, 0.0), HEAD_SECONDS_MAX) if value == value else 0.0

    def position(self, name: str) -> Position | None:
        """Return a position, None if it is missing."""
        return Position.parse(self.text(name)) if self.has(name) else None

    def needed_position(self, name: str) -> Position:
        """Return a required position."""
        return Position.parse(self.text(name))


def instance_of(served: Served, request: Request) -> ServedInstance:
    """Return the instance named by the path. Raises AccessDenied, SourceMissing."""
    name = request.path_params["instance"]
    account_of(request).prove_reads(name)
    return served.instance(name)


def whole_log_of(served: Served, request: Request) -> ServedLog:
    """Return the log for reading raw bytes, which contain all tables. Raises AccessDenied."""
    account_of(request).prove_reads_whole_log(request.path_params["instance"])
    return log_of(served, request)


def log_of(served: Served, request: Request) -> ServedLog:
    """Return the log of the instance named by the path. Propagates errors from `instance_of` and from the
    instance's `log`.

    A member of the fleet that copies the log also receives data that is not confirmed for other readers yet.
    """
    instance = instance_of(served, request)
    return instance.log() if member_of(request) is None else stored_log_of(instance)


def member_of(request: Request) -> str | None:
    """Return the fleet member that sent the request, None for any other client."""
    name = request.headers.get(MEMBER_HEADER)
    return name if name and account_of(request).admin else None
