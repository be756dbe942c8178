# SPDX-License-Identifier: Apache-2.0
"""The session of a DDL statement: the SQL mode and the time zone with which its text must be interpreted.

TiDB records both in the jobs that may move rows (`reorg_meta`). For other statements, the session is derived
from the text and the resulting definitions. For example, TiDB stores the default of a TIMESTAMP column in
UTC, so comparing it with the literal in the text reveals the session's time zone offset.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from penstock.errors import EventUnsupported
from penstock.tidb.jobs import Action, DdlJob, zone_of_offset

# Bits of MySQL's `sql_mode`.
_ANSI_QUOTES = 4

# TiDB's number of the type TIMESTAMP, and the first version of a column whose default is in UTC. Earlier
# defaults are in the server's zone.
_TIMESTAMP_TYPE = 7
_UTC_DEFAULTS_VERSION = 1

_OFFSET_MAX = timedelta(hours=14)
_OFFSET_STEP = timedelta(minutes=15)

_LITERAL = re.compile(r"""['"](\d{4}-\d{2}-\d{2}(?:[ T]\d{2}:\d{2}:\d{2}(?:\.\d{1,6})?)?)['"]""")

# Double quotes around a name: after a word or a dot that only a name can follow, or before a column's type.
_QUOTED_NAME = re.compile(
    r"""\b(?:TABLE|EXISTS|COLUMN|INDEX|KEY|CONSTRAINT|DATABASE|SCHEMA|VIEW|TO|ON|REFERENCES|ADD|DROP|CHANGE
    |MODIFY|PARTITION)\s*"|\."|[(,]\s*"[^"]+"\s+[A-Z]""",
    re.IGNORECASE | re.VERBOSE,
)
_STRING_OR_COMMENT = re.compile(r"'(?:[^'\\]|''|\\.)*'|/\*(?![!T]).*?\*/|--\s[^\n]*|#[^\n]*", re.DOTALL)


@dataclass(frozen=True)
class DdlSession:
    """The session of a DDL statement: the SQL mode as MySQL's bits, and the time zone, which is "" if the
    statement does not depend on it.
    """

    sql_mode: int = 0
    time_zone: str = ""


NO_SESSION = DdlSession()


def session_of(job: DdlJob, text: str, known_columns: frozenset[int]) -> DdlSession:
    """Return the session of a job's statement. `known_columns` are the numbers of columns that are not new.

    Raises EventUnsupported for a default of TIMESTAMP in a time zone that neither the job nor the text
    reveals.
    """
    sql_mode, zone = job.sql_mode, job.time_zone
    if sql_mode is None:
        sql_mode = _ANSI_QUOTES if _QUOTED_NAME.search(_STRING_OR_COMMENT.sub("''", text)) else 0
    if zone is None:
        zone = _zone_of_defaults(job, text, [*_new_defaults(job, known_columns)])
    return DdlSession(sql_mode, zone)


def _new_defaults(job: DdlJob, known_columns: frozenset[int]) -> Iterator[datetime]:
    """Yield the defaults of the TIMESTAMP columns that a job added, in UTC."""
    columns: Sequence[dict[str, Any]] = [column for table in job.tables for column in table["cols"] or ()]
    for column in columns:
        if column["id"] in known_columns or column["type"]["Tp"] != _TIMESTAMP_TYPE:
            continue
        default = column.get("default")
        if not isinstance(default, str) or int(column.get("version") or 0) < _UTC_DEFAULTS_VERSION:
            continue
        if (value := _moment(default)) is not None:
            yield value


def _zone_of_defaults(job: DdlJob, text: str, defaults: Sequence[datetime]) -> str:
    """Return the name of the time zone offset by which a statement's literals differ from the resulting
    defaults in UTC.
    """
    if not defaults:
        return ""
    literals = [moment for literal in _LITERAL.findall(text) if (moment := _moment(literal)) is not None]
    offsets = [{literal - default for literal in literals} for default in defaults]
    shared = {
        each for each in set.intersection(*offsets) if abs(each) <= _OFFSET_MAX and not each % _OFFSET_STEP
    }
    if len(shared) == 1:
        return zone_of_offset(int(shared.pop().total_seconds()))
    if job.action == Action.CREATE_TABLE:
        # A new table has no existing rows to which the default applied, and each logged row contains the
        # column's value, so the zone does not matter.
        return ""
    raise EventUnsupported(
        f"the time zone of {text[:200]!r} is unknown, and a default of TIMESTAMP depends on it",
        position=str(job.finished_ts),
        hint="Begin a new log: move the folder of this one away, and read the tables again",
    )


def _moment(text: str) -> datetime | None:
    """Return a date and time; None for a word such as CURRENT_TIMESTAMP, and for the zero date."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None
