# SPDX-License-Identifier: Apache-2.0
"""What a pipeline is told: `pipeline.yaml`, read whole and proved before anything starts.

    name: shop-lake
    source: {url: mysql://repl@db1:3306, password_env: SHOP_PASSWORD, tables: [shop.*]}
    steps:
      - filter: {tables: shop.orders, where: "status <> 'draft'"}
    sink:
      delta: {path: s3://lake/shop}

`load_pipeline(path)` returns `PipelineSettings`: every source opened by its `options`, steps and sink as
their own kinds' settings, of which `make_steps` and `make_sink` make what works. Everything pickles.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from pydantic import ValidationError

from penstock.errors import OptionInvalid, PenstockError
from penstock.model import ServerAddress, TablePatterns
from penstock.pipeline import step as step_seam
from penstock.pipeline.settings_sections import (
    EARLIEST,
    LATEST,
    BatchSettings,
    ErrorSettings,
    LoadSettings,
    LoopSettings,
    PipelineSection,
    SourceSection,
)
from penstock.pipeline.step import Step
from penstock.settings.file import (
    Document,
    Problem,
    ValuePath,
    read_yaml,
    refuse,
    translate_validation_errors,
)
from penstock.settings.values import Section, one_secret
from penstock.sinks import sink as sink_seam
from penstock.sinks.sink import Evolution, Sink
from penstock.source.bounds import Bound
from penstock.source.source import SourceOptions

__all__ = [
    "EARLIEST",
    "LATEST",
    "BatchSettings",
    "ErrorSettings",
    "LoadSettings",
    "LoopSettings",
    "PipelineSettings",
    "PipelineSource",
    "SinkSettings",
    "StepSettings",
    "load_pipeline",
    "pipeline_of_values",
]

_STATE_FILE = "penstock-pipelines.db"
_HINT_FILE = "Name the file of a pipeline that is there, such as: penstock run shop.yaml"
_HINT = "docs/reference/pipelines.md tells what may stand in it, penstock run --json-schema tells editors"


@dataclass(frozen=True)
class PipelineSource:
    """One source of a pipeline.

    `name` is what its rows carry as their instance, another one for each source. `options` open it by
    `open_source`. `start` is a bound, EARLIEST, LATEST, or None where nothing was said. `server` is whose
    tables can be read, None where only a log is known; `servers` are all of its cluster, that one first.
    `schemas` is a file of definitions, None for none.
    """

    name: str
    options: SourceOptions
    tables: TablePatterns
    start: Bound | str | None = None
    server: ServerAddress | None = None
    servers: tuple[ServerAddress, ...] = ()
    schemas: str | None = None
    fail_on_data_loss: bool = True
    on_lost: str = "stop"


@dataclass(frozen=True)
class StepSettings:
    """A step as it was written: its verb and what it was told."""

    verb: str
    settings: Section

    def make(self) -> Step:
        """Make the step. Raises OptionInvalid, DependencyMissing."""
        return step_seam.make_step(self.verb, self.settings)


@dataclass(frozen=True)
class SinkSettings:
    """A sink as it was written: its kind and what it was told."""

    kind: str
    settings: Section = field(repr=False)

    def make(self) -> Sink:
        """Make the sink; connects to nothing. Raises OptionInvalid, DependencyMissing."""
        return sink_seam.make_sink(self.kind, self.settings)


@dataclass(frozen=True)
class PipelineSettings:
    """A whole pipeline. Pickles; no representation shows a secret.

    `name` names it in the state; `state` is the URL of a coordination store (`open_store` takes it).
    `sources`       one or more `PipelineSource`: name, options, tables, start, server, schemas,
                    fail_on_data_loss
    `load`          mode ("full", "consistent", "none"), chunk_rows, parallel, rate (rows per second), where;
                    `load.where_of(database, table)`
    `steps`, `sink` `make_steps()`, `make_sink()`; `sink.kind`
    `batch`         bytes, rows, interval (seconds), parts, range_bytes
    `schema_changes` an `Evolution`; `apply` "parallel" or "serial"
    `on_cascade`    "refuse", "reread" or "ignore"
    `errors`        table ("stop", "skip_table"), rows ("stop", "skip", "dead_letter"), retry_for (seconds)
    `dead_letter`   a folder's absolute path, or a URL that Arrow's file systems know
    `loops`         server_ids, gtid_tags, mark_table
    `spark`         settings of the session that `penstock run` makes
    `path`          the file these were read from, None for those of a program
    """

    name: str
    state: str = field(repr=False)
    sources: tuple[PipelineSource, ...]
    sink: SinkSettings
    dead_letter: str = field(repr=False)
    steps: tuple[StepSettings, ...] = ()
    load: LoadSettings = field(default_factory=LoadSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    schema_changes: Evolution = Evolution.EVOLVE
    apply: Literal["parallel", "serial"] = "parallel"
    on_cascade: Literal["refuse", "reread", "ignore"] = "refuse"
    errors: ErrorSettings = field(default_factory=ErrorSettings)
    loops: LoopSettings = field(default_factory=LoopSettings)
    spark: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None

    def make_steps(self) -> list[Step]:
        """Make the steps, in the order written. Raises OptionInvalid, DependencyMissing."""
        return [one.make() for one in self.steps]

    def make_sink(self) -> Sink:
        """Make the sink; connects to nothing. Raises OptionInvalid, DependencyMissing."""
        sink = self.sink.make()
        sink.pipeline = self.name
        return sink

    def source(self, name: str) -> PipelineSource:
        """Return a source by its name. Raises KeyError."""
        for one in self.sources:
            if one.name == name:
                return one
        raise KeyError(name)


def load_pipeline(path: str | Path, environment: Mapping[str, str] | None = None) -> PipelineSettings:
    """Read and prove a pipeline's file. Raises OptionInvalid, which tells every problem with its line.

    Paths in the file are taken from where the pipeline runs; the state and the dead letter lie beside the
    file unless it says otherwise. `${NAME}` is taken from `environment`, else from the process's own.
    """
    path = Path(path)
    document = read_yaml(path, os.environ if environment is None else environment, _HINT_FILE)
    return _Reading(document, str(path), path.absolute()).settings()


@dataclass(frozen=True)
class StatePlace:
    """Where a pipeline keeps its state: the store's URL, and the pipeline's name there."""

    name: str
    state: str


def place_of_state(path: str | Path) -> StatePlace:
    """Read from a pipeline's file where its state is, and nothing else of it: whoever looks after a pipeline
    need not have the secrets that its runner has. Raises OptionInvalid."""
    path = Path(path)
    document = read_yaml(path, os.environ, _HINT_FILE)
    reading = _Reading(document, str(path), path.absolute())
    return reading.place_of_state()


def pipeline_of_values(value: Mapping[str, Any], folder: str | Path = ".") -> PipelineSettings:
    """Prove what would stand in a file, given as plain values. Raises OptionInvalid with every problem.

    A value that no file can hold, such as a function of the `python` step, may stand in them. `folder` is
    where the state and the dead letter lie unless the values say otherwise.
    """
    document = Document(value=dict(value))
    return _Reading(document, "", None, Path(folder).absolute()).settings()


class _Reading:
    """One file on its way to settings; problems are gathered until the end."""

    def __init__(self, document: Document, shown: str, path: Path | None, folder: Path | None = None) -> None:
        self._document = document
        self._shown = shown
        self._path = path
        self._folder = path.parent if path is not None else folder or Path()
        self._problems = list(document.problems)

    def settings(self) -> PipelineSettings:
        value = self._document.value
        whole = value if isinstance(value, dict) else {}
        section = self._section(PipelineSection, value, ())
        steps = self._steps(whole.get("steps"), _policy_of(whole))
        sink = self._sink(whole.get("sink"), section.apply if section is not None else None)
        sources = self._sources(section) if section is not None else []
        name = (section.name or self._name_of_file()) if section is not None else ""
        if self._problems or section is None or sink is None:
            raise self._refused()
        return PipelineSettings(
            name=name,
            state=self._state_url(section.state),
            sources=tuple(sources),
            sink=sink,
            dead_letter=self._dead_letter(section.dead_letter, name),
            steps=tuple(steps),
            load=section.load,
            batch=section.batch,
            schema_changes=section.schema_changes,
            apply=section.apply,
            on_cascade=section.on_cascade,
            errors=section.errors,
            loops=section.loops,
            spark=section.spark,
            path=self._path,
        )

    def place_of_state(self) -> StatePlace:
        value = self._document.value
        whole = value if isinstance(value, dict) else {}
        told = {"name": whole.get("name"), "state": whole.get("state")}
        self._problems = [one for one in self._problems if not one.path or one.path[0] in told]
        for name, one in told.items():
            if not isinstance(one, str | None):
                self._note((name,), "it must be a text")
        if self._problems:
            raise self._refused()
        return StatePlace(str(told["name"] or self._name_of_file()), self._state_url(told["state"]))

    def _refused(self) -> PenstockError:
        if self._shown:
            return refuse(self._shown, self._document, self._problems, _HINT)
        told = {f"{'.'.join(map(str, one.path))}: {one.message}".removeprefix(": ") for one in self._problems}
        count = "a problem" if len(told) == 1 else f"{len(told)} problems"
        return OptionInvalid(
            "\n  ".join([f"the pipeline has {count}:", *sorted(told)]),
            hint="See docs/reference/pipelines.md for every setting",
        )

    def _section(self, kind: type[Any], value: Any, place: ValuePath) -> Any:
        """Return a section, None where something is wrong with it, which is then noted."""
        try:
            return kind.model_validate({} if value is None else value)
        except ValidationError as found:
            told = translate_validation_errors(found.errors(include_url=False, include_input=False), kind)
            self._problems += [Problem((*place, *one.path), one.message) for one in told]
            return None

    # --- Sources ----------------------------------------------------------------------------

    def _sources(self, section: PipelineSection) -> list[PipelineSource]:
        found: list[PipelineSource] = []
        for index, one in enumerate(section.all_sources()):
            place: ValuePath = ("sources", index) if section.sources else ("source",)
            try:
                made = _source_of(one)
            except ValueError as problem:
                self._note(place, str(problem))
                continue
            if any(other.name == made.name for other in found):
                self._note((*place, "name"), f"another source is named {made.name!r} already")
            found.append(made)
        return found

    # --- Steps and sink ---------------------------------------------------------------------

    def _steps(self, value: Any, policy: str | None) -> list[StepSettings]:
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            self._note(("steps",), "write a list: - filter: {where: ...}")
            return []
        found = []
        for index, one in enumerate(value):
            chosen = self._chosen(one, ("steps", index), step_seam.settings_of, step_seam.verbs())
            if chosen is None:
                continue
            verb, settings = chosen
            # Who says nothing of rows that fail means what the pipeline says.
            if policy is not None and getattr(settings, "on_error", "") is None:
                settings = settings.model_copy(update={"on_error": policy})
            found.append(StepSettings(verb, settings))
        return found

    def _sink(self, value: Any, apply: str | None) -> SinkSettings | None:
        if value is None:
            self._note(("sink",), "it is missing: write sink: {stdout: }")
            return None
        chosen = self._chosen(value, ("sink",), sink_seam.settings_of, sink_seam.kinds())
        if chosen is None:
            return None
        kind, settings = chosen
        # A sink that knows more than one way of applying means the pipeline's, unless it says its own.
        if apply is not None and getattr(settings, "apply", "") is None:
            settings = settings.model_copy(update={"apply": apply})
        return SinkSettings(kind, settings)

    def _chosen(
        self, value: Any, place: ValuePath, settings_of: Any, known: Sequence[str]
    ) -> tuple[str, Section] | None:
        """Return a variant's name and settings, written `name` or `name: {...}`."""
        if isinstance(value, str):
            value = {value: None}
        if not isinstance(value, Mapping) or len(value) != 1:
            self._note(place, f"write one name and what belongs to it; known: {', '.join(known)}")
            return None
        ((name, told),) = value.items()
        try:
            kind = settings_of(str(name))
        except OptionInvalid as problem:
            self._note((*place, str(name)), f"{problem.message}. {problem.hint}")
            return None
        settings = self._section(kind, told, (*place, str(name)))
        if settings is None:
            return None
        try:
            return str(name), _with_secrets(settings)
        except ValueError as problem:
            self._note((*place, str(name)), str(problem))
            return None

    # --- Names and places -------------------------------------------------------------------

    def _note(self, place: ValuePath, what: str) -> None:
        self._problems.append(Problem(place, what))

    def _name_of_file(self) -> str:
        if self._path is None:
            self._note(("name",), "it is missing")
            return ""
        return self._path.name.split(".")[0] or "pipeline"

    def _state_url(self, url: str | None) -> str:
        if url is None:
            return f"sqlite://{quote(str(self._folder / _STATE_FILE))}"
        scheme, _, rest = url.partition(":")
        return f"sqlite://{os.path.abspath(rest.removeprefix('//'))}" if scheme == "sqlite" else url

    def _dead_letter(self, place: str | None, name: str) -> str:
        if place is None:
            return str(self._folder / f"{name}.dead-letter")
        return place if "://" in place else os.path.abspath(place)


