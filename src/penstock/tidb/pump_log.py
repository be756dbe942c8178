# SPDX-License-Identifier: Apache-2.0
"""The log of a Pump: the payloads of TiDB's pump client as received, in the segments of a kept log.

Each payload is one event, or several consecutive ones, of binlog files that the Pump writes itself:
`tidb-pump.000001`, `tidb-pump.000002`. Recovery, indexes, retention, compression and tiering therefore work
as in every other kept log.
"""

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from penstock._native import BlockCutter, tidb_file_head, tidb_payload_events, tidb_payloads
from penstock.errors import ServerChanged
from penstock.gtid_sets import NO_GTIDS
from penstock.logstore.disk import Buffer, Disk
from penstock.logstore.log import Log
from penstock.model import Position
from penstock.settings.daemon import LogSettings
from penstock.tidb.release_index import Location

_EPOCH = 0
_FLAVOR = "mysql"
_VERSION = "8.0.36-TiDB"
_SERVER_ID = 1

# A file ends at the first payload after this size, like a server's files.
_FILE_BYTES_MAX = 1 << 30

# The header of an event: its type and size. The head of a part of a payload: the payload's size, and the
# part's offset in the payload.
_HEADER = struct.Struct("<4xB4xI6x")
_PART = struct.Struct("<QQ")
_CHECKSUM_BYTES = 4
_PAYLOAD_CODE = _HEADER.unpack_from(tidb_payload_events([b""], 0, server_id=_SERVER_ID, time_s=0))[0]

_HEAD_BYTES = len(tidb_file_head(server_id=_SERVER_ID, time_s=0))


def file_name(number: int) -> str:
    """Return the name of the log's file with this number."""
    return f"tidb-pump.{number:06d}"


