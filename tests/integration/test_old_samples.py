# SPDX-License-Identifier: Apache-2.0
"""This version can read the samples of every earlier version, and returns the content that their servers
reported.
"""

import dataclasses
import json
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

import penstock as product
from penstock._native import GtidSet
from penstock.changes import Changes
from penstock.client import ChangeBatch, Subscriber
from penstock.coordinate.store import open_store
from penstock.coordinate.subscription_record import Subscriptions
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.logstore.records import CLOSED, COLD
from penstock.model import Position
from penstock.pipeline.dead_letter import dead_letters, rows_of_letter
from penstock.pipeline.settings import PipelineSettings, load_pipeline
from penstock.pipeline.state import Checkpoint, PipelineState
from penstock.pipeline.step import run_steps
from penstock.settings.daemon import LogSettings, load_settings
from penstock.sinks.sink import BatchMark, Evolution, Sink
from penstock.source.logged_tables import LoggedTables
from penstock.source.offsets import Offset
from penstock.source.reading import Selection, read_range
from penstock.source.source import SourceOptions, open_source
from penstock.source.tracking import TrackedSchemas
from penstock.spark.options import parse_settings
from penstock.spark.source import PenstockDataSource
from tests.samples.program import MEMBER, SUBSCRIPTION
from tests.samples.reading import (
    CAPTURED,
    COLUMNS,
    LOADED,
    STREAMED,
    VERSIONS,
    Change,
    Sample,
    only,
    row_changes,
    sorted_changes,
)
from tests.samples.shop import BAD_CODE, NOTES, ORDERS, plain
from tests.support.daemon.process import DaemonProcess
from tests.support.logstore.kept_log import BLOCK_BYTES, penstock
from tests.support.pipeline.running import run_to_end
from tests.support.spark.session import Collected, run_to_head, spark  # noqa: F401
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers.ports import free_port

# The columns of orders from the second phase on.
ORDERS_COLUMNS = ["id", "code", "total", "placed", "remark", "state"]
SECRETS = {"TOKEN": "t0ken", "PASSWORD": "sesame", "CACHE_TOKEN": "c4che"}


@pytest.fixture(params=VERSIONS)
def sample(request: pytest.FixtureRequest, tmp_path: Path) -> Sample:
    return Sample.copy(request.param, tmp_path / "sample")


def test_present_version_has_samples() -> None:
    assert product.__version__.rpartition(".")[0] in VERSIONS


# --- Logs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [ORDERS, NOTES])
def test_log_decodes_to_the_recorded_changes(sample: Sample, table: str) -> None:
    batches = product.read_binlog(sample.log, tables=table)
    rows = [row for batch in batches for row in batch.to_arrow().to_pylist()]
    assert row_changes(rows) == sample.changes(table)


def test_log_has_segments_of_every_state_and_verifies(sample: Sample) -> None:
    records = list(LogReader.open(sample.log).segments)
    assert {record.state for record in records} >= {COLD, CLOSED}
    for folder in (sample.log, sample.moved):
        verified = penstock("log", "verify", folder)
        assert verified.code == 0, verified
        assert "read, sound" in verified.out.replace("\n", " "), verified


@pytest.mark.parametrize("phase", [LOADED, STREAMED, CAPTURED])
def test_lookups_by_time_position_gtid_set_and_gtid_agree(sample: Sample, phase: int) -> None:
    ended, position = sample.shop["phases"][phase], sample.position(phase)
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=ended["time_us"])
    lookups = {
        "--position": ended["position"],
        "--gtid-set": ended["gtid_set"],
        "--time": moment.isoformat(),
    }
    later = [
        transaction
        for transaction in sample.shop["transactions"]
        if Position.parse(transaction["start"]) >= position
    ]
    last = Position.parse(later[0]["start"]) if later else sample.position(CAPTURED)
    if later:
        lookups["--gtid"] = later[0]["gtid"]
    for option, value in lookups.items():
        log_position = penstock("log", "locate", sample.log, option, value, "--json").one["position"]
        # Events outside any transaction may come between two transactions.
        assert position <= Position.parse(log_position) <= last, (option, value)
    assert LogReader.open(sample.log).gtid_set(position) == ended["gtid_set"]


