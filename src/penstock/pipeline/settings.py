# SPDX-License-Identifier: Apache-2.0
"""The settings of a pipeline: `pipeline.yaml`, parsed and validated before anything starts.

    name: shop-lake
    source: {url: mysql://repl@db1:3306, password_env: SHOP_PASSWORD, tables: [shop.*]}
    steps:
      - filter: {tables: shop.orders, where: "status <> 'draft'"}
    sink:
      delta: {path: s3://lake/shop}

`load_pipeline(path)` returns `PipelineSettings`. Its sources contain the `options` with which they are
opened. Its steps and its sink are settings, from which `make_steps` and `make_sink` create the working
objects. With `sinks` a pipeline has several sinks by name, and `of_sink` returns the settings of one of them.
Everything can be pickled.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import quote

from pydantic import ValidationError

from penstock.errors import OptionInvalid, PenstockError
from penstock.model import ServerAddress, TablePatterns
from penstock.narrowed_patterns import NarrowedPatterns
from penstock.pipeline import step as step_seam
from penstock.pipeline.settings_sections import (
    EARLIEST,
    LATEST,
    BatchSettings,
    ErrorSettings,
    LoadSettings,
    LoopSettings,
    PipelineSection,
    SinkTablesSection,
    SourceSection,
    StatePlace,
    validate_name,
)
from penstock.pipeline.shards import Shard, ShardTables
from penstock.pipeline.sink_places import may_share_target
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
_HINT_FILE = "Name an existing pipeline file, such as: penstock run shop.yaml"
_HINT = "docs/reference/pipelines.md lists the settings; penstock run --json-schema prints their JSON Schema"


@dataclass(frozen=True)
class PipelineSource:
    """One source of a pipeline.

    `name` is the instance name in the rows, unique per source. `options` are passed to `open_source`. `start`
    is a bound, EARLIEST, LATEST, or None if not set. `server` is the server whose tables can be read, None if
    only a log is available. `servers` are all servers of its cluster, starting with `server`. `schemas` is a
    file of table definitions, or None.
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
    """A step as configured: its verb and its settings."""

    verb: str
    settings: Section

    def make(self) -> Step:
        """Create the step. Raises OptionInvalid, DependencyMissing."""
        return step_seam.make_step(self.verb, self.settings)


@dataclass(frozen=True)
class SinkSettings:
    """A sink as configured: its kind and its settings.

    `name` is its name among `sinks`, and "" if the pipeline has a single `sink`. `tables` selects the source
    tables whose rows it receives.
    """

    kind: str
    settings: Section = field(repr=False)
    name: str = ""
    tables: TablePatterns = field(default_factory=TablePatterns)

    def make(self) -> Sink:
        """Create the sink without connecting. Raises OptionInvalid, DependencyMissing."""
        return sink_seam.make_sink(self.kind, self.settings)