def _with_secrets(settings: Section) -> Section:
    """Return settings that hold their secrets themselves: tasks elsewhere have neither file nor variable."""
    found: dict[str, Any] = {}
    for name in type(settings).model_fields:
        stem = name.removesuffix("_env")
        if stem == name or not hasattr(settings, stem):
            continue
        secret = one_secret(
            getattr(settings, stem), getattr(settings, f"{stem}_file", None), getattr(settings, name), stem
        )
        if secret is not None:
            found |= {stem: secret, name: None}
            found |= {f"{stem}_file": None} if hasattr(settings, f"{stem}_file") else {}
    return settings.model_copy(update=found) if found else settings


def _policy_of(whole: Mapping[str, Any]) -> str | None:
    errors = whole.get("errors")
    policy = errors.get("rows") if isinstance(errors, Mapping) else None
    return policy if policy in ("stop", "skip", "dead_letter") else None


def _source_of(section: SourceSection) -> PipelineSource:
    options = section.options()
    if section.on_lost != "stop":
        if section.server_address() is None:
            raise ValueError(f"on_lost: {section.on_lost} reads tables again: name the server of the log")
        if not section.fail_on_data_loss:
            raise ValueError(f"on_lost: {section.on_lost} and fail_on_data_loss: false exclude each other")
    return PipelineSource(
        name=options.instance,
        options=options,
        tables=TablePatterns(list(section.tables), list(section.exclude)),
        start=section.start_bound(),
        server=section.server_address(),
        servers=section.server_addresses(),
        schemas=None if section.schemas is None else str(section.schemas),
        fail_on_data_loss=section.fail_on_data_loss,
        on_lost=section.on_lost,
    )


