# SPDX-License-Identifier: Apache-2.0
"""The target: for each source table a Delta table equal to it, and one with every change it ever had.

Both are written once per micro-batch, in one commit each, and the commit says which batch it holds: a Delta
application transaction (the table's `txn` action: application id and version). So a batch that Spark sends
again after a failure is recognised, and every change arrives exactly once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from pyarrow import compute

APPLICATION = "penstock-demo"
SYSTEM_COLUMNS = ("_change_type", "_commit_version", "_commit_timestamp", "_metadata")

# A before image takes its row away and an after image puts it there. So an update that changes the primary
# key needs no case of its own, and what counts for a key is the last image it had.
_TAKES_AWAY = "source._change_type IN ('delete', 'update_preimage')"
_PUTS = "source._change_type IN ('insert', 'update_postimage')"


@dataclass(frozen=True)
class Mirror:
    """The two Delta tables of one source table below a directory: `<name>` and `<name>_changes`."""

    directory: Path
    name: str
    key: Sequence[str]

    @property
    def rows_path(self) -> Path:
        """The Delta table that is equal to the source table."""
        return self.directory / self.name

    @property
    def changes_path(self) -> Path:
        """The Delta table of every change, with its columns `_change_type`, `_commit_version` and so on."""
        return self.directory / f"{self.name}_changes"

    def apply(self, changes: pyarrow.Table, batch: int) -> None:
        """Apply the typed changes of one micro-batch, of whole transactions, unless that was done before."""
        if not _has(self.changes_path, batch):
            write_deltalake(
                self.changes_path, changes, mode="append", schema_mode="merge", commit_properties=_mark(batch)
            )
        if not _has(self.rows_path, batch):
            self._merge(last_images(changes, self.key), batch)

    def _merge(self, images: pyarrow.Table, batch: int) -> None:
        """Bring the mirror to the last image of each key; columns it does not have are added to it."""
        columns = [field for field in images.schema if field.name not in SYSTEM_COLUMNS]
        values = {f"`{field.name}`": f"source.`{field.name}`" for field in columns}
        target = DeltaTable.create(self.rows_path, pyarrow.schema(columns), mode="ignore")
        (
            target.merge(
                images.select([*(field.name for field in columns), "_change_type"]),
                " AND ".join(f"target.`{column}` = source.`{column}`" for column in self.key),
                source_alias="source",
                target_alias="target",
                merge_schema=True,
                commit_properties=_mark(batch),
            )
            .when_matched_delete(_TAKES_AWAY)
            .when_matched_update(values)
            .when_not_matched_insert(values, _PUTS)
            .execute()
        )


def last_images(changes: pyarrow.Table, key: Sequence[str]) -> pyarrow.Table:
    """Return the last image of each key, in commit order; both images of an update share their `row`."""
    ordered = changes.append_column("_row", compute.struct_field(changes["_metadata"], "row"))
    ordered = ordered.append_column("_is_after", compute.equal(changes["_change_type"], "update_postimage"))
    order = compute.sort_indices(
        ordered, [(name, "ascending") for name in ("_commit_version", "_row", "_is_after")]
    )
    numbered = changes.take(order).append_column("_place", pyarrow.array(range(len(order)), pyarrow.int64()))
    last = numbered.group_by(list(key)).aggregate([("_place", "max")])
    return numbered.take(last["_place_max"]).drop_columns(["_place"])


def _mark(batch: int) -> CommitProperties:
    return CommitProperties(app_transactions=[Transaction(APPLICATION, batch)])


def _has(path: Path, batch: int) -> bool:
    """Whether the Delta table holds the batch already."""
    if not DeltaTable.is_deltatable(str(path)):
        return False
    done = DeltaTable(path).transaction_version(APPLICATION)
    return done is not None and done >= batch
