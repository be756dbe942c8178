# SPDX-License-Identifier: Apache-2.0
"""The daemon's captures in this process, connected to the server that serves a corpus."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from bench.corpora.corpus import Corpus
from penstock.capture.run import Capture, CaptureParts
from penstock.captures import start_of
from penstock.errors import ServerBusy
from penstock.logstore.log import Log
from penstock.merge.capture import MergeCapture
from penstock.model import Position, ServerAddress
from penstock.mysql.start import LogLookup
from penstock.settings.daemon import Settings
from penstock.source.server import ServerSource
from penstock.source.source import SourceOptions

#: The polling interval for a log, small compared to every measured capture.
LOOK_SECONDS = 0.002
_WAIT_SECONDS_MAX = 600.0
_END_SECONDS_MAX = 120.0

_Found = TypeVar("_Found")


def settings_of(folder: Path, port: int, copies: int = 1, **log: Any) -> Settings:
    """Return settings that capture one server `copies` times from its earliest position, with a sync every
    second.

    `log` overrides settings of the log.
    """
    source = f"mysql://root@127.0.0.1:{port}?ssl_mode=disabled"
    return Settings.model_validate(
        {
            "listen": {"http": "127.0.0.1:0"},
            "log": {"folder": folder, "fsync": "seconds", "fsync_seconds": "1s", **log},
            "instances": {
                f"copy{number}": {"source": source, "start": "earliest"} for number in range(copies)
            },
        }
    )


@contextmanager
def capturing(settings: Settings) -> Iterator[list[Log]]:
    """Run the captures of every instance inside the block. The block receives their logs.

    No table definitions are stored. To start in the past with definitions, a daemon would first have to scan
    the server's statements.
    """
    captures = [capture_of(settings, name) for name in settings.instances]
    for capture in captures:
        capture.start()
    try:
        yield [_opened(capture) for capture in captures]
    finally:
        for capture in captures:
            capture.stop()
        for capture in captures:
            assert capture.join(_END_SECONDS_MAX), "the capture does not end"


def capture_of(settings: Settings, name: str, members: Mapping[str, Capture] | None = None) -> Capture:
    """Return the capture of an instance, or of a merge with the captures of its members; not started."""
    instance, log = settings.instances[name], settings.log_of(name)
    parts = CaptureParts(
        open_log=lambda: Log.open(log.folder, log, instance=name),
        open_lookup=_open_lookup,
        arrived=lambda instance: None,
    )
    if members is not None:
        return MergeCapture(name, instance, log, start_of(instance), parts, members)
    return Capture(name, instance, log, start_of(instance), parts)


def capture_all(settings: Settings, end: Position) -> None:
    """Capture until every instance's log has everything up to `end` on disk."""
    with capturing(settings) as logs:
        for log in logs:
            wait_until(lambda log=log: log.visible is not None and log.visible >= end)  # type: ignore[misc]
            log.sync()


def end_of(corpus: Corpus) -> Position:
    """Return the position of a corpus's end in the log of a server that serves the corpus."""
    return Position(0, corpus.path.name, corpus.bytes)


def wait_until(answer: Callable[[], _Found]) -> _Found:
    """Return the first result that is not empty, false or None."""
    deadline = time.monotonic() + _WAIT_SECONDS_MAX
    while not (answered := answer()):
        assert time.monotonic() < deadline, "the capture does not come to its end"
        time.sleep(LOOK_SECONDS)
    return answered


def _open_lookup(address: ServerAddress, epoch: int, server_key: str) -> LogLookup:
    return ServerSource(SourceOptions(address=address, epoch=epoch, server_key=server_key))


def _opened(capture: Capture) -> Log:
    def log() -> Log | None:
        try:
            return capture.log()
        except ServerBusy:
            return None

    captured_log = wait_until(log)
    assert captured_log is not None
    return captured_log
