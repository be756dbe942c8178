# SPDX-License-Identifier: Apache-2.0
"""Reports what becomes of each property of the original system: carried over, changed or not carried over,
and why.

An `OriginalProperties` pairs one configuration file of the original system with the reference of its
properties. A reader accounts for the properties that it uses. `account_for_the_rest` then reports all other
properties as described in the reference, so that none is left out. A property that the reference does not
contain is reported as unknown. Values never reach the report, because any of them may be a secret.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

_TRUE = ("true", "1", "yes", "on")


class Outcome(StrEnum):
    """What became of a property: carried over, changed or not carried over."""

    CARRIED = "carried"
    CHANGED = "changed"
    NOT_CARRIED = "not carried"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Rule:
    """How the reference treats a property: the outcome, and as a remark the new setting, or the reason why
    the property is not carried over.

    For the values in `harmless`, in lower case, it makes no difference that the property is missing. None
    means every value.
    """

    outcome: Outcome
    remark: str
    harmless: tuple[str, ...] | None = None


def carried(remark: str) -> Rule:
    """Return the rule of a property that keeps its meaning; `remark` names the setting."""
    return Rule(Outcome.CARRIED, remark)


def changed(remark: str) -> Rule:
    """Return the rule of a property whose setting has a different meaning; `remark` describes it."""
    return Rule(Outcome.CHANGED, remark)


def needless(remark: str) -> Rule:
    """Return the rule of a property that Penstock does not need."""
    return Rule(Outcome.NOT_CARRIED, remark)


def missing(remark: str, *harmless: str) -> Rule:
    """Return the rule of a property without an equivalent in Penstock. `harmless` values need no
    attention.
    """
    return Rule(Outcome.NOT_CARRIED, remark, harmless=("", *harmless))


@dataclass(frozen=True)
class Entry:
    """One property of one file. `attention` marks a difference that consumers or operators may notice."""

    location: str
    name: str
    outcome: Outcome
    remark: str
    is_set: bool = True
    attention: bool = False


@dataclass
class Report:
    """The entries of all files, in the order of the original files, and the tasks that remain for the
    user.
    """

    entries: list[Entry] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)

    @property
    def attention(self) -> list[Entry]:
        """The entries that need a decision."""
        return [entry for entry in self.entries if entry.attention]

    def count(self, outcome: Outcome) -> int:
        """Return how many properties of the files have this outcome."""
        return sum(entry.outcome is outcome and entry.is_set for entry in self.entries)


class OriginalProperties:
    """The properties of one file, and the reference of all properties that the original system knows.

    Names in the reference may contain `*`. `own_names` are the names that this kind of file can contain, by
    default all names without a `*`. The report lists them even if they are not set.
    """

    def __init__(
        self,
        report: Report,
        location: str,
        values: Mapping[str, str],
        reference: Mapping[str, Rule],
        own_names: Iterable[str] | None = None,
    ) -> None:
        self.location = location
        self._report = report
        self._values = dict(values)
        self._reference = reference
        self._own_names = list(reference if own_names is None else own_names)
        self._accounted: set[str] = set()
        self._patterns = [
            (re.compile(".*".join(map(re.escape, name.split("*")))), rule)
            for name, rule in reference.items()
            if "*" in name
        ]

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str, default: str = "") -> str:
        """Return a property's value without blanks around it; `default` if it is not set or empty."""
        return self._values.get(name, "").strip() or default

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a property's truth value."""
        value = self.get(name).lower()
        return value in _TRUE if value else default

    def below(self, prefix: str) -> dict[str, str]:
        """Return the properties whose names begin with a prefix, by the names without the prefix."""
        return {
            name.removeprefix(prefix): value
            for name, value in self._values.items()
            if name.startswith(prefix)
        }

    def carried(self, *names: str, remark: str | None = None) -> None:
        """Account for properties that keep their meaning."""
        self._account(Outcome.CARRIED, names, remark, attention=False)

    def changed(self, *names: str, remark: str, attention: bool = False) -> None:
        """Account for properties whose new setting has another meaning."""
        self._account(Outcome.CHANGED, names, remark, attention)

    def not_carried(self, *names: str, remark: str, attention: bool = True) -> None:
        """Account for properties without an equivalent."""
        self._account(Outcome.NOT_CARRIED, names, remark, attention)

    def not_carried_below(self, prefixes: tuple[str, ...], remark: str) -> None:
        """Account for every property with one of the prefixes as not needed."""
        names = [name for name in self._values if name.startswith(prefixes)]
        self._account(Outcome.NOT_CARRIED, tuple(names), remark, attention=False)

    def remind(self, step: str) -> None:
        """Add a reminder that does not come from a property of the file."""
        self._report.steps.append(step)

    def account_for_the_rest(self) -> None:
        """Account for every other property according to the reference: first the properties set in the file,
        then those not set.
        """
        for name in self._values:
            if name not in self._accounted:
                self._report.entries.append(self._by_reference(name))
        for name in self._own_names:
            if "*" not in name and name not in self._values:
                rule = self._reference[name]
                self._report.entries.append(
                    Entry(self.location, name, rule.outcome, rule.remark, is_set=False)
                )

    def rule_of(self, name: str) -> Rule | None:
        """Return the reference's rule for a property, None if it is unknown."""
        exact = self._reference.get(name)
        return exact or next((rule for pattern, rule in self._patterns if pattern.fullmatch(name)), None)

    def _account(self, outcome: Outcome, names: tuple[str, ...], remark: str | None, attention: bool) -> None:
        for name in names:
            if name not in self._values or name in self._accounted:
                continue
            self._accounted.add(name)
            rule = self.rule_of(name)
            text = remark if remark is not None else rule.remark if rule is not None else ""
            self._report.entries.append(Entry(self.location, name, outcome, text, attention=attention))

    def _by_reference(self, name: str) -> Entry:
        rule = self.rule_of(name)
        if rule is None:
            return Entry(
                self.location,
                name,
                Outcome.UNKNOWN,
                "no property of this name is in the original's reference",
                attention=True,
            )
        value = self.get(name).lower()
        attention = rule.harmless is not None and value not in rule.harmless
        if rule.outcome is Outcome.NOT_CARRIED:
            return Entry(self.location, name, rule.outcome, rule.remark, attention=attention)
        # The reader has not used this property, so it is not carried, whatever the reference says.
        remark = (
            f"it has no effect beside the others; its setting is {rule.remark}" if value else "it is empty"
        )
        return Entry(self.location, name, Outcome.NOT_CARRIED, remark, attention=bool(value))
