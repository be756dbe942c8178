# SPDX-License-Identifier: Apache-2.0
"""`python`: apply a user function to Arrow batches.

- python: {function: "shop_rules:enrich", columns: {region: varchar(20)}, on_error: dead_letter}

The function, `enrich(batch)` or `enrich(batch, target)`, receives a `pyarrow.RecordBatch` with the table's
columns and the system columns, and the table as a `penstock.changes.Target`. It returns a batch, a table, any
object with Arrow's C interface, or None for no rows. It must keep the order of rows and be deterministic: a
batch may be replayed, in parts of any size. If it drops one image of an update, the update becomes a delete
or an insert.
"""

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pyarrow
import pyarrow.compute as compute
from pydantic import Field, PlainValidator, PrivateAttr, WithJsonSchema

from penstock.changes import SYSTEM_COLUMNS, Changes, Target
from penstock.errors import OptionInvalid, StepFailed
from penstock.model import Column
from penstock.pipeline.expressions import type_known
from penstock.pipeline.pairs import Trial, settled, tried
from penstock.pipeline.step import Rejected, Step
from penstock.pipeline.step_section import OnError, StepSection, column_named
from penstock.settings.values import validate_option

VERB = "python"


def _function(value: Any) -> Any:
    if callable(value):
        return value
    if not isinstance(value, str) or not all(value.rpartition(":")[::2]):
        raise ValueError("write module:function, or path/to/file.py:function")
    return value


Function = Annotated[Any, PlainValidator(_function), WithJsonSchema({"type": "string"})]


class Settings(StepSection):
    """Which function, and what it makes of the table's columns."""

    function: Function = Field(description="module:function, or path/to/file.py:function")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="columns that the function adds, or whose type it changes: name to SQL type",
    )
    drop: tuple[str, ...] = Field(default=(), description="columns that the function drops")
    key: tuple[str, ...] | None = Field(
        default=None, description="the primary key of the output, if it differs"
    )
    on_error: OnError = Field(
        default=None, description="what to do with rows for which the function raises an error"
    )
    # A file's text, read where the pipeline is started: tasks elsewhere may not have the file.
    _text: str | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        if isinstance(self.function, str):
            place = self.function.rpartition(":")[0]
            if place.endswith(".py"):
                self._text = validate_option(lambda: _read(Path(place)))

    @property
    def text(self) -> str | None:
        """The text of the function's file, None where it is no file's."""
        return self._text


def make(settings: Settings) -> Step:
    """Make the step. Raises OptionInvalid where there is no such function."""
    return PythonStep(settings)


class PythonStep(Step):
    """Calls the function. Pickles: a file's text goes along, a module must be there where tasks run."""

    verb = VERB

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._loaded: Callable[[pyarrow.RecordBatch, Target], Any] | None = None
        # Whether the function is there is known before anything starts.
        self._call()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded": None}

    def target(self, target: Target) -> Target | None:
        if not self.settings.concerns(target):
            return target
        dropped = {column_named(name, target.column_names, VERB, target.name) for name in self.settings.drop}
        columns = {one.name: one for one in target.columns if one.name not in dropped}
        for name, type_text in self.settings.columns.items():
            kind = type_known(type_text, target.mariadb)
            spelt = next((one for one in columns if one.casefold() == name.casefold()), name)
            columns[spelt] = Column(spelt, kind.type_text, kind.charset, True)
        key = target.primary_key if self.settings.key is None else self.settings.key
        for name in key:
            column_named(name, columns, VERB, target.name)
        # What the function makes of values is not known: no further key is promised.
        return replace(target, columns=tuple(columns.values()), primary_key=tuple(key), unique_keys=())

    def apply(self, changes: Changes) -> Iterable[Changes | Rejected]:
        if not self.settings.concerns(changes.target):
            return [changes]
        return tried(changes, self._called, self.settings.on_error, VERB)

    def _called(self, changes: Changes) -> Changes:
        made = self.target(changes.target)
        assert made is not None, "rows of every table pass"
        call = self._call()
        with Trial() as trial:
            given = call(changes.rows, changes.target)
        if isinstance(trial.failure, OptionInvalid):
            raise trial.failure
        if trial.failure is not None:
            raise StepFailed(f"python: {self._name} raised {trial.failure!r}") from trial.failure
        rows = self._conforming(given, made, changes.rows.schema)
        return settled(replace(changes, target=made, rows=rows))

    def _conforming(self, given: Any, target: Target, before: pyarrow.Schema) -> pyarrow.RecordBatch:
        """Return what the function gave with the columns that are due. Raises StepFailed."""
        schema = pyarrow.schema([*target.arrow(), *(before.field(name) for name in SYSTEM_COLUMNS)])
        if given is None:
            return pyarrow.RecordBatch.from_pylist([], schema=schema)
        if isinstance(given, pyarrow.RecordBatch):
            given = pyarrow.Table.from_batches([given])
        try:
            table = pyarrow.table(given)
            lacking = [name for name in schema.names if name not in table.column_names]
            if lacking:
                raise StepFailed(
                    f"python: {self._name} gave no column {', '.join(lacking)}",
                    hint="Return every column of the batch, _change_type among them; drop names the rest",
                )
            extra = [name for name in table.column_names if name not in schema.names]
            if extra:
                raise StepFailed(
                    f"python: {self._name} gave {', '.join(extra)}, whose types are not told",
                    hint="Tell them in the step: columns: {name: SQL type}",
                )
            rows = table.select(schema.names).cast(schema).combine_chunks()
        except (pyarrow.ArrowException, TypeError) as problem:
            raise StepFailed(f"python: {self._name} gave other types: {problem}") from problem
        batch = rows.to_batches()[0] if rows.num_rows else pyarrow.RecordBatch.from_pylist([], schema=schema)
        versions = batch.column("_commit_version")
        if len(versions) > 1:
            falls = compute.less(versions.slice(1), versions.slice(0, len(versions) - 1))
            if compute.any(falls).as_py():
                raise StepFailed(f"python: {self._name} gave rows in another order than that of commits")
        return batch

    @property
    def _name(self) -> str:
        function = self.settings.function
        return function if isinstance(function, str) else getattr(function, "__name__", repr(function))

    def _call(self) -> Callable[[pyarrow.RecordBatch, Target], Any]:
        if self._loaded is None:
            function = self._found()
            takes = [
                one
                for one in inspect.signature(function).parameters.values()
                if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
            ]
            several = len(takes) > 1 and takes[1].default is inspect.Parameter.empty
            self._loaded = function if several else lambda batch, target: function(batch)
        return self._loaded

    def _found(self) -> Callable[..., Any]:
        named = self.settings.function
        if not isinstance(named, str):
            own: Callable[..., Any] = named
            return own
        place, _, name = named.rpartition(":")
        with Trial() as trial:
            found: Any
            if self.settings.text is not None:
                names: dict[str, Any] = {"__name__": Path(place).stem, "__file__": place}
                exec(compile(self.settings.text, place, "exec"), names)
                found = names.get(name)
            else:
                found = getattr(importlib.import_module(place), name, None)
        if trial.failure is not None:
            raise OptionInvalid(
                f"python: {place} cannot be loaded: {trial.failure!r}",
                hint="The module must be on Python's path: set PYTHONPATH, or write path/to/file.py:function",
            ) from trial.failure
        if not callable(found):
            raise OptionInvalid(f"python: {place} has no function {name!r}")
        loaded: Callable[..., Any] = found
        return loaded


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise OptionInvalid(
            f"python: {path} cannot be read: {problem}", hint="Paths are taken from where the pipeline runs"
        ) from problem
