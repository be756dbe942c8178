# SPDX-License-Identifier: Apache-2.0
"""Raises an error or logs a warning if selected tables were changed without their rows being logged."""

from typing import Any

from penstock.errors import StatementLogged
from penstock.model import Position, TablePatterns
from penstock.schema.statements.row_changes import RowChange, change_of, tables_of
from penstock.schema.statements.secrets import without_secrets
from penstock.schema.statements.tokens import ServerSpelling

_TEXT_SHOWN_MAX = 200
_HINT = (
    "`penstock pipelines skip PIPELINE {position}` passes over its transaction, and then `penstock verify"
    " PIPELINE --repair` mends the target; other readers start behind it ({end}) and read the tables again."
    " Servers log rows under binlog_format = ROW, but for MariaDB's tables that are versioned by transaction"
)


def refuse_change(
    statement: Any, spelling: ServerSpelling, selected: TablePatterns, position: Position
) -> None:
    """Raise StatementLogged if a statement changed, or may have changed, selected tables without logging
    rows."""
    change = change_of(statement.text, statement.database, spelling)
    if change is None:
        if not statement.is_change:
            return
        change = RowChange(frozenset(), "its kind is not known")
    changed = [str(name) for name in sorted(change.tables) if selected.matches(name.database, name.table)]
    if changed:
        problem = f"a change of {', '.join(changed)} was logged as a statement"
    elif doubt := change.doubt(statement.accessed, selected):
        problem = f"a change was logged as a statement, and which tables it changed is not known: {doubt}"
    else:
        return
    end = statement.transaction_end
    end_text = (
        f"at {end}" if end else f"`penstock inspect FILE --start {statement.position}` shows where it ends"
    )
    raise StatementLogged(
        f"{problem}: {without_secrets(statement.text)[:_TEXT_SHOWN_MAX]}",
        position=str(position),
        hint=_HINT.format(position=statement.position, end=end_text),
    )


def warn_of_unlogged_rows(
    statement: Any, spelling: ServerSpelling, selected: TablePatterns, position: Position
) -> None:
    """Log a warning if a definition added or removed rows of selected tables without logging them."""
    statement_tables = tables_of(statement.text, statement.database, spelling)
    context = {"position": str(position), "statement": without_secrets(statement.text)[:_TEXT_SHOWN_MAX]}
    for warning, tables in (
        ("a table was emptied without its rows in the log", statement_tables.emptied),
        (
            "rows of a table came or went without being logged",
            statement_tables.unlogged - statement_tables.emptied,
        ),
    ):
        for name in sorted(tables):
            if selected.matches(name.database, name.table):
                _warn(warning, table=str(name), **context)
    for database in sorted(statement_tables.databases):
        if selected.may_match_in(database):
            _warn("a database was dropped without its rows in the log", database=database, **context)


def _warn(event: str, **context: str) -> None:
    # Imported on demand: each planning worker of a Spark query imports this module, and few of them log.
    import structlog

    structlog.get_logger(__name__).warning(event, **context)
