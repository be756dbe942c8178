# SPDX-License-Identifier: Apache-2.0
"""How far the stream is: a live panel on a terminal, a log line now and then elsewhere."""

import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import pyarrow
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from demo.mirror import SYSTEM_COLUMNS
from demo.verdict import Verdict

LOG_EVERY_SECONDS = 2.0
RATE_OVER_SECONDS = 5.0

Place = tuple[str, int]


@dataclass
class Progress:
    """What has arrived in the Delta tables, and how far behind the server that is."""

    phase: str = "writing"
    batches: int = 0
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)
    lag_seconds: float = 0.0
    _heads: deque[tuple[float, Place]] = field(default_factory=deque)
    _totals: deque[tuple[float, int]] = field(default_factory=lambda: deque([(time.monotonic(), 0)]))

    @property
    def changes(self) -> int:
        """The changes of all tables so far; an update is one."""
        return sum(counter.total() for counter in self.counts.values())

    @property
    def rate(self) -> float:
        """Changes per second, over the last seconds."""
        (begin, before), (end, after) = self._totals[0], self._totals[-1]
        return (after - before) / (end - begin) if end > begin else 0.0

    def batch_done(self, batch: int, tables: Mapping[str, pyarrow.Table]) -> None:
        """Count the changes of a batch."""
        for name, changes in tables.items():
            kinds = Counter(
                {one["values"]: one["counts"] for one in changes["_change_type"].value_counts().to_pylist()}
            )
            del kinds["update_preimage"]
            self.counts.setdefault(name, Counter()).update(kinds)
            self.columns[name] = changes.num_columns - len(SYSTEM_COLUMNS)
        self.batches = batch + 1

    def measure(self, head: Place, reached: Place) -> None:
        """Take note of where the server's log ends and how much of it has arrived, and derive the lag.

        The lag is the age of the oldest bytes that have not arrived, as seen by these measurements.
        """
        now = time.monotonic()
        if not self._heads or self._heads[-1][1] < head:
            self._heads.append((now, head))
        while self._heads and self._heads[0][1] <= reached:
            self._heads.popleft()
        self.lag_seconds = now - self._heads[0][0] if self._heads else 0.0
        self._totals.append((now, self.changes))
        while self._totals[0][0] < now - RATE_OVER_SECONDS:
            self._totals.popleft()

    def line(self) -> str:
        """The state in one line."""
        return (
            f"{self.phase}: {self.changes:,} changes in {self.batches} batches, "
            f"{self.rate:,.0f} rows/s, lag {self.lag_seconds:.1f} s"
        )


class Screen:
    """Shows progress on standard output. A context manager."""

    def __init__(self, progress: Progress, console: Console | None = None) -> None:
        self._progress = progress
        self._console = console or Console(highlight=False)
        self._live: Live | None = None
        self._told_at = 0.0
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._panel, refresh_per_second=8, transient=True
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
        """Show the progress as it is now; a terminal is refreshed by itself."""
        if self._live is None and time.monotonic() > self._told_at + LOG_EVERY_SECONDS:
            self._told_at = time.monotonic()
            self.tell(self._progress.line())

    def show_verdicts(self, verdicts: list[Verdict]) -> None:
        """Print the table of verdicts, and the first differences where there are any."""
        table = _table("table", "rows", "values", "changes", title="Delta tables against the server")
        table.add_column("verdict")
        for verdict in verdicts:
            numbers = (f"{number:,}" for number in (verdict.rows, verdict.values, verdict.changes))
            told = "[green]equal[/]" if verdict.equal else f"[red]{len(verdict.differences):,} DIFFERENCES[/]"
            table.add_row(verdict.table, *numbers, told)
        self._console.print(table)
        for verdict in verdicts:
            for difference in verdict.first_differences:
                self._console.print(
                    f"{verdict.table}: {difference}", style="red", markup=False, soft_wrap=True
                )

    def _panel(self) -> Group:
        progress = self._progress
        table = _table("table", "rows", "inserts", "updates", "deletes", "columns")
        for name, counter in sorted(progress.counts.items()):
            inserts, deletes = counter["insert"], counter["delete"]
            numbers = (
                inserts - deletes,
                inserts,
                counter["update_postimage"],
                deletes,
                progress.columns[name],
            )
            table.add_row(name, *(f"{number:,}" for number in numbers))
        return Group(table, Text(progress.line()))


def _table(first: str, *others: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right", min_width=9)
    return table
