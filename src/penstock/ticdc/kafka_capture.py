# SPDX-License-Identifier: Apache-2.0
"""The capture of TiCDC's messages in Kafka, which become the instance's log.

    partitions ─▶ rows by commit timestamp up to the lowest watermark ─▶ events ─▶ the log

The offsets to resume from are recorded beside the log after it is durable. Messages that are read again after
a crash are recognised by their commit timestamp.
"""

import time
from contextlib import closing
from dataclasses import replace

from penstock.capture.status import State
from penstock.logstore.epochs import seal_json
from penstock.logstore.log import Log
from penstock.ticdc.capture import read_start, refuse_future_start
from penstock.ticdc.kafka_reader import KafkaReader, KafkaStart, open_reader
from penstock.ticdc.sink_log import SinkLog
from penstock.tidb.merged_capture import MergedCapture
from penstock.tidb.merged_log import MergedEnd, end_of_merged_log, server_key_of
from penstock.tidb.messages import physical_us

START_FILE = "ticdc-offsets.json"

_DURABLE_SECONDS = 1.0
# A watermark older than this blocks the log, and its partition is named in the status.
_STALE_SECONDS = 30.0


class TicdcKafkaCapture(MergedCapture):
    """Captures TiCDC's messages into the log of an instance. Implements the interface that all captures
    share.
    """

    def _attempt(self) -> None:
        """Open the log if necessary, find where to resume, and read until something fails."""
        log = self._connecting_log()
        with closing(open_reader(self._settings.source, self._settings.ticdc)) as reader:
            self._begin_log(
                log,
                server_key_of(self._settings.source),
                lambda: _record(log, self._found_start(reader)),
            )
            start, end = _recorded_start(log), end_of_merged_log(log)
            reader.resume(start, end.commit_ts)
            self._read(log, reader, start, end)

    def _found_start(self, reader: KafkaReader) -> KafkaStart:
        """Return where a new log starts."""
        start = self._start_at
        is_explicit = start.commit_ts is not None or start.time_us is not None
        commit_ts = self._start_ts(lambda: 0)
        refuse_future_start(commit_ts)
        return reader.find_start(
            commit_ts if is_explicit else None, is_latest=not is_explicit and not start.earliest
        )

    def _read(self, log: Log, reader: KafkaReader, start: KafkaStart, end: MergedEnd) -> None:
        """Append the transactions that the topics have after the end of the log, until stopped."""
        sink_log = SinkLog(self._merged_log(log))
        self._begin_running()
        durable_at = time.monotonic()
        while not self._stopping.is_set():
            for transaction in reader.read():
                sink_log.append_new(transaction, end)
                if self._stopping.is_set():
                    # Changes that were not appended are read again in the next run, because the recorded
                    # offsets are not past them.
                    break
            else:
                self._progress.heard_at = time.time()
                self._progress.caught_up = not reader.has_read
            if self._stopping.is_set() or time.monotonic() - durable_at >= _DURABLE_SECONDS:
                log.sync()
                start = _advanced(log, reader, start)
                durable_at = time.monotonic()
            self._set_state(State.RUNNING, _waiting_for(reader))


def _waiting_for(reader: KafkaReader) -> str | None:
    """Return the partition that blocks the log, None if its watermark is recent."""
    merge = reader.merge
    age = time.time() - physical_us(merge.lowest) / 1_000_000
    if age < _STALE_SECONDS:
        return None
    topic, number = merge.slowest[0]
    since = f"the watermark {merge.lowest}" if merge.lowest else "no watermark yet"
    return f"partition {number} of {topic} has {since}, so {merge.bytes} bytes of later changes wait"


def _advanced(log: Log, reader: KafkaReader, start: KafkaStart) -> KafkaStart:
    """Record the offsets if they have moved, and return the record."""
    offsets = reader.offsets()
    if offsets == start.offsets:
        return start
    start = replace(start, offsets=offsets)
    _record(log, start)
    return start


def _record(log: Log, start: KafkaStart) -> None:
    offsets = [[topic, number, offset] for (topic, number), offset in sorted(start.offsets.items())]
    values = {"commit_ts": start.commit_ts, "offsets": offsets}
    log.disk.write_atomic(log.folder / START_FILE, seal_json(values))


def _recorded_start(log: Log) -> KafkaStart:
    """Return the record in the file beside a log. Raises LogDamaged."""
    values = read_start(log, START_FILE, "the offsets of the topic")
    offsets = {(topic, number): offset for topic, number, offset in values["offsets"]}
    return KafkaStart(values["commit_ts"], offsets)
