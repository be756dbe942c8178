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


class Pipeline:
    """Source, steps and sink, proved when it is made; nothing is opened before `run`.

    `source` is a URL, a path, or what stands below `source` in a file; a list of these are several sources.
    `tables` and `exclude` are patterns for all of them. A step is a verb, a verb with what it is told
    (`{"mask": {...}}`), or a function over Arrow batches, which stands for the step `python`. `sink` is a
    kind, or a kind with what it is told. `name` names the pipeline in its state; without one its name is
    made of source and sink, the same whenever they are. `folder` is where the state and the dead letter lie
    unless `settings` says otherwise: those are the further sections of a file, such as `load`, `errors`, and
    `sinks` in place of `sink`.

    Raises OptionInvalid, which tells every problem; DependencyMissing.
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
            "steps": [{"python": {"function": one}} if callable(one) else one for one in steps],
            **({} if sink is None else {"sink": sink}),
            "name": name or _UNNAMED,
        }
        made = pipeline_of_values(value, folder)
        if name is None:
            made = pipeline_of_values(value | {"name": _name_of(made)}, folder)
        self.settings = made
        self._running: Any = None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a pipeline's file. Raises OptionInvalid, which tells every problem with its line."""
        made = cls.__new__(cls)
        made.settings, made._running = load_pipeline(path), None
        return made

    def run(
        self,
        spark: "SparkSession | None" = None,
        *,
        local: bool = False,
        until: str | None = None,
        told: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> "Checkpoint | dict[str, Checkpoint]":
        """Load the tables and follow their changes, until `stop`, or until "caught-up"; return what is done:
        with `sinks`, for each sink by name.

        `spark` is a session, classic or Connect; without one this process's own, or one on this host's cores.
        With `local` everything runs in this process, and no Spark is needed. `told` is called with plain
        values after each batch, during one that lasts longer than ten seconds, and with an error. Raises
        LeaseLost where another process runs the pipeline, DependencyMissing without PySpark, and the error
        that ended it.
        """
        if until not in (None, CAUGHT_UP):
            raise OptionInvalid(f"until {until!r} is unknown", hint=f'The one end there is is "{CAUGHT_UP}"')
        if local and spark is not None:
            raise OptionInvalid("local and a Spark session are both given", hint="Give one place to run")
        from penstock.engine.sink_runs import run_of

        driver = self._local() if local else self._on_spark(spark)
        run = run_of(self.settings, driver, until_caught_up=until is not None, report=told)
        self._running = run
        return run.run()

    @staticmethod
    def _local() -> "Driver":
        from penstock.local.driver import LocalDriver

        return LocalDriver()

    def _on_spark(self, spark: "SparkSession | None") -> "Driver":
        from penstock.spark.driver import SparkDriver
        from penstock.spark.session import session_for

        return SparkDriver(spark or session_for(self.settings.name, None, self.settings.spark))

    def relay(self, *, told: Callable[[Mapping[str, Any]], None] | None = None) -> "PipelineRun | SinkRuns":
        """Return a run in this process, which `run` starts. It waits while another process runs the pipeline.

        `run(local=True)` replaces it: this name goes with the next version.
        """
        from penstock.engine.sink_runs import run_of

        run = self._running = run_of(self.settings, self._local(), report=told, standby=True)
        return run

    def preview(self) -> dict[str, Any]:
        """Return what would be read, prepared and written; with `sinks`, below `sinks` for each sink by name.

        Asks servers and sinks, changes nothing.
        """
        from penstock.pipeline.preview import preview

        if len(self.settings.sinks) == 1:
            return preview(self.settings)
        sinks = {settings.sink.name: preview(settings) for settings in self.settings.each_sink()}
        return {"pipeline": self.settings.name, "sinks": sinks}

    def stop(self) -> None:
        """End what runs, behind its batch. Safe for threads and signals."""
        if self._running is not None:
            self._running.stop()

    def __repr__(self) -> str:
        sources = ", ".join(one.name for one in self.settings.sources)
        kinds = ", ".join(sink.kind for sink in self.settings.sinks)
        return f"Pipeline({self.settings.name!r}: {sources} to {kinds})"


def _sources(source: Any, tables: Any, exclude: Any) -> dict[str, Any]:
    """Return the sections `source` and `sources`."""
    shared = {name: value for name, value in (("tables", tables), ("exclude", exclude)) if value is not None}
    if isinstance(source, str | Path | Mapping):
        return {"source": {**shared, **_source(source)}}
    found = {"sources": [_source(one) for one in source]}
    return found | {"source": shared} if shared else found


def _source(source: Any) -> dict[str, Any]:
    if isinstance(source, Mapping):
        return dict(source)
    text = str(source)
    return {"url": text} if "://" in text else {"path": text}


def _name_of(settings: PipelineSettings) -> str:
    """Return a name that another source, other tables or another sink do not have."""
    # No representation has a secret in it, so neither has the name.
    sources_text = repr([(source.name, source.tables) for source in settings.sources])
    sources_text += "".join(repr(sink.settings) for sink in settings.sinks)
    return f"{settings.sinks[0].kind}-{hashlib.sha256(sources_text.encode()).hexdigest()[:10]}"
