# SPDX-License-Identifier: Apache-2.0
"""The command `penstock`: its verbs are the modules beside this one.

Each has a function `run`; one that has several things to do has `VERBS`, a function for each word.
"""

import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import structlog
import typer
from rich.console import Console
from rich.text import Text

import penstock
import penstock.cli as verbs
from penstock.errors import OperatorError, PenstockError, StreamError, TransientError

EXIT_OPERATOR = 2
EXIT_STREAM = 3
EXIT_TRANSIENT = 4

_EXIT_CODES: dict[type[PenstockError], int] = {
    OperatorError: EXIT_OPERATOR,
    StreamError: EXIT_STREAM,
    TransientError: EXIT_TRANSIENT,
}


def main() -> None:
    """Run the command line and exit.

    0 done, 1 findings or a bug, 2 operator, 3 stream, 4 transient, 5 not all was compared.
    """
    _log_to_stderr()
    make_app(sys.argv[1] if len(sys.argv) > 1 else None)()


def make_app(word: str | None = None) -> typer.Typer:
    """Return the application with every verb there is, or with one alone where `word` names it.

    Importing all verbs takes longer than most of them run.
    """
    app = typer.Typer(
        name="penstock",
        help="Change data capture from MySQL and MariaDB.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        # Brackets in help are what a user may leave out, not markup.
        rich_markup_mode=None,
    )
    app.callback()(_global_options)
    modules = {
        file.name.replace("_", "-"): file.name
        for file in pkgutil.iter_modules(verbs.__path__)
        if not file.ispkg
    }
    del modules["app"]
    for name in [word] if word in modules else modules:
        module = importlib.import_module(f"{verbs.__name__}.{modules[name]}")
        if hasattr(module, "VERBS"):
            app.add_typer(_group(module), name=name)
        else:
            app.command(name)(_reporting(module.run))
    return app


def exit_code(problem: PenstockError) -> int:
    """Return the exit code for an error: who has to act decides."""
    return next(code for kind, code in _EXIT_CODES.items() if isinstance(problem, kind))


def show_error(problem: PenstockError) -> None:
    """Print what happened, where, and the way out, to standard error."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble((f"{type(problem).__name__}: ", "bold red"), problem.message))
    if problem.position is not None:
        console.print(Text.assemble(("  at    ", "dim"), problem.position))
    if problem.hint is not None:
        console.print(Text.assemble(("  hint  ", "dim"), problem.hint))


def _group(module: ModuleType) -> typer.Typer:
    """Return the application of a verb that is followed by a second word."""
    group = typer.Typer(
        help=module.HELP, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    for word, run in module.VERBS.items():
        group.command(word)(_reporting(run))
    return group


def _reporting(run: Callable[..., None]) -> Callable[..., None]:
    """Turn the errors a verb raises into a message and an exit code; a bug keeps its traceback."""

    @functools.wraps(run)
    def reporting(*args: Any, **options: Any) -> None:
        try:
            run(*args, **options)
        except PenstockError as problem:
            # What was printed before the error belongs before it.
            sys.stdout.flush()
            show_error(problem)
            raise typer.Exit(exit_code(problem)) from problem

    return reporting


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(penstock.__version__)
        raise typer.Exit


def _global_options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def _log_to_stderr() -> None:
    """Keep standard output for results: log lines go to standard error."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            # The default shows the variables of every frame, and one of them may hold a password.
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
