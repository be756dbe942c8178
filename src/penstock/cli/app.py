# SPDX-License-Identifier: Apache-2.0
"""The command `penstock`. Its verbs are the other modules of this package.

Each verb has a function `run`. A verb with subcommands has `VERBS`, a function for each word.
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

    Exit codes: 0 success, 1 findings or a bug, 2 operator error, 3 stream error, 4 transient error, 5
    incomplete comparison.
    """
    _log_to_stderr()
    make_app(sys.argv[1] if len(sys.argv) > 1 else None)()


def make_app(word: str | None = None) -> typer.Typer:
    """Return the application with all verbs, or only with the verb named by `word`.

    Importing all verbs takes longer than most of them run.
    """
    app = typer.Typer(
        name="penstock",
        help="Change data capture from MySQL and MariaDB.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        # Brackets in help texts mark optional parts. They are not markup.
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
    """Return the exit code for an error, which depends on who has to act."""
    return next(code for kind, code in _EXIT_CODES.items() if isinstance(problem, kind))


def show_error(problem: PenstockError) -> None:
    """Print what happened, where, and what to do, to standard error."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble((f"{type(problem).__name__}: ", "bold red"), problem.message))
    if problem.position is not None:
        console.print(Text.assemble(("  at    ", "dim"), problem.position))
    if problem.hint is not None:
        console.print(Text.assemble(("  hint  ", "dim"), problem.hint))


def _group(module: ModuleType) -> typer.Typer:
    """Return the application of a verb with subcommands."""
    group = typer.Typer(
        help=module.HELP, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
    )
    for word, run in module.VERBS.items():
        group.command(word)(_reporting(run))
    return group


def _reporting(run: Callable[..., None]) -> Callable[..., None]:
    """Convert a verb's errors into a message and an exit code. A bug keeps its traceback."""

    @functools.wraps(run)
    def reporting(*args: Any, **options: Any) -> None:
        try:
            run(*args, **options)
        except PenstockError as problem:
            # Flush first, so that earlier output comes before the error.
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
    """Send log lines to standard error, so that standard output has only results."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            # The default prints the variables of every frame, and one of them may hold a password.
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
