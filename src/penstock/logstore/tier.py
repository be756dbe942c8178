# SPDX-License-Identifier: Apache-2.0
"""Segments in an object store, at any URL that fsspec supports.

An object is named `<log id>/<hour>/<segment>`, so logs that share a URL never use the same name, and an
existing object is never overwritten. A copy of a log folder gets its own log id. It reads the objects named
in its notes, but does not remove them. Version 0.1.0 named objects without the log id, so two logs could
overwrite each other's objects. Such an object is served or removed only after a check has proved that its
bytes belong to this log. The result of the check is recorded in the log's folder.

The index and a note stay in the log's folder: `<version>.tiered` contains the object's name, size and CRC32,
and the segment's head. A lookup therefore does not access the store, and reading a range fetches only the
bytes of that range.
"""

import base64
import itertools
import threading
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import structlog

from penstock.errors import (
    ChecksumMismatch,
    ConnectionLost,
    FileTruncated,
    LogDamaged,
    PenstockError,
)
from penstock.limits import MIB
from penstock.logstore.catalog import SegmentCatalog, stored_segment
from penstock.logstore.cold import SeekableFile, StoredFile
from penstock.logstore.disk import Disk
from penstock.logstore.epochs import seal_json, unseal_json
from penstock.logstore.index import SegmentIndex
from penstock.logstore.layout import Layout, StoredSegment
from penstock.logstore.object_store import open_store
from penstock.logstore.records import TIERED, SegmentRecord
from penstock.logstore.segment import SegmentHead, SegmentReader
from penstock.logstore.tier_proofs import TierProofs

TIERED_SUFFIX = ".tiered"

# In most stores, a request costs as much as reading this many bytes, so each request reads at least this
# many.
_REQUEST_BYTES = MIB
# Each concurrent reader continues where it stopped, so the latest few responses are cached.
_REQUESTS_KEPT = 4
_COPY_BYTES = 8 * MIB

_HINT_URL = "Write file:///folder, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class TieredNote:
    """A local note about a segment in remote storage: the object's `name` below the tier's URL, and its L1
    record.
    """

    name: str
    crc32: int
    cold: bool
    head: bytes
    record: SegmentRecord

    @property
    def stored_bytes(self) -> int:
        """The object's size."""
        return self.record.stored_bytes

    def encode(self) -> bytes:
        """Return the content of the note's file."""
        return seal_json(
            {
                "name": self.name,
                "data_crc32": self.crc32,
                "cold": self.cold,
                "head": base64.b64encode(self.head).decode("ascii"),
                "record": base64.b64encode(self.record.encode()).decode("ascii"),
            }
        )

    @classmethod
    def load(cls, disk: Disk, path: Path) -> Self:
        """Read a note. Raises SourceMissing, LogDamaged."""
        match unseal_json(disk.read(path)):
            case {
                "name": str(name),
                "data_crc32": int(crc32),
                "cold": bool(cold),
                "head": str(head),
                "record": str(record),
            } if (decoded := SegmentRecord.decode(base64.b64decode(record))) is not None:
                return cls(name, crc32, cold, base64.b64decode(head), decoded)
        raise LogDamaged(
            f"{path} is not what was written",
            position=f"{path.name}:0",
            hint="Restore the file from a copy; the segment itself is in the store, untouched",
        )


