# SPDX-License-Identifier: Apache-2.0
"""The reading thread of a subscriber, which follows a daemon for all shards of this member.

A member receives a single stream for all its shards and splits it by shard. The daemon therefore decodes one
view for the member and sends it over one connection. The stream begins at the lowest position of all shards;
shards that are further ahead drop the rows that they already have. If a shard's batches are not acked and
HELD_BYTES_MAX of its rows are waiting, the member's other shards are blocked too.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow
import structlog

from penstock.client.fetch import PositionFrame, RowFrame
from penstock.client.flow import REEVALUATE_SECONDS, Choice, DaemonBackoff, Place, Survey, choose
from penstock.client.merging import merged
from penstock.client.owned import HELD_BYTES_MAX, STALLED_SECONDS, OwnedShard, OwnedShards, Rows
from penstock.client.publishers import Answer, Publishers
from penstock.client.split import Cut, split
from penstock.errors import ConnectionLost, PenstockError, TransientError
from penstock.limits import DAEMON_SILENCE_SECONDS_MAX, MIB, SILENCE_SECONDS_MAX
from penstock.model import Position

# A response ends after this many bytes, so that a continuous stream regularly re-evaluates the daemons.
CREDIT_BYTES = 256 * MIB

# A daemon without new changes ends its response this long before its silence would count as a lost
# connection.
_MARGIN_SECONDS = 4.0
_WAIT_SECONDS = 10.0
# Rows of more bytes than this are not delivered together with later ones.
_MERGED_BYTES_MAX = MIB // 4

_log = structlog.get_logger(__name__)


@dataclass
class _Link:
    """The current daemon, the `Cut` of each shard, and the position of the stream."""

    daemon: int
    version: int
    count: int
    shards: Mapping[int, OwnedShard]
    cuts: dict[int, Cut]
    start: dict[str, str]
    by_gtid_set: bool
    chosen_at: float


class Intake:
    """Reads from daemons and adds the rows to shards, until it is stopped.

    `failed` is called with a permanent error. `request` is the body of the `changes` request, without shards
    and start. `preference` is any number; different numbers spread members over daemons with equal load.
    """

    def __init__(
        self,
        publishers: Publishers,
        shards: OwnedShards,
        request: Mapping[str, Any],
        preference: int,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._publishers = publishers
        self._shards = shards
        self._request = dict(request)
        self._preference = preference
        self._failed = failed
        has_several = len(publishers) > 1
        self._silence_seconds = DAEMON_SILENCE_SECONDS_MAX if has_several else SILENCE_SECONDS_MAX
        self._backoff = DaemonBackoff()
        self._refused: dict[int, PenstockError] = {}
        self._current: int | None = None
        self._answer: Answer | None = None
        self._answer_lock = threading.Lock()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="penstock-intake", daemon=True)
        self.behind_bytes: int | None = None

    @property
    def url(self) -> str | None:
        """The URL of the current daemon, None before the first daemon is chosen."""
        return None if self._current is None else self._publishers.url(self._current)

    def start(self) -> None:
        """Start reading."""
        self._thread.start()

    def turn(self) -> None:
        """Re-evaluate the shards, because a shard was gained or lost."""
        with self._answer_lock:
            if self._answer is not None:
                self._answer.cut()

    def end(self) -> None:
        """Stop reading; `join` waits for the end."""
        self._ending = True
        self._shards.wake()
        self.turn()

    def join(self) -> None:
        """Return when the reading thread has ended, or immediately if called from that thread."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # --- The thread -------------------------------------------------------------------------

    def _run(self) -> None:
        # Imports pandas, if it is installed, which takes half a second. Do that before rows arrive.
        pyarrow.array([0]).take(pyarrow.array([0]))
        try:
            while not self._ending:
                version = self._shards.version
                shards = _of_one_revision(self._shards.all())
                if not shards:
                    self._shards.wait(version, _WAIT_SECONDS)
                    continue
                link = self._connect(version, shards)
                if link is not None:
                    self._follow(link)
        except PenstockError as problem:
            self._failed(problem)
        except BaseException as problem:
            # Report bugs to the subscriber's caller as well: otherwise, the caller would wait forever.
            self._failed(problem)
            raise

    # --- Choosing a daemon ------------------------------------------------------------------

    def _connect(self, version: int, shards: Mapping[int, OwnedShard]) -> _Link | None:
        """Choose a daemon whose log has the shards' positions; None if no daemon can be read now."""
        places = {number: shard.read for number, shard in shards.items()}
        now = time.monotonic()
        ready = self._backoff.ready(range(len(self._publishers)), now)
        if not ready:
            self._shards.wait(version, self._backoff.pause(range(len(self._publishers)), now))
            return None
        surveys = {
            daemon: Survey(problem=ConnectionLost(f"{self._publishers.url(daemon)} did not answer before"))
            for daemon in range(len(self._publishers))
        }
        surveys.update(self._publishers.survey(ready))
        surveys.update({daemon: Survey(problem=problem) for daemon, problem in self._refused.items()})
        try:
            choice = choose(surveys, places, self._current, self._preference)
            positions = self._places_here(choice, places)
        except TransientError as problem:
            for daemon in ready:
                self._backoff.failed(daemon, time.monotonic())
            pause = self._backoff.pause(range(len(self._publishers)), time.monotonic())
            _log.warning("no daemon can be read", why=str(problem), again_after_seconds=round(pause, 1))
            self._shards.wait(version, pause)
            return None
        lowest = min(positions.values())
        if choice.daemon != self._current:
            _log.info("reading from", daemon=self._publishers.url(choice.daemon), position=str(lowest))
        self._current = choice.daemon
        count = next(iter(shards.values())).count
        cuts = {number: Cut.at(positions[number], choice.fits[number].shift) for number in places}
        start = {"position": str(lowest)}
        by_gtid_set = any(daemon.by_gtid_set for daemon in choice.fits.values())
        if all(daemon.by_gtid_set for daemon in choice.fits.values()):
            # Another server may have committed in a different order, so transactions in the set are skipped.
            start = {"gtid_set": places[min(positions, key=lambda number: positions[number])].gtid_set}
        return _Link(choice.daemon, version, count, shards, cuts, start, by_gtid_set, time.monotonic())

    def _places_here(self, choice: Choice, places: Mapping[int, Place]) -> dict[int, Position]:
        """Return each shard's position in the daemon's epoch numbers."""
        positions: dict[int, Position] = {}
        for number, place in places.items():
            mapping = choice.fits[number]
            if mapping.by_gtid_set:
                positions[number] = self._publishers.after_gtid_set(choice.daemon, place.gtid_set)
                _log.warning(
                    "another server's log is read on by GTID set",
                    shard=number,
                    daemon=self._publishers.url(choice.daemon),
                    position=str(positions[number]),
                )
            else:
                here = place.shifted(-mapping.shift)
                self._publishers.prove(choice.daemon, here)
                positions[number] = here.position
        return positions

    # --- Reading ----------------------------------------------------------------------------

    def _follow(self, link: _Link) -> None:
        """Read one response after another until the shards change, the daemon fails, or a re-evaluation is
        due.
        """
        try:
            while not self._turned(link):
                self._read(link)
                if len(self._publishers) > 1 and time.monotonic() - link.chosen_at >= REEVALUATE_SECONDS:
                    return
        except TransientError as problem:
            if self._turned(link):
                return
            self._backoff.failed(link.daemon, time.monotonic())
            _log.warning("a daemon is left", daemon=self._publishers.url(link.daemon), why=str(problem))
        except PenstockError as problem:
            # The error may concern this daemon only. If all daemons refuse, `choose` raises the error.
            self._refused[link.daemon] = problem
            if len(self._refused) == len(self._publishers):
                raise
            _log.warning("a daemon is left", daemon=self._publishers.url(link.daemon), why=str(problem))

    def _turned(self, link: _Link) -> bool:
        return self._ending or link.version != self._shards.version

    def _read(self, link: _Link) -> None:
        consumed = _consumed(link)
        answer = self._publishers.changes(link.daemon, self._body(link), self._silence_seconds, consumed)
        with self._answer_lock:
            self._answer = answer
        frames_held: list[RowFrame] = []
        frames_held_bytes = 0
        # The last position that was not delivered yet, and how many of the held frames precede it.
        position: PositionFrame | None = None
        whole = 0
        frames = answer.frames()
        try:
            if self._turned(link):
                # The shards changed before there was a response to cut off.
                return
            for frame in frames:
                if isinstance(frame, RowFrame):
                    frames_held.append(frame)
                    frames_held_bytes += frame.bytes
                    if frames_held_bytes >= HELD_BYTES_MAX and self._hand_on(link, frames_held):
                        frames_held, frames_held_bytes, position = [], 0, None
                    continue
                if isinstance(frame, PositionFrame):
                    position, whole = frame, len(frames_held)
                    if frames_held_bytes < _MERGED_BYTES_MAX and self._waits_for_more(link, answer):
                        continue
                if position is not None:
                    self._deliver(link, frames_held, position)
                    frames_held, frames_held_bytes, position = [], 0, None
                    if self._turned(link) or not self._room(link):
                        return
        except PenstockError:
            if position is not None and not self._turned(link):
                # The next response may end at the same place, so its rows would never be delivered.
                self._deliver(link, frames_held[:whole], position)
            raise
        finally:
            frames.close()
            with self._answer_lock:
                self._answer = None

    def _waits_for_more(self, link: _Link, answer: Answer) -> bool:
        """Return whether rows are delivered together with the next ones, which have arrived already.

        A member that is slower than the daemon thus gets fewer, larger batches. Floors apply to one position
        at a time.
        """
        return not any(shard.floors for shard in link.shards.values()) and answer.has_more()

    def _body(self, link: _Link) -> dict[str, Any]:
        # Shards of the same revision have the same settings.
        shard = next(iter(link.shards.values()))
        body = {
            **self._request,
            **shard.selection.fields(),
            "format": "arrow",
            "start": link.start,
            "credit_bytes": CREDIT_BYTES,
            "wait_seconds": self._silence_seconds - _MARGIN_SECONDS,
        }
        floors = any(shard.floors for shard in link.shards.values())
        if link.count > 1 or floors:
            body["shards"] = {
                "count": link.count,
                "of": sorted(link.shards),
                "columns": {table: list(names) for table, names in shard.shard_columns.items()},
            }
        return body

    def _hand_on(self, link: _Link, held: list[RowFrame]) -> bool:
        """Deliver the start of a transaction that is too large to buffer. Return False if the rows must be
        buffered instead.

        If the response breaks off before the transaction's end, the transaction is delivered again from its
        start.
        """
        if any(shard.floors for shard in link.shards.values()):
            # Floors depend on the transaction's server, which is known only at the transaction's end.
            return False
        rows_of = self._rows_of(link, held, link.cuts)
        for number, shard in link.shards.items():
            shard.offer(rows_of[number], None)
        self._room(link)
        return True

    def _deliver(self, link: _Link, held: list[RowFrame], frame: PositionFrame) -> None:
        """Deliver new rows to their shards, with the position after them, from where reading continues."""
        cuts = self._floored(link, frame)
        rows_of = self._rows_of(link, held, cuts)
        place = Place(frame.position, frame.gtid_set, frame.server_key, frame.time_us, frame.fingerprint)
        link.start = {"position": str(frame.position)}
        self._backoff.progressed(link.daemon)
        self._refused.clear()
        # A shard with rows wakes its thread, which then waits for the interpreter until this thread is done.
        # So those shards come last.
        for number in sorted(link.shards, key=lambda number: bool(rows_of[number])):
            link.shards[number].offer(rows_of[number], place.shifted(cuts[number].shift))
        self.behind_bytes = frame.behind_bytes

    def _rows_of(self, link: _Link, held: list[RowFrame], cuts: Mapping[int, Cut]) -> dict[int, list[Rows]]:
        """Return the rows of several batches, by shard."""
        rows_of: dict[int, list[Rows]] = {number: [] for number in link.shards}
        for frame in merged(held, self._request["batch_rows"]):
            row_bytes = frame.bytes / max(frame.rows, 1)
            for number, batch in split(frame.to_arrow(), link.count, cuts, in_runs=True):
                size = int(row_bytes * batch.num_rows)
                rows_of[number].append(Rows(frame.table, frame.schema_version, frame.key, batch, size))
        return rows_of

    def _floored(self, link: _Link, frame: PositionFrame) -> Mapping[int, Cut]:
        """Return the cuts. The cut of a shard that has not passed its floors yet includes the floors."""
        cuts = link.cuts
        for number, shard in link.shards.items():
            if not shard.floors:
                continue
            cut = link.cuts[number]
            end = Place(frame.position).shifted(cut.shift).position
            table = shard.floors.table(frame.server_key, end.epoch)
            cuts = {**cuts, number: Cut(cut.floor, cut.shift, table)}
            shard.floors = shard.floors.after(str(end), frame.server_key)
        return cuts

    def _room(self, link: _Link) -> bool:
        """Wait until every shard has room (backpressure). Return False if the shards change during the
        wait.
        """
        for shard in link.shards.values():
            while shard.is_full and not shard.wait_for_room(lambda: not self._turned(link), STALLED_SECONDS):
                if self._turned(link):
                    return False
                _log.warning("reading waits for acks", shard=shard.shard, position=str(shard.done.position))
        return True


def _consumed(link: _Link) -> Position | None:
    """Return the position before which all shards are consumed, in the daemon's epoch numbers; None if
    unknown.
    """
    positions = [
        shard.stored().shifted(-link.cuts[number].shift).position
        for number, shard in link.shards.items()
        if shard.stored is not None
    ]
    # After a switch by GTID set, the positions belong to another server.
    return min(positions) if positions and not link.by_gtid_set else None


def _of_one_revision(shards: Mapping[int, OwnedShard]) -> dict[int, OwnedShard]:
    """Return the shards of the newest revision. After a change, the shards of earlier revisions are being
    released.
    """
    newest = max((shard.revision for shard in shards.values()), default=(0, 0))
    return {number: shard for number, shard in shards.items() if shard.revision == newest and not shard.over}