def test_log_continues_where_its_writer_stopped(sample: Sample) -> None:
    line = penstock("position", "show", sample.log, "--json").one
    head = str(sample.position(CAPTURED))
    assert (line["position"], line["visible"], line["durable"]) == (head, head, head)
    assert line["gtid_set"] == sample.shop["phases"][CAPTURED]["gtid_set"]
    assert line["server"] == sample.shop["server_key"]
    assert line["holds"] == {"warehouse": str(sample.position(LOADED))}
    log = Log.open(sample.log, LogSettings(folder=sample.log, block_bytes=BLOCK_BYTES))
    try:
        assert log.visible == sample.position(CAPTURED)
    finally:
        log.close()


def test_log_of_two_servers_returns_each_row_once(sample: Sample) -> None:
    moved = sample.account["moved"]
    rows = [
        {name: row[name] for name in ("id", "item")}
        for batch in product.read_binlog(sample.moved, tables="shop.stock")
        for row in batch.to_arrow().to_pylist()
    ]
    assert len(rows) == 40
    assert rows == moved["rows"]
    log = LogReader.open(sample.moved)
    assert [epoch.epoch for epoch in log.epochs.epochs] == [0, 1]
    first = [extent for extent in log.extents() if extent.epoch == 0]
    assert str(first[-1].last) == moved["first_end"]
    # Version 0.1 recorded only the newest transaction of a domain.
    newest = [
        str(GtidSet.parse(log.gtid_set(position)).position()) for position in (first[-1].last, log.head())
    ]
    assert newest == [moved["first_gtid_set"], moved["gtid_set"]]
    assert str(log.head()) == moved["end"]


# --- Spark ----------------------------------------------------------------------------------


def planned_rows(sample: Sample, start: dict[str, Any], end: dict[str, Any] | None = None) -> list[Change]:
    """Plan a batch from an offset to the given end (default: the head), and decode it as executors do."""
    source = PenstockDataSource(sample.stream_options())
    reader = source.streamReader(source.schema())
    try:
        stop = end or reader.latestOffset(start, reader.getDefaultReadLimit())
        batches = [batch for part in reader.partitions(start, stop) for batch in reader.read(part)]
    finally:
        reader.stop()
    return row_changes([row for batch in batches for row in batch.to_pylist()], COLUMNS)


def test_stream_offsets_plan_the_same_batch_again_and_the_next_one(sample: Sample) -> None:
    first, second = sample.offset(0), sample.offset(1)
    assert Offset.from_json(first).position == sample.position(LOADED)
    assert planned_rows(sample, first, second) == only(sample.changes(ORDERS, LOADED, STREAMED))
    assert planned_rows(sample, second) == only(sample.changes(ORDERS, STREAMED))


def test_offsets_of_every_kind_of_source_are_read(sample: Sample) -> None:
    offsets = json.loads((sample.folder / "spark/offsets.json").read_text())
    parsed = {kind: Offset.from_text(json.dumps(value)) for kind, value in offsets.items()}
    assert {kind: offset.to_json() for kind, offset in parsed.items()} == offsets
    assert set(parsed) == {"kept", "kept_by_set", "server", "files"}
    head = sample.shop["phases"][CAPTURED]
    for kind in ("kept", "server"):
        assert str(parsed[kind].position) == head["position"]
        assert (parsed[kind].gtid_set, parsed[kind].server_key) == (
            head["gtid_set"],
            sample.shop["server_key"],
        )
    assert parsed["kept_by_set"].by_set
    assert planned_rows(sample, offsets["kept_by_set"]) == only(sample.changes(ORDERS, LOADED))


def test_tracked_schemas_of_a_server_stream_are_migrated(sample: Sample) -> None:
    tracking = str(sample.folder / "spark/server/tracking")
    source = f"mysql://repl@127.0.0.1:{free_port()}"
    settings = parse_settings({"source": source, "tables": ORDERS, "schemaTrackingLocation": tracking})
    tracked = TrackedSchemas.open(settings)
    assert tracked is not None
    assert [column.name for column in schema_columns(tracked)] == ORDERS_COLUMNS
    log = open_source(SourceOptions.parse(sample.log))
    start = Offset.from_json(sample.offset(1, "server")).position
    assert start == sample.position(STREAMED)
    tracked.advance(log, log.split(start, sample.position(CAPTURED)))
    saved = json.loads((sample.folder / "spark/server/tracking/schemas.json").read_text())
    assert saved["position"] == str(sample.position(CAPTURED))
    assert [column.name for column in schema_columns(tracked)] == ORDERS_COLUMNS


