# SPDX-License-Identifier: Apache-2.0
"""The tables of a TiDB cluster at each version of its schema, derived from DDL jobs.

Every transaction names the schema version with which it was prepared. It may commit after a schema change
that its TiDB server had not loaded yet. The last two definitions of each table are therefore kept, each with
the commit timestamp from which rows are written with it. While a column is being dropped, TiDB leaves it out
of rows before the DROP COLUMN job is finished. The new definition is therefore used before its schema version
if rows do not contain the column.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from penstock.model import TableName
from penstock.schema.statements.effects import RenameTable
from penstock.schema.statements.statement import effects_of
from penstock.schema.statements.tokens import ServerSpelling
from penstock.tidb.jobs import NOT_LOGGED, Action, DdlJob
from penstock.tidb.statement_sessions import NO_SESSION, DdlSession, session_of

# Databases that TiDB creates for itself, so their statements are not logged.
SYSTEM_DATABASES = frozenset({"mysql", "information_schema", "performance_schema", "metrics_schema", "sys"})

_VERSIONS_KEPT = 2
# A dropped table is forgotten after this many further schema changes. A transaction that was prepared before
# the drop is committed earlier than that.
_DROP_REMEMBERED = 1000
_DROPS = (Action.DROP_TABLE, Action.DROP_VIEW, Action.DROP_SEQUENCE)


@dataclass(frozen=True)
class TableVersion:
    """A table's definition from a schema version on, as TiDB's TableInfo.

    `info` is None if the table was dropped. All rows that commit from `commit_ts` on use this definition,
    whatever the schema version of their transaction.
    """

    table_id: int
    database: str
    schema_version: int
    info: dict[str, Any] | None = field(repr=False)
    commit_ts: int = 0

    @property
    def name(self) -> TableName | None:
        """The name, None for a dropped table."""
        return None if self.info is None else TableName(self.database, self.info["name"]["O"])


@dataclass(frozen=True)
class LoggedStatement:
    """The SQL of a DDL job as it is logged. Names without a database belong to `database`."""

    database: str
    text: str
    session: DdlSession = NO_SESSION


@dataclass(frozen=True)
class EarlyJob:
    """A job whose definitions took effect before the job's schema version."""

    schema_version: int
    # Whether the job's statement is logged when the definitions take effect, not when the job's own binlog
    # arrives.
    is_logged: bool


