# SPDX-License-Identifier: Apache-2.0
"""The page of limits: every limit with its value and the reason in its comment."""

import ast
import re
from pathlib import Path

from penstock import limits
from tools.document.markdown import document, table

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "src/penstock/limits.py"
RUST = ROOT / "native/kernel/src/limits.rs"

_RUST_LIMIT = re.compile(r"((?:^/// .*\n)+)pub const (\w+): \w+ = (.+);", re.MULTILINE)


def page() -> str:
    """Return the page."""
    head = (
        "Most names end in the unit and `MAX` or `MIN`. A reader that would exceed a limit stops with\n"
        "an error that names it."
    )
    columns = ("limit", "value", "reason")
    return document(
        "Limits",
        "src/penstock/limits.py` and `native/kernel/src/limits.rs",
        head,
        "## Control plane",
        table(columns, python_limits()),
        "## Kernel",
        table(columns, rust_limits()),
    )


def python_limits() -> list[tuple[str, str, str]]:
    """Return name, value and reason of each Python limit; a comment applies to all limits up to the next
    comment.
    """
    lines = PYTHON.read_text().splitlines()
    rows, reason = [], ""
    for node in ast.parse(PYTHON.read_text()).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        comment_line = definition_line = node.lineno - 1
        while comment_line and lines[comment_line - 1].startswith("# "):
            comment_line -= 1
        if comment_line < definition_line:
            reason = " ".join(line.removeprefix("# ") for line in lines[comment_line:definition_line])
        name = node.targets[0].id
        if reason:
            rows.append((f"`{name}`", shown(getattr(limits, name)), reason))
    return rows


def rust_limits() -> list[tuple[str, str, str]]:
    """Return name, value and reason of each limit of the kernel."""
    rows = []
    for comment, name, value in _RUST_LIMIT.findall(RUST.read_text()):
        reason = " ".join(line.removeprefix("/// ") for line in comment.splitlines())
        rows.append((f"`{name}`", re.sub(r"(?<=\d)_(?=\d)", "", value), reason))
    return rows


def shown(value: int | float) -> str:
    """Return a value in readable form."""
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value >> 20} × 2²⁰"
    return f"{value:,}"
