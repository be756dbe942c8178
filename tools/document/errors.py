# SPDX-License-Identifier: Apache-2.0
"""The page of errors: the person who must act, the cause, and the exit status of the command line."""

import inspect

from penstock import errors
from penstock.cli.app import exit_code
from tools.document.markdown import document, table

_GROUPS = (errors.OperatorError, errors.TransientError, errors.StreamError)


def page() -> str:
    """Return the page."""
    head = (
        "Every error says what happened, where (`position`), and what to do (`hint`). Select errors by"
        " class,\n"
        "never by message text: the class name is the stable code. All are `penstock.PenstockError`."
    )
    parts = [head]
    for group in _GROUPS:
        summary = (inspect.getdoc(group) or "").split("\n")[0]
        status = exit_code(group(""))
        rows = [(f"`{kind.__name__}`", inspect.getdoc(kind) or "") for kind in group.__subclasses__()]
        parts.append(f"## {group.__name__}")
        parts.append(f"{summary} Exit status of `penstock`: {status}.")
        parts.append(table(("error", "meaning"), rows))
    return document("Errors", "src/penstock/errors.py", *parts)
