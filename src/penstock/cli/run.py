# SPDX-License-Identifier: Apache-2.0
"""`penstock run`: run a pipeline on Spark or in this process."""

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import structlog
import typer

from penstock.cli.shared.child import child_command
from penstock.cli.shared.rendering import counted
from penstock.cli.shared.signals import stopped_by_signals
from penstock.errors import CoordinationLost, DependencyMissing, OptionInvalid
from penstock.telemetry.job_address import ADDRESS_FILE_VARIABLE, ANY_ADDRESS

if TYPE_CHECKING:
    from penstock.engine.driver import Driver
    from penstock.engine.run import PipelineRun
    from penstock.engine.sink_runs import SinkRuns
    from penstock.local.shard_runs import ShardRuns
    from penstock.pipeline.settings import PipelineSettings
    from penstock.pipeline.shards import Shard
    from penstock.telemetry.readings import Readings

CAUGHT_UP = "caught-up"
# A value of --until for the process of a shard: run to the position where the number of shards changes.
_BARRIER = "barrier"

Report = Callable[[Mapping[str, Any]], None]

# This option is set only for the process of a shard.
_Until = Annotated[
    str | None,
    typer.Option(
        "--until",
        metavar=CAUGHT_UP,
        help="Stop once every change logged before the full load finished has been written.",
    ),
]
_ShardOption = Annotated[str | None, typer.Option(hidden=True, help="Run this shard alone, such as 1-of-4.")]


def run(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="pipeline.yaml", help="The pipeline file; see docs/guides/pipelines.md."),
    ] = None,
    until: _Until = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be loaded, prepared and written, then exit.")
    ] = False,
    master: Annotated[
        str | None,
        typer.Option(
            help="Spark's master: local[*] or spark://host:7077; or a Spark Connect server, sc://host:15002."
        ),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Run in this process, without Spark and Java.")
    ] = False,
    standby: Annotated[
        bool, typer.Option("--standby", help="Wait while another process runs the pipeline, then take over.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per batch.")] = False,
    metrics: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve /metrics, /livez and /readyz here.")
    ] = None,
    otlp: Annotated[
        str | None, typer.Option(metavar="URL", help="Push the metrics to this OpenTelemetry collector.")
    ] = None,
    shard: _ShardOption = None,
    schema: Annotated[
        bool, typer.Option("--json-schema", help="Print the file's JSON Schema, for editors, then exit.")
    ] = False,
) -> None:
    """Load a pipeline's tables, then apply their changes to its sink until SIGTERM."""
    from penstock.engine.beginning import refuse_paused
    from penstock.pipeline.settings import load_pipeline
    from penstock.pipeline.settings_schema import json_schema

    if schema:
        typer.echo(json.dumps(json_schema(), indent=2))
        return
    if file is None:
        raise OptionInvalid("no pipeline is named", hint="Run: penstock run pipeline.yaml")
    if until not in (None, CAUGHT_UP, *(() if shard is None else (_BARRIER,))):
        raise OptionInvalid(f"--until {until} is unknown", hint=f"Write --until {CAUGHT_UP}")
    settings = load_pipeline(file)
    if dry_run:
        _print_plan(settings, as_json=as_json)
        return
    if local and master is not None:
        raise OptionInvalid("--local and --master are both given", hint="Name one place to run")
    settings = settings if shard is None else _take_shard(settings, shard)
    # Check for a pause before Spark starts, because its start takes seconds.
    if (paused := _pause_reason(settings)) is not None:
        refuse_paused(settings, paused, until_caught_up=until is not None)
        return
    summary = _Summary(file)
    stop = threading.Event()
    report_line = _print_line if as_json else summary.add
    with stopped_by_signals(stop.set), _metered(metrics, otlp, report_line, settings) as report:
        options = _RunOptions(file, stop, report, until, standby)
        shards = _shard_runs(settings, options) if local and shard is None else None
        pipeline_run = shards or options.run_of(settings, local=local, master=master)
        # Objects loaded so far live until the end, so the garbage collector need not visit them again.
        gc.freeze()
        pipeline_run.run()
    if not as_json:
        # Print to standard error, because a sink may have written rows to standard output.
        typer.echo(summary.text(settings.name, "stopped" if stop.is_set() else "caught up"), err=True)


