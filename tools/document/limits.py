# SPDX-License-Identifier: Apache-2.0
"""The page of limits: every bound, its value, and the reason that stands beside it."""

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
    """Return name, value and reason of each limit of the control plane; a comment holds for all below it."""
    lines = PYTHON.read_text().splitlines()
    found, reason = [], ""
    for node in ast.parse(PYTHON.read_text()).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        first = last = node.lineno - 1
        while first and lines[first - 1].startswith("# "):
            first -= 1
        if first < last:
            reason = " ".join(line.removeprefix("# ") for line in lines[first:last])
        name = node.targets[0].id
        if reason:
            found.append((f"`{name}`", shown(getattr(limits, name)), reason))
    return found


def rust_limits() -> list[tuple[str, str, str]]:
    """Return name, value and reason of each limit of the kernel."""
    found = []
    for comment, name, value in _RUST_LIMIT.findall(RUST.read_text()):
        reason = " ".join(line.removeprefix("/// ") for line in comment.splitlines())
        found.append((f"`{name}`", re.sub(r"(?<=\d)_(?=\d)", "", value), reason))
    return found


def shown(value: int | float) -> str:
    """Return a value as people read it."""
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value >> 20} × 2²⁰"
    return f"{value:,}"
