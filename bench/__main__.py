# SPDX-License-Identifier: Apache-2.0
"""`python -m bench [CASE ...] --size tiny|1GB --repeat 3`: run cases, print tables, store the results."""

import os
import pkgutil
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.corpora.corpus import NAMES, SIZES
from bench.result import RESULTS, CaseResult, Options, show, write

WIDTH_MIN = 130


def case_names() -> list[str]:
    """Return the names of all cases."""
    here = Path(__file__).parent / "cases"
    return sorted(module.name for module in pkgutil.iter_modules([str(here)]))


def run_case(name: str, options: Options) -> CaseResult:
    """Run one case."""
    result: CaseResult = import_module(f"bench.cases.{name}").run(options)
    return result


def main(
    cases: Annotated[list[str] | None, typer.Argument(help="Cases to run; all when none is named.")] = None,
    size: Annotated[str, typer.Option(help=f"Size of each file: {', '.join(SIZES)}.")] = "tiny",
    repeat: Annotated[int, typer.Option(help="Runs of each measurement; the median is kept.")] = 3,
    workload: Annotated[list[str] | None, typer.Option(help=f"Files: {', '.join(NAMES)}.")] = None,
    seconds_max: Annotated[float, typer.Option(help="Longest run of a peer that is slow.")] = 10.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the files' random values.", min=1)] = None,
    results: Annotated[Path, typer.Option(help="Where the page and the JSON file go.")] = RESULTS,
) -> None:
    """Measure Penstock and its peers side by side, and store the results."""
    # Truncated figures are useless, so a narrow terminal gets wrapped lines instead.
    console = Console(width=max(Console().width, WIDTH_MIN))
    case_titles = case_names()
    for name, allowed in (
        [(c, case_titles) for c in cases or []] + [(w, NAMES) for w in workload or []] + [(size, SIZES)]
    ):
        if name not in allowed:
            raise typer.BadParameter(f"{name!r} is unknown; choose from {', '.join(allowed)}")
    if seed is not None:
        # The processes of peers inherit it.
        os.environ["PENSTOCK_BENCH_SEED"] = str(seed)
    options = Options(size, repeat, tuple(workload or NAMES), seconds_max, tuple(cases or ()), seed)
    done = []
    for name in cases or case_titles:
        done.append(run_case(name, options))
        show(done[-1], console)
    page = write(done, options, results)
    console.print(f"written to {page}")


if __name__ == "__main__":
    application = typer.Typer(pretty_exceptions_enable=False)
    application.command()(main)
    application()
