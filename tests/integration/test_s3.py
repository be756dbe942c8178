# SPDX-License-Identifier: Apache-2.0
"""Logs, lakes, feeds, dead letters and large messages in S3, through each library's own S3 client."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import deltalake
import pyarrow
import pyarrow.dataset
import pytest
from pyarrow import fs

import penstock
from penstock.local.driver import LocalDriver
from penstock.logstore.cold import make_cold
from penstock.logstore.disk import LocalDisk
from penstock.logstore.log import Log
from penstock.logstore.records import CLOSED, TIERED
from penstock.logstore.tier import Tier, TieredNote
from penstock.pipeline.dead_letter import dead_letters, replay
from penstock.pipeline.settings import PipelineSettings, load_pipeline, pipeline_of_values
from penstock.sinks.claim_check import ClaimCheck
from penstock.sinks.iceberg.table import catalog_of
from tests.support.logstore.source import SETTINGS, TIME_S, Captured, check_log
from tests.support.pipeline.changes_made import changes_of, insert, target_of
from tests.support.pipeline.commands import lines, write_pipeline
from tests.support.pipeline.commands import penstock as command
from tests.support.pipeline.local_runs import notes_pipeline, run_here
from tests.support.pipeline.oracle import assert_same, source_rows
from tests.support.pipeline.rejected_rows import put_aside
from tests.support.pipeline.running import run_to_end
from tests.support.pipeline.workload import Workload
from tests.support.sinks.store_reading import as_source
from tests.support.suite.fixture_types import FreshDatabase, MissingPart
from tests.support.suite.nonempty import each
from tools.s3 import S3
from tools.servers import PartMissing, Server

# The log has 79 inserts.
NOTES = 79

pytestmark = pytest.mark.deep(
    guard="tests/integration/test_log_tier.py::test_log_mostly_in_a_store_reads_the_same"
)


@pytest.fixture(scope="module")
def server() -> Iterator[S3 | str]:
    """The server, or the reason why it is missing."""
    server = S3()
    try:
        server.start()
    except PartMissing as error:
        yield str(error)
        return
    yield server
    server.close()


@pytest.fixture
def url(
    server: S3 | str,
    missing_part: MissingPart,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> str:
    """The URL of a separate folder for each test."""
    if isinstance(server, str):
        missing_part("moto", server)
        raise AssertionError("a missing part ends the test")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"{server.url}/{request.node.originalname}"


def test_tiered_segments_are_read_verified_and_removed(url: str, tmp_path: Path) -> None:
    log = Log.open(tmp_path / "log", SETTINGS, LocalDisk(), clock=lambda: TIME_S)
    with log:
        Captured(log).run()
        tier = Tier(url, log.disk, log.layout, writes=True)
        log.tier = tier
        closed = [segment for segment in log.segments if segment.state == CLOSED]
        for number, segment in enumerate(closed):
            cold = make_cold(log.disk, log.layout, log, segment) if number % 2 else segment
            tier.move(log, cold)
        check_log(log, whole=True)
        [data_file] = (tmp_path / "log").glob("20*/*.binlog*")
        assert data_file.name.startswith(str(log.segments[-1].version).zfill(19))
    with Log.open(tmp_path / "log", SETTINGS, LocalDisk(), clock=lambda: TIME_S) as again:
        again.tier = Tier(url, again.disk, again.layout, writes=True)
        check_log(again, whole=True)
        for segment in each(segment for segment in again.segments if segment.state == TIERED):
            note = TieredNote.load(again.disk, again.tier.note_path(segment))
            again.tier.verify(note)
            again.tier.remove(note)
    assert objects_below(url) == []


def test_copied_log_folder_is_read_by_its_url(url: str, tmp_path: Path) -> None:
    with Log.open(tmp_path / "log", SETTINGS, LocalDisk(), clock=lambda: TIME_S) as log:
        Captured(log).run()
    fs.copy_files(str(tmp_path / "log"), url.removeprefix("s3://"), destination_filesystem=s3())
    local = rows_by_table(str(tmp_path / "log"))
    assert local
    assert rows_by_table(url) == local


@pytest.mark.parametrize("mode", ["mirror", "feed", "history"])
def test_delta_table_has_each_change_once(url: str, tmp_path: Path, mode: str) -> None:
    settings = notes_pipeline(tmp_path, {"delta": {"path": f"{url}/{mode}", "mode": mode}})
    for _ in range(2):
        run_here(settings)
    table = deltalake.DeltaTable(f"{url}/{mode}/shop/notes").to_pyarrow_table()
    assert len(set(table.column("id").to_pylist())) == table.num_rows == NOTES


def test_iceberg_table_has_each_change_once(url: str, tmp_path: Path) -> None:
    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": url,
        "s3.endpoint": os.environ["AWS_ENDPOINT_URL"],
    }
    settings = notes_pipeline(tmp_path, {"iceberg": {"catalog": catalog}})
    for _ in range(2):
        run_here(settings)
    table = catalog_of(catalog).load_table(("shop", "notes")).scan().to_arrow()
    assert len(set(table.column("id").to_pylist())) == table.num_rows == NOTES
    assert objects_below(url)


def test_files_feed_has_each_change_once(url: str, tmp_path: Path) -> None:
    settings = notes_pipeline(tmp_path, {"files": {"path": url}})
    for _ in range(2):
        run_here(settings)
    paths = [path for path in objects_below(f"{url}/shop/notes") if path.endswith(".parquet")]
    rows = pyarrow.dataset.dataset(paths, filesystem=s3()).to_table(columns=["id"])
    assert sorted(rows.column("id").to_pylist()) == sorted(set(rows.column("id").to_pylist()))
    assert rows.num_rows == NOTES


def test_killed_pipeline_ends_equal_to_its_source(
    url: str, mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    workload = Workload(mysql_server, database, seed=38, big_rows=300)
    workload.create()
    file = write_pipeline(tmp_path, mysql_server, database, {"delta": {"path": url}}, "full")
    with workload.busy(0.002):
        # The first process is killed while it loads, the second while it follows the log.
        for batches in (1, 4):
            with command("run", "--local", str(file), "--json") as killed:
                lines(killed, batches)
                killed.send_signal(signal.SIGKILL)
    run_to_end(LocalDriver(2), load_pipeline(file))
    for name in each(workload.tables):
        wanted = source_rows(mysql_server, database, name)
        stored = deltalake.DeltaTable(f"{url}/{database}/{name}").to_pyarrow_table().to_pylist()
        assert_same(wanted, as_source(wanted, stored, False), key=workload.keys(name))


def test_rejected_rows_are_stored_listed_and_replayed(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orders = target_of({"id": "bigint", "status": "varchar(20)"})

    def settings(**cast: str) -> PipelineSettings:
        values = {
            "name": "shop",
            "source": {"url": "mysql://repl@127.0.0.1:1", "name": "test"},
            "steps": [{"map": {"rename": {"status": "number"}, "cast": cast}}],
            "sink": "stdout",
            "errors": {"rows": "dead_letter"},
            "dead_letter": url,
        }
        return pipeline_of_values(values, tmp_path)

    put_aside(settings(status="int"), changes_of(orders, insert(1, id=7, status="seven")))
    assert [letter.rows for letter in dead_letters(settings())] == [1]
    assert [replayed.written for replayed in replay(settings())] == [1]
    assert "seven" in capsys.readouterr().out
    assert dead_letters(settings()) == []
    assert len(dead_letters(settings(), replayed=True)) == 1


def test_large_message_is_stored_under_its_reference(url: str) -> None:
    check = ClaimCheck(above=1024, path=f"{url}/claims")
    check.check()
    message = b"m" * 10_000
    reference = json.loads(check.store("shop.orders", message))["claim_check"]
    with s3().open_input_file(reference["path"].removeprefix("s3://")) as stored:
        assert stored.read() == message


def test_missing_bucket_is_reported_before_the_first_batch(url: str, tmp_path: Path) -> None:
    settings = notes_pipeline(tmp_path, {"delta": {"path": "s3://nowhere/lake"}})
    [finding] = settings.make_sink().check()
    assert finding.fatal
    assert "the bucket of s3://nowhere/lake does not exist" in finding.what


def s3() -> fs.FileSystem:
    """The S3 file system that pyarrow creates from the environment variables. When used directly, pyarrow's
    S3 class does not read the endpoint from these variables.
    """
    return fs.FileSystem.from_uri("s3://lake")[0]


def rows_by_table(path: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for batch in penstock.read_binlog(path):
        counts[str(batch.table)] = counts.get(str(batch.table), 0) + len(batch)
    return counts


def objects_below(url: str) -> list[str]:
    selector = fs.FileSelector(url.removeprefix("s3://"), recursive=True, allow_not_found=True)
    files = s3().get_file_info(selector)
    return [file.path for file in files if file.type is fs.FileType.File]
