# SPDX-License-Identifier: Apache-2.0
"""Compares a pipeline's target with its source at the pipeline's position.

A stopped pipeline is compared exactly at its own position: the source's current rows are read, and the
effects of changes that were logged after the position are excluded. For a running pipeline, the current rows
of source and target are compared first. Keys that differ are read again once the pipeline has applied all
changes up to the time at which the source was read. Keys that still differ, and that no change in the log has
touched in between, are reported as differences.

In both cases the first pass compares two hashes per row, and only keys that may differ are read in full.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy
import pyarrow

from penstock.changes import Changes, Origin, Target
from penstock.commit_versions import are_positional
from penstock.errors import PenstockError, ServerBehind
from penstock.model import Position, TableName
from penstock.pipeline.record import BatchRecord
from penstock.pipeline.state import Checkpoint, PipelineState, table_key
from penstock.pipeline.verify.differences import Difference, Kind, differences, hashes_of
from penstock.pipeline.verify.hashed import NONE, Hashes, concatenate_hashes, hashes, is_among
from penstock.pipeline.verify.kept_values import expected_values
from penstock.pipeline.verify.log_reader import LogReader, position_of
from penstock.pipeline.verify.shares import (
    ComparedTable,
    Share,
    Suspects,
    TouchedBySource,
    apply_steps,
    source_rows_of,
    suspects_of,
    target_rows_of,
)
from penstock.pipeline.verify.source_rows import SourceTable
from penstock.pipeline.verify.touched import Touched, as_inserts
from penstock.pipeline.verify.unjudged import Unjudged
from penstock.source.source import place_of

# The number of times that keys are read again while they keep changing.
ROUNDS_MAX = 6
_POLL_SECONDS = 0.2
# How long a comparison waits for a running pipeline that completes no batch.
_SETTLE_SECONDS_MAX = 120
_CATCH_UP = "run the pipeline until it has caught up, then compare"

# Calls `suspects_of` for each share, in any order and in any process. The second argument holds the keys that
# the logs touched.
Spreading = Callable[[Sequence[Share], TouchedBySource], Iterable[tuple[int, Suspects]]]


def in_this_process(shares: Sequence[Share], touched: TouchedBySource) -> Iterator[tuple[int, Suspects]]:
    """Compare shares one after another in this process."""
    for number, share in enumerate(shares):
        yield number, suspects_of(share, touched)


@dataclass
class TableResult:
    """The result of comparing one table.

    `found` contains its differences, up to a limit. `beyond` counts further keys that differ or may differ.
    `open` is the reason why the table cannot be judged, and "" if it can. `not_held` counts, by column,
    source values that the target cannot represent. If the target leaves such a value empty, it is counted as
    equal.
    """

    table: ComparedTable
    source_rows: int = 0
    target_rows: int = 0
    rejected: int = 0
    found: list[Difference] = field(default_factory=list)
    beyond: int = 0
    open: str = ""
    not_held: Counter[str] = field(default_factory=Counter)
    # Why a side cannot be read, None if both can.
    problem: PenstockError | None = None
    # The rows that the target should have, for the keys that differ and possibly others.
    expected: list[Changes] = field(default_factory=list)

    @classmethod
    def of(cls, table: ComparedTable) -> Self:
        """Return the initial result of a table."""
        return cls(table, open=table.open)

    @property
    def equal(self) -> bool:
        """Whether nothing differs, and every row was compared."""
        return not self.found and self.whole

    @property
    def differs(self) -> bool:
        """Whether at least one row certainly differs."""
        return any(difference.kind is not Kind.UNSETTLED for difference in self.found)

    @property
    def whole(self) -> bool:
        """Whether every row of the source and of the target was compared and could be judged."""
        unjudged = self.beyond or self.rejected or self.count(Kind.UNSETTLED)
        return not (self.open or self.table.left_out or unjudged)

    def count(self, kind: Kind) -> int:
        """Return how many rows differ in a given way."""
        return sum(difference.kind is kind for difference in self.found)


class _Logs:
    """The logs of all sources after the pipeline's position, and the keys that they touched."""

    def __init__(self, tables: Sequence[ComparedTable], offsets: Mapping[str, Mapping[str, Any]]) -> None:
        self._log_by_source: dict[str, LogReader] = {}
        self._tables = {source_table.key: source_table for table in tables for source_table in table.sources}
        self.touched: TouchedBySource = {
            key: Touched(source_table.table.primary_key) for key, source_table in self._tables.items()
        }
        for name in {name for name, _ in self._tables}:
            tables_of_source = [
                source_table for (source, _), source_table in self._tables.items() if source == name
            ]
            self._log_by_source[name] = LogReader(
                tables_of_source[0].source,
                offsets[name],
                {source_table.table.name: source_table.table for source_table in tables_of_source},
            )

    def close(self) -> None:
        for log in self._log_by_source.values():
            log.close()

    @property
    def names(self) -> list[str]:
        """The names of the sources."""
        return list(self._log_by_source)

    def settle(self) -> None:
        """Wait until every table reflects its log."""
        for log in self._log_by_source.values():
            log.moment()

    def skip(self) -> None:
        """Skip to the current log ends. Rows read from now on contain everything before them."""
        for log in self._log_by_source.values():
            log.skip()

    def heads(self) -> dict[str, Position]:
        """Return the current end of every log."""
        return {name: log.head() for name, log in self._log_by_source.items()}

    def read(
        self,
        take: Callable[[SourceTable, Changes], None] | None = None,
        ends: Mapping[str, Position] | None = None,
    ) -> None:
        """Read every log up to its head, or up to `ends`. A log that `ends` leaves out is not read.

        `take` is called with the changes of keys that were not touched before.
        """
        for name, log in self._log_by_source.items():
            if ends is not None and name not in ends:
                continue
            for changes in log.read(None if ends is None else ends[name]):
                key = (name, str(changes.source))
                if take is not None:
                    take(self._tables[key], self.touched[key].untouched(changes))
                self.touched[key].add(changes)

    def why_open(self, table: ComparedTable) -> str:
        """Return why a table's earlier rows cannot be reconstructed, "" if they can."""
        for source in table.sources:
            why = self._log_by_source[source.source.name].redefined.get(source.table.name)
            if why is not None:
                return (
                    f"{source.table.name} was emptied or defined anew behind the pipeline's position ({why})"
                )
            if not source.table.primary_key and self.touched[source.key].events:
                return f"{source.table.name} has no primary key, and has changed since"
        return ""

    def why_ahead(self, table: ComparedTable, checkpoint: Checkpoint) -> str:
        """Return why a table's rows are newer than the pipeline's position, "" if they are not."""
        for source in table.sources:
            load = checkpoint.loads.get(table_key(source.source.name, source.table.name))
            position = position_of(checkpoint.stands[source.source.name])
            version: int | None = position.commit_version
            if not are_positional(position.file):
                # The version of the first change of a TiDB cluster that the pipeline has not applied.
                version = self._log_by_source[source.source.name].first_versions.get(source.table.name)
            if load is not None and version is not None and version < max(load.floor, load.read_to):
                return (
                    f"{source.table.name} was loaded, and the stream has not come to where its rows were read"
                )
        return ""


