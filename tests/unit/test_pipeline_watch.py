# SPDX-License-Identifier: Apache-2.0
"""A daemon watches the pipelines in its configured state stores: alerts begin and end, and the results of
comparisons become metrics.
"""

import re
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.engine.run import PipelineRun
from penstock.errors import ServerBusy
from penstock.local.driver import LocalDriver
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.state import PipelineState
from penstock.pipeline.summary import summarize_pipeline
from penstock.pipeline.verification_record import read_verification, record_verification
from penstock.pipeline.watch import PipelineWatch
from penstock.settings.daemon import Settings
from penstock.sinks.files.sink import FilesSink
from penstock.telemetry.readings import Readings
from tests.support.pipeline.local_runs import notes_pipeline, run_here

SECRET = "value 4711 of a row"


class Watched:
    """A pipeline that has run once, and the reports of a daemon about it. `now` is the watch's clock."""

    def __init__(self, settings: PipelineSettings) -> None:
        self.settings = settings
        self.now = 0.0
        self.watch = PipelineWatch([settings.state], 60.0, lambda: self.now)

    def alerts(self) -> dict[str, str]:
        """Return the summaries of the alerts by name."""
        self.watch.look()
        alerts = self.watch.alerts()
        assert {alert.instance for alert in alerts} <= {"notes"}
        assert all(alert.is_pipeline for alert in alerts)
        return {alert.name: alert.summary for alert in alerts}

    def change(self, change: Callable[[PipelineState], object]) -> None:
        with closing(PipelineState.open(self.settings.state, "notes")) as state:
            change(state)

    def show(self, **progress: Any) -> None:
        self.change(lambda state: state.show(progress))


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    settings = notes_pipeline(tmp_path, {"files": {"path": str(tmp_path / "feed")}})
    run_here(settings)
    return Watched(settings)


def outcome(differing: int, *, whole: bool = True) -> Any:
    """Return the outcome of comparing a table of 79 rows."""
    return SimpleNamespace(remaining=differing, whole=whole, results=[SimpleNamespace(source_rows=79)])


def test_healthy_pipeline_has_no_alert(watched: Watched) -> None:
    assert watched.alerts() == {}


def test_failed_run_is_an_alert_without_the_values_of_its_error(watched: Watched) -> None:
    watched.show(state="failed", error="SinkRefused", what=SECRET)
    alerts = watched.alerts()
    assert list(alerts) == ["pipeline failed"]
    assert "SinkRefused" in alerts["pipeline failed"]
    assert SECRET not in str(alerts)
    watched.show(state="running")
    assert watched.alerts() == {}


def test_run_that_keeps_retrying_is_an_alert(watched: Watched) -> None:
    with closing(PipelineState.open(watched.settings.state, "notes")) as state:
        state.take()
        state.show({"state": "retrying", "error": "ConnectionLost", "what": SECRET})
        assert watched.alerts() == {}
        watched.now = 61.0
        assert watched.alerts() == {"pipeline retrying": "for 61 s because of ConnectionLost"}
        state.show({"state": "running"})
        assert watched.alerts() == {}
        state.show({"state": "retrying", "error": "ConnectionLost"})
        assert watched.alerts() == {}, "each time of retrying counts for itself"


