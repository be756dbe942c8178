# SPDX-License-Identifier: Apache-2.0
"""Turning merged transactions into events of the merged log, with the definitions of their schema version."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from penstock._native import TidbTranscoder, tidb_ddl
from penstock.errors import EventUnsupported, SchemaPending
from penstock.tidb.definition_log import DefinitionLog
from penstock.tidb.definitions import Definitions, TableVersion
from penstock.tidb.job_sources import JobSource
from penstock.tidb.jobs import DELETE_ONLY, DdlJob
from penstock.tidb.merge import PulledTransaction
from penstock.tidb.merged_log import MergedLog

_log = structlog.get_logger(__name__)

# A DDL binlog is committed before its job is in the history: TiDB first waits for all of its servers to load
# the new version of the schema, up to two leases of 45 s.
_JOB_SECONDS_MAX = 120.0
_JOB_PAUSE_SECONDS = 0.2


@dataclass(frozen=True)
class TranscriptionParts:
    """What transcription needs: definitions, jobs, the kernel's transcoder, and when to give up waiting."""

    kept: DefinitionLog
    jobs: JobSource
    transcoder: TidbTranscoder
    stopping: threading.Event
    report: Callable[[str | None], None]


class Transcription:
    """Writes transactions to a merged log, in commit order. One thread uses it."""

    def __init__(self, merged: MergedLog, parts: TranscriptionParts) -> None:
        self._merged = merged
        self._parts = parts
        self._kept = parts.kept
        # The newest schema version for which the history was searched for jobs without a binlog.
        self._searched = 0
        if self._kept.definitions is not None:
            self._define(self._kept.definitions.versions())

    def write(self, transactions: Sequence[PulledTransaction]) -> None:
        """Append the transactions of one commit timestamp as one transaction.

        Raises SchemaPending while a job is not finished, EventMalformed, SchemaUnknown, and the errors of the
        log and of the source of jobs.
        """
        first, payloads = transactions[0], [transaction.payload for transaction in transactions]
        text, job_id, state = tidb_ddl(first.payload)
        if job_id and len(payloads) == 1:
            self._write_statement(first, text, job_id, state)
            return
        transcoder = self._parts.transcoder
        self._prepare(max(transcoder.tables_of(payload)[0] for payload in payloads))
        offset = self._merged.begin_transaction(first.commit_ts)
        for piece in transcoder.transaction(payloads, offset):
            self._merged.append(piece)

    def _write_statement(self, transaction: PulledTransaction, text: str, job_id: int, state: int) -> None:
        if state == DELETE_ONLY or text.lstrip().lower().startswith("select setval("):
            # The first of the two binlogs of DROP COLUMN, or the next values of a sequence, which have no
            # job.
            return
        job = self._finished_job(job_id)
        if not job.schema_version:
            # It was cancelled or rolled back, so it names no version to read definitions of.
            return
        definitions = self._kept.definitions or self._seed(job.schema_version - 1)
        statement = definitions.statement_of(job, text)
        self._define(self._kept.apply(job))
        if statement is not None:
            offset = self._merged.begin_transaction(transaction.commit_ts)
            events = self._parts.transcoder.ddl(
                transaction.payload, statement.database, offset, statement.text
            )
            self._merged.append(events)

    # --- Definitions ------------------------------------------------------------------------

    def _prepare(self, version: int) -> None:
        """Apply jobs up to a schema version whose binlogs did not come: they were finished before the start.

        Usually there are none: the binlog of each job precedes the transactions that used its result.
        """
        definitions = self._kept.definitions or self._seed(version)
        if version <= max(definitions.version, self._searched):
            return
        self._searched = version
        jobs = self._parts.jobs.newest()
        oldest = min((job for job in jobs if job.schema_version), key=lambda job: job.job_id, default=None)
        if oldest is None or oldest.schema_version > definitions.version:
            # The page begins after the last job that was applied: what lies between is in the history only.
            jobs = list(self._parts.jobs.jobs())
        missing = [job for job in jobs if definitions.version < job.schema_version <= version]
        for job in sorted(missing, key=lambda job: job.schema_version):
            _log.warning("a DDL job without a binlog is applied", job=job.job_id, query=job.query[:200])
            self._define(self._kept.apply(job))

    def _seed(self, version: int) -> Definitions:
        """Read the definitions up to a schema version from all jobs of the cluster."""
        definitions = Definitions()
        jobs = [job for job in self._parts.jobs.jobs() if 0 < job.schema_version <= version]
        for job in sorted(jobs, key=lambda job: job.schema_version):
            definitions.apply(job)
        self._kept.seed(definitions)
        _log.info("the cluster's definitions were read", jobs=len(jobs), version=definitions.version)
        self._define(definitions.versions())
        return definitions

    def _define(self, changed: Iterable[TableVersion]) -> None:
        for table in changed:
            # A dropped table keeps its definition: rows from before the drop may still be to come.
            if table.info is None or table.info.get("view") or table.info.get("sequence"):
                continue
            info = json.dumps(table.info).encode()
            try:
                self._parts.transcoder.define(table.database, info, table.schema_version)
            except EventUnsupported as problem:
                # Only rows of the table would stop the log.
                _log.warning("a table cannot be logged", table=str(table.name), why=problem.message)

    def _finished_job(self, job_id: int) -> DdlJob:
        """Return a job once it is finished. Raises SchemaPending after two minutes."""
        deadline = time.monotonic() + _JOB_SECONDS_MAX
        try:
            while (job := self._parts.jobs.job(job_id)) is None:
                self._parts.report(f"waiting for the DDL job {job_id} to be finished")
                if time.monotonic() > deadline or self._parts.stopping.wait(_JOB_PAUSE_SECONDS):
                    raise SchemaPending(
                        f"the DDL job {job_id} is not in the cluster's history",
                        hint="Run on TiDB: ADMIN SHOW DDL JOBS",
                    )
        finally:
            self._parts.report(None)
        return job
