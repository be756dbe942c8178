# SPDX-License-Identifier: Apache-2.0
"""Keeps a lake table equal to its source, with one commit per batch that stores the batch's number."""

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
from penstock.sinks.lake.table import LakeTable, NextVersion

# The run number of rows that the table already has. Those rows are older than the rows of every run.
_TABLE = -1


class MirrorTable:
    """The changes of one batch to one mirror.

    Rows are buffered in memory up to a limit in bytes. Beyond the limit, rows are spilled to files of the
    table, and only their keys stay in memory.
    """

    def __init__(
        self,
        target: Target,
        table: LakeTable,
        output: Callable[[], PartFiles],
        *,
        bytes_max: int,
        memory_bytes: int,
        output_of_version: Callable[[], PartFiles] | None = None,
    ) -> None:
        self._target = target
        self._table = table
        self._output = output
        # Writers of files whose next version is committed only after the caller has made them durable.
        self._output_of_version = output_of_version or output
        self._bytes_max = bytes_max
        self._memory_bytes = memory_bytes
        self._images = LastImages(target, memory_bytes // 4)
        # For each spilled run: its keys, including deleted ones, their versions, and its files.
        self._keys: list[pyarrow.Table] = []
        self._versions: list[numpy.ndarray] = []
        self._spilled: list[list[DataFile]] = []
        self._version: NextVersion | None = None
        self.unrepresentable: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        """The memory used by buffered rows."""
        return self._images.bytes

    def add(self, changes: Changes) -> None:
        """Add changes, which follow the changes added before."""
        self._images.add(changes)
        if self._images.bytes > self._memory_bytes:
            self.spill()

    def add_stored(self, rows: pyarrow.Table) -> None:
        """Add stored rows of a load, in which no key occurs twice."""
        if not rows.num_rows:
            return
        writer = self._output()
        writer.write(_sorted(rows, self._target.primary_key))
        self._spilled.append(writer.finish())
        self._keys.append(rows.select(list(self._target.primary_key)))
        self._versions.append(numpy.zeros(rows.num_rows, numpy.int64))

    def empty(self, version: int) -> None:
        """Record that the source table was emptied."""
        self.abort()
        self._images.empty(version)

    def abort(self) -> None:
        """Delete the files that belong to no version yet."""
        self._table.folder.delete([file.path for run in self._spilled for file in run])
        version, self._version = self._version, None
        if version is not None:
            self._table.folder.delete([file.path for file in (*version.added, *version.leftover)])
        self._spilled, self._keys, self._versions = [], [], []

    def stage(self) -> None:
        """Write the files of the table's next version, which `commit` adds to the table."""
        files = [] if self._images.emptied is not None else self._table.files()
        emptied = self._table.files() if self._images.emptied is not None else []
        if self._spilled:
            self.spill()
            self._version = self._stage_spilled(files, emptied)
        else:
            self._version = self._stage_buffered(files, emptied)

    def commit(self, numbers: Mapping[str, int]) -> int:
        """Commit the table's next version, and return the number of rows written or deleted.

        Stages the version first if `stage` was not called.
        """
        if self._version is None:
            self.stage()
        assert self._version is not None, "it is staged"
        # If the commit's answer is lost, the commit may exist. Keep its files whatever it raises.
        version, self._version = self._version, None
        self._table.commit(version.added, version.removed, numbers)
        self._table.folder.delete([file.path for file in version.leftover])
        return version.rows

    def _stage_buffered(self, files: list[DataFile], emptied: list[DataFile]) -> NextVersion:
        rows, keys, is_put_column = self._stored(self._take_images())
        if rows is None:
            rows = self._table.schema.empty_table()
        is_put = is_put_column.to_numpy()
        # Rows that replace no row of a file.
        fresh = is_put.copy()
        if files:
            # Join the chunks once, because taking rows from many chunks would join them on each call.
            rows = rows.combine_chunks()

        def replace_rows(group: pyarrow.Table, key_numbers: numpy.ndarray, _: int) -> pyarrow.Table:
            matched = key_numbers[key_numbers >= 0]
            replaced = matched[is_put[matched]]
            fresh[replaced] = False
            kept = group.filter(pyarrow.array(key_numbers < 0))
            return pyarrow.concat_tables([kept, rows.take(pyarrow.array(replaced))])

        rewritten = self._rewrite(files, keys, replace_rows)
        try:
            writer = self._output_of_version()
            writer.write(_sorted(rows.filter(pyarrow.array(fresh)), self._target.primary_key))
            rewritten.added += writer.finish()
        except BaseException:
            self._table.folder.delete([file.path for file in rewritten.added])
            raise
        return NextVersion(rewritten.added, [*rewritten.removed, *emptied], int(keys.num_rows))

    def _stage_spilled(self, files: list[DataFile], emptied: list[DataFile]) -> NextVersion:
        """Stage spilled runs: the row of each key comes from the run with its last version.

        This may be an earlier run, because load rows arrive after log rows and are older than some of them.
        """
        all_keys = pyarrow.concat_tables(self._keys)
        runs = numpy.repeat(numpy.arange(len(self._keys)), [part.num_rows for part in self._keys])
        order = numpy.lexsort((runs, numpy.concatenate(self._versions)))
        rank = numpy.empty(len(order), numpy.int64)
        rank[order] = numpy.arange(len(order))
        last = order[last_of_each([plain(column) for column in all_keys.columns], rank)]
        keys, last_run = all_keys.take(pyarrow.array(last)), runs[last]
        spilled = [file for run in self._spilled for file in run]
        run_of = numpy.array(
            [_TABLE] * len(files) + [number for number, run in enumerate(self._spilled) for _ in run]
        )

        def replace_rows(group: pyarrow.Table, key_numbers: numpy.ndarray, number: int) -> pyarrow.Table:
            superseded = (key_numbers >= 0) & (last_run[key_numbers] != run_of[number])
            return group.filter(pyarrow.array(~superseded))

        rewritten = self._rewrite([*files, *spilled], keys, replace_rows)
        removed_paths = {file.path for file in rewritten.removed}
        added = [file for file in spilled if file.path not in removed_paths] + rewritten.added
        removed = [file for file in files if file.path in removed_paths]
        # From here on the files belong to the version.
        self._spilled, self._keys, self._versions = [], [], []
        leftover = [file for file in spilled if file.path in removed_paths]
        return NextVersion(added, [*removed, *emptied], int(keys.num_rows), leftover)

    def _rewrite(
        self, files: list[DataFile], keys: pyarrow.Table, replace_rows: Callable[..., pyarrow.Table]
    ) -> Rewritten:
        if not files or not keys.num_rows:
            return Rewritten()
        index = KeyIndex(keys)
        work = CopyOnWrite(
            self._table.folder, self._table.schema, self._target.primary_key, index, replace_rows
        )
        return work.rewrite(files, self._output_of_version, self._bytes_max)

    def spill(self) -> None:
        """Write the buffered rows as a run, and keep their keys."""
        images = self._take_images()
        rows, keys, is_put = self._stored(images)
        if images is None or rows is None:
            return
        versions = images.column("_commit_version").to_numpy()
        # Each of these steps copies all buffered rows, so free the previous copy first.
        del images
        if not pc.all(is_put).as_py():
            rows = rows.filter(is_put)
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

    def _take_images(self) -> pyarrow.Table | None:
        """Return the last images of the buffered rows, and clear the buffer."""
        images, self._images = self._images.rows(), self._images.followed()
        return images

    def _stored(
        self, images: pyarrow.Table | None
    ) -> tuple[pyarrow.Table | None, pyarrow.Table, pyarrow.ChunkedArray]:
        """Return rows as they are stored, their keys, and a mask of those to write."""
        key = list(self._target.primary_key)
        if images is None:
            return (
                None,
                self._table.schema.empty_table().select(key),
                pyarrow.chunked_array([], pyarrow.bool_()),
            )
        check_keys(self._target, images)
        is_put = puts(images)
        self.unrepresentable += unrepresentable_counts(self._target, images, is_put)
        rows = stored_rows(images, self._table.schema)
        return rows, rows.select(key), is_put


def _sorted(rows: pyarrow.Table, key: tuple[str, ...]) -> pyarrow.Table:
    """Return rows in key order, so that files and row groups have narrow bounds."""
    first = rows.column(key[0])
    if len(key) == 1 and pyarrow.types.is_integer(first.type) and not first.null_count:
        numbers = first.to_numpy()
        if (numbers[1:] >= numbers[:-1]).all():
            return rows
    order = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in key])
    return rows.take(order)
