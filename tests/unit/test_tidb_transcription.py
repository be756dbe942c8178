# SPDX-License-Identifier: Apache-2.0
"""With which definitions rows are written: DDL jobs without effect or without binlogs, and rows from servers
that lag behind a DDL change.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from penstock._native import TidbTranscoder, tidb_ddl, tidb_heads
from penstock.errors import EventUnsupported, SchemaMismatch
from penstock.logstore.disk import LocalDisk
from penstock.tidb.definition_log import FILE, DefinitionLog
from penstock.tidb.definitions import Definitions
from penstock.tidb.jobs import DELETE_ONLY, DdlJob
from penstock.tidb.merge import PulledTransaction
from penstock.tidb.merged_log import MergedLog
from penstock.tidb.messages import Message
from penstock.tidb.transcription import Transcription, TranscriptionParts
from tests.support.binlog.decoding import Decoded, decode
from tests.support.tidb.rows import (
    NOT_NULL,
    PRIMARY_KEY,
    TIMESTAMP,
    VARCHAR,
    Row,
    column,
    ddl_job,
    matched_rows,
    matched_statement,
    table_info,
)
from tests.support.tidb.sample_log import FILE as LOG_FILE
from tests.support.tidb.sample_log import SAMPLES, head, payloads
from tests.support.tidb.sample_log import jobs as sample_jobs

CANCELLED = 7
CREATE_TABLE, ADD_COLUMN, DROP_COLUMN, MULTI_SCHEMA_CHANGE = 3, 5, 6, 60
TABLE_ID = 80
KEY = column(1, "id", flags=NOT_NULL | PRIMARY_KEY)


class HistoryOfJobs:
    """A history of finished jobs, in the order of their ids."""

    def __init__(self, values: Sequence[dict[str, Any]]) -> None:
        self._jobs = [DdlJob.parse(json.dumps(job)) for job in sorted(values, key=lambda job: job["id"])]

    def job(self, job_id: int) -> DdlJob | None:
        return next((job for job in self._jobs if job.job_id == job_id), None)

    def jobs(self) -> Iterator[DdlJob]:
        yield from self._jobs

    def newest(self) -> Sequence[DdlJob]:
        return self._jobs[-1:]

    def close(self) -> None:
        return


class LoggedEvents:
    """The events that are stored in the log, and the events that are not stored yet."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.pending: list[bytes] = []

    def begin_transaction(self, commit_ts: int) -> int:
        return len(head()) + sum(map(len, self.events + self.pending))

    def append(self, events: bytes) -> None:
        self.pending.append(events)

    def flush(self) -> None:
        self.events += self.pending
        self.pending.clear()


class TranscribedLog:
    """A transcription of a history of jobs, with its table definitions and its logged events."""

    def __init__(self, folder: Path, history: Sequence[dict[str, Any]]) -> None:
        folder.mkdir(exist_ok=True)
        self.kept = DefinitionLog(LocalDisk(), folder)
        self.logged = LoggedEvents()
        transcoder = TidbTranscoder(cluster_id=1, server_id=1)
        parts = TranscriptionParts(
            self.kept, HistoryOfJobs(history), transcoder, threading.Event(), lambda why: None
        )
        self._transcription = Transcription(cast(MergedLog, self.logged), parts)

    def write(self, *received: bytes) -> None:
        heads = zip(tidb_heads(list(received)), received, strict=True)
        self._transcription.write(
            [PulledTransaction(commit_ts, start_ts, payload)]
            for (_, start_ts, commit_ts, _), payload in heads
        )

    def decoded(self) -> Decoded:
        return decode(head() + b"".join(self.logged.events), file=LOG_FILE)


@pytest.fixture
def statement() -> tuple[bytes, dict[str, Any]]:
    """The first DDL binlog of the sample, and its job."""
    payload = next(payload for payload in payloads() if tidb_ddl(payload)[1])
    return payload, sample_jobs()[tidb_ddl(payload)[1]]


