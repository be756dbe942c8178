# SPDX-License-Identifier: Apache-2.0
"""Progress of a long run: a progress bar on a terminal, otherwise occasional log lines."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import structlog
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_LOG_EVERY_SECONDS = 10.0

_log = structlog.get_logger(__name__)


class ReadingProgress:
    """Shows progress in log bytes on standard error. A context manager.

    A bar appears only if standard error is a terminal and standard output is not, because output on the same
    terminal already shows that the run is progressing. `alone` means that the command prints hardly any
    output; the bar then appears on any terminal.
    """

    def __init__(self, label: str, bytes_total: int, alone: bool = False) -> None:
        self._label = label
        self._total = bytes_total
        self._done = 0
        self._logged_at = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty() and (alone or not sys.stdout.isatty()):
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(label, total=bytes_total)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def done(self) -> int:
        """The number of bytes read so far."""
        return self._done

    def reach_of(self, bytes_done: int, bytes_total: int) -> None:
        """Report progress when the total is not known until the run is under way."""
        if bytes_total != self._total:
            self._total = bytes_total
            if self._bar is not None:
                self._bar.update(self._task, total=bytes_total)
        self.reach(bytes_done)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Hide the bar while other output is printed."""
        if self._bar is not None:
            self._bar.stop()
        yield
        if self._bar is not None:
            self._bar.start()

    def reach(self, bytes_done: int) -> None:
        """Report the number of bytes read so far."""
        self._done = bytes_done
        if self._bar is not None:
            self._bar.update(self._task, completed=bytes_done)
            return
        now = time.monotonic()
        if not sys.stderr.isatty() and now - self._logged_at >= _LOG_EVERY_SECONDS:
            self._logged_at = now
            _log.info(self._label, bytes_done=bytes_done, bytes_total=self._total)