class Tier:
    """A location below a URL that stores closed segments. Safe for concurrent reads.

    Raises DependencyMissing if fsspec or its package for the URL is not installed, OptionInvalid for an
    unknown URL. With `writes`, the tier belongs to the log's writer. It records in the log's folder which
    objects it has proved intact.
    """

    def __init__(self, url: str, disk: Disk, layout: Layout, *, writes: bool = False) -> None:
        self._files, self._root = open_store(url, _HINT_URL)
        self._disk = disk
        self._layout = layout
        self._proofs = TierProofs(disk, layout.tier_proofs, writes=writes)

    def __repr__(self) -> str:
        return f"Tier({self._root!r})"

    # --- Moving -----------------------------------------------------------------------------

    def move(self, catalog: SegmentCatalog, segment: SegmentRecord) -> SegmentRecord:
        """Move a closed segment to the store and return its new L1 record. Raises any error from `copy`.

        After a crash at any step, the segment is complete in the folder or in the store, and moving it again
        completes the move.
        """
        moved = self.copy(segment)
        catalog.replace(moved)
        self.drop_local(moved)
        return moved

    def copy(self, segment: SegmentRecord) -> SegmentRecord:
        """Copy a closed segment to the store, verify the copy, and save a note; return its new L1 record.

        The local file stays: once the new record is in L1, `drop_local` removes it. Repeating the copy after
        a crash is harmless. Raises ChecksumMismatch if the store returns different bytes, ConnectionLost.
        """
        stored = stored_segment(self._layout, segment)
        folder = f"{self._log_id()}/{segment.hour:010d}"
        with SegmentReader.open(self._disk, stored) as reader:
            head = reader.head.raw
        crc, size = self._checksum(stored.path)
        record = replace(segment, state=TIERED, stored_bytes=size)
        for attempt in itertools.count():
            name = f"{folder}/{stored.path.name}" + (f".{attempt}" if attempt else "")
            note = TieredNote(name, crc, stored.cold, head, record)
            if not self._exists(name):
                try:
                    self._upload(stored.path, note)
                    self.verify(note)
                except BaseException:
                    self._discard(name)
                    raise
                break
            if self._is_stored(note):
                break
            # A crash left a partial upload under this name. Leave that object, and use another name.
            _log.warning("an object in the tier is incomplete and of no use", object=name)
        self._disk.write_atomic(self.note_path(segment), note.encode())
        _log.info("a segment was copied to the tier", segment=stored.path.name, bytes=size)
        return record

    def _log_id(self) -> str:
        """Return the id of this log's objects; the first call saves it.

        The id belongs to the folder in which it was saved; a copy of the folder gets a new id.
        """
        path, folder = self._layout.log_id, self._disk.folder_identity(self._layout.folder)
        log_id = uuid.uuid4().hex
        if self._disk.exists(path):
            known, _, written_in = self._disk.read(path).decode().partition(" ")
            if written_in == folder:
                return known
            if written_in:
                _log.warning(
                    "the log's folder is a copy: objects of the first folder are read and never removed",
                    folder=str(self._layout.folder),
                    first_log_id=known,
                )
            else:
                # The id was written by a version that did not record the folder.
                log_id = known
        self._disk.write_atomic(path, f"{log_id} {folder}".strip().encode())
        return log_id

    def _checksum(self, path: Path) -> tuple[int, int]:
        """Return the CRC32 and the size of a local file."""
        crc, size = 0, 0
        with self._disk.open_read(path) as source:
            while piece := source.read(size, size + _COPY_BYTES):
                crc, size = zlib.crc32(piece, crc), size + len(piece)
        return crc, size

    def _upload(self, path: Path, note: TieredNote) -> None:
        with self._reaching(note.name):
            self._files.makedirs(self._path(note.name).rpartition("/")[0], exist_ok=True)
            with (
                self._disk.open_read(path) as source,
                self._files.open(self._path(note.name), "wb") as target,
            ):
                start = 0
                while piece := source.read(start, start + _COPY_BYTES):
                    target.write(piece)
                    start += len(piece)

    def _discard(self, name: str) -> None:
        """Remove a failed upload under a name of this log; log a warning if that fails."""
        try:
            with self._reaching(name), suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))
        except ConnectionLost as problem:
            _log.warning("part of an upload stays in the tier", object=name, reason=str(problem))

    def _exists(self, name: str) -> bool:
        with self._reaching(name):
            return bool(self._files.exists(self._path(name)))

    def _is_stored(self, note: TieredNote) -> bool:
        """Return whether the object has the bytes that the note describes. Raises ConnectionLost."""
        try:
            self.verify(note)
        except (ChecksumMismatch, LogDamaged):
            return False
        return True

    def _is_promised(self, note: TieredNote) -> bool:
        """Return whether an object is the one that the note describes.

        If the object's name does not prove this, its bytes are compared. They are read again only after the
        object has changed. Raises ConnectionLost, LogDamaged.
        """
        if _log_id_in(note) is not None:
            return True
        with self._reaching(note.name):
            state = str(self._files.ukey(self._path(note.name)))
        if not self._proofs.has(note.name, state):
            if not self._is_stored(note) or not self._has_head(note):
                return False
            self._proofs.add(note.name, state)
        return True

    def _has_head(self, note: TieredNote) -> bool:
        """Return whether an object starts with the note's head, and the head matches the segment's start."""
        record = note.record
        try:
            head = SegmentHead.parse(note.head, record.epoch)
            begins = self._stored(note).read(0, len(note.head)) == note.head
        except LogDamaged:
            return False
        return begins and (head.position.file_number, head.base) == (record.file_number, record.base)

    def _stored(self, note: TieredNote) -> StoredFile:
        """Return the plain bytes of an object."""
        stored: StoredFile = RemoteFile(self, note)
        return SeekableFile(stored, note.name, lazy=True) if note.cold else stored

    def drop_local(self, segment: SegmentRecord) -> None:
        """Remove the local data of a segment whose note and L1 record refer to the store."""
        for cold in (False, True):
            path = self._layout.segment(segment.hour, segment.version, cold)
            if self._disk.exists(path):
                self._disk.remove(path)
                self._disk.sync_folder(path.parent)

    def verify(self, note: TieredNote) -> None:
        """Read a whole object back and compare its checksum.

        Raises ChecksumMismatch, LogDamaged, ConnectionLost.
        """
        self._check_size(note)
        crc = 0
        for start in range(0, note.stored_bytes, _COPY_BYTES):
            with self._reaching(note.name):
                stop = min(start + _COPY_BYTES, note.stored_bytes)
                crc = zlib.crc32(self._get(note.name, start, stop), crc)
        if crc != note.crc32:
            raise ChecksumMismatch(
                f"the store gives back other bytes of {note.name} than it was given",
                position=f"{note.name}:0",
                hint="Run: penstock log verify; what the host still has is kept",
            )

    def remove(self, note: TieredNote) -> None:
        """Remove a segment from the store; a missing object is not an error. Raises ConnectionLost.

        An object that another log may have written is kept.
        """
        if not self._exists(note.name):
            return
        log_id = _log_id_in(note)
        if not (self._is_promised(note) if log_id is None else log_id == self._log_id()):
            _log.warning("an object that another log wrote stays in the tier", object=note.name)
            return
        with self._reaching(note.name), suppress(FileNotFoundError):
            self._files.rm_file(self._path(note.name))
        self._proofs.remove(note.name)

    # --- Reading ----------------------------------------------------------------------------

    def note_path(self, segment: SegmentRecord) -> Path:
        """Return the path of a segment's note."""
        return note_path(self._layout, segment)

    def head(self, segment: SegmentRecord) -> SegmentHead:
        """Return a segment's head from its note, without accessing the store. Raises LogDamaged,
        SourceMissing.
        """
        note = TieredNote.load(self._disk, self.note_path(segment))
        return SegmentHead.parse(note.head, segment.epoch)

    def reader(self, segment: SegmentRecord) -> SegmentReader:
        """Open a segment in the store.

        Raises LogDamaged if it is missing, has another size or belongs to another log, ConnectionLost.
        """
        note = TieredNote.load(self._disk, self.note_path(segment))
        if not self._is_promised(note):
            self._check_size(note)
            raise LogDamaged(
                f"{note.name} in the store {self._root} is not what this log moved there",
                position=f"{note.name}:0",
                hint="Another log with this log.tier overwrote it; restore an older version of the object",
            )
        path = self._layout.segment(segment.hour, segment.version, note.cold)
        head = SegmentHead.parse(note.head, segment.epoch)
        epoch, number = segment.epoch, segment.file_number
        stored_segment = StoredSegment(segment.version, segment.hour, path, note.cold, epoch, number)
        return SegmentReader(stored_segment, self._stored(note), head)

    def _check_size(self, note: TieredNote) -> None:
        with self._reaching(note.name):
            size = self._files.info(self._path(note.name))["size"]
        if size != note.stored_bytes:
            raise LogDamaged(
                f"the store has {size} bytes of {note.name}, {note.stored_bytes} were given to it",
                position=f"{note.name}:{min(size, note.stored_bytes)}",
                hint="Restore the object from a version that the store kept",
            )

    def _get(self, name: str, start: int, stop: int) -> bytes:
        return bytes(self._files.cat_file(self._path(name), start=start, end=stop))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _reaching(self, name: str) -> Iterator[None]:
        """Translate store exceptions into Penstock errors. Every kind of store has its own exceptions."""
        try:
            yield
        except FileNotFoundError as problem:
            raise LogDamaged(
                f"{name} is not in the store {self._root}",
                position=f"{name}:0",
                hint="Restore the object from a version that the store kept",
            ) from problem
        except PenstockError:
            raise
        except Exception as problem:
            raise ConnectionLost(
                f"the store {self._root} does not answer as it should: {type(problem).__name__}",
                position=f"{name}:0",
                hint="Check its address, its credentials and the network",
            ) from problem