def test_cancelled_statement_leaves_the_definitions_unread(
    tmp_path: Path, statement: tuple[bytes, dict[str, Any]]
) -> None:
    payload, job = statement
    log = TranscribedLog(tmp_path, [{**job, "state": CANCELLED}])
    log.write(payload)
    assert log.kept.definitions is None
    assert not (tmp_path / FILE).exists()
    assert not log.logged.events


def test_jobs_older_than_the_newest_page_are_applied_before_rows_of_their_version(tmp_path: Path) -> None:
    history = list(sample_jobs().values())
    added = next(job for job in history if job["type"] == ADD_COLUMN)
    version = added["binlog"]["SchemaVersion"]
    rows = next(
        payload
        for payload in payloads()
        if not tidb_ddl(payload)[1] and TidbTranscoder.tables_of(payload)[0] == version
    )
    created = Definitions()
    for job in HistoryOfJobs(history).jobs():
        if job.schema_version < version:
            created.apply(job)
    log = TranscribedLog(tmp_path, history)
    log.kept.seed(created)
    log = TranscribedLog(tmp_path, history)
    log.write(rows)
    assert log.kept.definitions is not None
    assert log.kept.definitions.version == version
    columns = added["binlog"]["TableInfo"]["cols"]
    tables = {table.table_id: table.info for table in log.kept.definitions.tables()}
    assert (tables[added["table_id"]] or {})["cols"] == columns
    assert log.logged.events


def created(*columns: dict[str, Any], last: int, version: int = 10) -> dict[str, Any]:
    """The job that created the table."""
    return ddl_job(
        100, CREATE_TABLE, version, "CREATE TABLE t (...)", table_info(TABLE_ID, "t", columns, last)
    )


def inserted(commit_ts: int, version: int, row: Row) -> bytes:
    return matched_rows(commit_ts, version, TABLE_ID, inserted=[row])


class DropOfColumn:
    """A DROP COLUMN job, optionally of a NOT NULL column, with rows written in each state of the job."""

    TEXT = "ALTER TABLE t DROP COLUMN c"

    def __init__(self, flags: int) -> None:
        kept = (KEY, column(3, "z"))
        table = table_info(TABLE_ID, "t", kept, 3)
        self.history = [
            created(KEY, column(2, "c", flags=flags), column(3, "z"), last=3),
            ddl_job(101, DROP_COLUMN, 14, self.TEXT, table),
        ]
        self.stream = [
            inserted(1000, 10, {1: 1, 2: 5, 3: 7}),
            matched_statement(1010, 101, self.TEXT, DELETE_ONLY),
            # A server that has not loaded the new schema state still writes the column.
            inserted(1020, 11, {1: 2, 2: 5, 3: 7}),
            inserted(1030, 12, {1: 3, 3: 7}),
            matched_rows(1040, 13, TABLE_ID, updated=[({1: 3, 3: 7}, {1: 3, 3: 8})], deleted=[{1: 2, 3: 7}]),
            matched_statement(1050, 101, self.TEXT, 0),
            inserted(1060, 14, {1: 4, 3: 7}),
        ]


@pytest.mark.parametrize("name", ["apply_early", "apply"])
def test_definitions_are_kept_only_after_the_transactions_before_them_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    drop = DropOfColumn(0)
    log = TranscribedLog(tmp_path, drop.history)
    apply, stored = getattr(log.kept, name), []

    def note(*words: Any, **named: Any) -> Any:
        stored.append(len(log.logged.events) if not log.logged.pending else None)
        return apply(*words, **named)

    monkeypatch.setattr(log.kept, name, note)
    log.write(*drop.stream)
    assert stored == [{"apply_early": 1, "apply": 5}[name]]


