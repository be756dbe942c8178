# SPDX-License-Identifier: Apache-2.0
"""An instance's log as its daemon tells it: how far a checkpoint is behind, and where one may be set."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit

from penstock.cli.shared.log_folder import Wanted, committed_from, first_in, outside
from penstock.coordinate.checkpoint import Checkpoint
from penstock.errors import (
    OptionInvalid,
    PositionInvalid,
    PositionPurged,
    ServerBusy,
    ServerChanged,
    SourceMissing,
)
from penstock.logstore.holds import consumer_hold_name
from penstock.model import Position, Tls
from penstock.settings.daemon import LOOPBACK_DEFAULT, PORT_DEFAULT, load_settings
from penstock.source.bounds import Bound
from penstock.source.daemon import DaemonSource
from penstock.source.daemon_address import DaemonAddress
from penstock.source.daemon_client import DaemonClient
from penstock.source.kept import KeptRun, epoch_shift
from penstock.source.source import FIRST_EVENT_OFFSET, ByteRange, SourceOptions
from penstock.source.walk import TransactionWalk

EARLIEST, LATEST = "earliest", "latest"


@dataclass(frozen=True)
class Lag:
    """How far a checkpoint is behind the daemon's log; None where that is not known.

    `seconds` lie between the commits of the last transaction consumed and the last one that is there. `why`
    tells what stands in the way of the figures.
    """

    bytes: int | None = None
    seconds: float | None = None
    why: str | None = None


def daemon_address(instance: str, url: str | None, config: Path | None) -> DaemonAddress:
    """Return the instance of the daemon that `--url`, else the settings file, else the default means.

    A URL is `host:port`, or begins with http, https, penstock or penstocks; its query has the options of
    every penstock:// URL. Raises OptionInvalid.
    """
    token, tls = None, None
    host, port = LOOPBACK_DEFAULT, PORT_DEFAULT
    if config is not None:
        settings = load_settings(config)
        listen = settings.listen
        host = LOOPBACK_DEFAULT if listen.host in ("0.0.0.0", "::") else listen.host
        port, token = listen.port, settings.operator_token()
        if listen.tls is not None:
            # The file names the certificate itself: that one is trusted, under whatever name it has.
            tls = Tls(mode="verify_ca", ca=str(listen.tls.cert))
    secure, place, query = tls is not None, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", ""
    if url is not None:
        parts = urlsplit(url if "://" in url else f"penstock://{url}")
        if parts.scheme not in ("http", "https", "penstock", "penstocks") or not parts.netloc:
            raise OptionInvalid(f"{url!r} is no daemon", hint=f"Write http://{host}:{PORT_DEFAULT}")
        secure, place, query = parts.scheme in ("https", "penstocks"), parts.netloc, parts.query
        tls = tls if secure and not query else None
    text = f"{'penstocks' if secure else 'penstock'}://{place}/{quote(instance, safe='')}"
    return DaemonAddress.parse(f"{text}?{query}" if query else text, token=token, tls=tls)


class AskedDaemon:
    """One instance of a daemon. Every call raises ConnectionLost where it does not answer."""

    def __init__(self, address: DaemonAddress) -> None:
        self.address = address
        self._client = DaemonClient(address, address.base_urls[0])

    @classmethod
    def find(cls, instance: str, url: str | None, config: Path | None) -> Self:
        """Return the daemon that `--url`, else the settings file, else the default means."""
        return cls(daemon_address(instance, url, config))

    # --- How far ----------------------------------------------------------------------------

    def lag(self, checkpoint: Checkpoint) -> Lag:
        """Return how far a checkpoint is behind."""
        runs, status = self._runs(), self._client.ask("status")
        try:
            position = self._here(checkpoint)
        except ServerChanged as problem:
            return Lag(why=problem.message)
        if not runs or position > runs[-1].last:
            return Lag(0, 0.0)
        if position < runs[0].first:
            return Lag(why=f"the log begins behind it, at {runs[0].first}")
        left = sum(_bytes_behind(run, position) for run in runs)
        newest = status["time_us"] or 0
        if not left:
            return Lag(0, 0.0)
        if not checkpoint.time_us or not newest:
            return Lag(left)
        return Lag(left, max(newest - checkpoint.time_us, 0) / 1e6)

    def _here(self, checkpoint: Checkpoint) -> Position:
        """Return a checkpoint's place under this daemon's numbers of epochs. Raises ServerChanged."""
        position = Position.parse(checkpoint.position)
        if not checkpoint.server_key:
            return position
        shift = epoch_shift([(position.epoch, checkpoint.server_key)], self._epochs(), str(self.address))
        return position.shifted(-shift)

    # --- Where ------------------------------------------------------------------------------

    def place(self, wanted: Bound | str) -> Checkpoint:
        """Return the checkpoint that a bound, `earliest` or `latest` means, proved against the log.

        Behind it lies the first transaction that was committed at or after a time, that is outside a GTID
        set, or that begins at a position. Raises PositionInvalid inside a transaction, PositionPurged, and
        ServerBusy behind the head.
        """
        # A daemon that is not there is told at once; the source would ask it again for a while.
        self._client.ask("status")
        source = DaemonSource(SourceOptions(daemon=self.address, instance=self.address.instance))
        try:
            position = self._find(source, wanted)
            gtid_set = source.gtid_set(position)
        finally:
            source.close()
        keys = dict(self._epochs())
        return Checkpoint.now(str(position), gtid_set, keys.get(position.epoch, ""))

    def _find(self, source: DaemonSource, wanted: Bound | str) -> Position:
        if isinstance(wanted, str):
            return source.earliest() if wanted == EARLIEST else source.head()
        if wanted.time_us is not None:
            return self._first(source, source.find_time(wanted.time_us), committed_from(wanted.time_us))
        if wanted.gtid_set is not None:
            return self._first(source, source.find_gtid_set(wanted.gtid_set), outside(wanted.gtid_set))
        assert wanted.position is not None, "a bound has one field"
        self._prove(source, wanted.position)
        return wanted.position

    def _first(self, source: DaemonSource, start: Position, wanted: Wanted) -> Position:
        """Return the first transaction from `start` on that is wanted, else the end of the log."""
        for run in self._runs():
            if run.last <= start:
                continue
            begin = start.offset if run.first <= start else run.start
            found = first_in(source, ByteRange(run.epoch, run.file, begin, run.end, True), wanted)
            if found is not None:
                return found
        return source.head()

    def _prove(self, source: DaemonSource, position: Position) -> None:
        """Raise what is wrong with a place that is to be set."""
        runs = self._runs()
        if not runs or position > runs[-1].last:
            raise ServerBusy(
                f"the log goes to {runs[-1].last if runs else 'nowhere yet'}",
                position=str(position),
                hint="Wait for the daemon, or choose an earlier place: penstock status",
            )
        if position < runs[0].first:
            raise PositionPurged(
                f"the log begins at {runs[0].first}",
                position=str(position),
                hint="Choose a later place, or --earliest",
            )
        run = next((one for one in runs if one.first <= position <= one.last), None)
        if run is None:
            raise PositionInvalid("the log has no such place", position=str(position), hint="penstock status")
        begun = max(run.start, FIRST_EVENT_OFFSET)
        if not begun < position.offset < run.end:
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
        """Return the holds of the log that the account may see."""
        found: list[dict[str, Any]] = self._client.ask("holds")["holds"]
        return found

    def remove_hold(self, reader: str) -> None:
        """Remove a hold. Raises SourceMissing, AccessDenied."""
        self._client.delete(f"holds/{quote(reader, safe='')}")

    def release_consumer(self, consumer: str) -> bool:
        """Remove the hold of a named consumer; return whether there was one. Raises AccessDenied."""
        try:
            self.remove_hold(consumer_hold_name(consumer))
        except SourceMissing:
            return False
        return True

    # --- Answers ----------------------------------------------------------------------------

    def _epochs(self) -> list[tuple[int, str]]:
        return [(one["epoch"], one["server_key"]) for one in self._client.ask("epochs")["epochs"]]

    def _runs(self) -> list[KeptRun]:
        found = self._client.ask("extents")["extents"]
        return [KeptRun(one["epoch"], one["file"], one["start"], one["end"]) for one in found]

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _bytes_behind(run: KeptRun, position: Position) -> int:
    """Return how many bytes of a run lie behind a position."""
    if run.last <= position:
        return 0
    return run.end - (position.offset if run.first <= position else run.start)


def _around(source: DaemonSource, byte_range: ByteRange) -> tuple[int, int]:
    """Return where the last transaction that starts in a range begins and ends; 0, 0 where none does."""
    found = 0, 0
    for batch in TransactionWalk(source, byte_range):
        if batch.num_rows:
            found = batch["offset"][-1].as_py(), batch["end_offset"][-1].as_py()
    return found


def shown_lag(daemon: AskedDaemon | None, checkpoint: Checkpoint | None) -> Lag:
    """Return the lag of a checkpoint where there are one and a daemon; else why it is not known."""
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