@contextmanager
def _metered(
    address: str | None, otlp: str | None, report_line: Report, settings: "PipelineSettings"
) -> Iterator[Report]:
    """Publish the metrics of a run inside the block. Yield the object that the run reports to."""
    # A worker that serves the metrics of its jobs sets this variable. The processes of shards must not
    # inherit it.
    address_file = os.environ.pop(ADDRESS_FILE_VARIABLE, None)
    if address is None and otlp is None and address_file is None:
        yield report_line
        return
    from penstock.coordinate.store import without_password
    from penstock.pipeline.waiting_letters import counting_letters
    from penstock.telemetry.pipelines import PipelineMeter
    from penstock.telemetry.publish import publish_metrics

    meter = PipelineMeter(store=without_password(settings.state))

    def report(progress: Mapping[str, Any]) -> None:
        meter.observe(progress)
        report_line(progress)

    if address_file is not None:
        address = address or ANY_ADDRESS
    with ExitStack() as stack:
        read_letters = stack.enter_context(counting_letters(settings))

        def read(readings: "Readings") -> None:
            meter.read(readings)
            read_letters(readings)

        published = publish_metrics(read, address=address, otlp=otlp, is_ready=meter.is_ready)
        bound = stack.enter_context(published)
        if address_file is not None:
            Path(address_file).write_text(str(bound), encoding="utf-8")
        yield report


