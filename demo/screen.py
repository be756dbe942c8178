# SPDX-License-Identifier: Apache-2.0
"""How far the pipeline is: a live line on a terminal, a log line now and then elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from demo.pipeline import Progress

LOG_EVERY_SECONDS = 2.0


class Screen:
    """Shows progress on standard output. A context manager."""

    def __init__(self, progress: Progress, console: Console | None = None) -> None:
        self._progress = progress
        self._console = console or Console(highlight=False)
        self._live: Live | None = None
        self._logged_at = 0.0
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._line, refresh_per_second=8, transient=True
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def tell(self, sentence: str) -> None:
        """Print one line that stays, with the seconds since the start."""
        self._console.print(f"{time.monotonic() - self._began:5.1f} s  {sentence}", soft_wrap=True)

    def refresh(self) -> None:
        """Show the progress as it is now; a terminal refreshes itself."""
        if self._live is None and time.monotonic() > self._logged_at + LOG_EVERY_SECONDS:
            self._logged_at = time.monotonic()
            self.tell(str(self._progress))

    def _line(self) -> Text:
        return Text(f"         {self._progress}")
