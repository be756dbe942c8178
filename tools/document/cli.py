# SPDX-License-Identifier: Apache-2.0
"""The page of the command `penstock`: each verb with its arguments and options, as reported by Typer."""

from typing import Any

from typer.main import get_command

from penstock.cli.app import make_app
from tools.document.markdown import document, table


def page() -> str:
    """Return the page."""
    command: Any = get_command(make_app())
    head = [
        command.help or "",
        "Exit status: 0 success, 1 findings, 2 operator error, 3 stream error, 4 transient error, 5"
        " comparison incomplete.",
    ]
    verbs = [part for name, verb in sorted(command.commands.items()) for part in describe(name, verb)]
    return document("Command line", "src/penstock/cli", *head, *verbs)


def describe(name: str, verb: Any) -> list[str]:
    """Return a verb's part of the page, with a part for each subcommand."""
    if hasattr(verb, "commands"):
        parts = [f"## penstock {name}", (verb.help or "").strip()]
        return parts + [
            part for word, inner in verb.commands.items() for part in describe(f"{name} {word}", inner)
        ]
    arguments = [parameter for parameter in verb.params if parameter.param_type_name == "argument"]
    options = [
        parameter
        for parameter in verb.params
        if parameter.param_type_name == "option" and not parameter.hidden
    ]
    words = " ".join(["penstock", name, "[OPTIONS]", *(metavar(argument) for argument in arguments)])
    rows = [[f"`{metavar(argument)}`", meaning(argument)] for argument in arguments]
    rows += [[f"`{', '.join(option.opts)}`", meaning(option)] for option in options]
    return [
        f"## penstock {name}",
        f"    {words}",
        (verb.help or "").strip(),
        table(("argument", "meaning"), rows),
    ]


def metavar(argument: Any) -> str:
    """Return an argument's name in a usage line, in brackets if it is optional."""
    name = str(argument.metavar or argument.name.upper())
    return (name if argument.required else f"[{name}]") + ("..." if argument.nargs == -1 else "")


def meaning(parameter: Any) -> str:
    """Return a parameter's help text in one line."""
    return " ".join((parameter.help or "").split())
