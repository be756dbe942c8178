# SPDX-License-Identifier: Apache-2.0
"""Reads many small tables over one session, with the queries of the next tables already sent.

Waiting for the answer to one query at a time costs more than reading a small table.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass

from penstock.changes import Changes, Target
from penstock.closing import Closing
from penstock.errors import AnswerTimedOut, TransientError
from penstock.limits import RECONNECT_TRIES_MAX
from penstock.model import ServerAddress
from penstock.mysql.result_batches import AnswerReader
from penstock.pipeline.load.chunks import Chunk
from penstock.pipeline.load.reader import ChunkReading, read_chunk
from penstock.pipeline.load.session import LoadSession
from penstock.pipeline.load.session_pool import SessionPool
from penstock.pipeline.load.watermark import Watermark

# Bounds on the queries that wait for their turn. All of them fit into the network's buffers, so the server
# need not read while it sends an answer.
_QUERIES_MAX = 32
_QUERY_BYTES_MAX = 16 << 10


@dataclass(frozen=True)
class TableRead:
    """A chunk of a table, to be read as inserts of `instance`; see `read_chunk`."""

    address: ServerAddress
    target: Target
    chunk: Chunk
    instance: str
    epoch: int = 0
    where: str | None = None

    @property
    def reading(self) -> ChunkReading:
        """The read at its beginning."""
        return ChunkReading(self.target, self.chunk, self.instance, None, self.where)

    def changes(
        self,
        sessions: SessionPool,
        on_watermark: Callable[[Watermark], None],
        tries_max: int,
        *,
        rate: float | None = None,
        exact: bool = False,
    ) -> Iterator[Changes]:
        """Yield the rows by a query of their own, as `read_chunk` does."""
        yield from read_chunk(
            self.address,
            self.target,
            self.chunk,
            instance=self.instance,
            epoch=self.epoch,
            where=self.where,
            rate=rate,
            exact=exact,
            on_watermark=on_watermark,
            tries_max=tries_max,
            sessions=sessions,
        )


@dataclass(frozen=True)
class _Flight:
    """Queries that were sent over a session, and the log position before them."""

    session: LoadSession
    watermark: Watermark
    answers: AnswerReader


class ReadsAhead(Closing):
    """Reads tables one after another, by ascending number. For one thread.

    A table whose read fails does not affect the others: the queries after it are sent again, over another
    session.
    """

    def __init__(
        self, reads: Mapping[int, TableRead], sessions: SessionPool, tries_max: int = RECONNECT_TRIES_MAX
    ) -> None:
        self._reads = reads
        self._numbers = sorted(reads)
        self._sessions = sessions
        self._tries_max = tries_max
        # The reads whose queries were sent, in order. Their answers have not been read.
        self._sent: deque[tuple[int, ChunkReading]] = deque()
        self._flight: _Flight | None = None

    def close(self) -> None:
        """Close the session if it has answers that were not read."""
        self._discard(GeneratorExit())

    def changes(
        self, number: int, on_watermark: Callable[[Watermark], None]
    ) -> Generator[Changes, None, None]:
        """Yield the rows of a table, as `read_chunk` does. Close it before the next table is read."""
        read = self._reads[number]
        reading: ChunkReading | None = None
        try:
            if not self._sent or self._sent[0][0] != number:
                # The answers of tables that were skipped are not read.
                self._discard(GeneratorExit())
                self._send(number)
            if self._flight is not None:
                reading = self._sent.popleft()[1]
                flight = self._flight
                on_watermark(flight.watermark)
                yield from reading.changes(flight.session, flight.watermark, flight.answers)
                if not self._sent:
                    self._flight = None
                    self._sessions.give_back(flight.session)
                return
        except BaseException as problem:
            self._discard(problem)
            # As for any chunk, a server that hangs is not asked again, and no row is yielded twice.
            is_repeatable = isinstance(problem, TransientError) and not isinstance(problem, AnswerTimedOut)
            if not is_repeatable or (reading is not None and not reading.can_resume):
                raise
        yield from read.changes(self._sessions, on_watermark, self._tries_max)

    def _send(self, first: int) -> None:
        """Send the queries of a table, and of tables after it on the same server.

        Sends none to a TiDB cluster, whose sessions read as of the time of one chunk.
        """
        of_first = self._reads[first]
        session = self._sessions.borrow(of_first.address)
        try:
            if session.tidb:
                self._sessions.give_back(session)
                return
            watermark = self._sessions.watermark(session, of_first.epoch, None)
            queries: list[str] = []
            query_bytes = 0
            for number in self._numbers[bisect_left(self._numbers, first) :][:_QUERIES_MAX]:
                read = self._reads[number]
                reading = read.reading
                query = reading.sql()
                query_bytes += len(query.encode())
                is_elsewhere = (read.address, read.epoch) != (of_first.address, of_first.epoch)
                if queries and (is_elsewhere or query_bytes > _QUERY_BYTES_MAX):
                    break
                queries.append(query)
                self._sent.append((number, reading))
            self._flight = _Flight(session, watermark, session.send(queries))
        except BaseException as problem:
            self._sent.clear()
            self._sessions.discard(session, problem)
            raise

    def _discard(self, problem: BaseException) -> None:
        """Close the session, whose remaining answers are not read."""
        flight, self._flight = self._flight, None
        self._sent.clear()
        if flight is not None:
            self._sessions.discard(flight.session, problem)
