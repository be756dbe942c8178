# SPDX-License-Identifier: Apache-2.0
"""The server that each epoch of a log belongs to: `epochs.json`, checksummed and replaced atomically.

No other file contains this information. If the file is damaged, it cannot be rebuilt, and the log is
rejected.
"""

import dataclasses
import json
import zlib
from dataclasses import dataclass
from typing import Any, Self

from penstock.commit_versions import epoch_base
from penstock.errors import LogDamaged, SourceMissing
from penstock.gtid_sets import NO_GTIDS, LoggedSet, LostGtids, union
from penstock.limits import EPOCH_COUNTED_MAX, FILE_NUMBER_MAX
from penstock.logstore.disk import Disk
from penstock.logstore.layout import Layout, StoredSegment
from penstock.model import Position


@dataclass(frozen=True)
class EpochRecord:
    """One epoch: a server, and the position where its bytes start in the log.

    `server_key` is `ServerIdentity.key`, `flavor` is "mysql" or "mariadb", and `version` is the server's
    version string. `gtid_set` contains the transactions before the epoch. `time_us` is when the epoch began,
    in microseconds since 1970, UTC. `is_logged_set` is true if `gtid_set` was read from the server's log.
    Version 0.1 of Penstock did not do that, so sets that it wrote may be incomplete. `lost` contains
    transactions that are in the log but not on the server; an operator has accepted their loss.
    """

    epoch: int
    server_key: str
    server_id: int
    flavor: str
    version: str
    file: str
    offset: int
    gtid_set: LoggedSet
    time_us: int
    is_logged_set: bool = False
    lost: LoggedSet = NO_GTIDS

    @property
    def position(self) -> Position:
        """Where the bytes of the epoch start."""
        return Position(self.epoch, self.file, self.offset)


@dataclass(frozen=True)
class EpochFile:
    """All epochs of a log, in ascending order. Immutable: `add` returns a new file."""

    epochs: tuple[EpochRecord, ...] = ()

    @classmethod
    def load(cls, disk: Disk, layout: Layout) -> Self:
        """Read the file. A missing file has no epochs. Raises LogDamaged."""
        try:
            content = disk.read(layout.epochs)
        except SourceMissing:
            return cls()
        values = unseal_json(content)
        try:
            return cls(tuple(EpochRecord(**record) for record in values["epochs"]))
        except (TypeError, KeyError) as problem:
            raise LogDamaged(
                f"{layout.epochs} is not what was written",
                position=f"{layout.epochs.name}:0",
                hint="Restore the file from a copy; segments and their bytes are not touched by this",
            ) from problem

    def write(self, disk: Disk, layout: Layout) -> None:
        """Replace the file atomically and durably. Raises LogFull, DiskFailed."""
        records = [dataclasses.asdict(record) for record in self.epochs]
        for record in records:
            # Leave the field out if no loss was accepted, so that earlier versions can read the log.
            if not record["lost"]:
                del record["lost"]
        disk.write_atomic(layout.epochs, seal_json({"epochs": records}))

    @property
    def lost(self) -> dict[int, LostGtids]:
        """For each epoch with an accepted loss, the transactions that are missing from the epoch's server."""
        return {
            record.epoch: LostGtids(record.lost, record.gtid_set) for record in self.epochs if record.lost
        }

    @property
    def latest(self) -> EpochRecord | None:
        """The epoch that capture appends to, None in a new log."""
        return self.epochs[-1] if self.epochs else None

    def get(self, epoch: int) -> EpochRecord | None:
        """Return the record of an epoch, None if it is unknown."""
        return next((record for record in self.epochs if record.epoch == epoch), None)

    def decode_version(self, version: int) -> tuple[int, int]:
        """Return the epoch and the file number of a commit version of this log.

        The file numbers between the bases of two epochs belong to the first of the two. An epoch without a
        base stores its number in the 8 bits above the 23 bits of the file number.
        """
        file_part = version >> 32
        epochs = [
            record.epoch
            for record in self.epochs
            if record.epoch > EPOCH_COUNTED_MAX and epoch_base(record.epoch) <= file_part
        ]
        if epochs:
            return max(epochs), file_part - epoch_base(max(epochs))
        return file_part >> 23, file_part & FILE_NUMBER_MAX

    def add(self, record: EpochRecord) -> Self:
        """Return the epochs with one more record."""
        return type(self)((*self.epochs, record))

    def complete(self, epoch: int, gtid_set: LoggedSet) -> Self:
        """Return the epochs, with transactions added to the GTID set before one epoch."""
        return type(self)(
            tuple(
                dataclasses.replace(record, gtid_set=union(record.gtid_set, gtid_set), is_logged_set=True)
                if record.epoch == epoch
                else record
                for record in self.epochs
            )
        )


def stored_segments(disk: Disk, layout: Layout) -> list[StoredSegment]:
    """Return the records of all segments in a log's folder. Raises LogDamaged."""
    return layout.segments(disk, lambda: EpochFile.load(disk, layout).decode_version)


def seal_json(values: dict[str, Any]) -> bytes:
    """Return JSON text that includes a CRC32 of its values."""
    body = json.dumps(values, sort_keys=True)
    return json.dumps(
        {**values, "crc32": f"{zlib.crc32(body.encode()):08x}"}, indent=1, sort_keys=True
    ).encode()


def unseal_json(content: bytes) -> dict[str, Any]:
    """Return the values of sealed JSON text, an empty dictionary if the text is damaged."""
    try:
        values = json.loads(content)
        crc = values.pop("crc32")
        body = json.dumps(values, sort_keys=True)
    except (ValueError, KeyError, AttributeError, TypeError):
        return {}
    return values if crc == f"{zlib.crc32(body.encode()):08x}" else {}
