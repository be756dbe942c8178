# SPDX-License-Identifier: Apache-2.0
"""Filters out changes that a pipeline itself wrote into the source.

If two servers replicate to each other, the log of each pipeline's source contains the changes that the other
pipeline wrote. Such changes are recognized by the server id with which they were logged (MariaDB), by the tag
of their GTID (MySQL 8.3), or by a mark table: the sink's position table, which every transaction of the other
pipeline writes, or the table in which a TiDB-Binlog Drainer marks its transactions.
"""

import re
from collections.abc import Set

import pyarrow
import pyarrow.compute as pc

from penstock.model import TableName, TablePatterns
from penstock.pipeline.settings_sections import LoopSettings
from penstock.settings.tidb import DRAINER_MARK_TABLE
from penstock.source.bounds import Bounds
from penstock.source.reading import Schemas, Selection, read_range
from penstock.source.source import ByteRange, Source

_VERSION = "_commit_version"


def marked_versions(
    loops: LoopSettings,
    source: Source,
    byte_range: ByteRange,
    bounds: Bounds,
    known: Schemas | None,
) -> frozenset[int]:
    """Return the commit versions of a range's transactions that write a mark.

    Reads the range a second time and decodes only the tables of marks. Returns an empty set if no table of
    marks is configured.
    """
    if not loops.has_marks:
        return frozenset()
    mark_table = None if loops.mark_table is None else TableName.parse(loops.mark_table)
    names = [] if mark_table is None else [str(mark_table)]
    names += [DRAINER_MARK_TABLE] if loops.drainer_channels else []
    channels = pyarrow.array(loops.drainer_channels, pyarrow.int64())
    selection = Selection(TablePatterns(names), bounds=bounds)
    versions: set[int] = set()
    for batch in read_range(source, byte_range, selection, known, emit="typed"):
        rows = batch.to_arrow()
        if TableName.parse(batch.table) != mark_table:
            rows = rows.filter(pc.is_in(rows.column("channel_id").cast(pyarrow.int64()), value_set=channels))
        versions.update(pc.unique(rows.column(_VERSION)).to_pylist())
    return frozenset(versions)


def drop_own_changes(
    rows: pyarrow.RecordBatch, loops: LoopSettings, marked: Set[int] = frozenset()
) -> pyarrow.RecordBatch:
    """Return the rows that no pipeline wrote. `marked` are the versions of transactions with a mark."""
    own = None
    if marked:
        own = pc.is_in(rows.column(_VERSION), value_set=pyarrow.array(sorted(marked), pyarrow.int64()))
    metadata = rows.column("_metadata") if loops.server_ids or loops.gtid_tags else None
    if loops.server_ids:
        ids = pyarrow.array(loops.server_ids, pyarrow.int64())
        own = _combine_masks(own, pc.is_in(pc.struct_field(metadata, "server_id"), value_set=ids))
    if loops.gtid_tags:
        # A GTID consists of a server id, an optional tag, and a number.
        tags = "|".join(map(re.escape, loops.gtid_tags))
        gtids = pc.fill_null(pc.struct_field(metadata, "gtid"), "")
        own = _combine_masks(
            own, pc.match_substring_regex(gtids, f"^[^:]+:(?:{tags}):\\d+$", ignore_case=True)
        )
    return rows if own is None else rows.filter(pc.invert(own))


def _combine_masks(own: pyarrow.Array | None, more: pyarrow.Array) -> pyarrow.Array:
    return more if own is None else pc.or_(own, more)
