# SPDX-License-Identifier: Apache-2.0
"""Run a capture in this process, and prove that its log equals the server's."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.capture.run import Capture
from penstock.capture.status import CaptureStatus, State
from penstock.captures import make_capture
from penstock.logstore.reader import LogReader
from penstock.model import Position
from penstock.settings.daemon import Settings
from tests.support.suite.patience import PAUSE_SECONDS, WAIT_SECONDS_MAX, wait_until
from tools.servers import Server

BINLOG_CHECKPOINT = 161


def head_of(server: Server) -> Position:
    """Return the end of a server's log."""
    statement = "SHOW MASTER STATUS" if server.family == "mariadb" else "SHOW BINARY LOG STATUS"
    row = server.sql(statement)[0]
    return Position(0, row[0], row[1])


def rotate(server: Server) -> None:
    """Rotate the binlog, and wait for the checkpoint that MariaDB writes into the new file later."""
    server.sql("FLUSH BINARY LOGS")
    if server.family == "mariadb":
        # MariaDB writes the checkpoint once its storage engine is synced, either by itself or on request.
        server.sql(
            "SET @kept = @@GLOBAL.innodb_flush_log_at_trx_commit; SET GLOBAL"
            " innodb_flush_log_at_trx_commit = 1; FLUSH LOCAL ENGINE LOGS;"
            " SET GLOBAL innodb_flush_log_at_trx_commit = @kept"
        )
        wait_until(lambda: _is_checkpointed(server))


def _is_checkpointed(server: Server) -> bool:
    """Return whether a MariaDB server has logged a checkpoint that frees all earlier files."""
    file = server.sql("SHOW MASTER STATUS")[0][0]
    events = server.sql(f"SHOW BINLOG EVENTS IN '{file}'")
    return any(event[2] == "Binlog_checkpoint" and event[5] == file for event in events)


def purge(server: Server) -> str:
    """Purge every file but the last, and return the name of the last file.

    A server temporarily keeps files that a dump is reading, even after its client has disconnected. MariaDB
    also keeps files needed for crash recovery.
    """

    def is_alone() -> bool:
        server.sql(f"PURGE BINARY LOGS TO '{head_of(server).file}'")
        return len(server.sql("SHOW BINARY LOGS")) == 1

    wait_until(is_alone)
    return head_of(server).file


def settings_of(folder: Path, source: str, log: dict[str, Any] | None = None, **instance: Any) -> Settings:
    """Return the settings of one instance, `shop`, whose log is in a folder."""
    return Settings.model_validate(
        {
            "log": {"folder": str(folder), **(log or {})},
            "instances": {"shop": {"source": source, **instance}},
        }
    )


def failing_over(folder: Path, primary: Server, follower: Server, after: str) -> Settings:
    """Return the settings of an instance that continues at another server once the first fails."""
    others = [f"127.0.0.1:{follower.port}"]
    return settings_of(folder, primary.url(), servers=others, start="earliest", fail_over_after=after)


@contextmanager
def capturing(settings: Settings, arrived: Callable[[str], None] = lambda name: None) -> Iterator[Capture]:
    """Capture inside the block, and shut down in order."""
    capture = make_capture("shop", settings, arrived)
    capture.start()
    try:
        yield capture
    finally:
        capture.stop()
        assert capture.join(WAIT_SECONDS_MAX), "the capture does not end"


def wait_for(capture: Capture, condition: Callable[[CaptureStatus], bool]) -> CaptureStatus:
    """Wait until the capture's status satisfies a condition, and return the status."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not condition(status := capture.snapshot()):
        assert time.monotonic() < deadline, status
        time.sleep(PAUSE_SECONDS)
    return status


def wait_for_state(capture: Capture, state: State) -> CaptureStatus:
    """Wait until the capture is in a state."""
    return wait_for(capture, lambda status: status.state is state)


def wait_for_position(capture: Capture, position: Position) -> CaptureStatus:
    """Wait until the log holds all bytes before a position, ignoring its epoch."""

    def holds(status: CaptureStatus) -> bool:
        if status.position is None:
            return False
        here = Position.parse(status.position)
        return (here.file_number, here.offset) >= (position.file_number, position.offset)

    return wait_for(capture, holds)


def assert_equal_to_server(folder: Path, server: Server, start: Position | None = None) -> int:
    """Assert that a log's latest epoch equals the server's files byte for byte, and return the number of
    bytes.

    The log must have no gaps from `start` (by default its own start) to the end of the server's log.
    """
    log = LogReader.open(folder)
    epoch = log.epochs.latest
    assert epoch is not None
    extents = [extent for extent in log.extents() if extent.epoch == epoch.epoch]
    files = {path.name: path for path in server.binlog_files()}
    compared = 0
    for before, this_extent in zip([None, *extents], extents, strict=False):
        if before is not None:
            assert before.file != this_extent.file, f"a hole between {before} and {this_extent}"
            assert before.end == files[before.file].stat().st_size, f"{before} lacks the end of its file"
        own = files[this_extent.file].read_bytes()[this_extent.start : this_extent.end]
        assert (
            b"".join(log.read(this_extent.epoch, this_extent.file, this_extent.start, this_extent.end)) == own
        ), this_extent
        compared += len(own)
    if start is not None:
        assert (extents[0].file, extents[0].start) == (start.file, start.offset)
    head, end = head_of(server), extents[-1].last
    assert end.file == head.file
    assert_only_checkpoints(files[head.file].read_bytes()[end.offset : head.offset])
    return compared


def assert_only_checkpoints(events: bytes) -> None:
    """Assert that only MariaDB checkpoints follow, which are logged a while after a file starts."""
    while events:
        assert events[4] == BINLOG_CHECKPOINT, events[:40]
        events = events[int.from_bytes(events[9:13], "little") :]
