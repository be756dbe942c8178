# SPDX-License-Identifier: Apache-2.0
"""Which server each epoch of a log belongs to: `epochs.json`, small, checked, replaced whole.

Nothing else says this, so a damaged file is refused and not made again.
"""

import dataclasses
import json
import zlib
from dataclasses import dataclass
from typing import Any, Self

from penstock.commit_versions import epoch_base
from penstock.errors import LogDamaged, SourceMissing
from penstock.gtid_sets import LoggedSet, union
from penstock.limits import EPOCH_COUNTED_MAX, FILE_NUMBER_MAX
from penstock.logstore.disk import Disk
from penstock.logstore.layout import Layout, StoredSegment
from penstock.model import Position


@dataclass(frozen=True)
class EpochRecord:
    """One epoch: a server, and where its bytes begin in the log.

    `server_key` is `ServerIdentity.key`, `flavor` "mysql" or "mariadb", `version` the server's own text,
    `gtid_set` what came before, `time_us` when it began, microseconds UTC since 1970. `is_logged_set` tells
    whether `gtid_set` was read from the server's log; that of version 0.1 may miss transactions.
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

    @property
    def position(self) -> Position:
        """Where its bytes begin."""
        return Position(self.epoch, self.file, self.offset)


@dataclass(frozen=True)
class EpochFile:
    """Every epoch of a log, rising. Frozen: `add` gives a new one."""

    epochs: tuple[EpochRecord, ...] = ()

    @classmethod
    def load(cls, disk: Disk, layout: Layout) -> Self:
        """Read the file; no epochs where there is none. Raises LogDamaged."""
        try:
            content = disk.read(layout.epochs)
        except SourceMissing:
            return cls()
        found = unseal_json(content)
        try:
            return cls(tuple(EpochRecord(**one) for one in found["epochs"]))
        except (TypeError, KeyError) as problem:
            raise LogDamaged(
                f"{layout.epochs} is not what was written",
                position=f"{layout.epochs.name}:0",
                hint="Restore the file from a copy; segments and their bytes are not touched by this",
            ) from problem

    def write(self, disk: Disk, layout: Layout) -> None:
        """Put the file in place whole, and durable. Raises LogFull, DiskFailed."""
        disk.write_atomic(
            layout.epochs, seal_json({"epochs": [dataclasses.asdict(one) for one in self.epochs]})
        )

    @property
    def latest(self) -> EpochRecord | None:
        """The epoch that bytes are added to now, None in a new log."""
        return self.epochs[-1] if self.epochs else None

    def get(self, epoch: int) -> EpochRecord | None:
        """Return an epoch's record, None where it is not known."""
        return next((one for one in self.epochs if one.epoch == epoch), None)

    def place_of(self, version: int) -> tuple[int, int]:
        """Return the epoch and the file number of a commit version of this log.

        Between the bases of two epochs lie the file numbers of the first. A log without a base counts its
        epochs in 8 bits above 23 of the file number.
        """
        place = version >> 32
        begun = [
            one.epoch
            for one in self.epochs
            if one.epoch > EPOCH_COUNTED_MAX and epoch_base(one.epoch) <= place
        ]
        if begun:
            return max(begun), place - epoch_base(max(begun))
        return place >> 23, place & FILE_NUMBER_MAX

    def add(self, record: EpochRecord) -> Self:
        """Return the epochs with one more."""
        return type(self)((*self.epochs, record))

    def complete(self, epoch: int, gtid_set: LoggedSet) -> Self:
        """Return the epochs with more transactions in the set of what came before one of them."""
        return type(self)(
            tuple(
                dataclasses.replace(one, gtid_set=union(one.gtid_set, gtid_set), is_logged_set=True)
                if one.epoch == epoch
                else one
                for one in self.epochs
            )
        )


def stored_segments(disk: Disk, layout: Layout) -> list[StoredSegment]:
    """Return every segment in a log's folder, by commit version. Raises LogDamaged."""
    return layout.segments(disk, lambda: EpochFile.load(disk, layout).place_of)


def seal_json(values: dict[str, Any]) -> bytes:
    """Return JSON text with a CRC32 of the values in it."""
    body = json.dumps(values, sort_keys=True)
    return json.dumps(
        {**values, "crc32": f"{zlib.crc32(body.encode()):08x}"}, indent=1, sort_keys=True
    ).encode()


def unseal_json(content: bytes) -> dict[str, Any]:
    """Return the values of sealed text, an empty dictionary where it is not as it was written."""
    try:
        values = json.loads(content)
        crc = values.pop("crc32")
        body = json.dumps(values, sort_keys=True)
    except (ValueError, KeyError, AttributeError, TypeError):
        return {}
    return values if crc == f"{zlib.crc32(body.encode()):08x}" else {}
