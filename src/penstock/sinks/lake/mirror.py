# SPDX-License-Identifier: Apache-2.0
"""Keeps a lake table equal to its source, with one commit per batch that stores the batch's number."""

from collections import Counter
from collections.abc import Callable, Sequence

import numpy
import pyarrow
import pyarrow.compute as pc

from penstock.changes import Changes, Target
from penstock.sinks.concurrent_calls import call_for_each
from penstock.sinks.images import LastImages, puts, unrepresentable_counts
from penstock.sinks.lake.copy_on_write import (
    CopyOnWrite,
    KeyedReplacement,
    MaskedReplacement,
    Replacement,
    Rewritten,
    find_rows,
)
from penstock.sinks.lake.key_index import KeyIndex
from penstock.sinks.lake.parquet_files import DataFile, PartFiles
from penstock.sinks.lake.rows import check_keys, stored_rows
from penstock.sinks.lake.spill_file import SpillFile
from penstock.sinks.lake.spilled_runs import SpilledRuns
from penstock.sinks.lake.table import LakeTable, NextVersion, StagedChanges

# The part of the memory in which rows are buffered. The rest is for their copies: sorting rows, reducing them
# and building an index each need about as much memory as the rows.
_BUFFERED_FRACTION = 2
# Sorted rows are passed to a file in pieces of this many rows.
_PIECE_ROWS = 1 << 14
# How many files are searched for keys at once.
_MARKING_THREADS_MAX = 2


