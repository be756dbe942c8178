# SPDX-License-Identifier: Apache-2.0
"""Keeps a table of a lake equal to its source: one commit a batch, with the batch's number in it."""

from collections import Counter
from collections.abc import Callable, Mapping

import numpy
import pyarrow
import pyarrow.compute as pc

from penstock.changes import Changes, Target
from penstock.sinks.images import LastImages, last_of_each, puts, unrepresentable_counts
from penstock.sinks.lake.copy_on_write import CopyOnWrite, Rewritten
from penstock.sinks.lake.key_index import KeyIndex, plain
from penstock.sinks.lake.parquet_files import DataFile, PartFiles
from penstock.sinks.lake.rows import check_keys, stored_rows
from penstock.sinks.lake.table import LakeTable

# Where a run of rows stands: in memory, and before all runs the table itself.
_TABLE = -1


class MirrorTable:
    """What one batch makes of one table. Rows are gathered up to a number of bytes; more are written to files
    of the table, and only their keys are held."""

    def __init__(
        self,
        target: Target,
        table: LakeTable,
        output: Callable[[], PartFiles],
        *,
        bytes_max: int,
        memory_bytes: int,
    ) -> None:
        self._target = target
        self._table = table
        self._output = output
        self._bytes_max = bytes_max
        self._memory_bytes = memory_bytes
        self._images = LastImages(target, memory_bytes // 4)
        # Of each run that was written: its keys, also those that it takes away, their versions, its files.
        self._keys: list[pyarrow.Table] = []
        self._versions: list[numpy.ndarray] = []
        self._spilled: list[list[DataFile]] = []
        self.unrepresentable: Counter[str] = Counter()

    def add(self, changes: Changes) -> None:
        """Take changes, which follow those taken before."""
        self._images.add(changes)
        if self._images.bytes > self._memory_bytes:
            self._spill()

    def add_stored(self, rows: pyarrow.Table) -> None:
        """Take rows of a load as they are stored, of which no key comes twice."""
        if not rows.num_rows:
            return
        writer = self._output()
        writer.write(_sorted(rows, self._target.primary_key))
        self._spilled.append(writer.finish())
        self._keys.append(rows.select(list(self._target.primary_key)))
        self._versions.append(numpy.zeros(rows.num_rows, numpy.int64))

    def empty(self, version: int) -> None:
        """Take that the source table was emptied."""
        self.abort()
        self._images.empty(version)

    def abort(self) -> None:
        """Delete what was written."""
        self._table.folder.delete([one.path for run in self._spilled for one in run])
        self._spilled, self._keys, self._versions = [], [], []

    def commit(self, numbers: Mapping[str, int]) -> int:
        """Make the table's next version; return how many rows were put there or taken away."""
        files = [] if self._images.emptied is not None else self._table.files()
        emptied = self._table.files() if self._images.emptied is not None else []
        if not self._spilled:
            return self._commit_gathered(files, emptied, numbers)
        self._spill()
        return self._commit_spilled(files, emptied, numbers)

    def _commit_gathered(
        self, files: list[DataFile], emptied: list[DataFile], numbers: Mapping[str, int]
    ) -> int:
        rows, keys, put = self._stored(self._let_go())
        if rows is None:
            rows = self._table.schema.empty_table()
        is_put = put.to_numpy()
        # Rows that no file has in their place yet.
        fresh = is_put.copy()
        if files:
            # Taking rows of many chunks would join them each time.
            rows = rows.combine_chunks()

        def mend(group: pyarrow.Table, found: numpy.ndarray, _: int) -> pyarrow.Table:
            there = found[found >= 0]
            replaced = there[is_put[there]]
            fresh[replaced] = False
            kept = group.filter(pyarrow.array(found < 0))
            return pyarrow.concat_tables([kept, rows.take(pyarrow.array(replaced))])

        done = self._rewrite(files, keys, mend)
        try:
            writer = self._output()
            writer.write(_sorted(rows.filter(pyarrow.array(fresh)), self._target.primary_key))
            done.added += writer.finish()
        except BaseException:
            self._table.folder.delete([one.path for one in done.added])
            raise
        # A commit whose answer is lost may have been made: the files that it names stay, whatever it raises.
        self._table.commit(done.added, [*done.removed, *emptied], numbers)
        return int(keys.num_rows)

    def _commit_spilled(
        self, files: list[DataFile], emptied: list[DataFile], numbers: Mapping[str, int]
    ) -> int:
        """The same where rows were written before: each key's row is that of the run with its last version.

        That may be an earlier run: rows of a load come behind those of the log, and are older than some.
        """
        every = pyarrow.concat_tables(self._keys)
        runs = numpy.repeat(numpy.arange(len(self._keys)), [one.num_rows for one in self._keys])
        order = numpy.lexsort((runs, numpy.concatenate(self._versions)))
        rank = numpy.empty(len(order), numpy.int64)
        rank[order] = numpy.arange(len(order))
        last = order[last_of_each([plain(one) for one in every.columns], rank)]
        keys, last_run = every.take(pyarrow.array(last)), runs[last]
        spilled = [one for run in self._spilled for one in run]
        run_of = numpy.array(
            [_TABLE] * len(files) + [number for number, run in enumerate(self._spilled) for _ in run]
        )

        def mend(group: pyarrow.Table, found: numpy.ndarray, number: int) -> pyarrow.Table:
            superseded = (found >= 0) & (last_run[found] != run_of[number])
            return group.filter(pyarrow.array(~superseded))

        done = self._rewrite([*files, *spilled], keys, mend)
        gone = {one.path for one in done.removed}
        added = [one for one in spilled if one.path not in gone] + done.added
        removed = [one for one in files if one.path in gone]
        # From here on files belong to the commit, which may have been made although its answer is lost.
        self._spilled, self._keys, self._versions = [], [], []
        self._table.commit(added, [*removed, *emptied], numbers)
        self._table.folder.delete([one.path for one in spilled if one.path in gone])
        return int(keys.num_rows)

    def _rewrite(
        self, files: list[DataFile], keys: pyarrow.Table, mend: Callable[..., pyarrow.Table]
    ) -> Rewritten:
        if not files or not keys.num_rows:
            return Rewritten()
        index = KeyIndex(keys)
        work = CopyOnWrite(self._table.folder, self._table.schema, self._target.primary_key, index, mend)
        return work.rewrite(files, self._output, self._bytes_max)

    def _spill(self) -> None:
        """Write what is held as a run, and keep its keys."""
        images = self._let_go()
        rows, keys, put = self._stored(images)
        if images is None or rows is None:
            return
        versions = images.column("_commit_version").to_numpy()
        # Each of these is a copy of all that was held, so the one before it goes first.
        del images
        if not pc.all(put).as_py():
            rows = rows.filter(put)
        rows = _sorted(rows, self._target.primary_key)
        writer = self._output()
        try:
            writer.write(rows)
            self._spilled.append(writer.finish())
        except BaseException:
            writer.abort()
            raise
        self._keys.append(keys)
        self._versions.append(versions)

    def _let_go(self) -> pyarrow.Table | None:
        """Return the last images of what is held, and hold nothing any longer."""
        images, self._images = self._images.rows(), self._images.followed()
        return images

    def _stored(
        self, images: pyarrow.Table | None
    ) -> tuple[pyarrow.Table | None, pyarrow.Table, pyarrow.ChunkedArray]:
        """Return rows as they are stored, their keys, and which of them are put there."""
        key = list(self._target.primary_key)
        if images is None:
            return (
                None,
                self._table.schema.empty_table().select(key),
                pyarrow.chunked_array([], pyarrow.bool_()),
            )
        check_keys(self._target, images)
        put = puts(images)
        self.unrepresentable += unrepresentable_counts(self._target, images, put)
        rows = stored_rows(images, self._table.schema)
        return rows, rows.select(key), put


def _sorted(rows: pyarrow.Table, key: tuple[str, ...]) -> pyarrow.Table:
    """Return rows in the order of their keys, so that files and row groups have narrow bounds."""
    first = rows.column(key[0])
    if len(key) == 1 and pyarrow.types.is_integer(first.type) and not first.null_count:
        numbers = first.to_numpy()
        if (numbers[1:] >= numbers[:-1]).all():
            return rows
    order = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in key])
    return rows.take(order)
