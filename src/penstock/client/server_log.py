# SPDX-License-Identifier: Apache-2.0
"""A database server as the log of a subscriber, without a daemon; see `penstock.client.publishers`.

The log has a single epoch, 0, for the server that is currently connected. After a failover to another server,
a subscriber maps epoch 0 to a later epoch, as it does when it changes to another daemon's log.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pyarrow

from penstock._native import GtidSet
from penstock.client.daemons import EARLIEST, LATEST, Start
from penstock.client.fetch import EndFrame, Frame, PositionFrame, RowsFrame
from penstock.client.flow import Place, Survey
from penstock.errors import ConnectionLost, PenstockError, ServerChanged
from penstock.gtid_sets import LoggedSet, OutsideSet, union
from penstock.limits import MIB
from penstock.model import Position, ServerAddress, TablePatterns
from penstock.predicate import Predicate
from penstock.source.asking import ask_again
from penstock.source.bounds import Bounds
from penstock.source.read_settings import TYPED, ReadSettings
from penstock.source.reading import Batch, RangeFollower, Schemas, Selection
from penstock.source.rows_filter import RowsFilter, ShardSet, decoded_for, row_parts
from penstock.source.server import ServerSource
from penstock.source.sharding import preimages_of, sharded, slots_of
from penstock.source.source import SourceOptions, place_of
from penstock.source.tracking import TrackedSchemas, known_schemas
from penstock.source.walk import TransactionWalk

# The interval at which the end of the server's log is checked while there are no changes.
_LOOK_SECONDS = 0.2
# How much of the log is read at a time. The amount is small, so that little is repeated after a restart.
# Transactions are never split.
_STRETCH_BYTES = 64 * MIB

_Answer = TypeVar("_Answer")


class ServerLog:
    """The binary log of one server.

    Each query has its own session, so any thread may send a query. Surveys, position checks and reads of
    answer frames must all happen in the same thread, because they depend on which server was surveyed last.
    """

    def __init__(self, address: ServerAddress, instance: str) -> None:
        self.address = address
        self._options = SourceOptions(address=address, instance=instance)
        self._surveyed_key: str | None = None
        # The expected fingerprints of the files on the server that was surveyed last.
        self._fingerprints: dict[str, str] = {}

    def __len__(self) -> int:
        return 1

    def url(self, number: int) -> str:
        """Return the server's URL, without the password."""
        return str(self.address)

    def close(self) -> None:
        """Do nothing: no session stays open between queries."""

    def survey(self, numbers: Iterable[int]) -> dict[int, Survey]:
        """Ask the server for its state. Never raises for an unavailable server: the survey holds the
        error.
        """
        return {number: self._survey() for number in numbers}

    def have_something(self) -> bool:
        """Return True: a server's log always has an end position. Propagates errors from the server."""
        self._ask(lambda source: source.head())
        return True

    def changes(
        self, number: int, body: Mapping[str, Any], silence_seconds: float, consumed: Position | None = None
    ) -> "ServerAnswer":
        """Return the changes from a start on. The server purges its log regardless of `consumed`."""
        return ServerAnswer(self, body)

    def locate_start(self, start: Start) -> Place:
        """Return the position of a start. Raises PositionPurged and PositionInvalid."""
        return self._ask(partial(self._locate_start, start=start))

    def after_gtid_set(self, number: int, gtid_set: str) -> Position:
        """Return the start of the first transaction outside a set.

        Raises PositionPurged, and ServerBehind if the set contains transactions that the server does not
        have.
        """
        return self._ask(partial(self._after_gtid_set, gtid_set=gtid_set))

    def prove(self, number: int, location: Place) -> None:
        """Raise PositionInvalid if the server has a different file under the name of a position's file."""
        file, fingerprint = location.position.file, location.fingerprint
        if not fingerprint or self._fingerprints.get(file) == fingerprint:
            return
        self._ask(lambda source: source.prove_file(location.position, fingerprint))
        self._fingerprints[file] = fingerprint

    # --- For an answer --------------------------------------------------------------------------

    def surveyed_source(self) -> ServerSource:
        """Return a source that raises ServerChanged unless the server that answers is the one that was
        surveyed last.
        """
        return ServerSource(replace(self._options, server_key=self._surveyed_key))

    def fingerprint(self, source: ServerSource, file: str) -> str:
        """Return the fingerprint that a file must have on the server surveyed last."""
        if file not in self._fingerprints:
            self._fingerprints[file] = source.fingerprint(file)
        return self._fingerprints[file]

    # --- Questions ------------------------------------------------------------------------------

    def _ask(self, question: Callable[[ServerSource], _Answer]) -> _Answer:
        """Query the current server. An error counts as transient if another server has taken its place."""

        def ask() -> _Answer:
            source = ServerSource(self._options)
            try:
                source.options = replace(self._options, server_key=source.server_key())
                return question(source)
            except ServerChanged as problem:
                raise ConnectionLost(problem.message, position=problem.position) from problem
            finally:
                source.close()

        return ask_again(ask, hang_up=self.close)

    def _survey(self) -> Survey:
        try:
            return self._ask(self._look)
        except PenstockError as problem:
            return Survey(problem=problem)

    def _look(self, source: ServerSource) -> Survey:
        self._surveyed_key = key = source.server_key()
        self._fingerprints.clear()
        earliest, head = source.earliest(), source.head()
        return Survey(epochs=((0, key),), earliest=earliest, head=head, is_server=True)

    def _locate_start(self, source: ServerSource, start: Start) -> Place:
        position = self._position(source, start)
        return Place(
            position,
            source.gtid_set(position),
            source.options.server_key or "",
            fingerprint=source.fingerprint(position.file),
        )

    def _position(self, source: ServerSource, start: Start) -> Position:
        if start.end is not None:
            assert start.end in (EARLIEST, LATEST), "a start has one field"
            return source.earliest() if start.end == EARLIEST else source.head()
        bound = start.bound
        assert bound is not None, "a start has one field"
        if bound.gtid_set is not None:
            return self._after_gtid_set(source, bound.gtid_set)
        if bound.time_us is not None:
            time_us = bound.time_us
            return _first(source, source.find_time(time_us), lambda _, committed: committed >= time_us)
        assert bound.position is not None, "a bound has one field"
        source.prove_position(bound.position)
        return replace(bound.position, epoch=0)

    def _after_gtid_set(self, source: ServerSource, gtid_set: str) -> Position:
        source.prove_executed(gtid_set)
        located = source.find_gtid_set(gtid_set)
        is_outside = OutsideSet(gtid_set, source.gtid_set(located))
        return _first(source, located, lambda gtid, _: is_outside(gtid))


