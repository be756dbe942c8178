# SPDX-License-Identifier: Apache-2.0
"""The remarks of a migration name options and commands that exist."""

import ast
import re
from pathlib import Path
from typing import Any

from typer.main import get_command

import penstock.migrate as migrate
from penstock.cli.app import make_app
from tests.support.suite.nonempty import each


def texts() -> set[str]:
    """Return every text in the package."""
    paths = Path(migrate.__path__[0]).glob("*.py")
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text())))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_options_that_remarks_name_exist() -> None:
    app: Any = get_command(make_app())
    verbs = [app.commands[name] for name in ("run", "migrate", "verify", "resnapshot")]
    commands = [inner for verb in verbs for inner in getattr(verb, "commands", {"": verb}).values()]
    known = {option for command in commands for parameter in command.params for option in parameter.opts}
    named = {option for text in texts() for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}
    assert "--until" in known
    for option in each(sorted(named)):
        assert option in known, option
