# SPDX-License-Identifier: Apache-2.0
"""Reads another system's ZooKeeper nodes. It never writes to them."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from penstock.errors import CoordinationLost, DependencyMissing

_ANSWER_SECONDS_MAX = 15.0

_Answer = TypeVar("_Answer")


class ZooKeeperTree:
    """The nodes of a ZooKeeper ensemble, whose hosts are given as `host:port,host:port`.

    Raises DependencyMissing if kazoo is missing, and CoordinationLost if no host answers.
    """

    def __init__(self, hosts: str) -> None:
        try:
            import kazoo.client
            import kazoo.exceptions
            import kazoo.handlers.threading
        except ImportError as missing:
            raise DependencyMissing(
                "positions in ZooKeeper need the package kazoo", hint="pip install 'penstock[zookeeper]'"
            ) from missing
        self._hosts = hosts
        self._exceptions: Any = kazoo.exceptions
        self._timed_out: type[Exception] = kazoo.handlers.threading.KazooTimeoutError
        self._client = kazoo.client.KazooClient(hosts=hosts, timeout=_ANSWER_SECONDS_MAX, read_only=True)

    def __enter__(self) -> Self:
        try:
            self._client.start(_ANSWER_SECONDS_MAX)
        except self._timed_out as problem:
            self._client.close()
            raise CoordinationLost(
                f"ZooKeeper at {self._hosts} does not answer", hint="Check --zookeeper"
            ) from problem
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.stop()
        self._client.close()

    def children(self, path: str) -> list[str]:
        """Return the names below a node, sorted; none if there is no such node."""
        return sorted(self._ask(path, lambda: list(self._client.get_children(path))) or [])

    def text(self, path: str) -> str | None:
        """Return the text of a node, None if there is no such node or it is empty."""
        value = self._ask(path, lambda: self._client.get(path)[0])
        return value.decode("utf-8", "replace") if value else None

    def _ask(self, path: str, read: Callable[[], _Answer]) -> _Answer | None:
        try:
            return read()
        except self._exceptions.NoNodeError:
            return None
        except self._exceptions.KazooException as problem:
            raise CoordinationLost(
                f"ZooKeeper at {self._hosts}: {path}: {type(problem).__name__}", hint="Check --zookeeper"
            ) from problem
