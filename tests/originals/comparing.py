# SPDX-License-Identifier: Apache-2.0
"""Pair the events of two systems, and find every field that differs."""

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# Represents an event or a field that is missing on one side.
ABSENT = "absent"


@dataclass(frozen=True)
class Event:
    """One event of a system: the values that identify it, its table, and its fields as plain JSON."""

    identity: tuple[str, ...]
    table: str
    fields: Any


@dataclass(frozen=True)
class Difference:
    """A field whose value differs between two systems. Values are JSON, or `ABSENT`."""

    table: str
    event: str
    path: str
    original: str
    ours: str

    def __str__(self) -> str:
        return f"{self.table} {self.event} {self.path}: {self.original[:200]} but {self.ours[:200]}"


@dataclass(frozen=True)
class Rule:
    """A difference that docs/formats/messages.md describes, in the row whose first cell is `what`.

    The other fields are regular expressions, each of which must match the whole text of the corresponding
    field of a difference. `unseen` is the reason if the statements do not produce the difference.
    """

    what: str
    path: str = ""
    table: str = ".*"
    event: str = ".*"
    original: str = ".*"
    ours: str = ".*"
    unseen: str = ""

    def covers(self, difference: Difference) -> bool:
        """Return whether the rule describes a difference."""
        return not self.unseen and all(
            re.fullmatch(getattr(self, name), getattr(difference, name), re.DOTALL)
            for name in ("path", "table", "event", "original", "ours")
        )


def rules_of(system: str) -> list[Rule]:
    """Return the differences that are listed for a system."""
    listed = tomllib.loads((HERE / "differences.toml").read_text())
    return [Rule(**rule) for rule in listed[system]]


def unlisted(rules: Sequence[Rule], differing: Sequence[Difference]) -> list[Difference]:
    """Return the differences that no rule describes."""
    return [difference for difference in differing if not any(rule.covers(difference) for rule in rules)]


def not_seen(rules: Sequence[Rule], differing: Sequence[Difference]) -> list[Rule]:
    """Return the rules that describe none of the differences, although the statements should produce such a
    difference.
    """
    return [
        rule
        for rule in rules
        if not rule.unseen and not any(rule.covers(difference) for difference in differing)
    ]


def differences(original: Sequence[Event], ours: Sequence[Event]) -> Iterator[Difference]:
    """Yield the differences: events of only one system, and fields that differ in events of both."""
    pairing = SequenceMatcher(
        None, [event.identity for event in original], [event.identity for event in ours], autojunk=False
    )
    for tag, first, last, our_first, our_last in pairing.get_opcodes():
        if tag == "equal":
            for left, right in zip(original[first:last], ours[our_first:our_last], strict=True):
                for path, expected, other in _unequal("", left.fields, right.fields):
                    yield Difference(left.table, " ".join(left.identity), path, expected, other)
            continue
        for event in original[first:last]:
            yield Difference(event.table, " ".join(event.identity), "", _text(event.fields), ABSENT)
        for event in ours[our_first:our_last]:
            yield Difference(event.table, " ".join(event.identity), "", ABSENT, _text(event.fields))


def _unequal(path: str, original: Any, other: Any) -> Iterator[tuple[str, str, str]]:
    if isinstance(original, dict) and isinstance(other, dict):
        for name in [*original, *(name for name in other if name not in original)]:
            within = f"{path}.{name}" if path else name
            if name not in original or name not in other:
                # A null field differs from a missing field.
                yield (
                    within,
                    _text(original[name]) if name in original else ABSENT,
                    _text(other[name]) if name in other else ABSENT,
                )
            else:
                yield from _unequal(within, original[name], other[name])
        if original.keys() == other.keys() and list(original) != list(other):
            yield f"{path}()", " ".join(original), " ".join(other)
    elif isinstance(original, list) and isinstance(other, list) and len(original) == len(other):
        for number, (left, right) in enumerate(zip(original, other, strict=True)):
            yield from _unequal(f"{path}[{number}]", left, right)
    elif type(original) is not type(other) or original != other:
        yield path, _text(original), _text(other)


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
