# SPDX-License-Identifier: Apache-2.0
"""The capture of TiCDC's storage sink: its files become the instance's log.

    checkpoint ─▶ files ─▶ rows by commit timestamp ─▶ events ─▶ the log

The capture resumes after the last commit timestamp of its log.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from penstock.capture.status import State
from penstock.errors import LogDamaged, OptionInvalid
from penstock.logstore.epochs import seal_json, unseal_json
from penstock.logstore.log import Log
from penstock.ticdc.sink_log import SinkLog
from penstock.ticdc.sink_reader import SinkReader
from penstock.ticdc.storage import open_storage, read_checkpoint
from penstock.tidb.merged_capture import MergedCapture
from penstock.tidb.merged_log import MergedEnd, end_of_merged_log, server_key_of
from penstock.tidb.messages import LOGICAL_BITS

START_FILE = "ticdc-start.json"

_DURABLE_SECONDS = 1.0
# How far the cluster's clock may be ahead of this host's clock, in seconds.
_CLOCK_SECONDS = 600.0


@dataclass(frozen=True)
class _Start:
    """The commit timestamp after which a log starts, and the state of reading; see `SinkReader`."""

    commit_ts: int
    last_file: str | None = None
    finished: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class TicdcCapture(MergedCapture):
    """Captures the output of TiCDC into the log of an instance. Implements the interface that all captures
    share.
    """

    def _attempt(self) -> None:
        """Open the log if necessary, find where to resume, and read until something fails."""
        log = self._connecting_log()
        storage = open_storage(self._settings.source)

        def record_start() -> None:
            start_ts = self._start_ts(lambda: read_checkpoint(storage) - 1)
            refuse_future_start(start_ts)
            _record(log, _Start(start_ts))

        self._begin_log(log, server_key_of(self._settings.source), record_start)
        end = end_of_merged_log(log)
        start = _recorded_start(log)
        position = max(end.commit_ts, start.commit_ts)
        if end.commit_ts and position == end.commit_ts:
            # Some statements of the last commit timestamp may be missing from the log, so that timestamp is
            # read again.
            position -= 1
        reader = SinkReader(storage, self._settings.ticdc, position, start.last_file, start.finished)
        self._read(log, reader, start, end)

    def _read(self, log: Log, reader: SinkReader, start: _Start, end: MergedEnd) -> None:
        """Append the transactions that the sink has after the end of the log, until stopped."""
        sink_log = SinkLog(self._merged_log(log))
        self._begin_running()
        durable_at = time.monotonic()
        while not self._stopping.is_set():
            for transaction in reader.read():
                sink_log.append_new(transaction, end)
                self._progress.heard_at = time.time()
                if time.monotonic() - durable_at >= _DURABLE_SECONDS:
                    start = _sync(log, reader, start)
                    durable_at = time.monotonic()
                if self._stopping.is_set():
                    break
            start = _sync(log, reader, start)
            self._progress.heard_at = time.time()
            is_behind = reader.checkpoint <= reader.position
            self._progress.caught_up = not is_behind
            why = (
                f"the checkpoint {reader.checkpoint} of the changefeed is before the log's end, so it repeats"
            )
            self._set_state(State.RUNNING, why if is_behind else None)
            self._stopping.wait(self._settings.ticdc.poll)


def refuse_future_start(start_ts: int) -> None:
    """Raise OptionInvalid if a commit timestamp is in the future, so that a cluster with a correct clock has
    not reached it yet.

    The changefeed's checkpoint cannot serve as the limit, because it lags behind the timestamp of a dump that
    was just made.
    """
    latest_ts = int((time.time() + _CLOCK_SECONDS) * 1000) << LOGICAL_BITS
    if start_ts > latest_ts:
        at = datetime.fromtimestamp((start_ts >> LOGICAL_BITS) / 1000, UTC)
        raise OptionInvalid(
            f"start: the commit timestamp {start_ts} is of {at:%Y-%m-%d %H:%M:%S} UTC, in the future",
            hint="Use a commit timestamp of the cluster, such as that of the dump that was loaded",
        )


def read_start(log: Log, file_name: str, content: str) -> dict[str, Any]:
    """Return the record in the file beside a log. Raises LogDamaged."""
    path = log.folder / file_name
    values = unseal_json(log.disk.read(path)) if log.disk.exists(path) else {}
    if not values:
        raise LogDamaged(
            f"{path} is missing or damaged, which has {content}",
            hint="Begin a new log: move its folder away, and read the tables again",
        )
    return values


def _sync(log: Log, reader: SinkReader, start: _Start) -> _Start:
    """Make the log durable, then record how far the sink's files were read; return the record."""
    log.sync()
    if (reader.last_file, reader.finished) == (start.last_file, start.finished):
        return start
    start = replace(start, last_file=reader.last_file, finished=dict(reader.finished))
    _record(log, start)
    return start


def _record(log: Log, start: _Start) -> None:
    log.disk.write_atomic(log.folder / START_FILE, seal_json(asdict(start)))


def _recorded_start(log: Log) -> _Start:
    """Return the record in the file beside a log. Raises LogDamaged."""
    values = read_start(log, START_FILE, "the start of the log")
    finished = {sequence: (number, size) for sequence, (number, size) in values.get("finished", {}).items()}
    return _Start(values["commit_ts"], values.get("last_file"), finished)
