# SPDX-License-Identifier: Apache-2.0
"""The page of the command `penstock`: each verb with its arguments and options, as Typer reports them."""

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
    """Return a verb's part of the page; of one that is followed by a second word, a part for each."""
    if hasattr(verb, "commands"):
        parts = [f"## penstock {name}", (verb.help or "").strip()]
        return parts + [
            part for word, inner in verb.commands.items() for part in describe(f"{name} {word}", inner)
        ]
    arguments = [one for one in verb.params if one.param_type_name == "argument"]
    options = [one for one in verb.params if one.param_type_name == "option"]
    words = " ".join(["penstock", name, "[OPTIONS]", *(metavar(one) for one in arguments)])
    rows = [[f"`{metavar(one)}`", meaning(one)] for one in arguments]
    rows += [[f"`{', '.join(one.opts)}`", meaning(one)] for one in options]
    return [
        f"## penstock {name}",
        f"    {words}",
        (verb.help or "").strip(),
        table(("argument", "meaning"), rows),
    ]


def metavar(argument: Any) -> str:
    """Return what a usage line calls an argument."""
    return str(argument.metavar or argument.name.upper())


def meaning(parameter: Any) -> str:
    """Return what a parameter is for, in one line."""
    return " ".join((parameter.help or "").split())
