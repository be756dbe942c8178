# SPDX-License-Identifier: Apache-2.0
"""The types of fixtures that are functions, for the annotations of tests."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

from tools.servers import Server

FreshDatabase = Callable[[Server], str]


class MissingPart(Protocol):
    """Skips the test that calls it, or fails the test under `CI=true`. The reason is repeated at the end of
    the test run.
    """

    def __call__(self, part: str, reason: str) -> NoReturn: ...


class LendServer(Protocol):
    """Lends a clean server to a `with` block. Used by module fixtures. The options are options of the
    server.
    """

    def __call__(
        self, flavor: str = "mysql", *, tls: bool = False, **options: Any
    ) -> AbstractContextManager[Server]: ...


class StartServer(Protocol):
    """Lends a clean server to the test until the test ends. The options are options of the server."""

    def __call__(self, flavor: str = "mysql", *, tls: bool = False, **options: Any) -> Server: ...