@pytest.mark.parametrize("flags", [0, NOT_NULL])
def test_rows_lose_a_dropped_column_at_its_delete_only_state(tmp_path: Path, flags: int) -> None:
    drop = DropOfColumn(flags)
    log = TranscribedLog(tmp_path, drop.history)
    log.write(*drop.stream)
    decoded = log.decoded()
    assert [(statement.text, statement.commit_ts) for statement in decoded.statements] == [(drop.TEXT, 1010)]
    columns = [sorted(name for name in row if not name.startswith("_")) for row in decoded.rows("shop.t")]
    assert columns == [["c", "id", "z"]] + [["id", "z"]] * 6
    assert [row["_change_type"] for row in decoded.rows("shop.t")][3:6] == [
        "update_preimage",
        "update_postimage",
        "delete",
    ]


@pytest.mark.parametrize("restart", range(8))
def test_restart_during_drop_column_writes_the_same_log(tmp_path: Path, restart: int) -> None:
    drop = DropOfColumn(NOT_NULL)
    whole = TranscribedLog(tmp_path / "whole", drop.history)
    whole.write(*drop.stream)
    before = TranscribedLog(tmp_path / "parts", drop.history)
    before.write(*drop.stream[:restart])
    # The definitions of the last transaction are durable, but its events were lost.
    logged = 0 if restart == 0 else restart - 1
    kept = TranscribedLog(tmp_path / "kept", drop.history)
    kept.write(*drop.stream[:logged])
    after = TranscribedLog(tmp_path / "parts", drop.history)
    after.logged.events = list(kept.logged.events)
    after.write(*drop.stream[logged:])
    assert after.logged.events == whole.logged.events


def test_dropped_column_of_a_job_with_several_changes_waits_for_the_job(tmp_path: Path) -> None:
    text = "ALTER TABLE t DROP COLUMN c, DROP COLUMN d"
    history = [
        created(KEY, *(column(n, name, flags=NOT_NULL) for n, name in ((2, "c"), (3, "d"))), last=3),
        ddl_job(101, MULTI_SCHEMA_CHANGE, 20, text, table_info(TABLE_ID, "t", [KEY], 3)),
    ]
    log = TranscribedLog(tmp_path, history)
    log.write(
        inserted(1000, 10, {1: 1, 2: 5, 3: 6}),
        inserted(1010, 15, {1: 2}),
        matched_rows(1020, 15, TABLE_ID, deleted=[{1: 1}]),
        matched_statement(1030, 101, text, 0),
        inserted(1040, 20, {1: 3}),
    )
    assert log.decoded().values("shop.t") == [
        ("insert", 1, 5, 6),
        ("insert", 2),
        ("delete", 1),
        ("insert", 3),
    ]
    assert [statement.commit_ts for statement in log.decoded().statements] == [1030]


def test_rows_of_a_lagging_server_have_an_added_column(tmp_path: Path) -> None:
    text = "ALTER TABLE t ADD COLUMN c INT NOT NULL DEFAULT 9"
    added = column(2, "c", flags=NOT_NULL, origin_default="9", default="9")
    history = [
        created(KEY, last=1),
        ddl_job(101, ADD_COLUMN, 14, text, table_info(TABLE_ID, "t", [KEY, added], 2)),
    ]
    log = TranscribedLog(tmp_path, history)
    log.write(
        # The column is not public yet.
        inserted(1000, 13, {1: 1, 2: 9}),
        matched_statement(1010, 101, text),
        inserted(1020, 13, {1: 2, 2: 70}),
        matched_rows(1030, 13, TABLE_ID, deleted=[{1: 1}]),
    )
    assert log.decoded().values("shop.t") == [("insert", 1), ("insert", 2, 70), ("delete", 1, 9)]


def test_old_rows_equal_the_rows_as_they_stood_while_tidb_changes_a_table(tmp_path: Path) -> None:
    history = json.loads((SAMPLES / "ddl_under_load_jobs.json").read_text())
    written = Message((SAMPLES / "ddl_under_load.bin").read_bytes()).views(1)
    log = TranscribedLog(tmp_path, history)
    log.write(*map(bytes, written))
    rows: dict[int, dict[str, Any]] = {}
    old_rows = 0
    for row in log.decoded().rows("shop.t"):
        values = {name: str(value) for name, value in row.items() if not name.startswith("_")}
        key = row["id"]
        if row["_change_type"] in ("update_preimage", "delete"):
            # Old rows have the defaults of the columns that were added after the rows were written.
            stood = {"e": "9", "ts": "2025-12-31 16:00:00+00:00"} | rows.pop(key)
            assert values == {name: stood[name] for name in values}
            old_rows += 1
        else:
            rows[key] = values
    assert old_rows > 50
    versions = [statement.text for statement in log.decoded().statements if "ALTER" in statement.text]
    assert len(versions) == len(history) - 2, "each statement is logged once"


