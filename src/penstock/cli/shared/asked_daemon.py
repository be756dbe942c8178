# SPDX-License-Identifier: Apache-2.0
"""Accesses an instance's log through its daemon: finds the lag of checkpoints, and the positions of new
checkpoints.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from penstock.cli.shared.chosen_daemon import daemon_address
from penstock.cli.shared.log_folder import Condition, committed_from, first_in, outside
from penstock.coordinate.checkpoint import Checkpoint
from penstock.errors import (
    PositionInvalid,
    PositionPurged,
    ServerBusy,
    ServerChanged,
    SourceMissing,
)
from penstock.logstore.extent import Extent
from penstock.logstore.holds import consumer_hold_name
from penstock.model import Position, TableName
from penstock.source.bounds import Bound
from penstock.source.daemon import DaemonSource, extents_of
from penstock.source.daemon_address import DaemonAddress
from penstock.source.daemon_client import SEARCH_SILENCE_SECONDS_MAX, DaemonClient
from penstock.source.kept import epoch_shift
from penstock.source.source import FIRST_EVENT_OFFSET, ByteRange, SourceOptions
from penstock.source.walk import TransactionWalk

EARLIEST, LATEST = "earliest", "latest"


@dataclass(frozen=True)
class Lag:
    """How far a checkpoint is behind the daemon's log.

    `bytes` and `seconds` are None if unknown, and `why` is then the reason. `seconds` is the time between the
    commits of the last consumed and the last logged transaction.
    """

    bytes: int | None = None
    seconds: float | None = None
    why: str | None = None


class AskedDaemon:
    """Access to one instance of a daemon. Every call raises ConnectionLost if the daemon does not answer."""

    def __init__(self, address: DaemonAddress) -> None:
        self.address = address
        self._client = DaemonClient(address, address.base_urls[0])

    @classmethod
    def find(cls, instance: str, url: str | None, config: Path | None, ca: Path | None = None) -> Self:
        """Return the daemon selected by `--url`, the settings file, or the default; see `daemon_address`."""
        return cls(daemon_address(instance, url, config, ca))

    # --- Lag --------------------------------------------------------------------------------

    def lag(self, checkpoint: Checkpoint) -> Lag:
        """Return how far a checkpoint is behind."""
        runs, status = self._runs(), self._client.ask("status")
        try:
            position = self._to_local_position(checkpoint)
        except ServerChanged as problem:
            return Lag(why=problem.message)
        if not runs or position > runs[-1].last:
            return Lag(0, 0.0)
        if position < runs[0].first:
            return Lag(why=f"the log begins behind it, at {runs[0].first}")
        bytes_behind = sum(run.bytes_after(position) for run in runs)
        newest = status["time_us"] or 0
        if not bytes_behind:
            return Lag(0, 0.0)
        if not checkpoint.time_us or not newest:
            return Lag(bytes_behind)
        return Lag(bytes_behind, max(newest - checkpoint.time_us, 0) / 1e6)

    def _to_local_position(self, checkpoint: Checkpoint) -> Position:
        """Return a checkpoint's position with this daemon's epoch numbers. Raises ServerChanged."""
        position = Position.parse(checkpoint.position)
        if not checkpoint.server_key:
            return position
        shift = epoch_shift([(position.epoch, checkpoint.server_key)], self._epochs(), str(self.address))
        return position.shifted(-shift)

    # --- Positions --------------------------------------------------------------------------

    def find_checkpoint(self, bound: Bound | str) -> Checkpoint:
        """Return the checkpoint for `earliest`, `latest` or a bound, verified against the log.

        The checkpoint is just before the first matching transaction. A time matches transactions that were
        committed at or after it, a GTID set matches transactions outside the set, and a position matches the
        transaction that begins there. Raises PositionInvalid for a position inside a transaction, ServerBusy
        for a position past the head, and PositionPurged.
        """
        # Fail immediately if the daemon is down, because the source would retry for a while.
        self._client.ask("status")
        with closing(
            DaemonSource(SourceOptions(daemon=self.address, instance=self.address.instance))
        ) as source:
            position = self._find(source, bound)
            gtid_set = source.gtid_set(position)
        keys = dict(self._epochs())
        return Checkpoint.now(str(position), gtid_set, keys.get(position.epoch, ""))

    def _find(self, source: DaemonSource, bound: Bound | str) -> Position:
        if isinstance(bound, str):
            return source.earliest() if bound == EARLIEST else source.head()
        if bound.time_us is not None:
            is_late = committed_from(bound.time_us)
            return self._first(source, source.find_time(bound.time_us), lambda begin: is_late)
        if bound.gtid_set is not None:
            gtid_set = bound.gtid_set
            located = source.find_gtid_set(gtid_set)
            return self._first(source, located, lambda begin: outside(gtid_set, source.gtid_set(begin)))
        assert bound.position is not None, "a bound has one field"
        self._check_position(source, bound.position)
        return bound.position

    def _first(
        self, source: DaemonSource, start: Position, condition_from: Callable[[Position], Condition]
    ) -> Position:
        """Search for a matching transaction from `start` on, and return where it begins. If none matches,
        return the end of the log.

        `condition_from` is called with the start position of each contiguous run of the log.
        """
        for run in self._runs():
            if run.last <= start:
                continue
            begin = start.offset if run.first <= start else run.start
            span = ByteRange(run.epoch, run.file, begin, run.end, True)
            position = first_in(source, span, condition_from(span.position))
            if position is not None:
                return position
        return source.head()

    def _check_position(self, source: DaemonSource, position: Position) -> None:
        """Raise an error if a checkpoint must not be set to this position."""
        runs = self._runs()
        if not runs or position > runs[-1].last:
            raise ServerBusy(
                f"the log ends at {runs[-1].last}" if runs else "the log is empty so far",
                position=str(position),
                hint="Wait for the daemon, or choose an earlier position: penstock status",
            )
        if position < runs[0].first:
            raise PositionPurged(
                f"the log begins at {runs[0].first}",
                position=str(position),
                hint="Choose a later place, or --earliest",
            )
        run = next((candidate for candidate in runs if candidate.first <= position <= candidate.last), None)
        if run is None:
            raise PositionInvalid("the log has no such place", position=str(position), hint="penstock status")
        begin = max(run.start, FIRST_EVENT_OFFSET)
        if not begin < position.offset < run.end:
            return
        first = source.boundary_before(position)
        at, end = _around(source, ByteRange(run.epoch, run.file, first, position.offset, aligned=True))
        if end > position.offset:
            raise PositionInvalid(
                "no transaction begins or ends here",
                position=str(position),
                hint=f"The one around it begins at {run.file}:{at} and ends at {run.file}:{end}",
            )

    # --- Holds ------------------------------------------------------------------------------

    def holds(self) -> list[dict[str, Any]]:
        """Return the holds on the log that the account may see."""
        holds: list[dict[str, Any]] = self._client.ask("holds")["holds"]
        return holds

    def tables(self) -> list[TableName]:
        """Return the tables that have a definition at the end of the log and that the account may read."""
        return [TableName.parse(name) for name in self._client.ask("definitions")["tables"]]

    def as_of_file(self, wanted: dict[str, Any]) -> tuple[Mapping[str, str], Iterator[bytes]]:
        """Request a file with a table's rows as of a moment; return its headers and its pieces.

        Raises the daemon's errors. Reading the pieces raises ConnectionLost if the connection breaks before
        the end of the file.
        """
        response = self._client.post("as-of", wanted, SEARCH_SILENCE_SECONDS_MAX)
        return response.headers, self._client.pieces(response)

    def remove_hold(self, reader: str) -> None:
        """Remove a hold. Raises SourceMissing, AccessDenied."""
        self._client.delete(f"holds/{quote(reader, safe='')}")

    def resume(self) -> None:
        """Start the capture of an instance that was set aside. Raises OptionInvalid, AccessDenied."""
        self._client.command("resume")

    def release_consumer(self, consumer: str) -> bool:
        """Remove the hold of a named consumer; return whether it existed. Raises AccessDenied."""
        try:
            self.remove_hold(consumer_hold_name(consumer))
        except SourceMissing:
            return False
        return True

    # --- Responses --------------------------------------------------------------------------

    def _epochs(self) -> list[tuple[int, str]]:
        return [(epoch["epoch"], epoch["server_key"]) for epoch in self._client.ask("epochs")["epochs"]]

    def _runs(self) -> list[Extent]:
        return extents_of(self._client.ask("extents"))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _around(source: DaemonSource, byte_range: ByteRange) -> tuple[int, int]:
    """Return the bounds of the last transaction that starts in a range; 0, 0 if there is none."""
    bounds = 0, 0
    for batch in TransactionWalk(source, byte_range):
        if batch.num_rows:
            bounds = batch["offset"][-1].as_py(), batch["end_offset"][-1].as_py()
    return bounds


def shown_lag(daemon: AskedDaemon | None, checkpoint: Checkpoint | None) -> Lag:
    """Return the lag of a checkpoint, or why it is unknown."""
    if checkpoint is None:
        return Lag(why="nothing was consumed yet")
    if daemon is None:
        return Lag(why="no daemon was asked")
    try:
        return daemon.lag(checkpoint)
    except SourceMissing as problem:
        return Lag(why=problem.message)


def line_of(lag: Lag) -> dict[str, Any]:
    """Return a lag as plain JSON values."""
    return {"lag_bytes": lag.bytes, "lag_seconds": lag.seconds, "lag_unknown": lag.why}