@dataclass(frozen=True)
class PipelineSettings:
    """The settings of a whole pipeline. Can be pickled. Its representation shows no secrets.

    `name` is the pipeline's name in the state. `state` is the URL of a coordination store (for `open_store`).
      `sources`       one or more `PipelineSource`: name, options, tables, start, server, schemas,
                      fail_on_data_loss
      `load`          mode ("full", "consistent", "none"), chunk_rows, parallel,
                      rate (rows per second), where; `load.where_of(database, table)`
      `steps`         `make_steps()`
      `sinks`         one or more `SinkSettings`; of one sink: `sink`, `make_sink()`, `sink.kind`
      `batch`         bytes, rows, interval (seconds), parts, range_bytes
      `schema_changes` an `Evolution`; `apply` "parallel" or "serial"
      `on_cascade`    "refuse", "reread" or "ignore"
      `shards`        how many processes share the tables; `shard` is the one that these settings are for
      `errors`        table ("stop", "skip_table"), rows ("stop", "skip", "dead_letter"), retry_for (seconds)
      `dead_letter`   a folder's absolute path, or a URL of an Arrow file system
      `loops`         server_ids, gtid_tags, mark_table, drainer_channels
      `spark`         settings of the session that `penstock run` creates
      `path`          the file that the settings were read from, None if they came from a program
    """

    name: str
    state: str = field(repr=False)
    sources: tuple[PipelineSource, ...]
    sinks: tuple[SinkSettings, ...]
    dead_letter: str = field(repr=False)
    steps: tuple[StepSettings, ...] = ()
    load: LoadSettings = field(default_factory=LoadSettings)
    batch: BatchSettings = field(default_factory=BatchSettings)
    schema_changes: Evolution = Evolution.EVOLVE
    apply: Literal["parallel", "serial"] = "parallel"
    on_cascade: Literal["refuse", "reread", "ignore"] = "refuse"
    shards: int = 1
    shard: Shard | None = None
    errors: ErrorSettings = field(default_factory=ErrorSettings)
    loops: LoopSettings = field(default_factory=LoopSettings)
    spark: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None

    def make_steps(self) -> list[Step]:
        """Create the steps, in the order written. Raises OptionInvalid, DependencyMissing."""
        return [step.make() for step in self.steps]

    @property
    def sink(self) -> SinkSettings:
        """The only sink. Raises OptionInvalid if there are several: choose one with `of_sink`."""
        if len(self.sinks) > 1:
            names = " or ".join(sink.name for sink in self.sinks)
            raise OptionInvalid(
                f"the pipeline {self.name} has several sinks; choose one with --sink", hint=f"--sink {names}"
            )
        return self.sinks[0]

    def of_sink(self, name: str | None) -> Self:
        """Return the settings of one sink: with its tables and a separate dead letter.

        None chooses the only sink. Raises OptionInvalid if there is no such sink, or if there are several
        sinks and no name is passed.
        """
        sinks = {sink.name: sink for sink in self.sinks}
        if name is not None and name not in sinks:
            known = ", ".join(filter(None, sinks)) or "one sink without a name"
            raise OptionInvalid(f"the pipeline has no sink {name!r}", hint=f"It has {known}")
        sink = self.sink if name is None else sinks[name]
        return self if len(self.sinks) == 1 else self.narrowed_to(sink)

    def each_sink(self, name: str | None = None) -> list[Self]:
        """Return the settings of a sink, or of every sink. Raises OptionInvalid for an unknown name."""
        names = [sink.name or None for sink in self.sinks] if name is None else [name]
        return [self.of_sink(sink) for sink in names]

    def narrowed_to(self, sink: SinkSettings) -> Self:
        """Return these settings reduced to one sink, with its tables and a separate dead letter."""
        return replace(
            self,
            sinks=(sink,),
            sources=tuple(
                replace(source, tables=NarrowedPatterns(source.tables, sink.tables))
                for source in self.sources
            ),
            dead_letter=f"{self.dead_letter}/{sink.name}",
        )

    def each_shard(self) -> list[Self]:
        """Return the settings of each shard; these settings themselves if the pipeline has only one shard."""
        if self.shards == 1 or self.shard is not None:
            return [self]
        return [self.of_shard(shard) for shard in Shard.all_of(self.shards)]

    def of_shard(self, shard: Shard) -> Self:
        """Return the settings of a shard: its tables, and its share of the limits that apply to each
        server.
        """
        if shard.count == 1:
            return replace(self, shards=1)
        steps = [step.settings for step in self.steps]
        limits = {
            name: max(1, limit // shard.count)
            for name in ("rate", "parallel")
            if (limit := getattr(self.load, name)) is not None
        }
        return replace(
            self,
            shards=shard.count,
            shard=shard,
            sources=tuple(
                replace(
                    source, tables=NarrowedPatterns(source.tables, ShardTables(shard, steps, source.tables))
                )
                for source in self.sources
            ),
            load=self.load.model_copy(update=limits),
        )

    def make_sink(self) -> Sink:
        """Create the sink without connecting. Raises OptionInvalid, DependencyMissing."""
        sink = self.sink.make()
        sink.pipeline = self.name
        return sink

    def source(self, name: str) -> PipelineSource:
        """Return a source by its name. Raises KeyError."""
        for source in self.sources:
            if source.name == name:
                return source
        raise KeyError(name)


def load_pipeline(path: str | Path, environment: Mapping[str, str] | None = None) -> PipelineSettings:
    """Parse and validate a pipeline file. Raises OptionInvalid with every problem and its line.

    Relative paths in the file are relative to the working directory. By default the state and the dead letter
    are next to the file. `${NAME}` is read from `environment`, or from the process's environment if that is
    None.
    """
    path = Path(path)
    document = read_yaml(path, os.environ if environment is None else environment, _HINT_FILE)
    return _Reading(document, str(path), path.absolute()).settings()


def place_of_state(path: str | Path, document: Document | None = None) -> StatePlace:
    """Return where a pipeline stores its state and whether it begins with a load, according to its file or to
    `document`.

    Works without the pipeline's secrets, which may be available only to the process that runs it. Raises
    OptionInvalid.
    """
    path = Path(path)
    document = document or read_yaml(path, os.environ, _HINT_FILE)
    return _Reading(document, str(path), path.absolute()).place_of_state()


def pipeline_of_values(value: Mapping[str, Any], folder: str | Path = ".") -> PipelineSettings:
    """Validate a pipeline passed as plain values. Raises OptionInvalid with every problem.

    The values may include what a file cannot hold, such as a function of the `python` step. By default the
    state and the dead letter are in `folder`.
    """
    document = Document(value=dict(value))
    return _Reading(document, "", None, Path(folder).absolute()).settings()


class _Reading:
    """Turns one document into settings. Collects problems and raises them together at the end."""

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
        sinks = self._sinks(whole, section.apply if section is not None else None)
        sources = self._sources(section) if section is not None else []
        name = (section.name or self._name_of_file()) if section is not None else ""
        if self._problems or section is None:
            raise self._refused()
        settings = PipelineSettings(
            name=name,
            state=self._state_url(section.state),
            sources=tuple(sources),
            sinks=tuple(sinks),
            dead_letter=self._dead_letter(section.dead_letter, name),
            steps=tuple(steps),
            load=section.load,
            batch=section.batch,
            schema_changes=section.schema_changes,
            apply=section.apply,
            on_cascade=section.on_cascade,
            shards=section.shards,
            errors=section.errors,
            loops=section.loops,
            spark=section.spark,
            path=self._path,
        )
        return settings.narrowed_to(sinks[0]) if len(sinks) == 1 and sinks[0].name else settings

    def place_of_state(self) -> StatePlace:
        value = self._document.value
        whole = value if isinstance(value, dict) else {}
        fields = {"name": whole.get("name"), "state": whole.get("state")}
        self._problems = [
            problem for problem in self._problems if not problem.path or problem.path[0] in fields
        ]
        for name, setting in fields.items():
            if not isinstance(setting, str | None):
                self._add_problem((name,), "it must be a text")
        if self._problems:
            raise self._refused()
        load = whole.get("load")
        mode = load.get("mode") if isinstance(load, dict) else load
        return StatePlace(
            str(fields["name"] or self._name_of_file()), self._state_url(fields["state"]), mode != "none"
        )

    def _refused(self) -> PenstockError:
        if self._shown:
            return refuse(self._shown, self._document, self._problems, _HINT)
        lines = {
            f"{'.'.join(map(str, problem.path))}: {problem.message}".removeprefix(": ")
            for problem in self._problems
        }
        count = "a problem" if len(lines) == 1 else f"{len(lines)} problems"
        return OptionInvalid(
            "\n  ".join([f"the pipeline has {count}:", *sorted(lines)]),
            hint="See docs/reference/pipelines.md for every setting",
        )

    def _section(self, kind: type[Any], value: Any, place: ValuePath) -> Any:
        """Return a section, None if it is invalid; its problems are then recorded."""
        try:
            return kind.model_validate({} if value is None else value)
        except ValidationError as invalid:
            problems = translate_validation_errors(invalid.errors(include_url=False), kind)
            self._problems += [Problem((*place, *problem.path), problem.message) for problem in problems]
            return None

    # --- Sources ----------------------------------------------------------------------------

    def _sources(self, section: PipelineSection) -> list[PipelineSource]:
        sources: list[PipelineSource] = []
        for index, section_of_source in enumerate(section.all_sources()):
            place: ValuePath = ("sources", index) if section.sources else ("source",)
            try:
                source = _source_of(section_of_source)
            except ValueError as problem:
                self._add_problem(place, str(problem))
                continue
            if any(other.name == source.name for other in sources):
                self._add_problem((*place, "name"), f"another source is named {source.name!r} already")
            sources.append(source)
        return sources

    # --- Steps and sink ---------------------------------------------------------------------

    def _steps(self, value: Any, policy: str | None) -> list[StepSettings]:
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            self._add_problem(("steps",), "write a list: - filter: {where: ...}")
            return []
        steps = []
        for index, step in enumerate(value):
            variant = self._parse_variant(step, ("steps", index), step_seam.settings_of, step_seam.verbs())
            if variant is None:
                continue
            verb, settings = variant
            # A step that does not set on_error uses the pipeline's policy.
            if policy is not None and getattr(settings, "on_error", "") is None:
                settings = settings.model_copy(update={"on_error": policy})
            steps.append(StepSettings(verb, settings))
        return steps

    def _sinks(self, whole: Mapping[str, Any], apply: str | None) -> list[SinkSettings]:
        several = whole.get("sinks")
        if several is None:
            sink = self._sink(whole.get("sink"), ("sink",), apply)
            return [] if sink is None else [sink]
        if whole.get("sink") is not None:
            self._add_problem(("sinks",), "write either sink or sinks")
        if not isinstance(several, Mapping) or not several:
            self._add_problem(("sinks",), "write sinks by name: lake: {delta: {path: /lake/shop}}")
            return []
        sinks = [self._named_sink(str(name), value, apply) for name, value in several.items()]
        whole_sinks = [sink for sink in sinks if sink is not None]
        for number, sink in enumerate(whole_sinks):
            for other in whole_sinks[:number]:
                if sink.kind == other.kind and may_share_target(sink.settings, other.settings):
                    what = (
                        f"it may write to a target of {other.name}, and each would delete rows of the other:"
                        " give them different endpoints, or names that begin differently"
                    )
                    self._add_problem(("sinks", sink.name), what)
        return whole_sinks

    def _named_sink(self, name: str, value: Any, apply: str | None) -> SinkSettings | None:
        place: ValuePath = ("sinks", name)
        try:
            validate_name(name)
        except ValueError as problem:
            self._add_problem(place, str(problem))
        tables = TablePatterns()
        if isinstance(value, Mapping):
            names = set(SinkTablesSection.model_fields)
            chosen = {key: setting for key, setting in value.items() if key in names}
            section = self._section(SinkTablesSection, chosen, place)
            if section is not None:
                tables = TablePatterns(list(section.tables), list(section.exclude))
            value = {key: setting for key, setting in value.items() if key not in names}
        sink = self._sink(value, place, apply)
        return None if sink is None else replace(sink, name=name, tables=tables)

    def _sink(self, value: Any, place: ValuePath, apply: str | None) -> SinkSettings | None:
        if value is None:
            self._add_problem(place, f"it is missing: write {place[-1]}: {{stdout: }}")
            return None
        variant = self._parse_variant(value, place, sink_seam.settings_of, sink_seam.kinds())
        if variant is None:
            return None
        kind, settings = variant
        # A sink that supports several apply modes uses the pipeline's apply mode, unless it sets its own.
        if apply is not None and getattr(settings, "apply", "") is None:
            settings = settings.model_copy(update={"apply": apply})
        return SinkSettings(kind, settings)

    def _parse_variant(
        self, value: Any, place: ValuePath, settings_of: Any, known: Sequence[str]
    ) -> tuple[str, Section] | None:
        """Return a variant's name and settings, written as `name` or `name: {...}`."""
        if isinstance(value, str):
            value = {value: None}
        if not isinstance(value, Mapping) or len(value) != 1:
            self._add_problem(place, f"write one name and what belongs to it; known: {', '.join(known)}")
            return None
        ((name, own_settings),) = value.items()
        try:
            kind = settings_of(str(name))
        except OptionInvalid as problem:
            self._add_problem((*place, str(name)), f"{problem.message}. {problem.hint}")
            return None
        settings = self._section(kind, own_settings, (*place, str(name)))
        if settings is None:
            return None
        try:
            return str(name), _with_secrets(settings)
        except ValueError as problem:
            self._add_problem((*place, str(name)), str(problem))
            return None

    # --- Names and paths --------------------------------------------------------------------

    def _add_problem(self, place: ValuePath, what: str) -> None:
        self._problems.append(Problem(place, what))

    def _name_of_file(self) -> str:
        if self._path is None:
            self._add_problem(("name",), "it is missing")
            return ""
        return self._path.name.split(".")[0] or "pipeline"

    def _state_url(self, url: str | None) -> str:
        if url is None:
            return f"sqlite://{quote(str(self._folder / _STATE_FILE))}"
        scheme, _, rest = url.partition(":")
        return f"sqlite://{os.path.abspath(rest.removeprefix('//'))}" if scheme == "sqlite" else url

    def _dead_letter(self, location: str | None, name: str) -> str:
        if location is None:
            return str(self._folder / f"{name}.dead-letter")
        return location if "://" in location else os.path.abspath(location)


def _with_secrets(settings: Section) -> Section:
    """Return settings with their secrets resolved, because remote tasks do not have the files or variables
    that hold them.
    """
    resolved: dict[str, Any] = {}
    for name in type(settings).model_fields:
        stem = name.removesuffix("_env")
        if stem == name or not hasattr(settings, stem):
            continue
        secret = one_secret(
            getattr(settings, stem), getattr(settings, f"{stem}_file", None), getattr(settings, name), stem
        )
        if secret is not None:
            resolved |= {stem: secret, name: None}
            resolved |= {f"{stem}_file": None} if hasattr(settings, f"{stem}_file") else {}
    return settings.model_copy(update=resolved) if resolved else settings


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
