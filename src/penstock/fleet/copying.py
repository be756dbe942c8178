# SPDX-License-Identifier: Apache-2.0
"""A copy of an instance's log: a thread that follows the log of the member that captures, byte for byte.

    listing (waits) ─▶ definitions, holds ─▶ bytes ─▶ the kernel checks them and finds blocks ─▶ the copy

Every log contains the server's own bytes at the server's own positions, so the members need no protocol to
agree on the contents: a copy is simply a log that received its bytes from a member instead of the server. A
member that takes over the capture continues at the end of its own copy.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock._native import BlockCutter
from penstock.capture.receive import Progress, Receiver
from penstock.errors import DiskFailed, LogDamaged, LogTorn, PenstockError, ServerBusy, StreamError
from penstock.fleet.copied_metadata import CopiedMetadata
from penstock.fleet.records import CopyRecord
from penstock.gtid_sets import LoggedSet
from penstock.limits import MIB
from penstock.logstore.ending import end_log
from penstock.logstore.epochs import EpochRecord
from penstock.logstore.extent import Extent
from penstock.logstore.log import Log
from penstock.model import Position
from penstock.retry import Backoff, Retry
from penstock.source.daemon_address import DaemonAddress
from penstock.source.daemon_client import DaemonClient

# The interval between requests while nothing arrives. The interval is short, so that the loss of a member is
# noticed soon.
_POLL_SECONDS = 2.0
_SILENCE_SECONDS = 5.0
_BACKOFF = Backoff(longest=2.0)

# A copy with less than this left to receive counts as nearly complete.
_IN_STEP_BYTES_MAX = 64 * MIB
# A copy that received nothing for this long may be behind by any amount.
_UNHEARD_SECONDS_MAX = 60.0
# The number of bytes at the end of a copy that are compared with the capturing member's log before the copy
# continues.
_COMPARED_BYTES = 64 * 1024

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Listing:
    """The log of the capturing member: its epochs, ascending, and its end. `end` is None if the log is empty.

    `extents` contains its contiguous runs of bytes, ascending, except runs that end before this copy's end.
    `readable` is the end that readers of the log see, None if they see everything.
    """

    url: str
    epochs: tuple[EpochRecord, ...]
    end: Position | None
    extents: tuple[Extent, ...]
    readable: Position | None = None

    def bytes_after(self, position: Position | None) -> int:
        """Return how many of the listed bytes follow a position."""
        if position is None:
            return sum(extent.end - extent.start for extent in self.extents)
        return sum(extent.bytes_after(position) for extent in self.extents)

    def extent_with(self, position: Position) -> Extent | None:
        """Return the extent that contains a position or ends there."""
        file = position.epoch, position.file
        return next(
            (
                extent
                for extent in self.extents
                if (extent.epoch, extent.file) == file and extent.start <= position.offset <= extent.end
            ),
            None,
        )


class LogCopy:
    """Copies one instance's log until stopped. `start` and `stop` must be called from one thread.

    `open_log` opens the copy, and `put_aside` moves the folder of the closed copy away. `find_source` returns
    a member that knows which member captures the instance, None if no member captures it. Failures are
    retried until `stop`; the record contains the last failure. `member` is the name of the copying member,
    and `note_readable` is called with the end of the bytes that readers of the log can see.
    """

    def __init__(
        self,
        instance: str,
        open_log: Callable[[], Log],
        find_source: Callable[[], DaemonAddress | None],
        put_aside: Callable[[], Path],
        member: str = "",
        note_readable: Callable[[Position], None] = lambda position: None,
    ) -> None:
        self._instance = instance
        self._open_log = open_log
        self._find_source = find_source
        self._put_aside = put_aside
        self._member = member
        self._note_readable = note_readable
        self._stopping = threading.Event()
        # This lock is held while the log is changed, so that `stop` need not wait for an answer from a lost
        # member.
        self._writing = threading.Lock()
        self._log: Log | None = None
        self._why: str | None = None
        self._behind_bytes: int | None = None
        # Whether the copy has been complete at any time since it connected to the capturing member.
        self._has_caught_up = False
        self._heard_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name=f"copy-{instance}", daemon=True)

    # --- Called by other threads ------------------------------------------------------------

    def start(self) -> None:
        """Start copying in a separate thread."""
        self._thread.start()

    def stop(self) -> None:
        """Make the copied bytes durable and release the log. Nothing is stored after this call."""
        self._stopping.set()
        with self._writing:
            self._close_log()

    def log(self) -> Log | None:
        """Return the copy, None while it is not open."""
        return self._log

    def record(self) -> CopyRecord:
        """Return the progress of the copy. Never waits."""
        log, behind_bytes = self._log, self._behind_bytes
        is_following = self._has_caught_up and time.monotonic() - self._heard_at < _UNHEARD_SECONDS_MAX
        return CopyRecord(
            position=None if log is None else log.visible,
            behind_bytes=behind_bytes,
            in_step=log is not None
            and is_following
            and behind_bytes is not None
            and behind_bytes <= _IN_STEP_BYTES_MAX,
            why=self._why,
        )

    # --- The thread -------------------------------------------------------------------------

    def _run(self) -> None:
        retry = Retry("a log is not copied now", backoff=_BACKOFF, stop=self._stopping, quiet_seconds=1.0)
        while not self._stopping.is_set():
            try:
                self._follow(retry)
            except PenstockError as problem:
                if self._stopping.is_set():
                    return
                self._why = problem.message
                if isinstance(problem, DiskFailed):
                    with self._writing:
                        # After a failed write, the contents of the file are unknown until it has been read
                        # again.
                        self._close_log(finish=False)
                retry.wait(problem, instance=self._instance)
            except Exception as defect:
                # The exception ends the thread, which prints the traceback. The record shows that the copy
                # has ended.
                self._why = f"a defect ended the copy: {defect!r}"
                self._heard_at = float("-inf")
                raise

    def _follow(self, retry: Retry) -> None:
        """Copy from the member that captures, until that member is lost."""
        address = self._find_source()
        if address is None:
            raise ServerBusy(f"no member captures {self._instance} at the moment")
        client = DaemonClient(address, address.base_urls[0], _SILENCE_SECONDS, self._member)
        with closing(client):
            try:
                with self._permitted() as log:
                    metadata = CopiedMetadata(log, client)
            except (LogDamaged, LogTorn) as problem:
                # Replace the copy only if the capturing member's log can be read.
                _list(client, None, 0.0, None)
                self._begin_again(problem.message)
                return
            stream: _Stream | None = None
            proved: Listing | None = None
            while not self._stopping.is_set():
                if not log.in_place:
                    raise DiskFailed(
                        f"the folder {log.folder} was removed or replaced while it was in use",
                        hint="Check the disk; the copy begins again",
                    )
                # Report no progress before the first listing: bytes of a different history must not count as
                # a copy.
                synced = None if proved is None else log.durable
                listing = _list(client, log.visible, 0.0 if proved is None else _POLL_SECONDS, synced)
                is_first = proved is None
                if proved is None or (proved.url, proved.epochs) != (listing.url, listing.epochs):
                    reason = divergence(log, listing, client)
                    if reason is not None:
                        self._begin_again(f"it is not the start of the log that is captured: {reason}")
                        return
                    proved, stream = listing, None
                if listing.readable is not None:
                    self._note_readable(listing.readable)
                self._behind_bytes, self._heard_at = listing.bytes_after(log.visible), time.monotonic()
                self._has_caught_up = not self._behind_bytes or (self._has_caught_up and not is_first)
                with self._permitted():
                    metadata.refresh()
                stream = self._copy(log, listing, client, metadata, stream)
                if log.settings.serve == "durable":
                    # Readers do not see the copied data until it is durable.
                    with self._permitted():
                        log.sync()
                self._has_caught_up, self._why = True, None
                retry.succeeded()

    def _copy(
        self,
        log: Log,
        listing: Listing,
        client: DaemonClient,
        metadata: CopiedMetadata,
        stream: "_Stream | None",
    ) -> "_Stream | None":
        """Copy everything that is listed; return the stream that continues at the end of the copy."""
        for extent in listing.extents:
            end = log.visible
            if end is not None and extent.last <= end:
                continue
            is_inside = end is not None and (end.epoch, end.file) == (extent.epoch, extent.file)
            start = end if is_inside and end is not None and end.offset >= extent.start else extent.first
            with self._permitted():
                adopt_epochs(log, listing, extent.epoch)
                if stream is None or stream.position != start:
                    metadata.begin(start)
                    stream = _Stream(log, start, client, metadata, self._stopping, self._report_hold)
            server_key = stream.server_key
            pieces = client.stream(start.epoch, start.file, start.offset, extent.end, server_key)
            with closing(pieces):
                for piece in pieces:
                    with self._permitted():
                        stream.feed(piece)
                    self._behind_bytes = max((self._behind_bytes or 0) - len(piece), 0)
                    self._heard_at = time.monotonic()
        if log.visible == listing.end and listing.epochs:
            with self._permitted():
                adopt_epochs(log, listing, listing.epochs[-1].epoch)
        return stream

    # --- The log ----------------------------------------------------------------------------

    @contextmanager
    def _permitted(self) -> Iterator[Log]:
        """Allow the block to change the log, opening the log if necessary. Raises ServerBusy after `stop`."""
        with self._writing:
            if self._stopping.is_set():
                raise ServerBusy(f"the copy of {self._instance} ends")
            if self._log is None:
                self._log = self._open_log()
            yield self._log

    def _report_hold(self, why: str | None) -> None:
        self._why = why

    def _begin_again(self, reason: str) -> None:
        """Move the log away, so that the copy begins again. The bytes of the moved log are never served."""
        with self._writing:
            if self._stopping.is_set():
                return
            self._close_log()
            aside = self._put_aside()
        _log.error(
            "a log is set aside, and its copy begins again",
            instance=self._instance,
            folder=str(aside),
            why=reason,
        )

    def _close_log(self, *, finish: bool = True) -> None:
        # The next log that is opened may be shorter, so forget that this log was complete.
        self._has_caught_up, self._behind_bytes = False, None
        log, self._log = self._log, None
        if log is not None:
            end_log(log, self._instance, finish=finish)


class _Stream:
    """The bytes of one source file on their way into the log."""

    def __init__(
        self,
        log: Log,
        start: Position,
        client: DaemonClient,
        metadata: CopiedMetadata,
        stopping: threading.Event,
        report_hold: Callable[[str | None], None],
    ) -> None:
        epoch = log.epochs.get(start.epoch)
        assert epoch is not None, "the epoch was adopted"
        self._epoch = epoch
        gtid_set = (
            log.gtid_set(start)
            if start == log.visible
            else LoggedSet(client.ask("gtid_set", position=str(start))["gtid_set"])
        )
        self._cutter = BlockCutter(
            epoch=start.epoch,
            file=start.file,
            offset=start.offset,
            gtid_set=gtid_set,
            flavor=epoch.flavor,
            block_bytes=log.settings.block_bytes,
            time_max_us=log.time_max_us,
            live=False,
            head=client.content("head_bytes", epoch=start.epoch, file=start.file),
        )
        self._receiver = Receiver(
            log,
            Progress(),
            stopping,
            epoch=start.epoch,
            server_id=epoch.server_id,
            flavor=epoch.flavor,
            chunk_bytes=MIB,
            schemas=metadata,
            hold=report_hold,
            arrived=lambda: None,
        )
        self._receiver.resume_file(self._cutter)
        # The start of an event whose end has not arrived.
        self._rest = bytearray()

    @property
    def server_key(self) -> str:
        """The key of the server that wrote these bytes."""
        return self._epoch.server_key

    @property
    def position(self) -> Position | None:
        """The end of the stored bytes, None inside a transaction."""
        if self._rest or self._cutter.in_transaction:
            return None
        return Position(self._epoch.epoch, self._cutter.file, self._cutter.offset)

    def feed(self, piece: bytes) -> None:
        """Store the events that a piece completes. Raises errors from the log and the kernel."""
        self._rest += piece
        with memoryview(self._rest) as view:
            consumed = self._receiver.feed(view, self._cutter)
        del self._rest[:consumed]


def _list(client: DaemonClient, after: Position | None, seconds: float, synced: Position | None) -> Listing:
    position = None if after is None else str(after)
    confirmed = None if synced is None else str(synced)
    answer = client.ask("copy/listing", after=position, timeout=str(seconds), synced=confirmed)
    try:
        epochs = tuple(EpochRecord(**epoch) for epoch in answer["epochs"])
        end = None if answer["position"] is None else Position.parse(answer["position"])
        extents = tuple(Extent(**extent) for extent in answer["extents"])
        readable = answer.get("readable")
        return Listing(client.url, epochs, end, extents, readable and Position.parse(readable))
    except (KeyError, TypeError) as problem:
        raise StreamError(
            f"{client.url} lists its log in an unknown form", hint="Upgrade all members of the fleet"
        ) from problem


def adopt_epochs(log: Log, listing: Listing, until: int) -> None:
    """Record the epochs of another log unchanged, up to an epoch number."""
    for epoch in listing.epochs:
        own = log.epochs.get(epoch.epoch)
        if epoch.epoch > until:
            return
        if own is not None and own.is_logged_set != epoch.is_logged_set and epoch.is_logged_set:
            log.complete_epoch(epoch.epoch, epoch.gtid_set)
        elif own is None and (log.epoch is None or epoch.epoch > log.epoch.epoch):
            log.adopt_epoch(epoch)


def divergence(log: Log, listing: Listing, client: DaemonClient) -> str | None:
    """Return why a log is not a prefix of another log, None if it is.

    A log can diverge if its host captured earlier and received bytes from a server that was then replaced,
    before any other host received these bytes. Raises ServerBusy while the other log ends before this log, or
    an error from the daemon.
    """
    last, end = log.epoch, log.visible
    if last is None:
        return None
    if not listing.epochs or last.epoch > listing.epochs[-1].epoch:
        raise ServerBusy("the member that captures has not begun the epoch of this copy yet")
    server_keys = {epoch.epoch: epoch.server_key for epoch in listing.epochs}
    for epoch in log.epochs.epochs:
        if epoch.epoch >= listing.epochs[0].epoch and server_keys.get(epoch.epoch) != epoch.server_key:
            return f"epoch {epoch.epoch} is of another server there"
    if end is None:
        return None
    extent = listing.extent_with(end)
    if extent is None:
        if end.epoch == listing.epochs[-1].epoch and (listing.end is None or listing.end < end):
            raise ServerBusy("the member that captures has not reached the end of this copy yet")
        return f"{end}, where this log ends, is not in the other one"
    if log.head_bytes(end.epoch, end.file) != client.content("head_bytes", epoch=end.epoch, file=end.file):
        return f"{end.file} is another file there"
    own = next(own for own in reversed(log.extents()) if own.last == end)
    start = max(own.start, extent.start, end.offset - _COMPARED_BYTES)
    own_bytes = b"".join(log.read(end.epoch, end.file, start, end.offset))
    if own_bytes != b"".join(client.stream(end.epoch, end.file, start, end.offset, server_keys[end.epoch])):
        return f"the bytes before {end} are other ones there"
    return None