def schema_columns(tracked: TrackedSchemas) -> Any:
    schema = tracked.history.schema("shop", "orders")
    assert schema is not None
    return schema.columns


@pytest.mark.slow
@pytest.mark.deep(
    guard="tests/integration/test_old_samples.py::test_stream_offsets_plan_the_same_batch_again_and_the_next_one"
)
def test_spark_resumes_a_stream_and_a_pipeline_from_their_checkpoints(
    spark: SparkSession,  # noqa: F811
    sample: Sample,
) -> None:
    collected = Collected("_change_type", *COLUMNS)
    frame = spark.readStream.format("penstock").options(**sample.stream_options()).load()
    run_to_head(frame, collected, sample.folder / "spark/kept/checkpoint")
    rows = [dict(zip(("_change_type", *COLUMNS), row, strict=True)) for row in collected.rows]
    assert list(collected.batches) == [2]
    assert row_changes(rows, COLUMNS) == only(sample.changes(ORDERS, STREAMED))
    feed = sample.folder / "pipelines/shop-feed.yaml"
    text = feed.read_text()
    assert text.count('server: "${SERVER}", ') == 1
    # The server is gone; a log that stores table definitions is enough if nothing is loaded.
    feed.write_text(text.replace('server: "${SERVER}", ', ""))
    run_to_end(spark, sample.pipeline("shop-feed"))
    assert sorted_changes(feed_rows(sample)) == sorted_changes(only(sample.changes(ORDERS)))


# --- Subscriptions --------------------------------------------------------------------------


def test_subscriber_continues_after_the_checkpoints_of_a_killed_one(sample: Sample) -> None:
    settings = {
        "log": {"folder": str(sample.log.parent), "retention": {"age": None}},
        "instances": {"shop": {"source": f"mysql://repl@127.0.0.1:{free_port()}"}},
    }
    wanted, rows, done = sample.changes(ORDERS, LOADED), list[dict[str, Any]](), threading.Event()

    def keep(batch: ChangeBatch) -> None:
        rows.extend(batch.to_arrow().to_pylist())
        if len(rows) >= len(wanted):
            done.set()

    with DaemonProcess(sample.folder, settings) as daemon:
        subscriber = Subscriber(
            f"penstock://127.0.0.1:{daemon.port}/shop",
            name=SUBSCRIPTION,
            tables=[ORDERS],
            shards=2,
            coordination=f"sqlite://{sample.coordination('running')}",
        )

        def follow() -> None:
            try:
                subscriber.run(keep)
            finally:
                # The thread prints its error; missing rows fail the test.
                done.set()

        following = threading.Thread(target=follow)
        following.start()
        try:
            assert done.wait(WAIT_SECONDS_MAX), f"{len(rows)} of {len(wanted)} rows"
        finally:
            subscriber.stop()
            following.join(WAIT_SECONDS_MAX)
    assert sorted_changes(row_changes(rows, COLUMNS)) == sorted_changes(only(wanted))


def test_leases_members_and_assignment_of_a_killed_subscriber_are_read(sample: Sample) -> None:
    path = sample.coordination("running")
    with closing(sqlite3.connect(path)) as connection:
        # The ephemeral records stay until the session expires.
        connection.execute("UPDATE sessions SET expires = unixepoch('now') + seconds")
        connection.commit()
    with closing(open_store(f"sqlite://{path}")) as store:
        subscriptions = Subscriptions(store)
        subscription = subscriptions.get("shop", SUBSCRIPTION)
        assert subscription is not None
        assert (subscription.tables, subscription.shard_count) == ((ORDERS,), 2)
        assert list(subscriptions.members(subscription)) == [MEMBER]
        views = subscriptions.shards(subscription)
        assert len(views) == 2
        for view in views:
            assert view.holder is not None
            assert (view.holder.name, view.holder.token) == (MEMBER, view.state.token)
            assert view.state.checkpoint is not None
            assert view.state.checkpoint.position == str(sample.position(LOADED))
            assert view.state.checkpoint.server_key == sample.shop["server_key"]


