# SPDX-License-Identifier: Apache-2.0
"""What a request over HTTP asks for: the instance in its path, and its query, read by name."""

from typing import Any

from starlette.requests import Request

from penstock.errors import OptionInvalid
from penstock.logstore.log import Log
from penstock.model import Position
from penstock.serve.access import account_of
from penstock.serve.served import Served, ServedInstance

# A reader that waits longer asks again: what lies between us cuts connections that are silent for a minute.
HEAD_SECONDS_MAX = 55.0

# No number of 64 bits has more.
_DIGITS_MAX = 20


class Query:
    """The query of a request, read by name. Each method raises OptionInvalid."""

    def __init__(self, request: Request) -> None:
        self._query = request.query_params

    def given(self, name: str) -> bool:
        """Tell whether the query has it, and not empty."""
        return bool(self._query.get(name))

    def text(self, name: str) -> str:
        """Return a value that must be there; it may be empty."""
        value = self._query.get(name)
        if value is None:
            raise OptionInvalid(f"the query lacks {name}", hint=f"Add {name}=...")
        return value

    def number(self, name: str, default: Any = ...) -> Any:
        """Return an integer of 0 or more, or the default where it is not given."""
        if not self.given(name) and default is not ...:
            return default
        text = self.text(name)
        if not text.isascii() or not text.isdecimal() or len(text) > _DIGITS_MAX:
            raise OptionInvalid(f"{name}={text[:64]!r} is no number of 0 or more that there can be")
        return int(text)

    def seconds(self, name: str) -> float:
        """Return a duration that is bounded, 0 where it is not given."""
        text = self._query.get(name) or "0"
        try:
            value = float(text)
        except ValueError as problem:
            raise OptionInvalid(f"{name}={text!r} is no number of seconds") from problem
        return min(max(value, 0.0), HEAD_SECONDS_MAX) if value == value else 0.0

    def position(self, name: str) -> Position | None:
        """Return a position, None where it is not given."""
        return Position.parse(self.text(name)) if self.given(name) else None

    def needed_position(self, name: str) -> Position:
        """Return a position that must be there."""
        return Position.parse(self.text(name))


def instance_of(served: Served, request: Request) -> ServedInstance:
    """Return the instance that the path names. Raises AccessDenied, SourceMissing."""
    name = request.path_params["instance"]
    account_of(request).prove_reads(name)
    return served.instance(name)


def log_of(served: Served, request: Request) -> Log:
    """Return the log of the instance that the path names. Raises what `instance_of` and its `log` raise."""
    return instance_of(served, request).log()
