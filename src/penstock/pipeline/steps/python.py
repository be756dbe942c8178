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
from penstock.client.attempt import Attempt
from penstock.errors import OptionInvalid, StepFailed
from penstock.model import Column
from penstock.pipeline.expressions import type_known
from penstock.pipeline.pairs import split_lone_images, try_splitting
from penstock.pipeline.step import Rejected, Step
from penstock.pipeline.step_section import OnError, StepSection, resolve_column
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
    """Which function to call, and which columns it outputs."""

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
    # The source text of a file, read when the pipeline starts, since remote tasks may not have the file.
    _text: str | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        if isinstance(self.function, str):
            location = self.function.rpartition(":")[0]
            if location.endswith(".py"):
                self._text = validate_option(lambda: _read(Path(location)))

    @property
    def text(self) -> str | None:
        """The source text of the function's file, None if the function is in a module."""
        return self._text


class PythonStep(Step):
    """Calls the user's function. Can be pickled.

    The source text of a function's file is pickled too, but a module must be importable wherever tasks run.
    """

    verb = VERB
    reads_any_column = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._loaded: Callable[[pyarrow.RecordBatch, Target], Any] | None = None
        # Load the function now, so that a missing function is reported before the pipeline starts.
        self._call()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loaded": None}

    def target(self, target: Target) -> Target | None:
        if not self.settings.applies_to(target):
            return target
        dropped = {
            resolve_column(name, target.column_names, VERB, target.name) for name in self.settings.drop
        }
        columns = {column.name: column for column in target.columns if column.name not in dropped}
        for name, type_text in self.settings.columns.items():
            kind = type_known(type_text, target.mariadb)
            known_name = next((column for column in columns if column.casefold() == name.casefold()), name)
            columns[known_name] = Column(known_name, kind.type_text, kind.charset, True)
        key = target.primary_key if self.settings.key is None else self.settings.key
        for name in key:
            resolve_column(name, columns, VERB, target.name)
        # The function may change any value, so other unique keys are not guaranteed.
        return replace(target, columns=tuple(columns.values()), primary_key=tuple(key), unique_keys=())

    def apply(self, changes: Changes) -> Iterable[Changes | Rejected]:
        if not self.settings.applies_to(changes.target):
            return [changes]
        return try_splitting(changes, self._call_function, self.settings.on_error, VERB)

    def _call_function(self, changes: Changes) -> Changes:
        target = self.target(changes.target)
        assert target is not None, "rows of every table pass"
        call = self._call()
        with Attempt() as trial:
            returned = call(changes.rows, changes.target)
        if isinstance(trial.failure, OptionInvalid):
            raise trial.failure
        if trial.failure is not None:
            raise StepFailed(f"python: {self._name} raised {trial.failure!r}") from trial.failure
        rows = self._conform_returned(returned, target, changes.rows.schema)
        return split_lone_images(replace(changes, target=target, rows=rows))

    def _conform_returned(self, returned: Any, target: Target, before: pyarrow.Schema) -> pyarrow.RecordBatch:
        """Return the function's result with the expected columns. Raises StepFailed."""
        schema = pyarrow.schema([*target.arrow(), *(before.field(name) for name in SYSTEM_COLUMNS)])
        if returned is None:
            return pyarrow.RecordBatch.from_pylist([], schema=schema)
        if isinstance(returned, pyarrow.RecordBatch):
            returned = pyarrow.Table.from_batches([returned])
        try:
            table = pyarrow.table(returned)
            missing = [name for name in schema.names if name not in table.column_names]
            if missing:
                raise StepFailed(
                    f"python: {self._name} did not return {', '.join(missing)}",
                    hint="Return every column of the batch, with _change_type, or name the others in drop",
                )
            extra = [name for name in table.column_names if name not in schema.names]
            if extra:
                raise StepFailed(
                    f"python: {self._name} returned {', '.join(extra)}, whose types are not declared",
                    hint="Declare them in the step: columns: {name: SQL type}",
                )
            rows = table.select(schema.names).cast(schema).combine_chunks()
        except (pyarrow.ArrowException, TypeError) as problem:
            raise StepFailed(f"python: {self._name} returned values of other types: {problem}") from problem
        batch = rows.to_batches()[0] if rows.num_rows else pyarrow.RecordBatch.from_pylist([], schema=schema)
        versions = batch.column("_commit_version")
        if len(versions) > 1:
            falls = compute.less(versions.slice(1), versions.slice(0, len(versions) - 1))
            if compute.any(falls).as_py():
                raise StepFailed(
                    f"python: {self._name} returned rows in another order than that of their commits"
                )
        return batch

    @property
    def _name(self) -> str:
        function = self.settings.function
        return function if isinstance(function, str) else getattr(function, "__name__", repr(function))

    def _call(self) -> Callable[[pyarrow.RecordBatch, Target], Any]:
        if self._loaded is None:
            function = self._load_function()
            positional = [
                parameter
                for parameter in inspect.signature(function).parameters.values()
                if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            ]
            several = len(positional) > 1 and positional[1].default is inspect.Parameter.empty
            self._loaded = function if several else lambda batch, target: function(batch)
        return self._loaded

    def _load_function(self) -> Callable[..., Any]:
        named = self.settings.function
        if not isinstance(named, str):
            own: Callable[..., Any] = named
            return own
        location, _, name = named.rpartition(":")
        with Attempt() as trial:
            function: Any
            if self.settings.text is not None:
                names: dict[str, Any] = {"__name__": Path(location).stem, "__file__": location}
                exec(compile(self.settings.text, location, "exec"), names)
                function = names.get(name)
            else:
                function = getattr(importlib.import_module(location), name, None)
        if trial.failure is not None:
            raise OptionInvalid(
                f"python: {location} cannot be loaded: {trial.failure!r}",
                hint="The module must be on Python's path: set PYTHONPATH, or write path/to/file.py:function",
            ) from trial.failure
        if not callable(function):
            raise OptionInvalid(f"python: {location} has no function {name!r}")
        loaded: Callable[..., Any] = function
        return loaded


make = PythonStep


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise OptionInvalid(
            f"python: {path} cannot be read: {problem}", hint="Paths are taken from where the pipeline runs"
        ) from problem