def test_row_with_a_column_that_no_definition_has_stops_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tidb.transcription._JOB_SECONDS_MAX", 0.0)
    log = TranscribedLog(tmp_path, [created(KEY, column(3, "z"), last=3)])
    with pytest.raises(SchemaMismatch, match="column of number 2"):
        log.write(inserted(1000, 10, {1: 1, 2: 5, 3: 7}))


def test_statement_has_the_session_of_its_job(tmp_path: Path) -> None:
    text = 'ALTER TABLE "t" MODIFY COLUMN z BIGINT'
    table = table_info(TABLE_ID, "t", [KEY, column(2, "z")], 2)
    session = {"sql_mode": 4, "location": {"name": "UTC", "offset": 28800}}
    history = [created(KEY, last=1), ddl_job(101, 12, 14, text, table, reorg_meta=session)]
    log = TranscribedLog(tmp_path, history)
    log.write(matched_statement(1010, 101, text))
    assert b"\x05\x06+08:00" in log.logged.events[0]
    assert b"\x01\x04" + bytes(7) in log.logged.events[0]


@pytest.mark.parametrize(
    ("default", "zone"),
    [("'2026-01-01 00:00:00'", "+08:00"), ('"2026-01-01"', "+08:00"), ("'2025-12-31 16:00:00'", "+00:00")],
)
def test_time_zone_of_an_added_timestamp_follows_from_its_default(
    tmp_path: Path, default: str, zone: str
) -> None:
    text = f"ALTER TABLE t ADD COLUMN ts TIMESTAMP DEFAULT {default}"
    log = TranscribedLog(tmp_path, _history_of_added_timestamp(text))
    log.write(matched_statement(1010, 101, text))
    assert b"\x05\x06" + zone.encode() in log.logged.events[0]


def test_added_timestamp_in_an_unknown_time_zone_stops_the_log(tmp_path: Path) -> None:
    text = "ALTER TABLE t ADD COLUMN ts TIMESTAMP DEFAULT 20260101000000"
    log = TranscribedLog(tmp_path, _history_of_added_timestamp(text))
    with pytest.raises(EventUnsupported, match="time zone"):
        log.write(matched_statement(1010, 101, text))


def _history_of_added_timestamp(text: str) -> list[dict[str, Any]]:
    utc = "2025-12-31 16:00:00"
    added = column(2, "ts", TIMESTAMP, default=utc, origin_default=utc)
    return [
        created(KEY, last=1),
        ddl_job(101, ADD_COLUMN, 14, text, table_info(TABLE_ID, "t", [KEY, added], 2)),
    ]


@pytest.mark.parametrize(
    ("text", "is_ansi"),
    [
        ('CREATE TABLE "t" (id INT)', True),
        ('CREATE TABLE t ("id" INT)', True),
        ('ALTER TABLE t ADD COLUMN c VARCHAR(5) DEFAULT "x" COMMENT "y"', False),
        ("ALTER TABLE t COMMENT 'RENAME TABLE \"t\"'", False),
    ],
)
def test_sql_mode_without_a_record_follows_from_the_quotes(tmp_path: Path, text: str, is_ansi: bool) -> None:
    added = column(2, "c", VARCHAR)
    history = [created(KEY, last=1), ddl_job(101, 12, 14, text, table_info(TABLE_ID, "t", [KEY, added], 2))]
    log = TranscribedLog(tmp_path, history)
    log.write(matched_statement(1010, 101, text))
    assert (b"\x01\x04" + bytes(7) in log.logged.events[0]) == is_ansi
