# SPDX-License-Identifier: Apache-2.0
"""The interface of steps: what a pipeline does to changes, batch by batch.

A verb is a module in `penstock/pipeline/steps`, loaded by its name, with

    class Settings(Section)              its settings in the pipeline file
    make: Callable[[Settings], Step]     its class

Steps run in the order written, over Arrow batches, in the process that decodes. No step imports Spark. A step
treats rows of a full load, changes of the log, and the source rows read by verify alike.
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
    """Rows that a step rejected and that are set aside, as the step's `on_error` setting requires."""

    changes: Changes
    step: str
    error: PenstockError
    # Whether the rows go to the dead letter or are only counted.
    kept: bool = True
    # The number of steps not yet completed, including the rejecting step; 0 outside of a chain.
    steps_left: int = 0


@dataclass(frozen=True)
class ShardValue:
    """A column that distinguishes the rows of merged tables, and its value in the rows of one table."""

    column: str
    value: str


@dataclass(frozen=True)
class Slots:
    """Selects rows by a hash of columns. The hash divides the rows into `of` shards, and the rows of the
    shards in `keep` pass.
    """

    columns: tuple[str, ...]
    of: int
    keep: tuple[int, ...]


class Step(ABC):
    """One verb of a pipeline. Can be pickled; created once per process and used by one thread."""

    # The verb's name: its module in `steps`.
    verb: str
    # Whether tables keep their names and columns, so that the source's statements also fit the target.
    keeps_definitions: bool = False
    # Whether only the step itself knows which columns it reads.
    reads_any_column: bool = False

    @abstractmethod
    def target(self, target: Target) -> Target | None:
        """Return the target's name, columns and keys for a table. None if the step drops all its rows.

        Raises OptionInvalid if the step names a column that the table does not have.
        """

    @abstractmethod
    def apply(self, changes: Changes) -> Iterable[Changes | Rejected]:
        """Yield the changes after the step, and rejected rows.

        The target of the changes is the one that `target` returns or, if rows are routed by their values, one
        of several targets. Keeps the order of rows, and keeps both images of an update together.
        """

    def named_by_rows(self, target: Target) -> bool:
        """Return whether the name of a row's target table depends on the row's values.

        If so, `target` returns the columns and keys that all possible target tables share, under a name
        with placeholders in braces that no table has.
        """
        return False

    def empties(self, target: Target) -> bool:
        """Return whether emptying a source table also empties its target. It does not if the target has other
        rows.
        """
        return True

    def shard_of(self, target: Target, instance: str) -> ShardValue | None:
        """Return the column that the step adds, and its value for all rows of a source's table.

        None if the step adds no such column, or if its value differs between rows of a table.
        """
        return None

    def slots_of(self, target: Target) -> Slots | None:
        """Return the hash slots whose rows pass the step, None if the step does not select rows by a hash of
        columns.
        """
        return None

    def removes(self, target: Target) -> bool:
        """Return whether rows that are missing from a source's table are deleted from the target."""
        return True

    def close(self) -> None:
        """Release all resources."""


def run_steps(chain: Sequence[Step], changes: Changes) -> Iterable[Changes | Rejected]:
    """Apply a chain of steps to changes, and yield the results without empty batches."""
    if not len(changes):
        return
    if not chain:
        yield changes
        return
    for stepped in chain[0].apply(changes):
        if isinstance(stepped, Rejected):
            yield replace(stepped, steps_left=len(chain))
        else:
            yield from run_steps(chain[1:], stepped)


def target_through(chain: Sequence[Step], target: Target) -> Target | None:
    """Return the target of a chain of steps for a table, None if no row passes.

    Raises OptionInvalid, with the table's name, if a step does not fit the table.
    """
    current = target
    for step in chain:
        try:
            next_target = step.target(current)
        except OptionInvalid as problem:
            hint = f"{problem.hint or ''}. `tables` and `exclude` under a step say for which tables it is"
            raise OptionInvalid(
                f"{current.name}: {problem.message}", hint=hint.removeprefix(". ")
            ) from problem
        if next_target is None:
            return None
        current = next_target
    return current


def named_by_rows(chain: Sequence[Step], target: Target) -> bool:
    """Return whether the names of a table's target tables depend on the values of its rows."""
    current: Target | None = target
    for step in chain:
        if current is None:
            return False
        if step.named_by_rows(current):
            return True
        current = step.target(current)
    return False


def could_be_named(template: TableName, name: TableName) -> bool:
    """Return whether rows could be routed to this table. `template` is a target name with placeholders in
    braces.
    """
    return all(
        re.fullmatch(".*".join(map(re.escape, re.split(r"\{[^{}]*\}", template_part))), name_part, re.DOTALL)
        is not None
        for template_part, name_part in ((template.database, name.database), (template.table, name.table))
    )


def rows_of(changes: Changes, table: pyarrow.Table) -> Changes:
    """Return changes with the rows of a table, as one batch."""
    combined = table.combine_chunks().to_batches()
    empty = pyarrow.RecordBatch.from_pylist([], schema=table.schema)
    return changes.with_rows(combined[0] if combined else empty)


def verbs() -> list[str]:
    """Return all verbs, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(steps.__path__))


def settings_of(verb: str) -> type[Section]:
    """Return the settings class of a step. Raises OptionInvalid."""
    section: type[Section] = _module(verb).Settings
    return section


def make_step(verb: str, settings: Section) -> Step:
    """Create a step. Raises OptionInvalid, DependencyMissing."""
    step: Step = _module(verb).make(settings)
    return step


def _module(verb: str) -> Any:
    if verb not in verbs():
        near = difflib.get_close_matches(verb, verbs(), 1)
        raise OptionInvalid(
            f"there is no step {verb!r}",
            hint=f"Did you mean {near[0]}?" if near else f"There are {', '.join(verbs())}",
        )
    return import_module(f"{steps.__name__}.{verb}")
