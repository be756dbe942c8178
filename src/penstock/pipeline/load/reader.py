# SPDX-License-Identifier: Apache-2.0
"""The rows of a chunk, as the changes that the log would have held had they just been inserted."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow

from penstock._native import ResultSet
from penstock.changes import Changes, Origin, Target
from penstock.errors import AnswerTimedOut, OptionInvalid, ServerChanged, TransientError
from penstock.limits import (
    LOAD_BATCH_BYTES_MAX,
    LOAD_BATCH_ROWS_MAX,
    RECONNECT_TRIES_MAX,
)
from penstock.model import Column, ServerAddress, quote_name
from penstock.pipeline.load.chunks import Chunk, after
from penstock.pipeline.load.exact import open_exact
from penstock.pipeline.load.keys import KeyColumn
from penstock.pipeline.load.session import LoadSession, open_session
from penstock.pipeline.load.watermark import Watermark, watermark_of
from penstock.retry import Retry

# A server shows six digits of a FLOAT, and as many of a DOUBLE as its declaration says.
_ROUNDED = re.compile(r"\s*(float|(double|real)\b.*\()", re.IGNORECASE)


def read_chunk(
    address: ServerAddress,
    target: Target,
    chunk: Chunk,
    *,
    instance: str,
    watermark: Watermark | None = None,
    epoch: int = 0,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    rate: float | None = None,
    exact: bool = False,
    told: Callable[[Watermark], None] | None = None,
    tries_max: int = RECONNECT_TRIES_MAX,
) -> Iterator[Changes]:
    """Yield the rows of a chunk in bounded batches, in the order of its key; each an insert.

    `target` is the table's own, as `targets_of` gives it. Rows carry `watermark.version` as
    `_commit_version`, its place as file and offset in `_metadata`, and their number in the chunk; without a
    watermark one is taken just before the read. `columns` leaves the others out, of the rows and of their
    target. `where` is an SQL condition of the server's. `rate` is in rows per second.

    `exact` reads a table without a key as it was at one place of the log (see `open_exact`), whatever
    `watermark` says. `told` is called with the watermark in use before the first row: with `exact`, changes
    of the table with a `_commit_version` under `watermark.position.commit_version` are in the rows already.

    A lost connection is opened again, `tries_max` times without progress, and the read goes on behind the
    last row handed out; where the key does not tell which that is, and some were handed out, ConnectionLost
    is raised and the chunk has to be read again from its start. Raises ServerChanged where another server
    answers than the watermark is of, SchemaChanged where the table has other columns by now,
    PrivilegeMissing.
    """
    reading = _Reading(target, chunk, instance, columns, where)
    paced = _paced(rate)
    if exact:
        with open_exact(address, [target.name], epoch=epoch) as snapshot:
            if told is not None:
                told(snapshot.watermark)
            for changes in reading.changes(snapshot.session, snapshot.watermark):
                yield changes
                paced(len(changes))
        return
    retry = Retry("reading a chunk again", tries=tries_max - 1)
    while True:
        handed_out = reading.rows
        try:
            with open_session(address) as session:
                if watermark is None:
                    watermark = watermark_of(session, epoch)
                _same_server(session, watermark)
                if told is not None and not reading.rows:
                    told(watermark)
                for changes in reading.changes(session, watermark):
                    yield changes
                    paced(len(changes))
                return
        except TransientError as problem:
            if reading.rows > handed_out:
                retry.succeeded()
            # A server that hangs costs a timeout for each try.
            if isinstance(problem, AnswerTimedOut) or not reading.can_resume:
                raise
            retry.wait(problem, table=str(target.name))


def read_rows(
    session: LoadSession,
    target: Target,
    chunk: Chunk,
    watermark: Watermark,
    *,
    instance: str,
    columns: Sequence[str] | None = None,
    where: str | None = None,
) -> Iterator[Changes]:
    """Yield the rows of a chunk over a session at hand, as of its transaction if it has one; see
    `read_chunk`.

    A lost connection is raised.
    """
    yield from _Reading(target, chunk, instance, columns, where).changes(session, watermark)


class _Reading:
    """How far a chunk was read."""

    def __init__(
        self,
        target: Target,
        chunk: Chunk,
        instance: str,
        columns: Sequence[str] | None,
        where: str | None,
    ) -> None:
        self.rows = 0
        self._chunk = chunk
        self._instance = instance
        self._where = where
        self._source = target.name
        self._keys = [KeyColumn(target.column(name)) for name in chunk.key]
        self.target = _narrowed(target, columns)
        # The key is read too, so that a read can go on; what was not asked for is dropped from each batch.
        shown = {column.name for column in self.target.columns}
        self._read = tuple(one for one in target.columns if one.name in shown or one.name in chunk.key)
        self._last: tuple[str, ...] | None = None

    @property
    def can_resume(self) -> bool:
        """Whether what was handed out is known, so that no row comes twice."""
        return self.rows == 0 or self._last is not None

    def changes(self, session: LoadSession, watermark: Watermark) -> Iterator[Changes]:
        """Yield what was not handed out yet."""
        result = ResultSet(
            [(one.name, one.type_text, one.charset, one.nullable) for one in self._read],
            mariadb=self.target.mariadb,
            instance=self._instance,
            database=self._source.database,
            table=self._source.table,
            file=watermark.position.file,
            offset=watermark.position.offset,
            commit_version=watermark.version,
            timestamp_us=watermark.time_us,
            server_id=watermark.server_id,
            row_first=self.rows,
            key=list(self._chunk.key),
            batch_rows_max=LOAD_BATCH_ROWS_MAX,
            batch_bytes_max=LOAD_BATCH_BYTES_MAX,
        )
        for batch in session.batches(self._sql(), result):
            rows = pyarrow.record_batch(batch)
            self.rows += rows.num_rows
            self._note(result.key_last)
            if len(self._read) != len(self.target.columns):
                rows = rows.select([*self.target.column_names, *rows.schema.names[len(self._read) :]])
            yield Changes(self.target, rows, self._source, Origin.LOAD)

    def _note(self, sent: list[bytes | None]) -> None:
        """Remember the last row's key, where it can be written as literals."""
        literals = [
            None if value is None else key.literal_of_sent(value)
            for key, value in zip(self._keys, sent, strict=False)
        ]
        told = [one for one in literals if one is not None]
        self._last = tuple(told) if self._keys and len(told) == len(self._keys) else None

    def _sql(self) -> str:
        chunk = self._chunk
        names = [quote_name(name) for name in chunk.key]
        conditions = [chunk.condition] if chunk.condition else []
        if self._last is not None:
            conditions.append(after(names, self._last))
        if self._where:
            conditions.append(self._where)
        where = f" WHERE {' AND '.join(f'({one})' for one in conditions)}" if conditions else ""
        index = f" FORCE INDEX ({quote_name(chunk.index)})" if chunk.index else ""
        order = f" ORDER BY {', '.join(names)}" if names else ""
        selected = ", ".join(_expression(one) for one in self._read)
        return f"SELECT {selected} FROM {self._source.sql}{index}{where}{order}"