class Definitions:
    """The table definitions of all tables, up to the schema version `version`. Jobs are applied in ascending
    order of their version.
    """

    def __init__(self) -> None:
        self.version = 0
        self._databases: dict[int, str] = {}
        self._tables: dict[int, list[TableVersion]] = {}
        self._early: dict[int, EarlyJob] = {}

    # --- Jobs -------------------------------------------------------------------------------

    def apply(self, job: DdlJob, commit_ts: int = 0) -> Sequence[TableVersion]:
        """Apply a job; return the definitions that it created, replaced or dropped.

        They are in force for rows from `commit_ts` on. A job that was already applied (perhaps early) or that
        has no effect changes no definition.
        """
        if job.schema_version <= self.version:
            return ()
        changed = () if job.job_id in self._early else self._changes_of(job, commit_ts)
        self.version = job.schema_version
        self._add(changed)
        return changed

    def apply_early(self, job: DdlJob, commit_ts: int, *, is_logged: bool) -> Sequence[TableVersion]:
        """Make the definitions of a job effective before the job's schema version is reached; return them.

        With `is_logged`, the job's statement is logged now. Also apply the job when its own binlog arrives.
        """
        early = self._early.get(job.job_id)
        self._early[job.job_id] = EarlyJob(job.schema_version, is_logged or self.is_logged(job))
        changed = self._changes_of(job, commit_ts) if early is None else ()
        self._add(changed)
        return changed

    def is_early(self, job: DdlJob) -> bool:
        """Whether the definitions of a job took effect before the job's version."""
        return job.job_id in self._early

    def is_logged(self, job: DdlJob) -> bool:
        """Whether the statement of a job was logged before the job was finished."""
        early = self._early.get(job.job_id)
        return early is not None and early.is_logged

    def _add(self, changed: Iterable[TableVersion]) -> None:
        for table in changed:
            versions = self._tables.setdefault(table.table_id, [])
            versions.append(table)
            del versions[:-_VERSIONS_KEPT]

    def statement_of(self, job: DdlJob, text: str) -> LoggedStatement | None:
        """Return how to log the statement of a job, given the text in its binlog; None to leave it out.

        A rename is logged with the names of both databases. Raises EventUnsupported for a statement whose
        meaning depends on an unknown session.
        """
        database = self._databases.get(job.schema_id, job.schema_name)
        if job.database is not None:
            database = job.database["db_name"]["O"]
        if not job.schema_version or job.action in NOT_LOGGED or database.lower() in SYSTEM_DATABASES:
            return None
        text = text.strip().removesuffix(";")
        if job.action in (Action.RENAME_TABLE, Action.RENAME_TABLES):
            renamed = ", ".join(
                f"{old.sql} TO {new.sql}" for old, new in self._renamed(job) if old is not None and old != new
            )
            text = f"RENAME TABLE {renamed}" if renamed else text
        known = [table.info for info in job.tables if (table := self._before(job, int(info["id"])))]
        cols = (column for info in known if info is not None for column in info["cols"] or ())
        columns = frozenset(int(column["id"]) for column in cols)
        return LoggedStatement(database, text, session_of(job, text, columns))

    def _before(self, job: DdlJob, table_id: int) -> TableVersion | None:
        """Return the definition of a table before a job, even after the job was applied."""
        versions = reversed(self._tables.get(table_id, ()))
        return next((table for table in versions if table.schema_version < job.schema_version), None)

    def _changes_of(self, job: DdlJob, commit_ts: int) -> list[TableVersion]:
        return [replace(table, commit_ts=commit_ts) for table in self._versions_of(job)]

    def _versions_of(self, job: DdlJob) -> list[TableVersion]:
        version = job.schema_version
        if job.database is not None:
            self._databases[int(job.database["id"])] = job.database["db_name"]["O"]
        if job.action == Action.DROP_SCHEMA:
            database = self._databases.get(job.schema_id, job.schema_name)
            return [self._dropped(table, version) for table in self.tables() if table.database == database]
        if job.action in _DROPS:
            table_ids = {job.table_id, *(int(info["id"]) for info in job.tables)}
            return [self._dropped(table, version) for table in self.tables() if table.table_id in table_ids]
        changed = []
        if job.action == Action.TRUNCATE_TABLE:
            changed += [
                self._dropped(table, version) for table in self.tables() if table.table_id == job.table_id
            ]
        elif job.action == Action.EXCHANGE_PARTITION:
            changed += self._exchanged(job)
        for info in job.tables:
            changed.append(TableVersion(int(info["id"]), self._database_of(job, info), version, info))
        return changed

    def _database_of(self, job: DdlJob, info: dict[str, Any]) -> str:
        """Return the database of a table after a job."""
        known = self._databases.get(int(info.get("db_id") or 0))
        if known is None and job.action == Action.RENAME_TABLES:
            # A RENAME TABLES job has one schema id for tables of several databases, so use the names in its
            # statement.
            known = _rename_targets(job).get(info["name"]["L"])
        return known or self._databases.get(job.schema_id, job.schema_name)

    def _renamed(self, job: DdlJob) -> Iterable[tuple[TableName | None, TableName]]:
        for info in job.tables:
            before = self._before(job, int(info["id"]))
            new = TableName(self._database_of(job, info), info["name"]["O"])
            yield None if before is None else before.name, new

    def _exchanged(self, job: DdlJob) -> list[TableVersion]:
        """Return the table whose rows moved to a partition: it continues under the partition's old id."""
        single = self._tables.get(job.table_id)
        if not single or single[-1].info is None:
            return []
        changed = [self._dropped(single[-1], job.schema_version)]
        for info in job.tables:
            before = self._tables.get(int(info["id"]))
            ids_before = _partition_ids(before[-1].info) if before else set()
            for new_id in ids_before - _partition_ids(info):
                renumbered = {**single[-1].info, "id": new_id}
                changed.append(TableVersion(new_id, single[-1].database, job.schema_version, renumbered))
        return changed

    @staticmethod
    def _dropped(table: TableVersion, version: int) -> TableVersion:
        return TableVersion(table.table_id, table.database, version, None)

    # --- State ------------------------------------------------------------------------------

    def tables(self) -> list[TableVersion]:
        """Return the newest definition of every existing table."""
        return [versions[-1] for versions in self._tables.values() if versions[-1].info is not None]

    def versions(self) -> list[TableVersion]:
        """Return every definition that is kept, in ascending order of their versions."""
        kept = [table for versions in self._tables.values() for table in versions]
        return sorted(kept, key=lambda table: table.schema_version)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        forgotten = {
            table_id
            for table_id, versions in self._tables.items()
            if versions[-1].info is None and versions[-1].schema_version < self.version - _DROP_REMEMBERED
        }
        return {
            "version": self.version,
            "databases": {str(number): name for number, name in self._databases.items()},
            "tables": [
                [table.table_id, table.database, table.schema_version, table.info, table.commit_ts]
                for table in self.versions()
                if table.table_id not in forgotten
            ],
            "early": {
                str(job_id): [early.schema_version, early.is_logged]
                for job_id, early in self._early.items()
                if early.schema_version >= self.version - _DROP_REMEMBERED
            },
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Read the output of `to_json`."""
        definitions = cls()
        definitions.version = values["version"]
        definitions._databases = {int(number): name for number, name in values["databases"].items()}
        for table_id, database, version, info, *commit_ts in values["tables"]:
            table = TableVersion(table_id, database, version, info, *commit_ts)
            definitions._tables.setdefault(table_id, []).append(table)
        # Definitions that earlier versions wrote have neither early jobs nor commit timestamps.
        for job_id, early in values.get("early", {}).items():
            definitions._early[int(job_id)] = EarlyJob(*early)
        return definitions


def _partition_ids(info: dict[str, Any] | None) -> set[int]:
    partition = (info or {}).get("partition") or {}
    return {int(definition["id"]) for definition in partition.get("definitions") or ()}


def _rename_targets(job: DdlJob) -> dict[str, str]:
    """For each new table name of a RENAME TABLE statement, in lower case, return the table's database."""
    effects = effects_of(job.query, job.schema_name, ServerSpelling.of_server("8.0.11"))
    return {
        effect.to.table.lower(): effect.to.database for effect in effects if isinstance(effect, RenameTable)
    }
