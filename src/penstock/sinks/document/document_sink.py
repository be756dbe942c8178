# SPDX-License-Identifier: Apache-2.0
"""Sinks that write a document for each row. Each document stores the version of its row, so a repeated write
has no effect.
"""

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import Any, Generic, TypeVar

import pyarrow

from penstock.changes import Changes, Target
from penstock.sinks.client_sink import ClientSink, ClientT
from penstock.sinks.images import LastImages
from penstock.sinks.sink import Delivery, Receipt, Spread, Writer

_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


class DocumentSink(ClientSink[ClientT]):
    """Writes documents."""

    keeps_types = False
    delivery = Delivery.IDEMPOTENT
    spread = Spread.KEYS
    load_spread = Spread.RANGES


class DocumentWriter(Writer, Generic[ClientT]):
    """Buffers the last image of each key per table, then writes these images."""

    def __init__(self, sink: DocumentSink[ClientT], gather_bytes: int, connections: int) -> None:
        self._client = sink.writers_client()
        self._release = sink.release
        self._gather_bytes = gather_bytes
        self._connections = connections
        self._gathered: dict[Target, LastImages] = {}
        self._rows: Counter[str] = Counter()
        self._bytes = 0
        self._unrepresentable: Counter[str] = Counter()
        self._staged: list[Any] = []
        self._outdated = 0

    def write(self, changes: Changes) -> None:
        for target in list(self._gathered):
            if target.name == changes.target.name and target != changes.target:
                self._flush(target)
        gathered = self._gathered.setdefault(changes.target, LastImages(changes.target))
        gathered.add(changes)
        if gathered.bytes >= self._gather_bytes:
            self._flush(changes.target)

    def finish(self) -> Receipt:
        for target in list(self._gathered):
            self._flush(target)
        self.abort()
        return Receipt(
            self._rows.total(),
            self._bytes,
            self._rows,
            tuple(self._staged),
            self._unrepresentable,
            self._outdated,
        )

    def abort(self) -> None:
        self._release(self._client)

    def _flush(self, target: Target) -> None:
        rows = self._gathered.pop(target).rows()
        if rows is not None and rows.num_rows:
            with self.working_on(target.name):
                self._write(target, rows)
            self._rows[str(target.name)] += rows.num_rows

    @abstractmethod
    def _write(self, target: Target, rows: pyarrow.Table) -> None:
        """Write the last image of each row of a table."""

    def _send_all(
        self, send: Callable[[_Request], _Answer], requests: Iterator[_Request]
    ) -> Iterator[_Answer]:
        """Send requests, up to `connections` at a time, and yield their answers in order.

        The rows of a flush have different keys, so the order of its requests does not matter. No request is
        running any more when an error is raised.
        """
        first = list(islice(requests, 2))
        if len(first) < 2 or self._connections == 1:
            yield from map(send, chain(first, requests))
            return
        # The end of the `with` block waits for running requests.
        with ThreadPoolExecutor(self._connections, "penstock-documents") as pool:
            running: deque[Future[_Answer]] = deque()
            for request in chain(first, requests):
                if len(running) == self._connections:
                    yield running.popleft().result()
                running.append(pool.submit(send, request))
            while running:
                yield running.popleft().result()