def _same_server(session: LoadSession, watermark: Watermark) -> None:
    """Raise ServerChanged where another server answers than the one whose log the watermark is a place of."""
    found = session.identity.server_id
    if found != watermark.server_id:
        raise ServerChanged(
            f"{session.connection.address}: server {found} answers where server {watermark.server_id} did",
            position=str(watermark.position),
            hint="Rows of one server do not join the log of another. Run: penstock check",
        )


def _expression(column: Column) -> str:
    name = quote_name(column.name)
    return f"{name} * 1e0" if _ROUNDED.match(column.type_text) else name


def _narrowed(target: Target, columns: Sequence[str] | None) -> Target:
    if columns is None:
        return target
    unknown = set(columns) - set(target.column_names)
    if unknown:
        raise OptionInvalid(f"{target.name} has no column {', '.join(sorted(unknown))}")
    return replace(target, columns=tuple(one for one in target.columns if one.name in columns))


def _paced(rate: float | None) -> Any:
    """Return what waits after each batch so that no more than `rate` rows pass in a second."""
    started, passed = time.monotonic(), 0

    def wait(rows: int) -> None:
        nonlocal passed
        if rate is None:
            return
        passed += rows
        time.sleep(max(0.0, started + passed / rate - time.monotonic()))

    return wait