def test_floors_of_a_resized_subscription_are_read(sample: Sample) -> None:
    with closing(open_store(f"sqlite://{sample.coordination('resized')}")) as store:
        subscriptions = Subscriptions(store)
        report = subscriptions.get("shop", "report")
        assert report is not None
        states = [view.state for view in subscriptions.shards(report)]
        assert len(states) == 3
        floors = tuple(sample.position(phase).commit_version for phase in (LOADED, STREAMED))
        for state in states:
            assert state.checkpoint is not None
            assert state.checkpoint.position == str(sample.position(LOADED))
            assert (state.floors.versions, state.floors.server_key) == (floors, sample.shop["server_key"])


# --- Pipelines ------------------------------------------------------------------------------


def standing_of(state: PipelineState) -> Checkpoint:
    progress = state.checkpoint()
    assert progress is not None
    return progress


def test_pipeline_continues_at_its_position(sample: Sample) -> None:
    settings = sample.pipeline("shop-lake")
    with closing(PipelineState.open(settings.state, settings.name)) as state:
        before = standing_of(state)
        assert Offset.from_json(before.offsets["shop"]).position == sample.position(STREAMED)
        assert not before.loading
        load = before.loads[f"shop/{ORDERS}"]
        assert (load.finished, load.chunks) == (True, 1)
        taken = state.take()
        assert taken.token > before.token
        assert dataclasses.replace(taken, token=before.token) == before
        assert state.begun(taken) is None
        asked = {(request.where, request.state) for request in state.requests()}
        assert ("id < 10", "asked") in asked
        assert state.paused
        assert state.shown()["state"] == "running"


def test_started_batch_has_the_same_rows(sample: Sample) -> None:
    settings = sample.pipeline("shop-feed")
    with closing(PipelineState.open(settings.state, settings.name)) as state:
        progress = state.take()
        record = state.begun(progress)
    assert record is not None
    assert record.begin == progress.offsets
    assert Offset.from_json(record.end["shop"]).position == sample.position(CAPTURED)
    rows: list[dict[str, Any]] = []
    source = open_source(SourceOptions.parse(sample.log))
    for work in record.ranges:
        selection = Selection(settings.sources[0].tables, bounds=work.bounds)
        for batch in read_range(source, work.byte_range, selection, LoggedTables(source)):
            rows += batch.to_arrow().to_pylist()
    assert row_changes(rows, COLUMNS) == only(sample.changes(ORDERS, STREAMED))


def repaired_letter(settings: PipelineSettings) -> Changes:
    """Return the rows of the newest dead letter after correcting their code and running the pipeline's
    steps.
    """
    letter = rows_of_letter(settings, dead_letters(settings)[-1].name)
    at = letter.rows.schema.get_field_index("code")
    assert set(letter.rows.column(at).to_pylist()) == {BAD_CODE}
    field = letter.rows.schema.field(at)
    codes = pyarrow.array(["5"] * len(letter), field.type)
    repaired = letter.with_rows(letter.rows.set_column(at, field, codes))
    (changes,) = run_steps(settings.make_steps(), repaired)
    assert isinstance(changes, Changes), changes
    return changes


def write_batch(settings: PipelineSettings, sink: Sink, number: int, changes: Changes) -> None:
    """Write changes as a numbered batch, in the pipeline's current generation."""
    with closing(PipelineState.open(settings.state, settings.name)) as state:
        mark = BatchMark(settings.name, standing_of(state).generation, number)
    sink.prepare(changes.target, Evolution.EVOLVE)
    writer = sink.open(mark, 0)
    writer.write(changes)
    sink.commit(mark, [writer.finish()])


def feed_rows(sample: Sample) -> list[Change]:
    """Return the changes in the Parquet files visible to readers."""
    folder = sample.folder / "pipelines/feed/shop/orders"
    files = [path for path in sorted(folder.glob("*.parquet")) if not path.name.startswith("_")]
    rows = [row for path in files for row in parquet.read_table(path, partitioning=None).to_pylist()]
    return row_changes(rows, COLUMNS)


