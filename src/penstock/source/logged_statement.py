# SPDX-License-Identifier: Apache-2.0
"""A statement from the log, as readers of rows receive it."""

from dataclasses import dataclass, field

from penstock.changes import StatementOrigin
from penstock.model import Position, TableName


@dataclass(frozen=True)
class LoggedStatement:
    """A logged statement that defines, renames, drops or empties selected tables.

    It occupies [`position`, `end`) in the log. `tables` contains all tables that it names, `databases` the
    databases that it drops, `emptied` the tables that it empties, and `unlogged` the tables whose rows it
    adds or removes without logging them, and `created` the tables that did not exist before. `transaction` is
    the start of the transaction that contains it, None if it is outside a transaction. `sql_mode` contains
    the session's SQL modes that change how the text is parsed. `commit_ts` is the commit timestamp of a
    statement from a TiDB cluster. `definitions` describes how it changes each table, as in
    `DefiningStatement`. Can be pickled.
    """

    text: str
    database: str
    position: Position
    end: Position
    tables: frozenset[TableName]
    databases: frozenset[str]
    emptied: frozenset[TableName]
    transaction: Position | None = None
    unlogged: frozenset[TableName] = frozenset()
    sql_mode: frozenset[str] = frozenset()
    commit_ts: int | None = None
    definitions: tuple[tuple[str, str, str, str], ...] = ()
    origin: StatementOrigin = field(default_factory=StatementOrigin)
    created: frozenset[TableName] = frozenset()

    @property
    def version(self) -> int:
        """The commit version of the statement, comparable with the versions of the rows before and after
        it.
        """
        return self.position.commit_version if self.commit_ts is None else self.commit_ts

    @property
    def emptied_to(self) -> int:
        """The commit version up to which the rows of emptied tables are deleted.

        CREATE TABLE ... SELECT is logged inside the transaction of its rows. Those rows have the version of
        the transaction's start and are kept.
        """
        if self.transaction is None:
            return self.version
        return (self.transaction.commit_version if self.commit_ts is None else self.commit_ts) - 1