class _KeysOfChanges:
    """The target keys that changes affect: the keys of both images of each change, after the steps."""

    def __init__(self, tables: Sequence[ComparedTable]) -> None:
        self._tables: dict[tuple[str, str], list[ComparedTable]] = {}
        for table in tables:
            for source_table in table.sources:
                self._tables.setdefault(source_table.key, []).append(table)
        self._keys: dict[TableName, list[Hashes]] = {}

    def take(self, source_table: SourceTable, changes: Changes) -> None:
        if not len(changes):
            return
        rows = replace(changes, rows=as_inserts(changes.rows), origin=Origin.LOAD)
        for table in self._tables.get(source_table.key, ()):
            for stepped_changes in apply_steps(table, rows):
                key = table.target.primary_key or table.columns
                self._keys.setdefault(table.target.name, []).append(hashes(stepped_changes.rows, key))

    def of(self, table: ComparedTable) -> Hashes:
        """Return the affected keys of one target table, ascending."""
        return numpy.unique(concatenate_hashes(self._keys.get(table.target.name, [])))


@dataclass
class _Moved:
    """Differences of a share that was still changing during the comparison."""

    share: Share
    found: list[Difference]
    unjudged: Unjudged


class Comparison:
    """Compares tables of one pipeline, share by share.

    Tables that are `open`, because they cannot be compared, get a result but no shares. `limit` is the
    maximum number of keys per table that are read in full.
    """

    def __init__(
        self,
        tables: Sequence[ComparedTable],
        shares: Sequence[Share],
        state: PipelineState,
        *,
        spreading: Spreading = in_this_process,
        limit: int = 10_000,
    ) -> None:
        self._shares = list(shares)
        self._state = state
        self._spreading = spreading
        self._limit = limit
        self._every_table = list(tables)
        self._tables = [table for table in tables if not table.open]
        self._results = {table.target.name: TableResult.of(table) for table in tables}

    def run(self) -> list[TableResult]:
        """Compare, and return the result of each table.

        A table whose source or target cannot be read is reported as open. If no table can be read, the error
        is raised.
        """
        if self._shares and (self._state.runner() is None or not self._compare_running()):
            self._results = {table.target.name: TableResult.of(table) for table in self._every_table}
            self._compare_stopped()
        results = list(self._results.values())
        problems = [result.problem for result in results if result.problem is not None]
        if problems and len(problems) == len(results):
            raise problems[0]
        return results

    # --- A stopped pipeline -----------------------------------------------------------------

    def _compare_stopped(self) -> None:
        checkpoint = self._checkpoint()
        with closing(_Logs(self._tables, checkpoint.stands)) as logs:
            # Changes that the pipeline has read from the log may not be visible in the tables yet.
            logs.settle()
            unfinished = _KeysOfChanges(self._tables)
            record = self._state.begun(checkpoint)
            if record is not None:
                logs.read(unfinished.take, {name: position_of(end) for name, end in record.end.items()})
            logs.read()
            self._mark_open(logs, checkpoint)
            first = self._find_suspects(logs.touched)
            # Changes since the first read may have hidden a difference, so their keys are compared as well.
            later_changes = _KeysOfChanges(self._tables)
            logs.read(later_changes.take)
            for share, keys in zip(self._shares, first, strict=True):
                suspects = numpy.union1d(keys, later_changes.of(share.table))
                self._compare_rows(
                    share, self._apply_limit(share, suspects), logs, unfinished.of(share.table)
                )

    def _compare_rows(self, share: Share, keys: Hashes, logs: _Logs, unfinished: Hashes) -> None:
        table = share.table
        if not len(keys) or self._result(share).open:
            return
        for _ in range(ROUNDS_MAX):
            source_rows = source_rows_of(share, logs.touched, keys)
            # If the log touched a row only since the last read of the log, the source row may have been read
            # in its new state.
            later_changes = _KeysOfChanges([table])
            logs.read(later_changes.take)
            self._mark_open(logs, None)
            touched_since = numpy.intersect1d(keys, later_changes.of(table))
            if not len(touched_since):
                break
        if self._result(share).open:
            return
        target_rows = target_rows_of(share, keys)
        unsure = numpy.union1d(unfinished, touched_since)
        self._keep(
            share, _find_differences(share, source_rows.rows, target_rows), unsure, source_rows.unjudged
        )
        self._result(share).expected += source_rows.rows

    def _mark_open(self, logs: _Logs, checkpoint: Checkpoint | None) -> None:
        """Mark tables that cannot be judged as open."""
        for table in self._tables:
            why = logs.why_open(table) or (logs.why_ahead(table, checkpoint) if checkpoint else "")
            if why:
                self._results[table.target.name].open = f"{why}: {_CATCH_UP}"

    # --- A running pipeline -----------------------------------------------------------------

    def _compare_running(self) -> bool:
        """Compare while the pipeline runs. Return whether the pipeline ran until the end."""
        pending = list(zip(self._shares, self._find_suspects({}), strict=True))
        pending = [(share, self._apply_limit(share, keys)) for share, keys in pending if len(keys)]
        moved: list[_Moved] = []
        for _ in range(ROUNDS_MAX):
            if not pending:
                return True
            compared = self._compare_again(pending)
            if compared is None:
                return False
            moved = [unsettled for unsettled in compared if unsettled.found]
            pending = [(unsettled.share, hashes_of(unsettled.found)) for unsettled in moved]
        for unsettled in moved:
            self._keep(unsettled.share, unsettled.found, hashes_of(unsettled.found), unsettled.unjudged)
        return True

    def _compare_again(self, pending: Sequence[tuple[Share, Hashes]]) -> list[_Moved] | None:
        """Read the keys with differences a second time on both sides. The target is read after the pipeline
        has caught up.

        Keeps differences that are certain and returns those whose rows have changed in the meantime. Returns
        None if the pipeline stopped.
        """
        tables = list({share.table.target.name: share.table for share, _ in pending}.values())
        before = self._checkpoint()
        with closing(_Logs(tables, before.stands)) as logs:
            logs.skip()
            source_rows = [source_rows_of(share, {}, keys) for share, keys in pending]
            if not self._wait_until_passed(logs.heads()):
                return None
            target_rows = [target_rows_of(share, keys) for share, keys in pending]
            checkpoint = self._checkpoint()
            record = self._state.begun(checkpoint)
            written = checkpoint.stands if record is None else {**checkpoint.stands, **record.end}
            since = _KeysOfChanges(tables)
            ends = {name: position_of(written[name]) for name in logs.names}
            logs.read(since.take, ends)
            reread = {table.target.name for table in tables if logs.why_open(table)}
            reread |= {table.target.name for table in tables if _was_read(table, before, checkpoint, record)}
        still_moving = []
        for (share, keys), source_part, target_part in zip(pending, source_rows, target_rows, strict=True):
            table = share.table
            all_differences = _find_differences(share, source_part.rows, target_part)
            moved = keys if table.target.name in reread else since.of(table)
            sure = ~is_among(
                pyarrow.array(
                    [difference.hash for difference in all_differences], pyarrow.uint64()
                ).to_numpy(),
                moved,
            )
            certain = [difference for difference, kept in zip(all_differences, sure, strict=True) if kept]
            uncertain = [
                difference for difference, kept in zip(all_differences, sure, strict=True) if not kept
            ]
            self._keep(share, certain, NONE, source_part.unjudged)
            still_moving.append(_Moved(share, uncertain, source_part.unjudged))
        return still_moving

    def _wait_until_passed(self, heads: Mapping[str, Position]) -> bool:
        """Wait until the pipeline has passed the given positions; return whether it has.

        The result is False if the pipeline stopped first. Raises ServerBehind if it makes no progress for
        `_SETTLE_SECONDS_MAX`.
        """
        deadline, before = time.monotonic() + _SETTLE_SECONDS_MAX, None
        while True:
            checkpoint = self._checkpoint()
            if all(
                place_of(position_of(checkpoint.stands[name])) >= place_of(head)
                for name, head in heads.items()
            ):
                return True
            if checkpoint.number != before:
                deadline, before = time.monotonic() + _SETTLE_SECONDS_MAX, checkpoint.number
            if self._state.runner() is None:
                return False
            if time.monotonic() > deadline:
                raise ServerBehind(
                    f"the pipeline {self._state.name} has done no batch for {_SETTLE_SECONDS_MAX} seconds",
                    hint=f"penstock pipelines show {self._state.name} tells what it waits for",
                )
            time.sleep(_POLL_SECONDS)

    # --- Both -------------------------------------------------------------------------------

    def _checkpoint(self) -> Checkpoint:
        checkpoint = self._state.checkpoint()
        assert checkpoint is not None, "a pipeline that never ran is refused before"
        return checkpoint

    def _find_suspects(self, touched: TouchedBySource) -> list[Hashes]:
        """Compare the hashes of all shares, and return the keys of each share that may differ."""
        suspects = [NONE] * len(self._shares)
        compared = [number for number, share in enumerate(self._shares) if not self._result(share).open]
        for index, share_suspects in self._spreading([self._shares[number] for number in compared], touched):
            number = compared[index]
            suspects[number] = share_suspects.keys
            result = self._result(self._shares[number])
            result.source_rows += share_suspects.source_rows
            result.target_rows += share_suspects.target_rows
            result.rejected += share_suspects.rejected
            result.not_held += share_suspects.not_held
            if share_suspects.problem is not None and not result.open:
                result.problem, result.open = share_suspects.problem, str(share_suspects.problem)
        return suspects

    def _result(self, share: Share) -> TableResult:
        return self._results[share.table.target.name]

    def _apply_limit(self, share: Share, keys: Hashes) -> Hashes:
        result = self._result(share)
        room = max(self._limit - len(result.found), 0)
        result.beyond += max(len(keys) - room, 0)
        return keys[:room]

    def _keep(self, share: Share, found: Sequence[Difference], unsure: Hashes, unjudged: Unjudged) -> None:
        open_keys = set(unsure.tolist())
        judged = _mark_unjudged(found, share.table.target, unjudged)
        result = self._result(share)
        for difference in judged:
            unsettled = difference.kind is Kind.UNSETTLED or difference.hash in open_keys
            if difference.not_held and not difference.columns and not unsettled:
                result.not_held.update(difference.not_held)
            else:
                result.found.append(replace(difference, kind=Kind.UNSETTLED) if unsettled else difference)