class RemoteFile:
    """An object in remote storage as a StoredFile, read by range requests. The latest responses are
    cached.
    """

    def __init__(self, tier: Tier, note: TieredNote) -> None:
        self._tier = tier
        self._note = note
        self._kept: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.requests = 0

    @property
    def size(self) -> int:
        """The object's size in bytes."""
        return self._note.stored_bytes

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes of [start, stop), fewer at the end of the object.

        Raises ConnectionLost, LogDamaged.
        """
        stop = min(stop, self.size)
        if start >= stop:
            return b""
        first, last = start // _REQUEST_BYTES, (stop - 1) // _REQUEST_BYTES
        pieces = [self._piece(number) for number in range(first, last + 1)]
        shift = first * _REQUEST_BYTES
        return b"".join(pieces)[start - shift : stop - shift]

    def close(self) -> None:
        """Drop the cached responses."""
        with self._lock:
            self._kept.clear()

    def _piece(self, number: int) -> bytes:
        with self._lock:
            if number in self._kept:
                self._kept.move_to_end(number)
                return self._kept[number]
        start = number * _REQUEST_BYTES
        stop = min(start + _REQUEST_BYTES, self.size)
        if self.requests == 0:
            self._tier._check_size(self._note)
        with self._tier._reaching(self._note.name):
            piece = self._tier._get(self._note.name, start, stop)
        if len(piece) != stop - start:
            raise FileTruncated(
                f"the store gave {len(piece)} bytes of {stop - start}",
                position=f"{self._note.name}:{start}",
                hint="Run: penstock log verify",
            )
        with self._lock:
            self.requests += 1
            self._kept[number] = piece
            while len(self._kept) > _REQUESTS_KEPT:
                self._kept.popitem(last=False)
        return piece


def with_noted(disk: Disk, layout: Layout, loaded: SegmentIndex | None) -> SegmentIndex | None:
    """Return L1 with the segments that have notes in the folder; None if there is neither L1 nor a note.

    L1 is rebuilt from the notes of segments in a store, as it is from the data of local segments. Raises
    LogDamaged for an unreadable note.
    """
    note_paths = [
        layout.hour_folder(hour) / name
        for hour in layout.hours(disk)
        for name in disk.list(layout.hour_folder(hour))
        if name.endswith(TIERED_SUFFIX)
    ]
    index = loaded
    for path in note_paths:
        version = int(path.name.removesuffix(TIERED_SUFFIX))
        known = index.get(version) if index is not None else None
        if known is None or known.state != TIERED:
            record = TieredNote.load(disk, path).record
            index = (index if index is not None else SegmentIndex([])).put(record)
    return index


def _log_id_in(note: TieredNote) -> str | None:
    """Return the id of the log that wrote an object, None for an object of 0.1.0, whose name has no id."""
    log_id, _, rest = note.name.partition("/")
    return log_id if "/" in rest else None


def note_path(layout: Layout, segment: SegmentRecord) -> Path:
    """Return the path of the note of a segment in a store."""
    return layout.hour_folder(segment.hour) / f"{segment.version:019d}{TIERED_SUFFIX}"
