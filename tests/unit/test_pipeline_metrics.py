# SPDX-License-Identifier: Apache-2.0
"""The metrics of pipelines and of members of subscriptions, as their own processes publish them."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.client.following import FollowingStatus
from penstock.client.readings import read_member
from penstock.engine import progress
from penstock.errors import OptionInvalid, PenstockError
from penstock.model import Position
from penstock.pipeline import waiting_letters
from penstock.pipeline.dead_letter import purge, purgeable_letters
from penstock.pipeline.state import PipelineState
from penstock.pipeline.waiting_letters import counting_letters
from penstock.sinks.files.sink import FilesSink
from penstock.sinks.sink import BatchMark, Receipt
from penstock.telemetry import process, publish
from penstock.telemetry.pipelines import PipelineMeter
from penstock.telemetry.publish import publish_metrics
from penstock.telemetry.readings import Readings, Report
from tests.support.binlog.forged_log import NOTE_IDS, write_forged_log
from tests.support.daemon.scraping import otlp_collector, samples
from tests.support.pipeline.local_runs import notes_pipeline, run_here, run_sinks_here
from tests.support.pipeline.rejected_rows import reject_row
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until

ANYWHERE = "127.0.0.1:0"
WAITING = {"pipeline": "shop", "state": "waiting for changes"}
BATCH = {
    "pipeline": "shop",
    "state": "running",
    "rows": 12,
    "loaded": 2,
    "written": 11,
    "outdated": 1,
    "bytes": 900,
    "batch_rejected": 3,
    "filtered": 1,
    "operations": {
        "read": {"insert": 7, "update": 2, "delete": 1},
        "dead": {"update": 1},
        "written": {"insert": 8},
    },
    "phases": {"read": 0.2, "steps": 0.1, "write": 0.1, "commit": 0.2, "record": 0.01},
    "tables": {"loading": 1, "loaded": 2, "stopped": 0},
    "chunks": 10,
    "chunks_done": 4,
    "load_ends_in_seconds": 60,
    "load_started_us": 1_699_999_000_000_000,
    "schema_changes": {"applied": 1, "refused": 2},
    "positions": {"shop": "mysql-bin.000007:1500 after 3e11fa47-71ca-11e1-9e33-c80aa9429562:1-9"},
    "heads": {"shop": "mysql-bin.000007:9000"},
    "lag_seconds": 30.0,
}


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def get(address: str | None, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=WAIT_SECONDS_MAX) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as problem:
        with problem:
            return problem.code, problem.read().decode()


def value(meter: PipelineMeter, name: str, **labels: str) -> float | None:
    readings = Readings()
    meter.read(readings)
    wanted = {"pipeline": "shop", "sink": "", **labels}.items()
    values = [number for key, number in readings.values(name).items() if wanted <= dict(key).items()]
    return values[0] if values else None


def test_metrics_of_a_run_are_its_rows_batches_and_position(tmp_path: Path) -> None:
    meter = PipelineMeter()
    settings = notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    with publish_metrics(meter.read, address=ANYWHERE, is_ready=meter.is_ready) as address:
        run_here(settings, report=meter.observe)
        status, text = get(address, "/metrics")
        assert get(address, "/readyz") == (200, "running: ok\n")
        assert get(address, "/livez") == (200, "alive: ok\n")
        assert get(address, "/")[0] == 404
    values = samples(text)
    assert status == 200
    # Label values are sorted by label name.
    assert values["penstock_pipeline_rows_total", "insert", "notes", "", "", "read"] == len(NOTE_IDS)
    assert values["penstock_pipeline_rows_total", "insert", "notes", "", "", "written"] == len(NOTE_IDS)
    assert values["penstock_pipeline_batches_total", "notes", "", ""] == 2
    assert values["penstock_pipeline_batch_seconds_count", "commit", "notes", "", ""] == 2
    assert values["penstock_pipeline_state", "notes", "", "", "running"] == 1
    assert values["penstock_pipeline_lag_seconds", "notes", "", ""] == 0, "every change is in the target"
    assert values["penstock_pipeline_binlog_position", "notes", "", "", "shop"] > 0
    assert values["penstock_pipeline_source_aside", "notes", "", "", "shop"] == 0
    assert values["process_cpu_seconds_total",] > 0


def test_lease_of_a_run_is_held_until_it_fails(tmp_path: Path) -> None:
    meter = PipelineMeter(store="sqlite:///state.db")
    run_here(notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}}), report=meter.observe)
    labels = (("store", "sqlite:///state.db"), ("kind", "pipeline"), ("work", "notes"))

    def held() -> dict[Any, float]:
        readings = Readings()
        meter.read(readings)
        return dict(readings.values("penstock_lease_held"))

    assert held() == {labels: 1}
    problem = {"pipeline": "notes", "error": "LeaseLost", "what": "another process runs the pipeline"}
    meter.observe({**problem, "state": "retrying", "lease_held": False})
    assert held() == {labels: 0}
    meter.observe({**problem, "state": "failed", "lease_held": True})
    assert held() == {}, "the run releases it"


def test_waiting_dead_letters_are_counted_per_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_letters, "_PAUSE_SECONDS", 0.01)
    sinks = {name: {"files": {"path": str(tmp_path / name)}} for name in ("lake", "audit")}
    settings = notes_pipeline(tmp_path, sinks=sinks)
    lake = settings.of_sink("lake")

    def waiting(read: Report) -> dict[str, float]:
        readings = Readings()
        read(readings)
        values = readings.values("penstock_pipeline_dead_letters")
        return {dict(labels)["sink"]: number for labels, number in values.items()}

    letter = reject_row(lake)
    with counting_letters(settings) as read:
        wait_until(lambda: waiting(read) == {"lake": 1, "audit": 0})
        purge(lake, purgeable_letters(lake, [letter]), user="dba")
        wait_until(lambda: waiting(read) == {"lake": 0, "audit": 0})
        Path(lake.dead_letter).rename(tmp_path / "moved")
        Path(lake.dead_letter).write_text("a file where the folder has to be")
        wait_until(lambda: waiting(read) == {"audit": 0})


def test_revision_of_an_installation_from_a_repository_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = {"url": "https://example.com/penstock", "vcs_info": {"vcs": "git", "commit_id": "3f2a"}}
    for text, revision in ((json.dumps(recorded), {"revision": "3f2a"}), ('{"url": "x"}', {}), (None, {})):
        installed = SimpleNamespace(read_text=lambda _, text=text: text)
        monkeypatch.setattr(process, "distribution", lambda _, installed=installed: installed)
        assert process._revision() == revision


def test_sink_that_fails_is_counted_apart_from_the_other(tmp_path: Path) -> None:
    (tmp_path / "audit").write_text("a file where the feed's folder has to be")
    sinks = {name: {"files": {"path": str(tmp_path / name)}} for name in ("lake", "audit")}
    meter = PipelineMeter()
    with pytest.raises(PenstockError, match="sink audit: ") as raised:
        run_sinks_here(notes_pipeline(tmp_path, sinks=sinks), meter.observe)
    labels = {"pipeline": "notes", "sink": "audit"}
    assert value(meter, "penstock_pipeline_state", state="failed", **labels) == 1
    kind = type(raised.value).__name__
    assert value(meter, "penstock_pipeline_failures_total", type=kind, **labels) == 1
    assert value(meter, "penstock_pipeline_state", state="failed", **labels | {"sink": "lake"}) == 0
    assert meter.is_ready(), "one sink works"
    meter.observe({**labels, "sink": "lake", "state": "failed", "error": kind})
    with publish_metrics(meter.read, address=ANYWHERE, is_ready=meter.is_ready) as address:
        assert get(address, "/readyz") == (503, "running: failed\n"), "every sink has failed"


def test_every_field_of_a_report_is_counted() -> None:
    meter = PipelineMeter(Clock())
    for _ in range(2):
        meter.observe(BATCH)
    stages = {"read": "update", "loaded": "load", "dead": "update", "written": "insert"}
    rows = [
        value(meter, "penstock_pipeline_rows_total", stage=stage, operation=operation)
        for stage, operation in stages.items()
    ]
    assert rows == [4, 4, 2, 16]
    assert value(meter, "penstock_pipeline_rows_total", stage="filtered") == 2
    assert value(meter, "penstock_pipeline_rows_total", stage="outdated") == 2
    assert value(meter, "penstock_pipeline_dead_letters_total") == 6
    assert value(meter, "penstock_pipeline_read_bytes_total") == 1800
    assert value(meter, "penstock_pipeline_binlog_file", source="shop") == 7
    assert value(meter, "penstock_pipeline_binlog_position", source="shop") == 1500
    assert value(meter, "penstock_pipeline_tables", state="loading") == 1
    assert value(meter, "penstock_load_chunks", state="remaining") == 6
    assert value(meter, "penstock_load_remaining_seconds") == 60
    assert value(meter, "penstock_load_started_timestamp_seconds") == 1_699_999_000
    outcomes = ("applied", "ignored", "refused")
    changes = [value(meter, "penstock_schema_changes_total", outcome=outcome) for outcome in outcomes]
    assert changes == [2, 0, 4]
    meter.observe(WAITING)
    assert value(meter, "penstock_load_started_timestamp_seconds") is None


def test_lag_grows_by_the_clock_unless_everything_is_applied() -> None:
    clock = Clock()
    meter = PipelineMeter(clock)
    meter.observe(BATCH)
    clock.now += 5
    assert value(meter, "penstock_pipeline_lag_seconds") == 35
    # The last batch ended at the end of the log. Nothing is reported while nothing changes.
    meter.observe(BATCH | {"positions": BATCH["heads"]})
    clock.now += 604
    assert value(meter, "penstock_pipeline_lag_seconds") == 0
    # The state of the log is unknown while its source fails.
    meter.observe(WAITING | {"state": "retrying", "error": "ConnectionLost"})
    assert value(meter, "penstock_pipeline_lag_seconds") == 604
    meter.observe(WAITING)
    assert value(meter, "penstock_pipeline_lag_seconds") == 0
    assert value(meter, "penstock_pipeline_retries_total", type="ConnectionLost") == 1


def test_lag_grows_while_a_batch_lasts() -> None:
    clock = Clock()
    meter = PipelineMeter(clock)
    meter.observe(BATCH | {"positions": BATCH["heads"]})
    clock.now += 604
    long = {"pipeline": "shop", "state": "long batch", "running_batch": 9, "running_seconds": 10.0}
    meter.observe(long)
    clock.now += 30
    lasting = [value(meter, f"penstock_pipeline_{name}_seconds") for name in ("lag", "batch_running")]
    assert lasting == [40, 40], "nothing was missing before the batch began"
    assert value(meter, "penstock_pipeline_state", state="running") == 1
    meter.observe(BATCH | {"positions": BATCH["heads"]})
    done = [value(meter, f"penstock_pipeline_{name}_seconds") for name in ("lag", "batch_running")]
    assert done == [0, 0]
    meter.observe(long)
    meter.observe(WAITING | {"state": "retrying", "error": "ConnectionLost"})
    assert value(meter, "penstock_pipeline_batch_running_seconds") == 0, "what is retried has ended"


def test_long_batch_of_a_load_leaves_the_pipeline_loading() -> None:
    meter = PipelineMeter(Clock())
    meter.observe(BATCH | {"state": "loading"})
    meter.observe({"pipeline": "shop", "state": "long batch", "running_batch": 2, "running_seconds": 10.0})
    assert value(meter, "penstock_pipeline_state", state="loading") == 1


def test_batch_that_hangs_is_reported_until_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LONG_BATCH_SECONDS", 0.01)
    reports: list[Mapping[str, Any]] = []
    shown: list[Mapping[str, Any]] = []
    settings = notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    commit = FilesSink.commit

    def hang(sink: FilesSink, mark: BatchMark, receipts: Sequence[Receipt]) -> None:
        wait_until(lambda: [report.get("running_batch") for report in reports[-2:]] == [mark.number] * 2)
        with closing(PipelineState.open(settings.state, settings.name)) as state:
            shown.append(state.shown())
        commit(sink, mark, receipts)

    monkeypatch.setattr(FilesSink, "commit", hang)
    run_here(settings, report=reports.append)
    assert [each["state"] for each in shown] == ["long batch"] * 2
    assert reports[-1]["state"] == "running"
    assert [report["batch"] for report in reports if "batch" in report] == [1, 2]


def test_source_that_is_set_aside_is_shown_before_it_has_a_position() -> None:
    meter = PipelineMeter(Clock())
    meter.observe(WAITING | {"sources_aside": {"east": "ConnectionLost: it does not answer"}})
    assert value(meter, "penstock_pipeline_source_aside", source="east") == 1
    meter.observe(BATCH)
    assert value(meter, "penstock_pipeline_source_aside", source="shop") == 0


def test_scrapers_beyond_the_limit_and_garbage_leave_the_others_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publish, "_CONNECTIONS_MAX", 2)
    with publish_metrics(lambda readings: None, address=ANYWHERE) as address:
        host, _, port = str(address).rpartition(":")
        held = [socket.create_connection((host, int(port)), WAIT_SECONDS_MAX) for _ in range(2)]
        with socket.create_connection((host, int(port)), WAIT_SECONDS_MAX) as refused:
            assert refused.recv(1) == b"", "the limit is reached"
        for connection in held:
            connection.sendall(b"\xff\x00 garbage\r\n\r\n")
            while connection.recv(4096):
                pass
            connection.close()
        assert get(address, "/livez")[0] == 200


def test_address_that_cannot_be_bound_is_refused_by_name() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OptionInvalid, match=f"127.0.0.1:{taken.getsockname()[1]}"),
        publish_metrics(lambda readings: None, address=f"127.0.0.1:{taken.getsockname()[1]}"),
    ):
        pass


def test_collector_receives_what_the_end_of_a_run_has_counted() -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    meter = PipelineMeter()
    with otlp_collector() as (url, bodies), publish_metrics(meter.read, otlp=url):
        meter.observe(BATCH)
    (resource,) = ExportMetricsServiceRequest.FromString(bodies[-1]).resource_metrics
    names = {metric.name for metric in resource.scope_metrics[0].metrics}
    assert {"penstock.pipeline.lag", "penstock.pipeline.rows"} <= names


def test_run_command_reports_to_the_metrics_and_to_its_output(tmp_path: Path) -> None:
    log = write_forged_log(tmp_path / "log", blob_bytes=50_000)
    file = tmp_path / "notes.yaml"
    file.write_text(
        json.dumps(
            {
                "name": "notes",
                "source": {"path": str(log), "name": "shop", "tables": "shop.notes"},
                "load": "none",
                "sink": {"files": {"path": str(tmp_path / "feed")}},
            }
        )
    )
    words = ["run", str(file), "--local", "--until", "caught-up", "--json", "--metrics", ANYWHERE]
    done = CliRunner().invoke(make_app(), words)
    assert done.exit_code == 0, done.output
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sum(report.get("rows", 0) for report in reports) == len(NOTE_IDS)


def status_of(consumed: Mapping[int, int], behind: int | None, *, is_consumed: bool) -> FollowingStatus:
    shards = {shard: Position.parse("mysql-bin.000001:4") for shard in consumed}
    return FollowingStatus("h1:42", "http://h1:7070", behind, shards, consumed, is_consumed)


def test_member_lag_is_that_of_its_shard_that_is_furthest_behind() -> None:
    lags = []
    for status in (
        status_of({0: 1_000_000, 1: 2_000_000}, 10, is_consumed=False),
        status_of({0: 1_000_000}, 0, is_consumed=True),
        status_of({0: 0}, 10, is_consumed=False),
    ):
        readings = Readings()
        read_member(readings, "cache", status, 3)
        lags.append(list(readings.values("penstock_subscriber_lag_seconds").values()))
        assert list(readings.values("penstock_subscriber_skipped_batches_total").values()) == [3]
    assert lags[0][0] > 1e9
    assert lags[1:] == [[0.0], []]
