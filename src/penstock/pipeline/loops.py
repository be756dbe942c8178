# SPDX-License-Identifier: Apache-2.0
"""Changes that a pipeline itself wrote into the source, and that go no further.

Where two servers copy to each other, each pipeline meets in its source's log what the other one wrote there.
It is known by the server's id under which it was logged (MariaDB), by the tag of its GTID (MySQL 8.3), or by
a table that every one of the other's transactions writes, which is its sink's table of positions.
"""

import re
from collections.abc import Set

import pyarrow
import pyarrow.compute as pc

from penstock.model import TableName, TablePatterns
from penstock.pipeline.settings_sections import LoopSettings
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
    """Return the commit versions of a range's transactions that write the mark table, none without one.

    Reads the range once more, and decodes nothing else of it.
    """
    if loops.mark_table is None:
        return frozenset()
    name = TableName.parse(loops.mark_table)
    chosen = Selection(TablePatterns([str(name)]), (_VERSION,), None, bounds)
    found: set[int] = set()
    for batch in read_range(source, byte_range, chosen, known, emit="typed"):
        found.update(pc.unique(batch.to_arrow().column(_VERSION)).to_pylist())
    return frozenset(found)


def without_own(
    rows: pyarrow.RecordBatch, loops: LoopSettings, marked: Set[int] = frozenset()
) -> pyarrow.RecordBatch:
    """Return the rows that no pipeline wrote. `marked` are the versions of transactions with a mark."""
    found = None
    if marked:
        found = pc.is_in(rows.column(_VERSION), value_set=pyarrow.array(sorted(marked), pyarrow.int64()))
    metadata = rows.column("_metadata") if loops.server_ids or loops.gtid_tags else None
    if loops.server_ids:
        ids = pyarrow.array(loops.server_ids, pyarrow.int64())
        found = _either(found, pc.is_in(pc.struct_field(metadata, "server_id"), value_set=ids))
    if loops.gtid_tags:
        # A GTID is its server's id, a tag where it has one, and a number.
        tags = "|".join(map(re.escape, loops.gtid_tags))
        gtids = pc.fill_null(pc.struct_field(metadata, "gtid"), "")
        found = _either(found, pc.match_substring_regex(gtids, f"^[^:]+:(?:{tags}):\\d+$", ignore_case=True))
    return rows if found is None else rows.filter(pc.invert(found))


def _either(found: pyarrow.Array | None, more: pyarrow.Array) -> pyarrow.Array:
    return more if found is None else pc.or_(found, more)
