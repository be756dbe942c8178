# SPDX-License-Identifier: Apache-2.0
"""A mutant: one edit of one source file, named by what it changes and not by its line number."""

import difflib
import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar


@dataclass(frozen=True)
class Mutant:
    """An edit: the characters `start` to `end` of a file are replaced.

    `line_text` is the first changed line, stripped. `change` says what becomes of it: for Python the mutated
    line, for the kernel the sentence of cargo-mutants. `number` tells equal mutations of equal lines apart.
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
    def place(self) -> tuple[str, int, int]:
        """The part of the file that is replaced."""
        return self.path, self.start, self.end

    @property
    def key(self) -> str:
        """The name of the mutant; it stays the same while its line stays the same."""
        suffix = f" #{self.number}" if self.number > 1 else ""
        return f"{self.path}: {self.line_text} => {self.change}{suffix}"

    def apply(self, text: str) -> str:
        """Return the text of the file with the mutation."""
        return text[: self.start] + self.replacement + text[self.end :]

    def lines(self, text: str) -> range:
        """Return the numbers of the lines that the mutation replaces."""
        last = text.count("\n", 0, max(self.start, self.end - 1)) + 1
        return range(self.line, max(self.line, last) + 1)

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
    room = min(len(before), len(after)) - start
    while tail < room and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    return start, len(before) - tail, after[start : len(after) - tail]


def line_at(text: str, place: int) -> tuple[int, str]:
    """Return the number and the text of the line that a character belongs to."""
    number = text.count("\n", 0, place) + 1
    first = text.rfind("\n", 0, place) + 1
    last = text.find("\n", place)
    return number, text[first : last if last >= 0 else len(text)].strip()


def numbered(mutants: Iterable[Mutant]) -> list[Mutant]:
    """Return the mutants with numbers that tell those of equal lines apart, in the order of the file."""
    seen: Counter[str] = Counter()
    result = []
    for mutant in mutants:
        count = seen[mutant.key] = seen[mutant.key] + 1
        result.append(replace(mutant, number=count))
    return result


class Drawable(Protocol):
    """A mutant, or what becomes one."""

    @property
    def key(self) -> str: ...

    @property
    def place(self) -> tuple[str, int, int]: ...


Item = TypeVar("Item", bound=Drawable)


def sample_order(items: Iterable[Item], seed: int) -> list[Item]:
    """Return one item of each place in a file, in the order in which a seed draws them.

    The order depends on the items' keys alone: a change elsewhere in the code leaves the drawn ones
    where they are, and a larger sample begins with the smaller one. One item per place keeps an
    operator with many replacements from crowding out the others.
    """

    def rank(item: Item) -> bytes:
        return hashlib.sha256(f"{seed} {item.key}".encode()).digest()

    drawn: dict[tuple[str, int, int], Item] = {}
    for item in sorted(items, key=rank):
        drawn.setdefault(item.place, item)
    return list(drawn.values())
