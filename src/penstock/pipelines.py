# SPDX-License-Identifier: Apache-2.0
"""Pipelines in a program: the same settings as in a file, as Python values.

import penstock

penstock.Pipeline(
    source="mysql://repl@db1:3306",
    tables=["shop.*"],
    steps=[{"filter": "status <> 'draft'"}, enrich],
    sink={"delta": {"path": "/lake/shop"}},
).run(spark)
"""

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from penstock.errors import OptionInvalid
from penstock.pipeline.settings import PipelineSettings, load_pipeline, pipeline_of_values

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.engine.driver import Driver
    from penstock.engine.run import PipelineRun
    from penstock.engine.sink_runs import SinkRuns
    from penstock.pipeline.state import Checkpoint

CAUGHT_UP = "caught-up"

_UNNAMED = "pipeline"

Report = Callable[[Mapping[str, Any]], None]


class Pipeline:
    """A source, steps and a sink, validated when it is created.

    Nothing is opened before `run`. `source` is a URL, a path, or the section `source` of a pipeline file; a
    list means several sources. `tables` and `exclude` are patterns for all sources. A step is a verb, a verb
    with its settings (`{"mask": {...}}`), or a function over Arrow batches, which is a shorthand for the step
    `python`. `sink` is a kind, or a kind with its settings. `name` identifies the pipeline in its state. The
    default name is derived from the sources, tables and sinks, and changes only when they change. The state
    and the dead letter are in `folder`, unless `settings` places them elsewhere. `settings` contains the
    other sections of a pipeline file, such as `load`, `errors`, and `sinks` in place of `sink`. Raises
    OptionInvalid, which lists every problem, and DependencyMissing.
    """

    def __init__(
        self,
        *,
        source: str | Path | Mapping[str, Any] | Sequence[str | Path | Mapping[str, Any]],
        sink: str | Mapping[str, Any] | None = None,
        steps: Sequence[str | Mapping[str, Any] | Callable[..., Any]] = (),
        tables: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        name: str | None = None,
        folder: str | Path = ".",
        **settings: Any,
    ) -> None:
        value: dict[str, Any] = {
            **settings,
            **_sources(source, tables, exclude),
            "steps": [{"python": {"function": step}} if callable(step) else step for step in steps],
            **({} if sink is None else {"sink": sink}),
            "name": name or _UNNAMED,
        }
        self.settings = pipeline_of_values(value, folder)
        if name is None:
            self.settings = pipeline_of_values(value | {"name": _name_of(self.settings)}, folder)
        self._running: Any = None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a pipeline file. Raises OptionInvalid with every problem and its line."""
        pipeline = cls.__new__(cls)
        pipeline.settings, pipeline._running = load_pipeline(path), None
        return pipeline

    def run(
        self,
        spark: "SparkSession | None" = None,
        *,
        local: bool = False,
        until: str | None = None,
        report: Report | None = None,
        told: Report | None = None,
    ) -> "Checkpoint | dict[str, Checkpoint]":
        """Load the tables and follow their changes until `stop`, or until "caught-up". Return the checkpoint,
        or with `sinks`, each sink's checkpoint by name.

        `spark` is a classic or Connect session; the default is this process's active session, or a new
        session on this host's cores. With `local` everything runs in this process, without Spark. `report` is
        called with plain values after each batch, during a batch that lasts longer than ten seconds, and with
        each error; `told` is its former name, for one version. Raises LeaseLost if another process runs the
        pipeline, DependencyMissing without PySpark, and the error that ended the run.
        """
        if until not in (None, CAUGHT_UP):
            raise OptionInvalid(f"until {until!r} is unknown", hint=f'Write until="{CAUGHT_UP}"')
        if local and spark is not None:
            raise OptionInvalid("local and a Spark session are both given", hint="Give one place to run")
        from penstock.engine.sink_runs import run_of

        driver = self._local() if local else self._on_spark(spark)
        report = _report_of(report, told)
        run = self._running = run_of(self.settings, driver, until_caught_up=until is not None, report=report)
        return run.run()

    @staticmethod
    def _local() -> "Driver":
        from penstock.local.driver import LocalDriver

        return LocalDriver()

    def _on_spark(self, spark: "SparkSession | None") -> "Driver":
        from penstock.spark.driver import SparkDriver
        from penstock.spark.session import session_for

        return SparkDriver(spark or session_for(self.settings.name, None, self.settings.spark))

    def relay(self, *, report: Report | None = None, told: Report | None = None) -> "PipelineRun | SinkRuns":
        """Return a run in this process; the caller starts it with `run`.

        The run waits while another process runs the pipeline. Deprecated: use `run(local=True)`. The next
        version removes this method.
        """
        from penstock.engine.sink_runs import run_of

        report = _report_of(report, told)
        run = self._running = run_of(self.settings, self._local(), report=report, standby=True)
        return run

    def preview(self) -> dict[str, Any]:
        """Return what would be read, prepared and written; with `sinks`, the preview of each sink is below
        `sinks` by name.

        Queries servers and sinks, and changes nothing.
        """
        from penstock.pipeline.preview import preview

        if len(self.settings.sinks) == 1:
            return preview(self.settings)
        sinks = {settings.sink.name: preview(settings) for settings in self.settings.each_sink()}
        return {"pipeline": self.settings.name, "sinks": sinks}

    def stop(self) -> None:
        """End the run after its current batch. Safe to call from threads and signal handlers."""
        if self._running is not None:
            self._running.stop()

    def __repr__(self) -> str:
        sources = ", ".join(source.name for source in self.settings.sources)
        kinds = ", ".join(sink.kind for sink in self.settings.sinks)
        return f"Pipeline({self.settings.name!r}: {sources} to {kinds})"


def _report_of(report: Report | None, told: Report | None) -> Report | None:
    """Return the function that receives reports, which callers may still pass as `told`. Raises TypeError if
    both are passed.
    """
    if told is None:
        return report
    if report is not None:
        raise TypeError("report and told are both given: told is the former name of report")
    # The warning names the caller of `run` or `relay`.
    warnings.warn("told is now report; the next version removes told", DeprecationWarning, stacklevel=3)
    return told


def _sources(source: Any, tables: Any, exclude: Any) -> dict[str, Any]:
    """Return the sections `source` and `sources`."""
    shared = {name: value for name, value in (("tables", tables), ("exclude", exclude)) if value is not None}
    if isinstance(source, str | Path | Mapping):
        return {"source": {**shared, **_source(source)}}
    sources = {"sources": [_source(each) for each in source]}
    return sources | {"source": shared} if shared else sources


def _source(source: Any) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    text = str(source)
    return {"url": text} if "://" in text else {"path": text}


def _name_of(settings: PipelineSettings) -> str:
    """Return a name that is unique to the sources, tables and sinks."""
    # The representation of a secret does not contain its value, so the name does not reveal it.
    sources_text = repr([(source.name, source.tables) for source in settings.sources])
    sources_text += "".join(repr(sink.settings) for sink in settings.sinks)
    return f"{settings.sinks[0].kind}-{hashlib.sha256(sources_text.encode()).hexdigest()[:10]}"