def lake_rows(sample: Sample) -> list[dict[str, Any]]:
    """Return the rows of the Delta table by key."""
    rows = DeltaTable(sample.folder / "pipelines/lake/shop/orders").to_pyarrow_table().to_pylist()
    return sorted(
        ({name: plain(row[name]) for name in ORDERS_COLUMNS} for row in rows), key=lambda row: row["id"]
    )


def test_delta_table_recognizes_its_batches(sample: Sample) -> None:
    wanted = [
        {**row, "code": int(row["code"])}
        for row in sample.shop["phases"][STREAMED]["rows"][ORDERS]
        if row["code"] != BAD_CODE
    ]
    assert wanted
    assert lake_rows(sample) == wanted
    settings = sample.pipeline("shop-lake")
    with closing(PipelineState.open(settings.state, settings.name)) as state:
        number = standing_of(state).number
    changes, sink = repaired_letter(settings), settings.make_sink()
    write_batch(settings, sink, number, changes)
    assert lake_rows(sample) == wanted
    write_batch(settings, sink, number + 1, changes)
    assert len(lake_rows(sample)) == len(wanted) + len(changes)


def test_feed_of_files_recognizes_its_batches(sample: Sample) -> None:
    wanted = sorted_changes(only(sample.changes(ORDERS, None, STREAMED)))
    assert sorted_changes(feed_rows(sample)) == wanted
    feed, lake = sample.pipeline("shop-feed"), sample.pipeline("shop-lake")
    changes = rows_of_letter(lake, dead_letters(lake)[-1].name)
    write_batch(feed, feed.make_sink(), 2, changes)
    assert sorted_changes(feed_rows(sample)) == wanted
    write_batch(feed, feed.make_sink(), 3, changes)
    assert len(feed_rows(sample)) == len(wanted) + len(changes)


def test_dead_letters_have_their_rows_and_reasons(sample: Sample) -> None:
    settings = sample.pipeline("shop-lake")
    letters = dead_letters(settings)
    rows = [row for letter in letters for row in rows_of_letter(settings, letter.name).rows.to_pylist()]
    bad = {row["id"] for _, row in sample.changes(ORDERS, None, STREAMED) if row["code"] == BAD_CODE}
    assert bad
    assert {row["id"] for row in rows} == bad
    assert {row["code"] for row in rows} == {BAD_CODE}
    assert {(letter.pipeline, str(letter.table), letter.instance, letter.step) for letter in letters} == {
        ("shop-lake", ORDERS, "shop", "map")
    }
    assert sum(letter.rows for letter in letters) == len(rows)


# --- Settings -------------------------------------------------------------------------------


def value_at(settings: Any, path: str) -> Any:
    """Return, as JSON, the setting at a path of names and indexes."""
    for name in path.split("."):
        match settings:
            case list() | tuple():
                settings = settings[int(name)]
            case dict():
                settings = settings[name]
            case _:
                settings = getattr(settings, name)
    return json.loads(json.dumps(settings, default=str))


@pytest.mark.parametrize(("name", "load"), [("penstock", load_settings), ("pipeline", load_pipeline)])
def test_settings_file_keeps_its_meaning(sample: Sample, name: str, load: Callable[..., Any]) -> None:
    folder = sample.folder / "settings"
    settings = load(folder / f"{name}.yaml", {**SECRETS, "FOLDER": str(folder)})
    expected = json.loads((folder / f"{name}.expected.json").read_text())
    assert expected
    assert {path: value_at(settings, path) for path in expected} == expected


def test_accounts_and_passwords_of_a_settings_file_are_those_of_the_environment(sample: Sample) -> None:
    folder = sample.folder / "settings"
    settings = load_settings(folder / "penstock.yaml", {**SECRETS, "FOLDER": str(folder)})
    token, cache = settings.listen.secret(), settings.access[0].token_secret()
    assert token is not None
    assert cache is not None
    assert (token.reveal(), cache.reveal()) == (SECRETS["TOKEN"], SECRETS["CACHE_TOKEN"])
    servers = [(address.host, address.port) for address in settings.instances["shop"].addresses()]
    assert servers == [("db1", 3307), ("db2", 3307), ("db3", 3308)]
    assert settings.log_of("shop").folder == Path("/fast/shop")
