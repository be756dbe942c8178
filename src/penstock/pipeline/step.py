# SPDX-License-Identifier: Apache-2.0
"""The seam of the steps: what happens to changes on their way, batch by batch.

A verb is a file in `penstock/pipeline/steps`, found by its name, with

    class Settings(Section)              what the settings file may say of it
    def make(settings: Settings) -> Step

Steps run in the order written, in the process that decodes, over Arrow batches; none imports Spark. A step is
the same for rows of a full load and for changes of the log, and for verify, which sends the source's rows
through it.
"""

import difflib
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pyarrow

from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid, PenstockError
from penstock.model import TableName
from penstock.pipeline import steps
from penstock.settings.values import Section


@dataclass(frozen=True)
class Rejected:
    """Rows that a step could not work on, and that its policy says are to be put aside."""

    changes: Changes
    step: str
    error: PenstockError
    # Whether they go to the dead letter, or are only counted.
    kept: bool = True
    # How many steps of the chain were still to come, this one among them; 0 where no chain was run.
    left: int = 0


@dataclass(frozen=True)
class ShardValue:
    """A column that tells the rows of merged tables apart, and its value in the rows of one table."""

    column: str
    value: str


@dataclass(frozen=True)
class Slots:
    """The rows that pass where a hash of columns shares them out: those of the shards `keep` of `of`."""

    columns: tuple[str, ...]
    of: int
    keep: tuple[int, ...]


class Step(ABC):
    """One verb of a pipeline. Pickles; made once in a process and used by one thread."""

    # The verb's name: the file in `steps`.
    verb: str

    @abstractmethod
    def target(self, target: Target) -> Target | None:
        """Return what becomes of a table: its name, columns and keys. None where no row of it passes.

        Raises OptionInvalid where the step names a column that the table lacks.
        """

    @abstractmethod
    def apply(self, changes: Changes) -> Iterable[Changes | Rejected]:
        """Yield what becomes of changes. Each one's target is one that `target` gives, or several where rows
        are routed by their values. Keeps the order of rows, and both images of an update together."""

    def named_by_rows(self, target: Target) -> bool:
        """Tell whether rows name the tables they go to.

        Then `target` gives the columns and keys of all of them, and a name in braces that none has.
        """
        return False

    def empties(self, target: Target) -> bool:
        """Tell whether an emptied source table empties the target: not where it has rows besides."""
        return True

    def shard_of(self, target: Target, instance: str) -> ShardValue | None:
        """Return the column that the step adds and the value that all rows of a source's table have in it.

        None where it adds none, or where rows of one table differ in it.
        """
        return None

    def slots_of(self, target: Target) -> Slots | None:
        """Return which rows of a table pass by the hash of columns, None where that does not decide."""
        return None

    def removes(self, target: Target) -> bool:
        """Tell whether a row goes from the target that a source's table no longer has."""
        return True

    def close(self) -> None:
        """Let go of what is held."""


def through(chain: Sequence[Step], changes: Changes) -> Iterable[Changes | Rejected]:
    """Yield what a chain of steps makes of changes; none with no rows."""
    if not len(changes):
        return
    if not chain:
        yield changes
        return
    for made in chain[0].apply(changes):
        if isinstance(made, Rejected):
            yield replace(made, left=len(chain))
        else:
            yield from through(chain[1:], made)


def target_through(chain: Sequence[Step], target: Target) -> Target | None:
    """Return what a chain of steps makes of a table, None where no row of it passes.

    Raises OptionInvalid, with the table's name, where a step does not fit it.
    """
    found = target
    for step in chain:
        try:
            made = step.target(found)
        except OptionInvalid as problem:
            hint = f"{problem.hint or ''}. `tables` and `exclude` under a step say for which tables it is"
            raise OptionInvalid(f"{found.name}: {problem.message}", hint=hint.removeprefix(". ")) from problem
        if made is None:
            return None
        found = made
    return found


def named_by_rows(chain: Sequence[Step], target: Target) -> bool:
    """Tell whether rows of a table name the tables they go to."""
    found: Target | None = target
    for step in chain:
        if found is None:
            return False
        if step.named_by_rows(found):
            return True
        found = step.target(found)
    return False


def could_be_named(template: TableName, name: TableName) -> bool:
    """Tell whether rows could name a table so, where the names that `target` gives have braces in them."""
    return all(
        re.fullmatch(".*".join(map(re.escape, re.split(r"\{[^{}]*\}", one))), other, re.DOTALL) is not None
        for one, other in ((template.database, name.database), (template.table, name.table))
    )


def rows_of(changes: Changes, table: pyarrow.Table) -> Changes:
    """Return changes with the rows of a table, as one batch."""
    combined = table.combine_chunks().to_batches()
    empty = pyarrow.RecordBatch.from_pylist([], schema=table.schema)
    return changes.with_rows(combined[0] if combined else empty)


def verbs() -> list[str]:
    """Return the verbs there are, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(steps.__path__))


def settings_of(verb: str) -> type[Section]:
    """Return what a step may be told. Raises OptionInvalid."""
    found: type[Section] = _module(verb).Settings
    return found


def make_step(verb: str, settings: Section) -> Step:
    """Make a step. Raises OptionInvalid, DependencyMissing."""
    made: Step = _module(verb).make(settings)
    return made


def _module(verb: str) -> Any:
    if verb not in verbs():
        near = difflib.get_close_matches(verb, verbs(), 1)
        raise OptionInvalid(
            f"there is no step {verb!r}",
            hint=f"Did you mean {near[0]}?" if near else f"There are {', '.join(verbs())}",
        )
    return import_module(f"{steps.__name__}.{verb}")
