# SPDX-License-Identifier: Apache-2.0
"""The command `penstock`.

Each other module of this package is a verb. Its function is `run`; a verb with subcommands instead has
`VERBS`, which maps each subcommand to its function.
"""

import ast
import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

import penstock
import penstock.cli as verbs
from penstock.errors import OperatorError, PenstockError, StreamError, TransientError
from penstock.telemetry.log_lines import log_to_stderr

# Brackets in help texts mark optional parts. They are not markup.
_PLAIN: Mapping[str, Any] = {"pretty_exceptions_enable": False, "rich_markup_mode": None}

EXIT_BUG = 1
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
    log_to_stderr()
    make_app()()


def make_app() -> typer.Typer:
    """Return the application with all verbs. Each verb is imported when its command is used."""
    app = typer.Typer(
        name="penstock",
        cls=_Group,
        help="Change data capture from MySQL and MariaDB.",
        no_args_is_help=True,
        add_completion=False,
        **_PLAIN,
    )
    app.callback()(_global_options)
    return app


class _Verbs(Mapping[str, Any]):
    """The command of each verb, by name. A verb is imported when its command is looked up."""

    def __init__(self) -> None:
        self._files = {
            file.name.replace("_", "-"): file
            for file in pkgutil.iter_modules(verbs.__path__)
            if not file.ispkg and file.name != "app"
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Any:
        module = importlib.import_module(f"{verbs.__name__}.{self._files[name].name}")
        if hasattr(module, "VERBS"):
            command: Any = typer.main.get_group(_group(module))
        else:
            single = typer.Typer(add_completion=False, **_PLAIN)
            single.command(name)(_reporting(module.run))
            command = typer.main.get_command(single)
        command.name = name
        return command

    def summary(self, name: str) -> str:
        """Return the summary in a verb's module docstring, without importing the module."""
        file = self._files[name]
        spec = file.module_finder.find_spec(file.name, None)
        origin = None if spec is None else spec.origin
        assert origin is not None, f"the finder listed {name}"
        first_line, *_ = (ast.get_docstring(ast.parse(Path(origin).read_bytes())) or "").splitlines()
        _, _, text = first_line.partition(": ")
        return text[:1].upper() + text[1:]


class _Group(TyperGroup):
    """The group of all verbs. Its help imports no verb."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self._verbs = _Verbs()
        self.commands = cast(Any, self._verbs)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the verbs, each with its summary."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._verbs.summary(name)) for name in self._verbs])


def exit_code(problem: PenstockError) -> int:
    """Return the exit code for an error, which depends on who has to act. An error that is not in the list
    counts as a bug.
    """
    return next((code for kind, code in _EXIT_CODES.items() if isinstance(problem, kind)), EXIT_BUG)


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
    group = typer.Typer(help=module.HELP, no_args_is_help=True, add_completion=False, **_PLAIN)
    for word, run in module.VERBS.items():
        group.command(word)(_reporting(run))
    return group


def _reporting(run: Callable[..., None]) -> Callable[..., None]:
    """Convert a verb's errors into a message and an exit code. A bug is shown with its traceback."""

    @functools.wraps(run)
    def reporting(*args: Any, **options: Any) -> None:
        try:
            run(*args, **options)
        except PenstockError as problem:
            # Flush standard output first, so that earlier output appears before the error.
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
