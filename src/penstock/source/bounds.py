# SPDX-License-Identifier: Apache-2.0
"""The start and end of a read: a position, a GTID set, or a time.

A start is inclusive. The read begins at the given position, or with the transactions that are not in the GTID
set, or with those committed at or after the given time. An end is exclusive. The read contains the
transactions before the given position, or those in the GTID set, or those committed before the given time.
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

# The types of a bound that callers may pass; see `parse_bound`.
BoundText = Position | datetime | str


@dataclass(frozen=True)
class Bound:
    """The start or the end of a read. Exactly one field is set. `time_us` is in microseconds since 1970,
    UTC.
    """

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


def parse_bound(value: BoundText) -> Bound:
    """Parse a position, a GTID set, or a time; a time without a zone is UTC.

    Text is `mysql-bin.000003:1542`, a MySQL or MariaDB GTID set, or ISO 8601. `2026-11-21` is a date; write
    it as `gtid:2026-11-21` to mean a MariaDB GTID. A position without an epoch belongs to epoch 0. Raises
    OptionInvalid.
    """
    if isinstance(value, Position):
        return Bound(position=value)
    if isinstance(value, datetime):
        return Bound(time_us=_to_microseconds(value))
    if not isinstance(value, str):
        raise _invalid(value)
    text = value.strip()
    if text.startswith(_GTID_PREFIX):
        return Bound(gtid_set=text.removeprefix(_GTID_PREFIX).strip())
    if _MYSQL_GTID.fullmatch(text):
        return Bound(gtid_set=text)
    if _DATE.fullmatch(text):
        try:
            return Bound(time_us=_to_microseconds(datetime.fromisoformat(text)))
        except ValueError as problem:
            raise _invalid(value) from problem
    if _MARIADB_GTID.fullmatch(text):
        return Bound(gtid_set=text)
    if match := _POSITION.fullmatch(text):
        return Bound(position=Position(int(match.group(1) or 0), match.group(2), int(match.group(3))))
    raise _invalid(value)


@dataclass(frozen=True)
class Bounds:
    """The range to read: the positions for planning, and the filters that the decoder applies between them.

    A `start` or `end` of None means the first or last available position. Can be pickled.
    """

    start: Position | None = None
    end: Position | None = None
    gtid_after: str | None = None
    gtid_until: str | None = None
    time_from_us: int | None = None
    time_until_us: int | None = None


def locate(source: Source, start: Bound | None, end: Bound | None) -> Bounds:
    """Return the bounds, with the start converted to a position for planning. Propagates errors from the
    source.

    An end that is not a position remains a filter. For an end time, files started after it are left out. For
    an end GTID set no file is left out, but reading stops once the whole set was seen.
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


def _to_microseconds(timestamp: datetime) -> int:
    timestamp = timestamp if timestamp.tzinfo else timestamp.replace(tzinfo=UTC)
    elapsed = timestamp - _EPOCH
    return (elapsed.days * 86_400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds


def _invalid(value: object) -> OptionInvalid:
    return OptionInvalid(
        f"{value!r} is no position, GTID set or time",
        hint="Write mysql-bin.000003:1542, a GTID set as @@gtid_executed shows it, or 2026-11-21T08:00:00Z",
    )
