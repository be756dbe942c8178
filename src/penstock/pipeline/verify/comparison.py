# SPDX-License-Identifier: Apache-2.0
"""Compares what a pipeline's target has with what its source had where the pipeline stands.

A stopped pipeline is compared at its own position, exactly: the source's rows are read as they are now, and
what the log changed behind the position is undone. A running one is compared as both sides are now; the keys
that differ are looked at again once the pipeline has passed the moment at which the source was read, and what
the log did not touch in between and still differs is a difference.

Either way the first look keeps two numbers of each row, and only keys that may differ are read in full.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy
import pyarrow

from penstock.changes import Changes, Origin, Target
from penstock.errors import PenstockError, ServerBehind
from penstock.model import Position, TableName
from penstock.pipeline.record import BatchRecord
from penstock.pipeline.state import PipelineState, Standing, table_key
from penstock.pipeline.verify.differences import Difference, Kind, differences, hashes_of
from penstock.pipeline.verify.hashed import NONE, Hashes, hashes, is_among, joined
from penstock.pipeline.verify.kept_values import expected_values
from penstock.pipeline.verify.log_behind import LogBehind, position_of
from penstock.pipeline.verify.shares import (
    ComparedTable,
    Share,
    Suspects,
    TouchedBySource,
    source_rows_of,
    stepped,
    suspects_of,
    target_rows_of,
)
from penstock.pipeline.verify.source_rows import SourceTable
from penstock.pipeline.verify.touched import Touched, as_inserts
from penstock.pipeline.verify.unjudged import Unjudged
from penstock.source.source import place_of

# How often keys that keep changing are looked at again.
ROUNDS_MAX = 6
_POLL_SECONDS = 0.2
_CATCH_UP = "run the pipeline until it has caught up, then compare"

# Compares shares in any order and place: `suspects_of` of each. The second argument is sent to each of them.
Spreading = Callable[[Sequence[Share], TouchedBySource], Iterable[tuple[int, Suspects]]]


def in_this_process(shares: Sequence[Share], touched: TouchedBySource) -> Iterator[tuple[int, Suspects]]:
    """Compare shares one after the other, here."""
    for number, share in enumerate(shares):
        yield number, suspects_of(share, touched)


@dataclass
class TableResult:
    """What came of one table.

    `found` are its differences, in full up to a limit; `beyond` counts further keys that differ or may.
    `open` says why nothing can be told of the table, "" where it can. `not_held` counts, by column, values of
    the source that the target cannot hold: where it has nothing for them, it is as equal as it can be.
    """

    table: ComparedTable
    source_rows: int = 0
    target_rows: int = 0
    rejected: int = 0
    found: list[Difference] = field(default_factory=list)
    beyond: int = 0
    open: str = ""
    not_held: Counter[str] = field(default_factory=Counter)
    # Why a side cannot be read, None where both can.
    problem: PenstockError | None = None
    # The rows that the target has to have, of the keys that differ and perhaps of others.
    expected: list[Changes] = field(default_factory=list)

    @classmethod
    def of(cls, table: ComparedTable) -> Self:
        """Return the result of a table that is not compared yet."""
        return cls(table, open=table.open)

    @property
    def equal(self) -> bool:
        """Whether nothing differs, and every row was compared."""
        return not self.found and self.whole

    @property
    def differs(self) -> bool:
        """Whether a row differs for certain."""
        return any(one.kind is not Kind.UNSETTLED for one in self.found)

    @property
    def whole(self) -> bool:
        """Whether every row of the source and of the target was compared, and could be judged."""
        unjudged = self.beyond or self.rejected or self.count(Kind.UNSETTLED)
        return not (self.open or self.table.left_out or unjudged)

    def count(self, kind: Kind) -> int:
        """Return how many rows differ in one way."""
        return sum(one.kind is kind for one in self.found)


class _Logs:
    """The logs of all sources behind where the pipeline stands, and what they touched."""

    def __init__(self, tables: Sequence[ComparedTable], offsets: Mapping[str, Mapping[str, Any]]) -> None:
        self._of_source: dict[str, LogBehind] = {}
        self._tables = {one.key: one for table in tables for one in table.sources}
        self.touched: TouchedBySource = {
            key: Touched(one.table.primary_key) for key, one in self._tables.items()
        }
        for name in {name for name, _ in self._tables}:
            of_it = [one for (source, _), one in self._tables.items() if source == name]
            self._of_source[name] = LogBehind(
                of_it[0].source, offsets[name], {one.table.name: one.table for one in of_it}
            )

    def close(self) -> None:
        for one in self._of_source.values():
            one.close()

    @property
    def names(self) -> list[str]:
        """The names of the sources."""
        return list(self._of_source)

    def settle(self) -> None:
        """Wait until every table shows what is in its log."""
        for log in self._of_source.values():
            log.moment()

    def skip(self) -> None:
        """Go on without reading, to places of which rows read from now on hold everything before."""
        for log in self._of_source.values():
            log.skip()

    def heads(self) -> dict[str, Position]:
        """Return the end of every log now."""
        return {name: log.head() for name, log in self._of_source.items()}

    def read(
        self,
        take: Callable[[SourceTable, Changes], None] | None = None,
        ends: Mapping[str, Position] | None = None,
    ) -> None:
        """Read every log on, to its head or to where `ends` says; those that it leaves out stay.

        `take` is told of the changes of keys that were not touched before.
        """
        for name, log in self._of_source.items():
            if ends is not None and name not in ends:
                continue
            for one in log.read(None if ends is None else ends[name]):
                key = (name, str(one.source))
                if take is not None:
                    take(self._tables[key], self.touched[key].untouched(one))
                self.touched[key].add(one)

    def why_open(self, table: ComparedTable) -> str:
        """Return why the rows of a table cannot be told as they were, "" where they can."""
        for one in table.sources:
            anew = self._of_source[one.source.name].anew.get(one.table.name)
            if anew is not None:
                return f"{one.table.name} was emptied or defined anew behind the pipeline's position ({anew})"
            if not one.table.primary_key and self.touched[one.key].events:
                return f"{one.table.name} has no primary key, and has changed since"
        return ""


class _KeysOfChanges:
    """The keys in the target that changes have to do with: of both images of each, through the steps."""

    def __init__(self, tables: Sequence[ComparedTable]) -> None:
        self._tables: dict[tuple[str, str], list[ComparedTable]] = {}
        for table in tables:
            for one in table.sources:
                self._tables.setdefault(one.key, []).append(table)
        self._keys: dict[TableName, list[Hashes]] = {}

    def take(self, source_table: SourceTable, changes: Changes) -> None:
        if not len(changes):
            return
        rows = replace(changes, rows=as_inserts(changes.rows), origin=Origin.LOAD)
        for table in self._tables.get(source_table.key, ()):
            for made in stepped(table, rows):
                key = table.target.primary_key or table.columns
                self._keys.setdefault(table.target.name, []).append(hashes(made.rows, key))

    def of(self, table: ComparedTable) -> Hashes:
        """Return the keys of one table of the target, ascending."""
        return numpy.unique(joined(self._keys.get(table.target.name, [])))


@dataclass
class _Moved:
    """Differences of a share whose rows changed while they were compared."""

    share: Share
    found: list[Difference]
    unjudged: Unjudged


class Comparison:
    """The comparison of some tables of one pipeline, share by share.

    `tables` that are open have a result and no shares. `limit` is how many keys of a table are read in full.
    `settle_for` is how long, in seconds, a running
    pipeline is waited for until it has passed a moment.
    """

    def __init__(
        self,
        tables: Sequence[ComparedTable],
        shares: Sequence[Share],
        state: PipelineState,
        *,
        spreading: Spreading = in_this_process,
        limit: int = 10_000,
        settle_for: float = 120.0,
    ) -> None:
        self._shares = list(shares)
        self._state = state
        self._spreading = spreading
        self._limit = limit
        self._settle_for = settle_for
        self._every_table = list(tables)
        self._tables = [table for table in tables if not table.open]
        self._results = {table.target.name: TableResult.of(table) for table in tables}

    def run(self) -> list[TableResult]:
        """Compare, and return what came of each table.

        A table of which a side cannot be read is open. Raises what reading either side raises where that
        concerns all tables, or each of them.
        """
        if self._shares and (self._state.runner() is None or not self._running()):
            self._results = {table.target.name: TableResult.of(table) for table in self._every_table}
            self._stopped()
        results = list(self._results.values())
        problems = [one.problem for one in results if one.problem is not None]
        if problems and len(problems) == len(results):
            raise problems[0]
        return results

    # --- A stopped pipeline -----------------------------------------------------------------

    def _stopped(self) -> None:
        standing = self._standing()
        logs = _Logs(self._tables, standing.stands)
        try:
            # What the pipeline has read from the log may not be shown to readers of the tables yet.
            logs.settle()
            unfinished = _KeysOfChanges(self._tables)
            record = self._state.begun(standing)
            if record is not None:
                logs.read(unfinished.take, {name: position_of(end) for name, end in record.end.items()})
            logs.read()
            self._note_open(logs, standing)
            first = self._first_look(logs.touched)
            # What the log did meanwhile may have hidden a difference, so those keys are looked at as well.
            meanwhile = _KeysOfChanges(self._tables)
            logs.read(meanwhile.take)
            for share, keys in zip(self._shares, first, strict=True):
                every = numpy.union1d(keys, meanwhile.of(share.table))
                self._look_closely(share, self._limited(share, every), logs, unfinished.of(share.table))
        finally:
            logs.close()

    def _look_closely(self, share: Share, keys: Hashes, logs: _Logs, unfinished: Hashes) -> None:
        table = share.table
        if not len(keys) or self._result(share).open:
            return
        for _ in range(ROUNDS_MAX):
            mine = source_rows_of(share, logs.touched, keys)
            # A row that the log touched only now may have been read as it is since.
            late = _KeysOfChanges([table])
            logs.read(late.take)
            self._note_open(logs, None)
            torn = numpy.intersect1d(keys, late.of(table))
            if not len(torn):
                break
        if self._result(share).open:
            return
        theirs = target_rows_of(share, keys)
        unsure = numpy.union1d(unfinished, torn)
        self._keep(share, _differing(share, mine.rows, theirs), unsure, mine.unjudged)
        self._result(share).expected += mine.rows

    def _note_open(self, logs: _Logs, standing: Standing | None) -> None:
        """Note of which tables nothing can be told."""
        for table in self._tables:
            why = logs.why_open(table) or (_why_ahead(table, standing) if standing is not None else "")
            if why:
                self._results[table.target.name].open = f"{why}: {_CATCH_UP}"

    # --- A running pipeline -----------------------------------------------------------------

    def _running(self) -> bool:
        """Compare while the pipeline runs; tell whether it did until the end."""
        pending = list(zip(self._shares, self._first_look({}), strict=True))
        pending = [(share, self._limited(share, keys)) for share, keys in pending if len(keys)]
        moved: list[_Moved] = []
        for _ in range(ROUNDS_MAX):
            if not pending:
                return True
            looked = self._look_again(pending)
            if looked is None:
                return False
            moved = [one for one in looked if one.found]
            pending = [(one.share, hashes_of(one.found)) for one in moved]
        for one in moved:
            self._keep(one.share, one.found, hashes_of(one.found), one.unjudged)
        return True

    def _look_again(self, pending: Sequence[tuple[Share, Hashes]]) -> list[_Moved] | None:
        """Read keys that differ once more, on both sides with the pipeline's passing between.

        Keeps what differs for certain, and returns what changed meanwhile; None where the pipeline stopped.
        """
        tables = list({share.table.target.name: share.table for share, _ in pending}.values())
        before = self._standing()
        logs = _Logs(tables, before.stands)
        try:
            logs.skip()
            mine = [source_rows_of(share, {}, keys) for share, keys in pending]
            if not self._passed(logs.heads()):
                return None
            theirs = [target_rows_of(share, keys) for share, keys in pending]
            standing = self._standing()
            record = self._state.begun(standing)
            written = standing.stands if record is None else {**standing.stands, **record.end}
            since = _KeysOfChanges(tables)
            ends = {name: position_of(written[name]) for name in logs.names}
            logs.read(since.take, ends)
            anew = {table.target.name for table in tables if logs.why_open(table)}
            anew |= {table.target.name for table in tables if _was_read(table, before, standing, record)}
        finally:
            logs.close()
        looked = []
        for (share, keys), one, other in zip(pending, mine, theirs, strict=True):
            table = share.table
            found = _differing(share, one.rows, other)
            moved = keys if table.target.name in anew else since.of(table)
            sure = ~is_among(pyarrow.array([one.hash for one in found], pyarrow.uint64()).to_numpy(), moved)
            certain = [difference for difference, kept in zip(found, sure, strict=True) if kept]
            uncertain = [difference for difference, kept in zip(found, sure, strict=True) if not kept]
            self._keep(share, certain, NONE, one.unjudged)
            looked.append(_Moved(share, uncertain, one.unjudged))
        return looked

    def _passed(self, heads: Mapping[str, Position]) -> bool:
        """Wait until the pipeline has passed positions; tell whether it did before it stopped, or took too
        long without any progress."""
        deadline, before = time.monotonic() + self._settle_for, None
        while True:
            standing = self._standing()
            if all(
                place_of(position_of(standing.stands[name])) >= place_of(head) for name, head in heads.items()
            ):
                return True
            if standing.number != before:
                deadline, before = time.monotonic() + self._settle_for, standing.number
            if self._state.runner() is None:
                return False
            if time.monotonic() > deadline:
                raise ServerBehind(
                    f"the pipeline {self._state.name} has done no batch for {self._settle_for:.0f} seconds",
                    hint=f"penstock pipelines show {self._state.name} tells what it waits for",
                )
            time.sleep(_POLL_SECONDS)

    # --- Both -------------------------------------------------------------------------------

    def _standing(self) -> Standing:
        standing = self._state.standing()
        assert standing is not None, "a pipeline that never ran is refused before"
        return standing

    def _first_look(self, touched: TouchedBySource) -> list[Hashes]:
        """Compare the hashes of all shares, and return the keys of each that may differ."""
        suspects = [NONE] * len(self._shares)
        looked = [number for number, share in enumerate(self._shares) if not self._result(share).open]
        for place, found in self._spreading([self._shares[number] for number in looked], touched):
            number = looked[place]
            suspects[number] = found.keys
            result = self._result(self._shares[number])
            result.source_rows += found.source_rows
            result.target_rows += found.target_rows
            result.rejected += found.rejected
            result.not_held += found.not_held
            if found.problem is not None and not result.open:
                result.problem, result.open = found.problem, str(found.problem)
        return suspects

    def _result(self, share: Share) -> TableResult:
        return self._results[share.table.target.name]

    def _limited(self, share: Share, keys: Hashes) -> Hashes:
        result = self._result(share)
        room = max(self._limit - len(result.found), 0)
        result.beyond += max(len(keys) - room, 0)
        return keys[:room]

    def _keep(self, share: Share, found: Sequence[Difference], unsure: Hashes, unjudged: Unjudged) -> None:
        open_keys = set(unsure.tolist())
        judged = _judged(found, share.table.target, unjudged)
        result = self._result(share)
        for one in judged:
            unsettled = one.kind is Kind.UNSETTLED or one.hash in open_keys
            if one.not_held and not one.columns and not unsettled:
                result.not_held.update(one.not_held)
            else:
                result.found.append(replace(one, kind=Kind.UNSETTLED) if unsettled else one)


def _judged(found: Sequence[Difference], target: Target, unjudged: Unjudged) -> list[Difference]:
    """Return differences in which a row of the target that cannot be judged is unsettled."""
    there = [one.target for one in found if one.target is not None]
    if not unjudged or not there:
        return list(found)
    rows = pyarrow.RecordBatch.from_pylist(there, schema=target.arrow())
    among = iter(unjudged.among(rows).tolist())
    return [
        replace(one, kind=Kind.UNSETTLED) if one.target is not None and next(among) else one for one in found
    ]


def _why_ahead(table: ComparedTable, standing: Standing) -> str:
    """Return why a table's rows are newer than the pipeline's position, "" where they are not."""
    for one in table.sources:
        load = standing.loads.get(table_key(one.source.name, one.table.name))
        position = position_of(standing.stands[one.source.name])
        if load is not None and position.commit_version < max(load.floor, load.read_to):
            return f"{one.table.name} was loaded, and the stream has not come to where its rows were read"
    return ""


def _was_read(table: ComparedTable, before: Standing, after: Standing, begun: BatchRecord | None) -> bool:
    """Tell whether rows of a table were read meanwhile, which may be newer than what the log told."""
    keys = {table_key(one.source.name, one.table.name) for one in table.sources}
    chunks = () if begun is None else begun.chunks
    return any(before.loads.get(key) != after.loads.get(key) for key in keys) or any(
        table_key(one.source, one.table) in keys for one in chunks
    )


def _differing(
    share: Share, mine: Sequence[Changes], theirs: Sequence[pyarrow.RecordBatch]
) -> list[Difference]:
    """Return what differs; rows that no full load takes may be there or not."""
    table = share.table
    sink = table.sink.make()
    expected = [expected_values(sink, table.target, table.columns, one.rows) for one in mine]
    found = list(differences(table.target, table.columns, expected, theirs))
    missing = [one for one in found if one.kind is Kind.MISSING]
    if not missing or not any(chunk.where for chunk in share.chunks):
        return found
    key = table.target.primary_key or table.columns
    taken = source_rows_of(share, {}, hashes_of(missing), loaded=True).rows
    wanted = {hashed for one in taken for hashed in hashes(one.rows, key).tolist()}
    return [one for one in found if one.kind is not Kind.MISSING or one.hash in wanted]