class ServerAnswer:
    """The changes of a server after a start, decoded and filtered in this process.

    One thread reads `frames`. Any thread may `cut` the answer, which ends the frames at the next batch.
    """

    def __init__(self, log: ServerLog, body: Mapping[str, Any]) -> None:
        self._log = log
        self._body = body
        self._cut = threading.Event()
        shards = body.get("shards")
        where = Predicate.compile(body["where"]) if body["where"] else None
        columns = None if body["columns"] is None else tuple(body["columns"])
        changes = None if body["changes"] is None else tuple(body["changes"])
        decoded = decoded_for(columns, changes, is_sharded=shards is not None, where=where)
        self._selection = Selection(
            TablePatterns(list(body["tables"]), list(body["exclude"])),
            decoded.columns,
            decoded.changes,
            shard_columns=tuple(
                (table, tuple(names)) for table, names in (shards or {}).get("columns", {}).items()
            ),
            with_keys=shards is not None,
        )
        self._filter = RowsFilter(
            None if shards is None else ShardSet(shards["count"], frozenset(shards["of"])),
            where,
            decoded.left_changes,
            columns,
        )

    def has_more(self) -> bool:
        """Return False: each stretch of the log is decoded when its frames are requested."""
        return False

    def cut(self) -> None:
        """End the frames as soon as possible."""
        self._cut.set()

    def frames(self) -> Generator[Frame, None, None]:
        """Yield rows, and the position after each stretch of the log, until no changes arrive for a while.

        Raises any read error, and ConnectionLost if another server answers.
        """
        source = self._log.surveyed_source()
        try:
            yield from self._frames(source)
        except ServerChanged as problem:
            # The subscriber handles a lost connection: it finds out which server answers, and continues by
            # GTID set.
            raise ConnectionLost(problem.message, position=problem.position) from problem
        finally:
            source.close()

    def _frames(self, source: ServerSource) -> Generator[Frame, None, None]:
        begin, gtid_set, gtid_after = self._begin(source)
        selection = replace(self._selection, bounds=Bounds(gtid_after=gtid_after))
        schemas = self._schemas(source, begin)
        deadline = time.monotonic() + self._body["wait_seconds"]
        fingerprint = self._log.fingerprint(source, begin.file)
        while not self._cut.is_set():
            head = source.head()
            if place_of(head) < place_of(begin):
                # The server was reset. After a lost connection, the subscriber surveys the server again, and
                # stops.
                raise ConnectionLost(f"{self._log.address} ends its log at {head}", position=str(begin))
            if place_of(head) == place_of(begin):
                if time.monotonic() > deadline:
                    yield EndFrame("wait")
                    return
                self._cut.wait(_LOOK_SECONDS)
                continue
            end = _stretch_end(source, begin, head)
            commit_time_us = 0
            for byte_range in source.split(begin, end):
                known = fingerprint if byte_range.file == begin.file else ""
                follower = RangeFollower(
                    source, replace(byte_range, fingerprint=known), selection, schemas, emit=TYPED
                )
                for batch in follower.batches():
                    yield from self._rows(batch)
                    if self._cut.is_set():
                        return
                gtid_set = union(gtid_set, LoggedSet(follower.gtid_set))
                commit_time_us = follower.commit_time_us or commit_time_us
            fingerprint = self._log.fingerprint(source, end.file)
            begin = end
            if gtid_after is not None and GtidSet.parse(gtid_set).contains(GtidSet.parse(gtid_after)):
                gtid_after, selection = None, self._selection
            yield PositionFrame(
                end,
                gtid_set,
                source.options.server_key or "",
                commit_time_us,
                _bytes_between(source, end, head),
                fingerprint,
            )

    def _begin(self, source: ServerSource) -> tuple[Position, LoggedSet, str | None]:
        """Return where to begin, the GTIDs before that position, and the GTIDs to skip after that
        position.
        """
        start = self._body["start"]
        if "position" in start:
            position = Position.parse(start["position"])
            return position, source.gtid_set(position), None
        located = source.find_gtid_set(start["gtid_set"])
        return located, source.gtid_set(located), start["gtid_set"]

    def _schemas(self, source: ServerSource, begin: Position) -> Schemas | None:
        """Return the table definitions in force at a position. While reading, statements are applied to
        them.
        """
        settings = ReadSettings(source.options, self._selection.tables, TYPED)
        tracked = TrackedSchemas.open(settings, begin)
        return known_schemas(source.options, None) if tracked is None else tracked.history

    def _rows(self, batch: Batch) -> Iterator[RowsFrame]:
        """Yield the rows of a batch that pass the filters."""
        arrow = batch.to_arrow()
        sharded_rows = None
        if self._filter.shards is not None:
            preimages = preimages_of(arrow)
            slots = slots_of(arrow, batch.key, batch.table, preimages)
            sharded_rows = sharded(arrow, slots, preimages, self._filter.shards.count)
        passing = self._filter.passing(arrow, sharded_rows, lambda: preimages_of(arrow))
        if passing is None:
            return
        for part in row_parts(passing[0], self._body["batch_rows"]):
            yield RowsFrame(batch.table, batch.schema_version, batch.primary_key, part)


def _first(source: ServerSource, start: Position, is_wanted: Callable[[str, int], bool]) -> Position:
    """Return the start of the first wanted transaction from a position on, otherwise the end of the log."""
    head = source.head()
    for byte_range in source.split(start, head) if place_of(start) < place_of(head) else ():
        for batch in TransactionWalk(source, byte_range):
            times = batch["commit_timestamp"].cast(pyarrow.int64())
            for row in range(len(batch)):
                if is_wanted(batch["gtid"][row].as_py() or "", times[row].as_py()):
                    return Position(0, batch["file"][row].as_py(), batch["offset"][row].as_py())
    return head


def _stretch_end(source: ServerSource, begin: Position, head: Position) -> Position:
    if begin.file == head.file and head.offset - begin.offset <= _STRETCH_BYTES:
        return head
    return source.walk(begin, head, bytes_max=_STRETCH_BYTES)


def _bytes_between(source: ServerSource, begin: Position, end: Position) -> int:
    if begin.file == end.file:
        return max(end.offset - begin.offset, 0)
    extents = source.extents(begin, end)
    return sum(extent.end for extent in extents[:-1]) - begin.offset + end.offset