def _mark_unjudged(found: Sequence[Difference], target: Target, unjudged: Unjudged) -> list[Difference]:
    """Return the differences. Differences of target rows that cannot be judged are marked as unsettled."""
    target_rows = [difference.target for difference in found if difference.target is not None]
    if not unjudged or not target_rows:
        return list(found)
    rows = pyarrow.RecordBatch.from_pylist(target_rows, schema=target.arrow())
    among = iter(unjudged.among(rows).tolist())
    return [
        replace(difference, kind=Kind.UNSETTLED)
        if difference.target is not None and next(among)
        else difference
        for difference in found
    ]


def _was_read(table: ComparedTable, before: Checkpoint, after: Checkpoint, begun: BatchRecord | None) -> bool:
    """Return whether a table was read during the comparison. Its rows may be newer than the log that was
    read.
    """
    keys = {table_key(source_table.source.name, source_table.table.name) for source_table in table.sources}
    chunks = () if begun is None else begun.chunks
    return any(before.loads.get(key) != after.loads.get(key) for key in keys) or any(
        table_key(chunk.source, chunk.table) in keys for chunk in chunks
    )


def _find_differences(
    share: Share, source_rows: Sequence[Changes], target_rows: Sequence[pyarrow.RecordBatch]
) -> list[Difference]:
    """Return the differences. Rows that the full load's condition excludes may exist in the target or not."""
    table = share.table
    sink = table.sink.make()
    expected = [expected_values(sink, table.target, table.columns, changes.rows) for changes in source_rows]
    all_differences = list(differences(table.target, table.columns, expected, target_rows))
    missing = [difference for difference in all_differences if difference.kind is Kind.MISSING]
    if not missing or not any(chunk.where for chunk in share.chunks):
        return all_differences
    key = table.target.primary_key or table.columns
    loaded = source_rows_of(share, {}, hashes_of(missing), loaded=True).rows
    loaded_keys = {hashed for changes in loaded for hashed in hashes(changes.rows, key).tolist()}
    return [
        difference
        for difference in all_differences
        if difference.kind is not Kind.MISSING or difference.hash in loaded_keys
    ]
