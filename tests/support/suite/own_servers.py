# SPDX-License-Identifier: Apache-2.0
"""Starts servers for a single test file."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from tests.support.suite.fixture_types import MissingPart
from tools.servers import PartMissing


class _Startable(Protocol):
    def start(self) -> object: ...

    def close(self) -> None: ...


OwnServer = TypeVar("OwnServer", bound=_Startable)


@contextmanager
def started(server: OwnServer, part: str, missing_part: MissingPart) -> Iterator[OwnServer]:
    """Run a server during the block; report a missing part."""
    try:
        server.start()
    except PartMissing as error:
        missing_part(part, str(error))
    try:
        yield server
    finally:
        server.close()