class MirrorTable(StagedChanges):
    """The changes of one batch to one mirror.

    Uses about `memory_bytes`, of which half is for buffered rows. Further rows are spilled to files of the
    table, and their keys to `spill_file`.
    """

    def __init__(
        self,
        target: Target,
        table: LakeTable,
        output: Callable[[], PartFiles],
        *,
        bytes_max: int,
        memory_bytes: int,
        spill_file: SpillFile,
        output_of_version: Callable[[], PartFiles] | None = None,
    ) -> None:
        super().__init__(table)
        self._target = target
        self._output = output
        # Writers of files whose next version is committed only after the caller has made them durable.
        self._output_of_version = output_of_version or output
        self._bytes_max = bytes_max
        self._memory_bytes = memory_bytes
        self._images = LastImages(target, memory_bytes // _BUFFERED_FRACTION // 2)
        self._runs = SpilledRuns(spill_file, memory_bytes)
        self.unrepresentable: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        """The memory used by buffered rows."""
        return self._images.bytes

    def add(self, changes: Changes) -> None:
        """Add changes, which follow the changes added before."""
        self._images.add(changes)
        if self._images.bytes > self._memory_bytes // _BUFFERED_FRACTION:
            self.spill()

    def add_stored(self, rows: pyarrow.Table) -> None:
        """Add stored rows of a load, in which no key occurs twice."""
        if not rows.num_rows:
            return
        zeros, is_put = numpy.zeros(rows.num_rows, numpy.int64), numpy.ones(rows.num_rows, numpy.bool_)
        self._write_run(rows, zeros, is_put)

    def empty(self, version: int) -> None:
        """Record that the source table was emptied."""
        self.abort()
        self._images.empty(version)

    def abort(self) -> None:
        """Delete the files that belong to no version yet."""
        self.table.folder.delete([file.path for file in self._runs.files])
        self._runs.clear()
        self._delete_staged()

    def stage(self) -> None:
        files = [] if self._images.emptied is not None else self.table.files()
        emptied = self.table.files() if self._images.emptied is not None else []
        if len(self._runs):
            self.spill()
            self._version = self._stage_spilled(files, emptied)
        else:
            self._version = self._stage_buffered(files, emptied)

    def _stage_buffered(self, files: list[DataFile], emptied: list[DataFile]) -> NextVersion:
        stored, keys, is_put_column = self._stored(self._take_images())
        rows: pyarrow.Table = self.table.schema.empty_table() if stored is None else stored
        del stored
        is_put = is_put_column.to_numpy()
        # Rows that replace no row of a file.
        fresh = is_put.copy()
        # Join the chunks once, because taking rows from many chunks would join them on each call.
        rows = rows.combine_chunks()

        def replace_rows(group: pyarrow.Table, key_numbers: numpy.ndarray, _: int) -> pyarrow.Table:
            matched = key_numbers[key_numbers >= 0]
            replaced = matched[is_put[matched]]
            fresh[replaced] = False
            kept = group.filter(pyarrow.array(key_numbers < 0))
            return pyarrow.concat_tables([kept, rows.take(pyarrow.array(replaced))])

        rewritten = Rewritten()
        if files and keys.num_rows:
            key = self._target.primary_key
            keyed = KeyedReplacement(self.table.schema, key, KeyIndex(keys), replace_rows)
            rewritten = self._rewrite(files, keyed)
        writer = self._output_of_version()
        try:
            if not fresh.all():
                rows = rows.filter(pyarrow.array(fresh))
            write_in_order(writer, rows, sorting_order(rows, self._target.primary_key))
            rewritten.added += writer.finish()
        except BaseException:
            writer.abort()
            self.table.folder.delete([file.path for file in rewritten.added])
            raise
        return NextVersion(rewritten.added, [*rewritten.removed, *emptied], int(keys.num_rows))

    def _stage_spilled(self, files: list[DataFile], emptied: list[DataFile]) -> NextVersion:
        """Stage spilled runs: the row of each key comes from the run with its last version.

        This may be an earlier run, because load rows arrive after log rows and are older than some of them.
        """
        masks: dict[int, numpy.ndarray] = {}
        keys = self._runs.find_superseded(lambda index: self._mark(files, index, masks))
        spilled = self._runs.files
        for number, mask in enumerate(self._runs.masks(), len(files)):
            if mask is not None:
                masks[number] = mask
        rewritten = self._rewrite([*files, *spilled], MaskedReplacement(masks))
        removed_paths = {file.path for file in rewritten.removed}
        added = [file for file in spilled if file.path not in removed_paths] + rewritten.added
        removed = [file for file in files if file.path in removed_paths]
        # From here on the files belong to the version.
        self._runs.clear()
        leftover = [file for file in spilled if file.path in removed_paths]
        return NextVersion(added, [*removed, *emptied], keys, leftover)

    def _mark(self, files: list[DataFile], index: KeyIndex, masks: dict[int, numpy.ndarray]) -> None:
        """Add the rows whose keys are in an index to the masks of their files."""
        key, schema = self._target.primary_key, self.table.schema
        keyed = KeyedReplacement(schema, key, index, lambda rows, _, __: rows)

        def mark_file(number: int) -> None:
            with self.table.folder.open(files[number].path) as opened:
                # A file of narrow rows may have tens of millions, so keep no number of each.
                marks = [numbers >= 0 for numbers in find_rows(opened, schema, key, index)]
            if any(mark.any() for mark in marks):
                bits = numpy.packbits(numpy.concatenate(marks))
                masks[number] = bits | masks[number] if number in masks else bits

        numbers = [number for number, file in enumerate(files) if keyed.may_change(number, file)]
        call_for_each(mark_file, numbers, _MARKING_THREADS_MAX)

    def _rewrite(self, files: list[DataFile], replacement: Replacement) -> Rewritten:
        work = CopyOnWrite(self.table.folder, self.table.schema, self._target.primary_key, replacement)
        return work.rewrite(files, self._output_of_version, self._bytes_max, self._memory_bytes)

    def spill(self) -> None:
        """Write the buffered rows as a run."""
        images = self._take_images()
        rows, _, is_put = self._stored(images)
        if images is None or rows is None:
            return
        versions = images.column("_commit_version").to_numpy()
        # Each of these steps copies all buffered rows, so free the previous copy first.
        del images
        self._write_run(rows, versions, is_put.to_numpy())

    def _write_run(self, rows: pyarrow.Table, versions: numpy.ndarray, is_put: numpy.ndarray) -> None:
        key = self._target.primary_key
        order = sorting_order(rows, key)
        if order is not None:
            versions, is_put = versions[order], is_put[order]
        keys = rows.select(list(key))
        keys = keys if order is None else keys.take(pyarrow.array(order))
        writer = self._output()
        try:
            if is_put.all():
                write_in_order(writer, rows, order)
            elif order is None:
                writer.write(rows.filter(pyarrow.array(is_put)))
            else:
                write_in_order(writer, rows, order[is_put])
            files = writer.finish()
        except BaseException:
            writer.abort()
            raise
        self._runs.add(keys, versions, is_put, files)

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
                self.table.schema.empty_table().select(key),
                pyarrow.chunked_array([], pyarrow.bool_()),
            )
        check_keys(self._target, images)
        is_put = puts(images)
        self.unrepresentable += unrepresentable_counts(self._target, images, is_put)
        rows = stored_rows(images, self.table.schema)
        return rows, rows.select(key), is_put


def sorting_order(rows: pyarrow.Table, key: Sequence[str]) -> numpy.ndarray | None:
    """Return the order of rows by their keys, None if they are in order. Files and row groups of ordered rows
    have narrow bounds.
    """
    first = rows.column(key[0])
    if len(key) == 1 and pyarrow.types.is_integer(first.type) and not first.null_count:
        numbers = first.to_numpy()
        if (numbers[1:] >= numbers[:-1]).all():
            return None
    order: numpy.ndarray = pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in key]).to_numpy()
    return order


def write_in_order(writer: PartFiles, rows: pyarrow.Table, order: numpy.ndarray | None) -> None:
    """Write rows in an order, None for their own, without a second copy of all rows."""
    if order is None:
        writer.write(rows)
        return
    # Join the chunks once, because taking rows from many chunks would join them on each call.
    rows = rows.combine_chunks()
    for first in range(0, len(order), _PIECE_ROWS):
        writer.write(rows.take(pyarrow.array(order[first : first + _PIECE_ROWS])))
