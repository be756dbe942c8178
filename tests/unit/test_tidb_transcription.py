# SPDX-License-Identifier: Apache-2.0
"""Which definitions transcription keeps: jobs without effect, and jobs whose binlogs did not come."""

import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from penstock._native import TidbTranscoder, tidb_ddl, tidb_heads
from penstock.logstore.disk import LocalDisk
from penstock.tidb.definition_log import FILE, DefinitionLog
from penstock.tidb.definitions import Definitions
from penstock.tidb.jobs import DdlJob
from penstock.tidb.merge import PulledTransaction
from penstock.tidb.merged_log import MergedLog
from penstock.tidb.transcription import Transcription, TranscriptionParts
from tests.support.tidb.sample_log import jobs as sample_jobs
from tests.support.tidb.sample_log import payloads

CANCELLED = 7
ADD_COLUMN = 5


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
    """What was appended to the log."""

    def __init__(self) -> None:
        self.events: list[bytes] = []

    def begin_transaction(self, commit_ts: int) -> int:
        return sum(map(len, self.events))

    def append(self, events: bytes) -> None:
        self.events.append(events)


class TranscribedLog:
    """A transcription that reads a history of jobs, the definitions that it keeps, and what it logged."""

    def __init__(self, folder: Path, history: Sequence[dict[str, Any]]) -> None:
        self.kept = DefinitionLog(LocalDisk(), folder)
        self.logged = LoggedEvents()
        transcoder = TidbTranscoder(cluster_id=1, server_id=1)
        parts = TranscriptionParts(
            self.kept, HistoryOfJobs(history), transcoder, threading.Event(), lambda why: None
        )
        self._transcription = Transcription(cast(MergedLog, self.logged), parts)

    def write(self, payload: bytes) -> None:
        _, start_ts, commit_ts, _ = tidb_heads([payload])[0]
        self._transcription.write([PulledTransaction(commit_ts, start_ts, payload)])


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
