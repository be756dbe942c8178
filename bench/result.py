# SPDX-License-Identifier: Apache-2.0
"""The result of a case, and its Markdown page and JSON file."""

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.corpora.corpus import NAMES

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True)
class Target:
    """The ratio to another line's rate that Penstock must reach. An `aim` is a goal that is not promised."""

    ratio: float
    aim: bool = False

    def __str__(self) -> str:
        return f"{'aim ' if self.aim else ''}≥ {self.ratio:g}"


@dataclass(frozen=True)
class Line:
    """One row of a case's table.

    `rates` maps a column title to a figure, in the unit that the title names. `ratio` is the rate of the
    case's subject divided by the rate of this line in the same run. It is compared with `target`.
    """

    workload: str
    subject: str
    rates: dict[str, float]
    ratio: float | None = None
    target: Target | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if the line has no target."""
        if self.ratio is None or self.target is None:
            return None
        return self.ratio >= self.target.ratio


@dataclass(frozen=True)
class Options:
    """The options of a run. `cases` are the selected cases; if it is empty, all cases run."""

    size: str
    repeat: int
    workloads: tuple[str, ...]
    seconds_max: float
    cases: tuple[str, ...] = ()
    seed: int | None = None

    @property
    def command(self) -> str:
        """Return the command that repeats the run."""
        words = ["python -m bench", *self.cases, f"--size {self.size}", f"--repeat {self.repeat}"]
        words += [f"--workload {workload}" for workload in self.workloads if self.workloads != NAMES]
        words += [] if self.seed is None else [f"--seed {self.seed}"]
        return " ".join([*words, f"--seconds-max {self.seconds_max:g}"])


@dataclass(frozen=True)
class CaseResult:
    """The lines of one case, and the versions of everything it used. `ratio_title` is the heading of the
    column of ratios.
    """

    case: str
    title: str
    lines: list[Line]
    versions: dict[str, str] = field(default_factory=dict)
    ratio_title: str = "Penstock is"


def machine() -> dict[str, str]:
    """Return the description of the machine that a published figure must state."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in _text("/proc/cpuinfo").splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory_kib = int(_text("/proc/meminfo").split()[1])
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    return {
        "processor": model,
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_kib / 2**20:.1f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or "unknown",
        "load at the end (1, 5, 15 minutes)": load,
    }


def _text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def _columns(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(title for line in lines for title in line.rates))


def _cells(line: Line, columns: Sequence[str]) -> list[str]:
    figures = [_figure(line.rates[title]) if title in line.rates else "" for title in columns]
    ratio = "" if line.ratio is None else f"{line.ratio:.2f}×"
    target = "" if line.target is None else f"{line.target} {'met' if line.met else 'missed'}"
    return [line.workload, line.subject, *figures, ratio, target, line.note]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"


def show(result: CaseResult, console: Console) -> None:
    """Print a case's table."""
    columns = _columns(result.lines)
    table = Table(title=result.title)
    table.add_column("file")
    table.add_column("who", no_wrap=True)
    for title in (*columns, result.ratio_title):
        table.add_column(title, justify="right")
    table.add_column("target")
    table.add_column("note")
    for line in result.lines:
        style = (
            None
            if line.met is None or line.target is None or line.target.aim
            else ("green" if line.met else "red")
        )
        table.add_row(*_cells(line, columns), style=style)
    console.print(table)


def markdown(results: Sequence[CaseResult], options: Options) -> str:
    """Return the page of a run: machine, command, versions, then one table per case."""
    facts = {"command": f"`{options.command}`", **machine()}
    text = ["# Benchmark results", "", *(f"- {name}: {value}" for name, value in facts.items())]
    versions = {name: version for result in results for name, version in result.versions.items()}
    text += [f"- {name}: {version}" for name, version in versions.items()]
    for result in results:
        columns = _columns(result.lines)
        heads = ["file", "who", *columns, result.ratio_title, "target", "note"]
        text += ["", f"## {result.title}", "", _row(heads), _row(["---"] * len(heads))]
        text += [_row(_cells(line, columns)) for line in result.lines]
    return "\n".join(text) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def write(results: Sequence[CaseResult], options: Options, directory: Path = RESULTS) -> Path:
    """Write the page and a JSON file with the same content, and return the page's path.

    The files are named after the day and the machine, and after the cases unless all cases ran.
    """
    directory.mkdir(parents=True, exist_ok=True)
    facts = machine()
    now = datetime.now(UTC)
    stem = f"{now:%Y-%m-%d}-{facts['cores']}-core-{platform.machine()}"
    if options.size != "1GB":
        stem += f"-{options.size}"
    if options.seed is not None:
        stem += f"-seed{options.seed}"
    stem += "".join(f"-{case}" for case in options.cases)
    page = directory / f"{stem}.md"
    page.write_text(markdown(results, options), encoding="utf-8")
    record = {
        "finished_at": now.isoformat(timespec="seconds"),
        "command": options.command,
        "options": asdict(options),
        "machine": facts,
        "cases": [asdict(result) for result in results],
    }
    page.with_suffix(".json").write_text(
        json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    return page
