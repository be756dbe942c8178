# SPDX-License-Identifier: Apache-2.0
"""Where reading starts and ends: a position, a GTID set, or a time.

A start is inclusive and an end exclusive: transactions from a position on, not in a GTID set, committed
at or after a time; up to a position, in a GTID set, committed before a time.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from penstock.errors import OptionInvalid
from penstock.model import Position
from penstock.source.search import find_time_end
from penstock.source.source import Source

_POSITION = re.compile(r"(?:(\d+)/)?([^/:\s]+):(\d+)")
_MYSQL_GTID = re.compile(r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}:\S.*", re.DOTALL)
_MARIADB_GTID = re.compile(r"\d+-\d+-\d+(?:\s*,\s*\d+-\d+-\d+)*")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}(?:[T ].*)?")
_GTID_PREFIX = "gtid:"

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# What callers may give: see `parse_bound`.
BoundText = Position | datetime | str


@dataclass(frozen=True)
class Bound:
    """One end of what is read; exactly one field is set. `time_us` is microseconds UTC since 1970."""

    position: Position | None = None
    gtid_set: str | None = None
    time_us: int | None = None

    def __str__(self) -> str:
        if self.position is not None:
            return str(self.position)
        if self.gtid_set is not None:
            return f"{_GTID_PREFIX}{self.gtid_set}"
        assert self.time_us is not None, "a bound has one field"
        seconds, micros = divmod(self.time_us, 1_000_000)
        return datetime.fromtimestamp(seconds, UTC).replace(microsecond=micros).isoformat()


def parse_bound(value: BoundText, epoch: int = 0) -> Bound:
    """Read a position, a GTID set, or a time; a time without a zone is UTC.

    Text is `mysql-bin.000003:1542`, a GTID set of either family, or ISO 8601. `2026-11-21` is a date; as a
    MariaDB GTID it is written `gtid:2026-11-21`. A position without an epoch gets `epoch`.
    Raises OptionInvalid.
    """
    if isinstance(value, Position):
        return Bound(position=value)
    if isinstance(value, datetime):
        return Bound(time_us=_microseconds(value))
    if not isinstance(value, str):
        raise _invalid(value)
    text = value.strip()
    if text.startswith(_GTID_PREFIX):
        return Bound(gtid_set=text.removeprefix(_GTID_PREFIX).strip())
    if _MYSQL_GTID.fullmatch(text):
        return Bound(gtid_set=text)
    if _DATE.fullmatch(text):
        try:
            return Bound(time_us=_microseconds(datetime.fromisoformat(text)))
        except ValueError as problem:
            raise _invalid(value) from problem
    if _MARIADB_GTID.fullmatch(text):
        return Bound(gtid_set=text)
    if match := _POSITION.fullmatch(text):
        return Bound(position=Position(int(match.group(1) or epoch), match.group(2), int(match.group(3))))
    raise _invalid(value)


@dataclass(frozen=True)
class Bounds:
    """What is read: positions to plan by, and the filters the decoder applies in between.

    `start` and `end` are positions, None for the first and the last there is. Pickles.
    """

    start: Position | None = None
    end: Position | None = None
    gtid_after: str | None = None
    gtid_until: str | None = None
    time_from_us: int | None = None
    time_until_us: int | None = None


def locate(source: Source, start: Bound | None, end: Bound | None) -> Bounds:
    """Return the bounds with start turned into a position to plan from. Raises what the source raises.

    The end stays a filter where it is no position. Of a time, files begun after it are left out; of a GTID
    set none is, but reading ends where all of the set was seen.
    """
    first = start.position if start else None
    if start is not None and start.gtid_set is not None:
        first = source.find_gtid_set(start.gtid_set)
    if start is not None and start.time_us is not None:
        first = source.find_time(start.time_us)
    last = end.position if end else None
    if end is not None and end.time_us is not None:
        last = find_time_end(source, end.time_us)
    return Bounds(
        start=first,
        end=last,
        gtid_after=start.gtid_set if start else None,
        gtid_until=end.gtid_set if end else None,
        time_from_us=start.time_us if start else None,
        time_until_us=end.time_us if end else None,
    )


def _microseconds(moment: datetime) -> int:
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    since = moment - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _invalid(value: object) -> OptionInvalid:
    return OptionInvalid(
        f"{value!r} is no position, GTID set or time",
        hint="Write mysql-bin.000003:1542, a GTID set as @@gtid_executed shows it, or 2026-11-21T08:00:00Z",
    )
