# SPDX-License-Identifier: Apache-2.0
"""MySQL, MariaDB and TiDB: tables like the source's, with the batch number in the same commit."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow
from pydantic import Field, model_validator

from penstock.changes import Target
from penstock.errors import OperatorError
from penstock.model import TableName
from penstock.settings.values import Bytes
from penstock.sinks.endpoint import MysqlEndpoint, encryption_findings
from penstock.sinks.mysql.check import findings
from penstock.sinks.mysql.connection import Session, connect
from penstock.sinks.mysql.drainer_marks import create_drainer_marks
from penstock.sinks.mysql.log import create_commit_log
from penstock.sinks.mysql.read import rows_of
from penstock.sinks.mysql.tables import column_names, comment_sql, create_database, layout_of, statements
from penstock.sinks.mysql.transaction import create_position_table, has_numbers, last_number, stored_number
from penstock.sinks.mysql.writer import MysqlWriter, WriterOptions
from penstock.sinks.sink import BatchMark, Evolution, Finding, Writer, is_repeated
from penstock.sinks.sql.rows import SkippingWriter, feed_target
from penstock.sinks.sql.sql_sink import SqlSettings, SqlSink, TableText, table_missing
from penstock.sinks.sql.table_owner import is_taken_over, refuse_foreign

EXTRA = ""


class Settings(SqlSettings, MysqlEndpoint):
    """A server that speaks MySQL's protocol: mysql://user@host:3306, with ?ssl_mode=required and the like."""

    connections: int = Field(
        default=2, ge=1, le=64, description="connections per writer of a batch, for rows with a key"
    )
    commit_log: TableText | None = Field(
        default=None, description="database.table that logs the keys of all written rows"
    )
    truncate: bool = Field(
        default=False,
        description="true: empty tables with TRUNCATE, which commits at once; false: with DELETE, inside"
        " the transaction",
    )
    foreign_key_checks: bool = Field(default=False, description="whether the target checks its foreign keys")
    server_id: int | None = Field(
        default=None, ge=1, lt=1 << 32, description="the server_id under which the target logs rows (MariaDB)"
    )
    gtid_tag: str | None = Field(
        default=None,
        pattern="^[a-z_][a-z0-9_]{0,31}$",
        description="tag of the GTIDs that the target assigns (MySQL 8.3)",
    )
    drainer_channel: int | None = Field(
        default=None,
        description="mark every transaction for a Drainer in the other direction with this channel-id, which"
        " then does not send it back",
    )
    statement_bytes: Bytes = Field(
        default=1 << 20,
        ge=1024,
        description="approximate size of a statement; must be below max_allowed_packet",
    )

    @model_validator(mode="after")
    def _refuse_log_of_feed(self) -> "Settings":
        if self.mode == "feed" and self.commit_log is not None:
            raise ValueError("commit_log is for mode: mirror; a feed is a log of every change itself")
        return self


class MysqlSink(SqlSink):
    """Writes to the tables of a server. See the module's docstring."""

    settings: Settings
    kind = "mysql"
    keeps_texts = True

    def check(self) -> Sequence[Finding]:
        try:
            with self._session() as session:
                problems = findings(session, self.settings.statement_bytes)
                return [*encryption_findings(self.settings.address()), *problems]
        except OperatorError as error:
            return [Finding(str(self.settings.address()), error.message, mend=error.hint or "")]

    def columns_missing(self, targets: Sequence[Target]) -> Mapping[TableName, Sequence[str]]:
        with self._session() as session:
            return self._columns_not_in(targets, lambda target: column_names(session, target.name))

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        with self._session() as session:
            return self._statements(session, target, evolution)

    def prepare(self, target: Target, evolution: Evolution) -> None:
        with self._session() as session:
            create_position_table(session, self.positions)
            if self.settings.commit_log is not None:
                create_commit_log(session, TableName.parse(self.settings.commit_log))
            if self.settings.drainer_channel is not None:
                create_drainer_marks(session)
            for statement in self._statements(session, target, evolution):
                session.run(statement)

    def _statements(self, session: Session, target: Target, evolution: Evolution) -> list[str]:
        target = feed_target(target) if self._feed else target
        layout = layout_of(session, target.name)
        creation = create_database(session, target.name.database) if layout is None else []
        changes = statements(target, layout, evolution, session.dialect, self.pipeline)
        if layout is not None and changes:
            name, owner = target.name.sql, layout.owner
            refuse_foreign(name, owner, self.pipeline, changes, take_over=self.settings.take_over)
            if is_taken_over(owner, self.pipeline):
                changes.append(f"ALTER TABLE {name} {comment_sql(self.pipeline)}")
        return creation + changes

    def remembers(self, pipeline: str, targets: Sequence[Target]) -> bool:
        """Look for the pipeline's batch numbers in the position table, which covers all tables, and for rows
        in the targets.
        """
        with self._session() as session:
            return has_numbers(session, self.positions, pipeline) and any(
                layout_of(session, target.name) is not None
                and session.run(f"SELECT 1 FROM {target.name.sql} LIMIT 1")
                for target in targets
            )

    def settle_load(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        with self._session() as session:
            if not self._feed or not is_repeated(mark, last_number(session, self.positions, mark)):
                return None
            versions = [
                session.run(f"SELECT MAX(_commit_version) FROM {target.name.sql}")[0][0]
                for target in targets
                if layout_of(session, target.name) is not None
            ]
        return max((int(version) for version in versions if version is not None), default=None)

    def last_number(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        with self._session() as session:
            return last_number(session, self.positions, mark)

    def open(self, mark: BatchMark, part: int) -> Writer:
        with self._session() as session:
            stored = stored_number(session, self.positions, mark, part)
        if is_repeated(mark, stored):
            return SkippingWriter()
        options = WriterOptions(
            self.positions,
            self.settings.statement_bytes,
            self.settings.held_bytes,
            self.settings.connections,
            self._whole,
            self._feed,
            self.settings.truncate,
            TableName.parse(self.settings.commit_log) if self.settings.commit_log else None,
            self.settings.drainer_channel,
        )
        return MysqlWriter(self._session, options, mark, part)

    def read(
        self, target: Target, low: Mapping[str, Any] | None = None, high: Mapping[str, Any] | None = None
    ) -> Iterator[pyarrow.RecordBatch]:
        self._refuse_feed()
        with self._session() as session:
            layout = layout_of(session, target.name)
            if layout is None:
                raise table_missing(target, "Run the pipeline first: it makes the table")
            yield from rows_of(session, target, layout, low, high)

    def _session(self) -> Session:
        settings = self.settings
        session_statements = ["SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"]
        if not settings.foreign_key_checks:
            session_statements.append("SET SESSION foreign_key_checks=0")
        if settings.server_id is not None:
            session_statements.append(f"SET SESSION server_id={settings.server_id}")
        if settings.gtid_tag is not None:
            session_statements.append(f"SET SESSION gtid_next='AUTOMATIC:{settings.gtid_tag}'")
        return connect(settings.address(), *session_statements)


make = MysqlSink