def test_run_that_was_killed_is_an_alert_until_another_runs(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    watched.change(lambda state: state.reset())
    with monkeypatch.context() as patch:
        # The process ends before it can record anything.
        patch.setattr(FilesSink, "commit", die)
        with pytest.raises(KeyboardInterrupt):
            run_here(watched.settings)
    assert watched.alerts() == {}
    watched.now = 61.0
    assert list(watched.alerts()) == ["pipeline gone"]
    listed = CliRunner().invoke(make_app(), ["pipelines", "list", watched.settings.state]).output
    assert re.search(
        r"notes +lost +its process was killed .* last sign of life is of 2\d{3}-.*Z$", listed.strip()
    )
    run_here(watched.settings)
    assert watched.alerts() == {}
    listed = CliRunner().invoke(make_app(), ["pipelines", "list", watched.settings.state]).output
    assert listed.split() == ["notes", "finished", "-"]


def test_run_that_is_stopped_during_an_outage_is_no_alert(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()

    def refuse(*_: object) -> None:
        stop.set()
        raise ServerBusy("it is being restarted")

    watched.change(lambda state: state.reset())
    monkeypatch.setattr(FilesSink, "commit", refuse)
    PipelineRun(watched.settings, LocalDriver(1), stop=stop).run()
    watched.alerts()
    watched.now = 61.0
    assert watched.alerts() == {}


def test_run_of_a_version_that_recorded_no_end_is_no_alert(watched: Watched) -> None:
    watched.show(state="running")
    watched.alerts()
    watched.now = 61.0
    assert watched.alerts() == {}


def test_rejected_rows_are_an_alert_until_none_has_followed_for_a_while(watched: Watched) -> None:
    watched.show(state="running", rejected=4)
    assert "4 rows" in watched.alerts()["rows rejected"]
    watched.now = 899.0
    watched.show(state="running", rejected=5)
    assert "5 rows" in watched.alerts()["rows rejected"]
    watched.now = 899.0 + 900.0
    assert watched.alerts() == {}
    # The next run counts from 0.
    watched.show(state="running", rejected=0)
    assert watched.alerts() == {}
    watched.show(state="running", rejected=1)
    assert list(watched.alerts()) == ["rows rejected"]


def test_comparison_that_finds_differences_is_an_alert_and_a_metric(watched: Watched) -> None:
    labels = (("pipeline", "notes"), ("sink", ""))

    def values() -> dict[str, float]:
        readings = Readings()
        watched.watch.read(readings)
        names = ("differences", "rows", "last_timestamp_seconds", "last_success_timestamp_seconds")
        return {name: readings.values(f"penstock_verify_{name}").get(labels, -1.0) for name in names}

    assert watched.alerts() == {}
    assert set(values().values()) == {-1.0}, "a pipeline that was never compared has no series"
    watched.change(lambda state: record_verification(state, outcome(0)))
    assert watched.alerts() == {}
    equal = values()
    assert (equal["differences"], equal["rows"]) == (0, 79)
    assert equal["last_success_timestamp_seconds"] == equal["last_timestamp_seconds"] > 0
    watched.change(lambda state: record_verification(state, outcome(3)))
    assert watched.alerts() == {"target differs": "the last comparison found 3 rows that differ"}
    different = values()
    assert different["last_success_timestamp_seconds"] == equal["last_success_timestamp_seconds"]
    assert different["last_timestamp_seconds"] > equal["last_timestamp_seconds"]
    watched.change(lambda state: record_verification(state, outcome(0, whole=False)))
    assert watched.alerts() == {}
    assert values()["last_success_timestamp_seconds"] == equal["last_success_timestamp_seconds"]


def test_status_of_a_pipeline_has_its_last_comparison_until_it_is_reset(watched: Watched) -> None:
    with closing(PipelineState.open(watched.settings.state, "notes")) as state:
        assert "verified" not in summarize_pipeline(state)
        record_verification(state, outcome(3))
        assert summarize_pipeline(state)["verified"]["differences"] == 3
        state.reset()
        assert read_verification(state) is None


def test_stopped_tables_are_an_alert(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = {"state": "running", "stopped": {"shop/shop.notes": SECRET}, "progress": {}}
    with monkeypatch.context() as patch:
        patch.setattr("penstock.pipeline.summary.summarize_part", lambda part: summary)
        assert watched.alerts() == {"tables stopped": "their changes are not applied: shop/shop.notes"}
    assert watched.alerts() == {}


def test_store_that_does_not_answer_is_an_alert_without_its_password(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    watch = PipelineWatch([f"sqlite:///{tmp_path}/folder"], 60.0)
    watch.look()
    (alert,) = watch.alerts()
    assert alert.name == "pipelines unknown"
    assert "does not answer" in alert.summary
    (tmp_path / "folder").rmdir()
    watch.look()
    assert watch.alerts() == []


def test_file_that_cannot_be_read_is_an_alert_until_it_can(watched: Watched, tmp_path: Path) -> None:
    """The files may be those of a console on another host, and must not keep the daemon from capturing."""
    file = tmp_path / "late.yaml"
    watch = PipelineWatch([watched.settings.state, str(file)], 60.0)
    watch.look()
    (alert,) = watch.alerts()
    assert (alert.name, alert.instance) == ("pipelines unknown", str(file))
    assert "OptionInvalid" in alert.summary
    assert alert.is_pipeline
    file.write_text(f"name: notes\nstate: {watched.settings.state}\n")
    watch.look()
    assert watch.alerts() == []


def test_store_that_several_files_name_is_watched_once(watched: Watched, tmp_path: Path) -> None:
    files = [tmp_path / "first.yaml", tmp_path / "second.yaml"]
    for file in files:
        file.write_text(f"name: notes\nstate: {watched.settings.state}\n")
    watched.show(state="failed", error="SinkRefused", what=SECRET)
    watch = PipelineWatch([str(file) for file in files], 60.0)
    watch.look()
    assert [alert.name for alert in watch.alerts()] == ["pipeline failed"]


def test_settings_name_the_pipelines_to_watch() -> None:
    instances = {"shop": {"source": "mysql://repl@127.0.0.1:1", "password": "x"}}

    def watched(**sections: Any) -> tuple[tuple[str, ...], float]:
        return Settings.model_validate({"instances": instances, **sections}).pipelines_to_watch()

    console, alerts = {"pipelines": ["a.yaml"]}, {"webhook": "http://127.0.0.1:9/x", "after": "5s"}
    assert watched() == ((), 60.0)
    assert watched(console=console) == (("a.yaml",), 60.0)
    assert watched(console=console, alerts=alerts) == (("a.yaml",), 5.0)
    assert watched(console=console, alerts=alerts | {"pipelines": ["b.yaml"]}) == (("b.yaml",), 5.0)


def test_watch_without_pipelines_has_no_thread() -> None:
    watch = PipelineWatch([], 60.0)
    watch.start()
    watch.stop()
    assert watch.alerts() == []
