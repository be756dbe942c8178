# SPDX-License-Identifier: Apache-2.0
"""A mutant: one edit of one source file, identified by the changed text instead of its line number."""

import difflib
import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar


@dataclass(frozen=True)
class Mutant:
    """An edit that replaces the characters from `start` to `end` of a file.

    `line_text` is the first changed line, stripped. `change` describes the result: for Python, the mutated
    line; for the kernel, the description by cargo-mutants. `number` distinguishes equal mutations of equal
    lines.
    """

    language: str
    area: str
    path: str
    line: int
    line_text: str
    change: str
    start: int
    end: int
    replacement: str
    number: int = 1

    @property
    def span(self) -> tuple[str, int, int]:
        """The part of the file that is replaced."""
        return self.path, self.start, self.end

    @property
    def key(self) -> str:
        """The name of the mutant. The name stays the same as long as the line does."""
        suffix = f" #{self.number}" if self.number > 1 else ""
        return f"{self.path}: {self.line_text} => {self.change}{suffix}"

    def apply(self, text: str) -> str:
        """Return the text of the file with the mutation."""
        return text[: self.start] + self.replacement + text[self.end :]

    def lines(self, text: str) -> range:
        """Return the numbers of the lines that the mutation replaces."""
        last_line = text.count("\n", 0, max(self.start, self.end - 1)) + 1
        return range(self.line, max(self.line, last_line) + 1)

    def diff(self, text: str) -> str:
        """Return the mutation as a unified diff without context."""
        lines = difflib.unified_diff(
            text.splitlines(), self.apply(text).splitlines(), self.path, self.path, n=0, lineterm=""
        )
        return "\n".join(lines)


def edit(before: str, after: str) -> tuple[int, int, str]:
    """Return the smallest single edit that turns one text into another: start, end and replacement."""
    start = 0
    while start < min(len(before), len(after)) and before[start] == after[start]:
        start += 1
    tail = 0
    middle_bytes = min(len(before), len(after)) - start
    while tail < middle_bytes and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    return start, len(before) - tail, after[start : len(after) - tail]


def line_at(text: str, offset: int) -> tuple[int, str]:
    """Return the number and the text of the line that a character belongs to."""
    number = text.count("\n", 0, offset) + 1
    line_start = text.rfind("\n", 0, offset) + 1
    line_end = text.find("\n", offset)
    return number, text[line_start : line_end if line_end >= 0 else len(text)].strip()


def numbered(mutants: Iterable[Mutant]) -> list[Mutant]:
    """Return the mutants, numbered in file order to distinguish mutants of equal lines."""
    seen: Counter[str] = Counter()
    result = []
    for mutant in mutants:
        count = seen[mutant.key] = seen[mutant.key] + 1
        result.append(replace(mutant, number=count))
    return result


class Drawable(Protocol):
    """A mutant, or a candidate from which a mutant can be created."""

    @property
    def key(self) -> str: ...

    @property
    def span(self) -> tuple[str, int, int]: ...


Drawn = TypeVar("Drawn", bound=Drawable)


def sample_order(drawables: Iterable[Drawn], seed: int) -> list[Drawn]:
    """Return one mutant for each span of a file, in the order in which a seed draws them.

    The order depends only on the keys. So a change elsewhere in the code does not change the order, and a
    larger sample begins with the smaller one. There is only one mutant per span, so that an operator with
    many replacements does not dominate the sample.
    """

    def rank(drawable: Drawn) -> bytes:
        return hashlib.sha256(f"{seed} {drawable.key}".encode()).digest()

    drawn: dict[tuple[str, int, int], Drawn] = {}
    for drawable in sorted(drawables, key=rank):
        drawn.setdefault(drawable.span, drawable)
    return list(drawn.values())
