# SPDX-License-Identifier: Apache-2.0
"""The shards for which the progress of a pipeline is recorded, and the barrier, the position at which all
shards end before their number changes.

/pipelines/NAME/shards          their number, if there are several
               /shards/barrier  the offsets, by source, at which all shards end
               /shards/1-of-4   the records of a shard
"""

from collections.abc import Mapping
from typing import Any

from penstock.coordinate.store import CoordinationStore, decoded_name, reading_record
from penstock.pipeline.paged_records import PagedRecords
from penstock.pipeline.resnapshot import HINT_STATE
from penstock.pipeline.shards import Shard

_BARRIER = "barrier"

Offsets = Mapping[str, Mapping[str, Any]]


class ShardRecords(PagedRecords):
    """The records that all shards of a pipeline share. Methods raise CoordinationLost."""

    def __init__(self, store: CoordinationStore, path: str) -> None:
        super().__init__(store, path)

    def count(self) -> int:
        """Return the number of shards for which progress is recorded: 1 if the progress is not divided."""
        record = self.store.get(self._path, latest=True)
        with reading_record("the shards of a pipeline", HINT_STATE):
            return 1 if record is None else int(record.value)

    def write_count(self, count: int) -> None:
        """Record the number of shards that the progress is recorded for."""
        if count == 1:
            self.store.delete(self._path)
        else:
            self.store.put(self._path, str(count).encode())

    def known(self) -> list[Shard]:
        """Return every shard that has records, including shards that remain from a division into a different
        number of shards.
        """
        names = map(decoded_name, self.store.list(self._path))
        return [Shard.parse(name) for name in names if name != _BARRIER]

    def barrier(self) -> Offsets | None:
        """Return where all shards end before their number changes, None if it does not change."""
        offsets: Offsets | None = self.get_large(_BARRIER)
        return offsets

    def set_barrier(self, offsets: Offsets | None) -> None:
        """Record where all shards end. With None, the shards continue."""
        if offsets is None:
            self.drop_large(_BARRIER)
        else:
            self.put_large(_BARRIER, offsets)
