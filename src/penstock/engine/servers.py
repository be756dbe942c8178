# SPDX-License-Identifier: Apache-2.0
"""Chooses which server a run reads from, for sources that are configured with several servers."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import structlog

from penstock.errors import ConnectionLost, PenstockError, ServerBehind
from penstock.model import ServerAddress
from penstock.mysql.connection import connect
from penstock.pipeline.settings import PipelineSettings, PipelineSource
from penstock.pipeline.source_servers import key_of_server, read_at

# The default, as in a daemon. Another server starts a new epoch, so do not fail over for a short outage.
_FAIL_OVER_SECONDS = 10.0
_WATCH_SECONDS = 10.0

_log = structlog.get_logger(__name__)


@dataclass
class _Cluster:
    """The servers of one source, and when the chosen server began to fail, if it did."""

    servers: tuple[ServerAddress, ...]
    chosen: int = 0
    failing_since: float | None = None

    @property
    def address(self) -> ServerAddress:
        return self.servers[self.chosen]


class SourceServers:
    """Tracks which server is in use for each source that lists several. Used by one thread."""

    def __init__(self, settings: PipelineSettings) -> None:
        self._given = settings
        self._clusters = {
            source.name: _Cluster(source.servers) for source in settings.sources if len(source.servers) > 1
        }

    def settings(self) -> PipelineSettings:
        """Return the settings, with the server in use for each source."""
        return replace(self._given, sources=tuple(self._in_use(source) for source in self._given.sources))

    def prefer(self, name: str, server_key: str) -> None:
        """Choose the server that a source's position belongs to, unless that server does not answer."""
        cluster = self._clusters.get(name)
        if cluster is None or not server_key:
            return
        for number, address in enumerate(cluster.servers):
            if key_of_server(address) == server_key:
                cluster.chosen = number
                return

    def turn(self, problem: PenstockError) -> bool:
        """After a failure, check whether the servers in use answer.

        Returns whether a server that had failed for ten seconds was replaced by another.
        """
        turned = False
        for name, cluster in self._clusters.items():
            # Checking a hung server takes a long time. Count the outage from when the check began.
            begun = time.monotonic()
            if not isinstance(problem, ServerBehind) and key_of_server(cluster.address) is not None:
                cluster.failing_since = None
                continue
            now = time.monotonic()
            cluster.failing_since = cluster.failing_since or begun
            if now - cluster.failing_since < _FAIL_OVER_SECONDS:
                continue
            for step in range(1, len(cluster.servers)):
                number = (cluster.chosen + step) % len(cluster.servers)
                if key_of_server(cluster.servers[number]) is not None:
                    _log.warning("another server is read", source=name, server=str(cluster.servers[number]))
                    cluster.chosen, cluster.failing_since, turned = number, None, True
                    break
        return turned

    def _in_use(self, source: PipelineSource) -> PipelineSource:
        cluster = self._clusters.get(source.name)
        if cluster is None:
            return source
        return read_at(source, cluster.address)


@contextmanager
def watched(sources: Sequence[PipelineSource], report: Callable[[PenstockError], None]) -> Iterator[None]:
    """Report each server that does not answer while the block runs.

    Tasks retry by themselves, and report the reason only when they give up.
    """
    addresses = {source.server for source in sources if source.server is not None}
    if not addresses:
        yield
        return
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_WATCH_SECONDS):
            for address in addresses:
                problem = _lost(address)
                if problem is not None and not ended.is_set():
                    _log.warning("a server does not answer, its tasks retry", why=str(problem))
                    report(problem)

    # The thread may be waiting for a server when the block ends, so do not join it.
    threading.Thread(target=watch, name="watch-servers", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _lost(address: ServerAddress) -> ConnectionLost | None:
    """Return why a server does not answer, or None if it answers, even with an error."""
    try:
        connect(address).close()
    except ConnectionLost as problem:
        return problem
    except PenstockError:
        return None
    return None
