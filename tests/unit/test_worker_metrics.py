# SPDX-License-Identifier: Apache-2.0
"""A worker has the metrics of its jobs, which each job serves to this machine."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli import run
from penstock.fleet.job_tenure import ADDRESS_FILE
from penstock.telemetry.job_address import ADDRESS_FILE_VARIABLE
from penstock.telemetry.jobs import read_jobs
from penstock.telemetry.pipelines import PipelineMeter
from penstock.telemetry.process import read_process
from penstock.telemetry.prometheus import exposition
from penstock.telemetry.publish import publish_metrics
from penstock.telemetry.readings import Readings
from tests.support.pipeline.local_runs import notes_pipeline
from tests.support.suite.nonempty import each

BATCH = {
    **{"pipeline": "orders", "state": "running", "rows": 9, "loaded": 0, "written": 9, "bytes": 70},
    **{"batch_rejected": 1, "phases": {"read": 0.2, "commit": 0.1}, "tables": {"loaded": 1}},
    "operations": {"read": {"insert": 9}, "written": {"insert": 9}},
}


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PipelineMeter]:
    """A job that has reported a batch, and serves its metrics to the worker."""
    (tmp_path / "orders").mkdir()
    monkeypatch.setenv(ADDRESS_FILE_VARIABLE, str(tmp_path / "orders" / ADDRESS_FILE))
    meter = PipelineMeter()
    settings = notes_pipeline(tmp_path, {"stdout": {}})
    with run._metered(None, None, lambda report: meter.observe(report), settings) as report:
        report(BATCH)
        yield meter


def read(folder: Path) -> Readings:
    readings = Readings()
    read_process(readings)
    read_jobs(readings, folder, ADDRESS_FILE)
    return readings


def pipeline_lines(readings: Readings) -> list[str]:
    """Return the samples of pipelines, except those that a clock or a thread changes."""
    text = exposition(readings, "")[0].decode()
    lines = [line for line in text.splitlines() if line.startswith("penstock_pipeline")]
    changing = ("timestamp", "lag", "penstock_pipeline_dead_letters{")
    return [line for line in lines if not any(part in line for part in changing)]


def test_worker_has_the_metrics_of_its_job(job: PipelineMeter, tmp_path: Path) -> None:
    own = Readings()
    job.read(own)
    assert pipeline_lines(read(tmp_path)) == list(each(pipeline_lines(own)))


def test_metrics_of_the_process_are_those_of_the_worker(job: PipelineMeter, tmp_path: Path) -> None:
    file = tmp_path / "orders" / ADDRESS_FILE
    with publish_metrics(read_process, address="127.0.0.1:0") as address:
        file.write_text(str(address))
        assert {definition.name for definition in read(tmp_path).present()} == {
            definition.name for definition in read(tmp_path / "nowhere").present()
        }


@pytest.mark.parametrize("content", ["127.0.0.1:1", "", "no address", "[::1"])
def test_job_that_does_not_answer_has_no_metrics(tmp_path: Path, content: str) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / ADDRESS_FILE).write_text(content)
    assert pipeline_lines(read(tmp_path)) == []


def test_readings_of_another_version_are_refused_or_left_out() -> None:
    readings = Readings()
    readings.add_json(
        {"values": [["penstock_of_the_future", {}, 1]], "buckets": []}, {"penstock_pipeline_state"}
    )
    assert readings.present() == []
    with pytest.raises(LookupError):
        readings.add_json(json.loads("{}"), {"penstock_pipeline_state"})


def test_shards_of_a_job_do_not_inherit_its_address(job: PipelineMeter) -> None:
    assert ADDRESS_FILE_VARIABLE not in os.environ