class PumpLog:
    """The payloads of one Pump, stored in a folder. One thread appends; any thread may read."""

    def __init__(
        self,
        folder: Path,
        settings: LogSettings,
        cluster_id: int,
        *,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the log, create it if it is missing, and recover it after a crash.

        Raises ServerChanged for the log of another cluster, and propagates errors from `Log.open`.
        """
        self._clock = clock
        # The log does not sync by itself: `sync` is called before payloads are acknowledged.
        log_settings = settings.model_copy(update={"fsync": "never"})
        self.log = Log.open(folder, log_settings, disk, instance=folder.name, clock=clock)
        # Staged events with their block records, and their offsets in the file.
        self._unstored: tuple[Buffer, bytes, int, int] | None = None
        try:
            self._resume(str(cluster_id))
        except BaseException:
            self.log.abandon()
            raise

    def _resume(self, server_key: str) -> None:
        epoch = self.log.epoch
        if epoch is not None and epoch.server_key != server_key:
            raise ServerChanged(
                f"{self.log.folder} is the log of the cluster {epoch.server_key}, not of {server_key}",
                hint="Set source to that cluster, or log.folder to another folder",
            )
        visible = self.log.visible
        if epoch is None or visible is None:
            if epoch is None:
                self.log.begin_epoch(
                    epoch=_EPOCH,
                    server_key=server_key,
                    server_id=_SERVER_ID,
                    flavor=_FLAVOR,
                    version=_VERSION,
                    file=file_name(1),
                    offset=0,
                    gtid_set=NO_GTIDS,
                )
            self._begin_file(1)
            return
        self._number = visible.file_number
        self._cutter = BlockCutter(
            epoch=_EPOCH,
            file=visible.file,
            offset=visible.offset,
            flavor=_FLAVOR,
            live=False,
            block_bytes=self.log.settings.block_bytes,
            time_max_us=self.log.time_max_us,
            head=self.log.head_bytes(_EPOCH, visible.file),
            statements=False,
        )
        self._begin_in_log()

    # --- Writing ----------------------------------------------------------------------------

    @property
    def end(self) -> Location:
        """The end of the log."""
        return Location(self._number, self._cutter.offset)

    def stage(self, payloads: Sequence[Buffer]) -> list[Location]:
        """Frame payloads as the log's next events, and return their future locations. `store` writes them."""
        assert self._unstored is None, "everything staged before was stored"
        if self._cutter.offset >= _FILE_BYTES_MAX:
            self._begin_file(self._number + 1)
        time_s = int(self._clock())
        offset = self._cutter.offset
        locations, events = [], []
        for payload in payloads:
            framed = tidb_payload_events([payload], offset, server_id=_SERVER_ID, time_s=time_s)
            locations.append(Location(self._number, offset, len(framed)))
            events.append(framed)
            offset += len(framed)
        self._cut(b"".join(events))
        cutter = self._cutter
        start, end = cutter.data_start, cutter.data_end
        self._unstored = cutter.take_data(), cutter.take_records(), start, end
        return locations

    def store(self) -> None:
        """Write the staged payloads; they are durable after `sync`. After LogFull, free space and call it
        again.

        Raises LogFull, and DiskFailed, after which the log has to be opened again.
        """
        if self._unstored is not None:
            data, records, start, end = self._unstored
            time_max_us = self._cutter.time_max_us
            self.log.append(data, start, end, end, records, time_max_us=time_max_us)
            self._unstored = None

    def sync(self) -> None:
        """Make everything appended durable. Raises DiskFailed, after which the log must be opened again."""
        self.log.sync()

    def close(self) -> None:
        """Make everything durable and close the log. Raises DiskFailed, LogFull."""
        self.log.close()

    def abandon(self) -> None:
        """Release the log as it is. The next open recovers it."""
        self.log.abandon()

    # --- Reading ----------------------------------------------------------------------------

    @property
    def earliest(self) -> Location:
        """The start of the oldest segment; the end in an empty log."""
        position = self.log.earliest()
        return self.end if position is None else Location(position.file_number, position.offset)

    def has_all_after(self, start: Location) -> bool:
        """Return whether nothing after a location was removed from the log."""
        if start.offset >= _FILE_BYTES_MAX:
            start = Location(start.file_number + 1, 0)
        return self.earliest <= max(start, Location(start.file_number, _HEAD_BYTES))

    @property
    def is_whole(self) -> bool:
        """Whether nothing was removed from the log."""
        return self.has_all_after(Location(1, 0))

    def position_of(self, location: Location) -> Position:
        """Return a location as a position of the log."""
        return Position(_EPOCH, file_name(location.file_number), location.offset)

    def read(self, location: Location) -> bytes:
        """Return one payload. Raises PositionPurged, LogDamaged, ChecksumMismatch, EventMalformed."""
        file, start = file_name(location.file_number), location.offset
        events = b"".join(self.log.read(_EPOCH, file, start, start + location.size))
        (payload,) = tidb_payloads(events)
        return payload

    def replay(self, start: Location) -> Iterator[tuple[bytes, Location]]:
        """Yield all payloads from a location, or from the start of the log, to its end.

        Raises LogDamaged, ChecksumMismatch, EventMalformed.
        """
        for extent in self.log.extents():
            number = Position(extent.epoch, extent.file, 0).file_number
            first = max(extent.start, start.offset if number == start.file_number else 0)
            if number >= start.file_number and first < extent.end:
                yield from self._replay_extent(number, first, extent.end)

    def _replay_extent(self, number: int, start: int, end: int) -> Iterator[tuple[bytes, Location]]:
        """Yield the payloads in one part of a file. The part begins at an event.

        A payload whose last parts are missing was never acknowledged, and is skipped.
        """
        pending, offset = bytearray(), start
        # Offsets in `pending`: where the events of the current payload begin, and where the next event
        # begins.
        first = at = 0
        for view in self.log.read(_EPOCH, file_name(number), start, end):
            pending += view
            while (part := _EventPart.read(pending, at)) is not None:
                if part.start == 0:
                    first = at
                at += part.event_bytes
                if part.is_last:
                    (payload,) = tidb_payloads(bytes(pending[first:at]))
                    yield payload, Location(number, offset + first, at - first)
                    first = at
            del pending[:first]
            offset, at, first = offset + first, at - first, 0

    # --- Internals --------------------------------------------------------------------------

    def _begin_file(self, number: int) -> None:
        self._number = number
        self._cutter = BlockCutter(
            epoch=_EPOCH,
            file=file_name(number),
            offset=0,
            flavor=_FLAVOR,
            live=False,
            block_bytes=self.log.settings.block_bytes,
            time_max_us=self.log.time_max_us,
            statements=False,
        )
        # The events after the format description are stored with the first payloads.
        self._cut(tidb_file_head(server_id=_SERVER_ID, time_s=int(self._clock())))

    def _begin_in_log(self) -> None:
        cutter = self._cutter
        self.log.begin_file(
            cutter.file,
            cutter.offset,
            cutter.format_description,
            NO_GTIDS,
            epoch=_EPOCH,
            server_id=_SERVER_ID,
            flavor=_FLAVOR,
        )

    def _cut(self, events: bytes) -> None:
        """Cut whole events into blocks. Announce a file whose format description is among them."""
        cutter = self._cutter
        consumed = cutter.feed(events)
        if cutter.state == "file":
            cutter.take_file()
            self._begin_in_log()
            consumed += cutter.feed(memoryview(events)[consumed:])
        assert consumed == len(events), "our own events are whole"


@dataclass(frozen=True)
class _EventPart:
    """The part of a payload that an event contains; an event of another type contains none."""

    event_bytes: int
    start: int
    is_last: bool

    @classmethod
    def read(cls, events: bytearray, at: int) -> Self | None:
        """Read the event at an index; None if it is not complete."""
        if at + _HEADER.size > len(events):
            return None
        code, size = _HEADER.unpack_from(events, at)
        if at + size > len(events):
            return None
        if code != _PAYLOAD_CODE:
            return cls(size, 0, is_last=False)
        total, start = _PART.unpack_from(events, at + _HEADER.size)
        part_bytes = size - _HEADER.size - _PART.size - _CHECKSUM_BYTES
        return cls(size, start, is_last=start + part_bytes == total)
