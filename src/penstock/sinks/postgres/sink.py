# SPDX-License-Identifier: Apache-2.0
"""PostgreSQL: one schema per source database, with the batch number in the same transaction."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow
from pydantic import Field, field_validator

from penstock.changes import Target
from penstock.errors import OperatorError
from penstock.model import TableName
from penstock.sinks.postgres.connection import Session
from penstock.sinks.postgres.privileges import prove_may_write
from penstock.sinks.postgres.read import rows_of, without_zero_bytes
from penstock.sinks.postgres.tables import (
    column_names,
    comment_sql,
    create_schema,
    layout_of,
    statements,
    table_sql,
)
from penstock.sinks.postgres.writer import PostgresWriter, WriterOptions
from penstock.sinks.sink import (
    BatchMark,
    Evolution,
    Finding,
    Writer,
    applications_of,
    is_repeated,
)
from penstock.sinks.sql.rows import SkippingWriter, feed_target
from penstock.sinks.sql.sql_sink import SqlSettings, SqlSink, TableText, table_missing
from penstock.sinks.sql.table_owner import is_taken_over, refuse_foreign

EXTRA = "postgres"


class Settings(SqlSettings):
    """A PostgreSQL server: postgresql://user@host:5432/database, with ?sslmode=require and the like."""

    positions: TableText = Field(
        default="penstock.positions",
        description="schema.table for batch numbers; created if missing",
    )
    truncate: bool = Field(
        default=False,
        description="true: empty tables with TRUNCATE, which waits for readers; false: with DELETE",
    )

    @field_validator("url")
    @classmethod
    def _valid_address(cls, url: str) -> str:
        if not url.startswith(("postgresql://", "postgres://")):
            raise ValueError("write postgresql://user@host:5432/database")
        return url


class PostgresSink(SqlSink):
    """Writes to the tables of a server. See the module's docstring."""

    settings: Settings
    kind = "postgres"

    def check(self) -> Sequence[Finding]:
        try:
            with self._session() as session:
                ((may_create, standby),) = session.run(
                    "SELECT has_database_privilege(current_database(), 'CREATE'), pg_is_in_recovery()"
                )
        except OperatorError as error:
            return [Finding(self.settings.url, error.message, mend=error.hint or "")]
        problems = []
        if standby:
            problems.append(Finding(self.settings.url, "the server is a standby, which takes no changes"))
        if not may_create:
            hint = "GRANT CREATE ON DATABASE ... TO the sink's account; or make schemas and tables by hand"
            problems.append(
                Finding(self.settings.url, "the account makes no schemas", fatal=False, mend=hint)
            )
        return problems

    def columns_missing(self, targets: Sequence[Target]) -> Mapping[TableName, Sequence[str]]:
        with self._session() as session:
            return self._columns_not_in(targets, lambda target: column_names(session, target.name))

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        with self._session() as session:
            planned = self._statements(session, target, evolution)
            changed = ["INSERT"] if self._feed else ["INSERT", "UPDATE", "DELETE"]
            changed += ["TRUNCATE"] if self.settings.truncate else []
            prove_may_write(session, target.name, ["SELECT", *changed], alters=bool(planned))
            prove_may_write(session, self.positions, ["SELECT", "INSERT", "UPDATE"], alters=False)
            return planned

    def prepare(self, target: Target, evolution: Evolution) -> None:
        with self._session() as session:
            self._create_position_table(session)
            for statement in self._statements(session, target, evolution):
                session.run(statement)
            session.commit()

    def _statements(self, session: Session, target: Target, evolution: Evolution) -> list[str]:
        target = feed_target(target) if self._feed else target
        layout = layout_of(session, target.name)
        creation = create_schema(session, target.name.database) if layout is None else []
        changes = statements(target, layout, evolution, self.pipeline)
        if layout is not None and changes:
            owner = layout.owner
            refuse_foreign(str(target.name), owner, self.pipeline, changes, take_over=self.settings.take_over)
            if is_taken_over(owner, self.pipeline):
                changes.append(comment_sql(target.name, self.pipeline))
        return creation + changes

    def _create_position_table(self, session: Session) -> None:
        if layout_of(session, self.positions) is not None:
            return
        for statement in create_schema(session, self.positions.database):
            session.run(statement)
        session.run(
            f"CREATE TABLE IF NOT EXISTS {table_sql(self.positions)} (application text, part integer,"
            " number bigint NOT NULL, written timestamptz NOT NULL DEFAULT now(),"
            " PRIMARY KEY (application, part))"
        )

    def remembers(self, pipeline: str, targets: Sequence[Target]) -> bool:
        """Look for the pipeline's batch numbers in the position table, which covers all tables, and for rows
        in the targets.
        """
        prefix = applications_of(pipeline)
        with self._session() as session:
            if layout_of(session, self.positions) is None:
                return False
            query = f"SELECT 1 FROM {table_sql(self.positions)} WHERE left(application, %s) = %s LIMIT 1"
            return bool(session.run(query, (len(prefix), prefix))) and any(
                layout_of(session, target.name) is not None
                and session.run(f"SELECT 1 FROM {table_sql(target.name)} LIMIT 1")
                for target in targets
            )

    def settle_load(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        with self._session() as session:
            if not self._feed or layout_of(session, self.positions) is None:
                return None
            if not is_repeated(mark, self._last_number(session, mark)):
                return None
            versions = [
                session.run(f"SELECT max(_commit_version) FROM {table_sql(target.name)}")[0][0]
                for target in targets
                if layout_of(session, target.name) is not None
            ]
        return max((int(version) for version in versions if version is not None), default=None)

    def last_number(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        with self._session() as session:
            if layout_of(session, self.positions) is None:
                return None
            return self._last_number(session, mark)

    def _last_number(self, session: Session, mark: BatchMark) -> int | None:
        query = f"SELECT max(number) FROM {table_sql(self.positions)} WHERE application = %s"
        number: int | None = session.run(query, (mark.application,))[0][0]
        return number

    def open(self, mark: BatchMark, part: int) -> Writer:
        with self._session() as session:
            stored: list[tuple[Any, ...]] = []
            if layout_of(session, self.positions) is not None:
                stored = session.run(
                    f"SELECT number FROM {table_sql(self.positions)} WHERE application = %s AND part = %s",
                    (mark.application, part),
                )
        if is_repeated(mark, stored[0][0] if stored else None):
            return SkippingWriter()
        settings = self.settings
        options = WriterOptions(self.positions, settings.held_bytes, self._feed, settings.truncate)
        return PostgresWriter(self._session, options, mark, part)

    def read(
        self, target: Target, low: Mapping[str, Any] | None = None, high: Mapping[str, Any] | None = None
    ) -> Iterator[pyarrow.RecordBatch]:
        self._refuse_feed()
        with self._session() as session:
            if layout_of(session, target.name) is None:
                raise table_missing(target, "Run the pipeline first: it makes the table")
            yield from rows_of(session, target, low, high)

    def held(self, target: Target, rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        return without_zero_bytes(rows, left=target.primary_key)

    def _session(self) -> Session:
        settings = self.settings
        return Session(settings.url, settings.user, settings.secret(), settings.ca)


make = PostgresSink