# --- For editors ----------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a pipeline's file, for editors: with every step and sink there is."""
    whole = PipelineSection.model_json_schema()
    definitions = whole.setdefault("$defs", {})
    whole["properties"]["load"] = {
        "anyOf": [{"enum": ["full", "consistent", "none"]}, {"$ref": "#/$defs/LoadSettings"}]
    }
    step = _choice(step_seam.verbs(), step_seam.settings_of, "step", definitions)
    sink = _choice(sink_seam.kinds(), sink_seam.settings_of, "sink", definitions)
    whole["properties"]["steps"] = {"type": "array", "items": step, "description": "in the order written"}
    whole["properties"]["sink"] = sink | {"description": "where changes go"}
    whole["required"] = ["sink"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole}


def _choice(names: Sequence[str], settings_of: Any, what: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one variant out of several, whose own schemas become definitions."""
    choices: list[dict[str, Any]] = [{"enum": list(names)}]
    for name in names:
        prefix = f"{what}_{name}"
        own = settings_of(name).model_json_schema(ref_template=f"#/$defs/{prefix}_{{model}}")
        for inner, schema in own.pop("$defs", {}).items():
            definitions[f"{prefix}_{inner}"] = schema
        definitions[prefix] = own
        choices.append(
            {
                "type": "object",
                "properties": {name: {"anyOf": [{"$ref": f"#/$defs/{prefix}"}, {"type": "null"}]}},
                "required": [name],
                "additionalProperties": False,
            }
        )
    return {"oneOf": choices}
