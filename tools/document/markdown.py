# SPDX-License-Identifier: Apache-2.0
"""Markdown as every page of the reference has it."""

from collections.abc import Iterable, Sequence

GENERATED = "*Written by `make docs` from {source}; edit that, not this page.*"


def document(title: str, source: str, *parts: str) -> str:
    """Return a page: its title, where it comes from, and its parts."""
    return "\n\n".join([f"# {title}", GENERATED.format(source=f"`{source}`"), *parts]) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
