# SPDX-License-Identifier: Apache-2.0
"""Converts merged transactions into events of the merged log, using the table definitions of each
transaction's schema version.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from penstock._native import TidbTranscoder, tidb_ddl
from penstock.errors import EventUnsupported, SchemaMismatch, SchemaPending
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
    """What transcription uses: the stored definitions, the job source, the kernel's transcoder, and an event
    that ends its waiting.
    """

    kept: DefinitionLog
    jobs: JobSource
    transcoder: TidbTranscoder
    stopping: threading.Event
    report: Callable[[str | None], None]


class Transcription:
    """Writes transactions to a merged log, in commit order. Used by one thread."""

    def __init__(self, merged: MergedLog, parts: TranscriptionParts) -> None:
        self._merged = merged
        self._parts = parts
        self._kept = parts.kept
        # The newest schema version for which the history was searched for jobs without a binlog.
        self._searched = 0
        if self._kept.definitions is not None:
            self._define(self._kept.definitions.versions())

    def write(self, commits: Iterable[Sequence[PulledTransaction]]) -> None:
        """Store the transactions of each commit timestamp as one transaction. Transactions before an error
        are stored too.

        Raises SchemaPending while a job is not finished, EventMalformed, SchemaUnknown, and propagates errors
        from the log and from the source of jobs.
        """
        try:
            for transactions in commits:
                self._write(transactions)
        finally:
            self._merged.flush()

    def _write(self, transactions: Sequence[PulledTransaction]) -> None:
        first, payloads = transactions[0], [transaction.payload for transaction in transactions]
        text, job_id, state = tidb_ddl(first.payload)
        if job_id and len(payloads) == 1:
            self._write_statement(first, text, job_id, state)
        else:
            self._write_rows(first.commit_ts, payloads)

    def _write_rows(self, commit_ts: int, payloads: Sequence[bytes]) -> None:
        transcoder = self._parts.transcoder
        versions, tables = zip(*map(transcoder.tables_of, payloads), strict=True)
        self._prepare(max(versions), commit_ts)
        offset = self._merged.begin_transaction(commit_ts)
        try:
            pieces = transcoder.transaction(payloads, offset)
        except SchemaMismatch:
            # While a column is being dropped, rows do not contain it. A job of several changes has no binlog
            # before its end.
            self._merged.flush()
            job = self._next_job({table for ids in tables for table in ids})
            if job is None:
                raise
            _log.warning("a DDL job comes into force before its end", job=job.job_id, query=job.query[:200])
            self._define(self._kept.apply_early(job, commit_ts, is_logged=False))
            pieces = transcoder.transaction(payloads, offset)
        for piece in pieces:
            self._merged.append(piece)

    def _write_statement(self, transaction: PulledTransaction, text: str, job_id: int, state: int) -> None:
        if text.lstrip().lower().startswith("select setval("):
            # This binlog only records the next values of a sequence. No job exists for it.
            return
        # Flush first: definitions are stored only after all earlier transactions, and readers must not wait
        # for the job.
        self._merged.flush()
        job = self._finished_job(job_id)
        if not job.schema_version:
            # The job was cancelled or rolled back, so it has no version whose definitions could be read.
            return
        definitions = self._kept.definitions or self._seed(job.schema_version - 1)
        statement = definitions.statement_of(job, text)
        commit_ts = transaction.commit_ts
        if state == DELETE_ONLY:
            # The first binlog of a DROP COLUMN: from here on, rows do not have the column.
            self._define(self._kept.apply_early(job, commit_ts, is_logged=True))
        else:
            is_logged = definitions.is_logged(job)
            self._define(self._kept.apply(job, commit_ts))
            if is_logged:
                return
        if statement is not None:
            offset = self._merged.begin_transaction(transaction.commit_ts)
            events = self._parts.transcoder.ddl(
                transaction.payload,
                statement.database,
                offset,
                statement.text,
                sql_mode=statement.session.sql_mode,
                time_zone=statement.session.time_zone,
            )
            self._merged.append(events)

    # --- Definitions ------------------------------------------------------------------------

    def _prepare(self, version: int, commit_ts: int) -> None:
        """Apply the jobs up to a schema version that were finished before the start, so that their binlogs
        were not received.

        Usually there are none: the binlog of each job precedes the transactions that used its result.
        """
        definitions = self._kept.definitions or self._seed(version)
        if version <= max(definitions.version, self._searched):
            return
        self._searched = version
        self._merged.flush()
        missing = [job for job in self._jobs_after(definitions) if job.schema_version <= version]
        for job in sorted(missing, key=lambda job: job.schema_version):
            _log.warning("a DDL job without a binlog is applied", job=job.job_id, query=job.query[:200])
            self._define(self._kept.apply(job, commit_ts))

    def _jobs_after(self, definitions: Definitions) -> list[DdlJob]:
        """Return all finished jobs that were not applied yet."""
        jobs = self._parts.jobs.newest()
        oldest = min((job for job in jobs if job.schema_version), key=lambda job: job.job_id, default=None)
        if oldest is None or oldest.schema_version > definitions.version:
            # The page of the newest jobs begins after the last applied job, so only the history has the jobs
            # in between.
            jobs = list(self._parts.jobs.jobs())
        return [job for job in jobs if job.schema_version > definitions.version]

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
            # A dropped table keeps its definition: rows from before the drop may still arrive.
            if table.info is None or table.info.get("view") or table.info.get("sequence"):
                continue
            info = json.dumps(table.info).encode()
            try:
                transcoder = self._parts.transcoder
                transcoder.define(table.database, info, table.schema_version, table.commit_ts)
            except EventUnsupported as problem:
                # Only warn: the log stops only if it receives rows of this table.
                _log.warning("a table cannot be logged", table=str(table.name), why=problem.message)

    def _finished_job(self, job_id: int) -> DdlJob:
        """Return a job once it is finished. Raises SchemaPending after two minutes."""
        job = self._wait_for_job(lambda: self._parts.jobs.job(job_id), f"the DDL job {job_id}")
        if job is None:
            raise SchemaPending(
                f"the DDL job {job_id} is not in the cluster's history",
                hint="Run on TiDB: ADMIN SHOW DDL JOBS",
            )
        return job

    def _next_job(self, table_ids: set[int]) -> DdlJob | None:
        """Return the next job of some tables once it is finished; None if there is none for two minutes."""
        definitions = self._kept.definitions
        assert definitions is not None, "they were read before rows"

        def find() -> DdlJob | None:
            following = [
                job
                for job in self._jobs_after(definitions)
                if job.table_id in table_ids and not definitions.is_early(job)
            ]
            return min(following, key=lambda job: job.schema_version, default=None)

        return self._wait_for_job(find, f"a DDL job of the tables {sorted(table_ids)}")

    def _wait_for_job(self, find: Callable[[], DdlJob | None], what: str) -> DdlJob | None:
        """Return a finished job once it is available; None after two minutes, or when stopping."""
        deadline = time.monotonic() + _JOB_SECONDS_MAX
        try:
            while (job := find()) is None:
                self._parts.report(f"waiting for {what} to be finished")
                if time.monotonic() > deadline or self._parts.stopping.wait(_JOB_PAUSE_SECONDS):
                    return None
        finally:
            self._parts.report(None)
        return job
