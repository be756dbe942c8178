# SPDX-License-Identifier: Apache-2.0
"""The Markdown shared by all pages of the reference."""

from collections.abc import Iterable, Sequence

GENERATED = "*Written by `make docs` from {source}; edit that, not this page.*"


def document(title: str, source: str, *parts: str) -> str:
    """Return a page: its title, its source, and its parts."""
    return "\n\n".join([f"# {title}", GENERATED.format(source=f"`{source}`"), *parts]) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
