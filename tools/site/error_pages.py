# SPDX-License-Identifier: Apache-2.0
"""The page of error messages: every message in the code, with its remedy.

Messages are read from the `raise` statements and calls that create errors. Parts that depend on the case are
shown as an ellipsis.
"""

import ast
import html
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from penstock import errors

SOURCE = Path(errors.__file__).parent
_VARIABLE = "…"
_LETTERS_MIN = 8
_MARKS = re.compile(r"[\\`*_{}\[\]#|]")


@dataclass(frozen=True, order=True)
class ErrorMessage:
    """A message of an error class, and the message's hint, "" if it has none."""

    error: str
    message: str
    hint: str


def error_page() -> str:
    """Return the page, in Markdown."""
    lines = [
        "# Error messages, and what to do",
        "",
        "Search this page for the words of a message; … stands for what depends on the case. A message ends"
        " with a position where that is known. [The reference](reference/errors.md) explains the groups and"
        " the exit status.",
    ]
    messages = sorted(set(messages_below(SOURCE)))
    for name, error in sorted(_classes().items()):
        own = [message for message in messages if message.error == name]
        if not own:
            continue
        lines += ["", f"## {name}", "", inspect.getdoc(error) or "", ""]
        for message in own:
            lines.append(f"- **{_escaped(message.message)}**{_remedy(message)}")
    return "\n".join(lines) + "\n"


def messages_below(folder: Path) -> Iterator[ErrorMessage]:
    """Yield each message in a folder's modules that has constant words, and not only computed parts."""
    for path in sorted(folder.rglob("*.py")):
        yield from messages_in(path.read_text())


def messages_in(source: str) -> Iterator[ErrorMessage]:
    """Yield the messages of one module."""
    names = _classes().keys()
    if not any(name in source for name in names):
        return
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names):
            continue
        message = _text(node.args[0]) if node.args else ""
        hints = [_text(keyword.value) for keyword in node.keywords if keyword.arg == "hint"]
        if sum(map(str.isalpha, message)) >= _LETTERS_MIN:
            yield ErrorMessage(node.func.id, message, next(iter(hints), ""))


@cache
def _classes() -> dict[str, type[errors.PenstockError]]:
    classes = inspect.getmembers(errors, inspect.isclass)
    return {name: error for name, error in classes if issubclass(error, errors.PenstockError)}


def _text(node: ast.expr) -> str:
    """Return a string in the code, with an ellipsis for each computed part."""
    parts: Iterable[ast.expr] = node.values if isinstance(node, ast.JoinedStr) else (node,)
    texts = [part.value if isinstance(part, ast.Constant) else _VARIABLE for part in parts]
    return "".join(map(str, texts))


def _remedy(message: ErrorMessage) -> str:
    hint = message.hint.strip()
    return "" if hint in ("", _VARIABLE) else f": {_escaped(hint)}"


def _escaped(text: str) -> str:
    """Return a text escaped so that no character has a meaning in Markdown or HTML."""
    return _MARKS.sub(r"\\\g<0>", html.escape(" ".join(text.split()), quote=False))