class _Summary:
    """Summarizes a run from its reports. Only one thread at a time sends reports."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._began = time.monotonic()
        self._batches = self._written = 0
        # The latest counts reported for each sink and shard. A count restarts at 0 when the run of its sink
        # or shard restarts.
        self._loaded: dict[tuple[str | None, str | None], int] = {}
        self._rejected: dict[tuple[str | None, str | None], int] = {}
        self._positions: dict[str, str] = {}

    def add(self, report: Mapping[str, Any]) -> None:
        """Count a completed batch. Reports of other states repeat the last batch."""
        if report["state"] not in ("loading", "running") or "written" not in report:
            return
        sink = report.get("sink"), report.get("shard")
        self._batches += 1
        self._written += report["written"]
        self._loaded[sink] = report.get("rows_loaded", self._loaded.get(sink, 0))
        self._rejected[sink] = report["rejected"]
        of_shard = f" (shard {report['shard']})" if "shard" in report else ""
        self._positions |= {
            f"{source}{of_shard}": position for source, position in report.get("positions", {}).items()
        }

    def text(self, name: str, ending: str) -> str:
        """Return the final message of the run."""
        batches = f"{self._batches:,} {'batch' if self._batches == 1 else 'batches'}"
        seconds = time.monotonic() - self._began
        text = f"{name} {ending} after {seconds:.1f} s: {batches}, {counted(self._written, 'row')} written"
        if loaded := sum(self._loaded.values()):
            text += f"; {counted(loaded, 'row')} read by the full load"
        for source, position in self._positions.items():
            text += f"\n  {source} at {position.partition(' ')[0]}"
        if rejected := sum(self._rejected.values()):
            rows = counted(rejected, "row")
            text += f"\n  {rows} skipped or put aside: penstock pipelines dead-letters {self._file}"
        return text


def _spark_driver(settings: "PipelineSettings", master: str | None) -> "Driver":
    try:
        from penstock.spark.driver import SparkDriver
        from penstock.spark.session import session_for
    except DependencyMissing as problem:
        raise DependencyMissing(
            problem.message, hint="Run: pip install 'penstock[spark]'; or without Spark: penstock run --local"
        ) from problem
    return SparkDriver(session_for(settings.name, master, settings.spark))


@dataclass(frozen=True)
class _RunOptions:
    """How a pipeline is run, in this process or on Spark."""

    file: Path
    stop: threading.Event
    report: Report
    until: str | None
    standby: bool

    @property
    def until_caught_up(self) -> bool:
        """Whether the run ends by itself once it has caught up."""
        return self.until is not None

    def run_of(
        self, settings: "PipelineSettings", *, local: bool, master: str | None
    ) -> "PipelineRun | SinkRuns":
        """Return the run of the pipeline, in this process or on Spark."""
        from penstock.engine.sink_runs import run_of
        from penstock.local.driver import LocalDriver

        return run_of(
            settings,
            # The process of a shard uses only a part of the host, because the processes of the other shards
            # run there too.
            LocalDriver.of_share(settings.shards) if local else _spark_driver(settings, master),
            until_caught_up=self.until_caught_up,
            to_barrier=self.until == _BARRIER,
            stop=self.stop,
            report=self.report,
            standby=self.standby,
        )

    def shard_command(self, shard: "Shard", *, to_barrier: bool = False) -> list[str]:
        """Return the command line of the process of a shard."""
        words = [*child_command(), "run", str(self.file), "--local", "--json", "--shard", str(shard)]
        if to_barrier or self.until_caught_up:
            return [*words, "--until", _BARRIER if to_barrier else CAUGHT_UP]
        return [*words, "--standby"] if self.standby else words


def _shard_runs(settings: "PipelineSettings", options: _RunOptions) -> "ShardRuns | None":
    """Return the runner of a pipeline's shards, or None if the pipeline has no shards. Take over from earlier
    shards first.
    """
    if settings.shards == 1 and not _had_shards(settings):
        return None
    from penstock.local.shard_runs import ShardRuns

    runs = ShardRuns(
        settings,
        options.shard_command,
        until_caught_up=options.until_caught_up,
        stop=options.stop,
        report=options.report,
    )
    if settings.shards > 1:
        return runs
    runs.agree_on_shards()
    return None


def _had_shards(settings: "PipelineSettings") -> bool:
    """Return whether the progress of a pipeline is recorded for several shards."""
    from penstock.pipeline.state import PipelineState

    if len(settings.sinks) > 1:
        return False
    try:
        with closing(PipelineState.of(settings)) as state:
            return state.shards.count() > 1
    except CoordinationLost:
        # Ignore the error: the run itself waits for the store, and then refuses progress that is recorded for
        # several shards.
        return False


def _take_shard(settings: "PipelineSettings", shard: str) -> "PipelineSettings":
    """Return the settings of a shard, and add the shard's name to all further log lines."""
    from penstock.pipeline.shards import Shard

    def add_shard(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
        return {**event, "shard": shard}

    structlog.configure(processors=[add_shard, *structlog.get_config()["processors"]])
    return settings.of_shard(Shard.parse(shard))


def _pause_reason(settings: "PipelineSettings") -> str | None:
    """Return why a pipeline is paused; None if it is not paused or the state store does not answer."""
    from penstock.pipeline.state import PipelineState

    try:
        with closing(PipelineState.open(settings.state, settings.name)) as state:
            return state.pause_message()
    except CoordinationLost:
        # Ignore the error: the run itself waits for the store.
        return None


def _print_line(progress: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(progress) + "\n")
    sys.stdout.flush()


def _print_plan(settings: "PipelineSettings", *, as_json: bool) -> None:
    from penstock.engine.beginning import refuse_undividable
    from penstock.pipeline.preview import preview

    if settings.shards > 1:
        refuse_undividable(settings)
    plans = [preview(sink_settings) for sink_settings in settings.each_sink()]
    if as_json:
        for plan in plans:
            _print_line(plan)
        return
    typer.echo(f"pipeline    {settings.name}")
    for plan in plans:
        _print_plan_of_sink(plan)


def _print_plan_of_sink(plan: Mapping[str, Any]) -> None:
    for source in plan["sources"]:
        tables = source["tables"]
        size = "its tables are known once it is read" if tables is None else counted(len(tables), "table")
        typer.echo(f"source      {source['name']}: {size}")
    name = f"{plan['sink_name']}: " if plan["sink_name"] else ""
    typer.echo(f"sink        {name}{plan['sink']} ({plan['delivery']})")
    for finding in plan["findings"]:
        mark = "stops it" if finding["fatal"] else "to know"
        hint = f"; {finding['mend']}" if finding["mend"] else ""
        typer.echo(f"{mark:<12}{finding['subject']}: {finding['what']}{hint}")
    for table in plan["targets"]:
        size = f"{counted(table['chunks'], 'chunk')}, {counted(table['rows'], 'row')}"
        typer.echo(f"{table['source']} -> {table['target']}: {size}")
        for statement in table["statements"]:
            typer.echo(f"    {statement}")
