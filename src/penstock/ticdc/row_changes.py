# SPDX-License-Identifier: Apache-2.0
"""A changed row reported by TiCDC, with its values in the form that the binlog writer expects."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from zoneinfo import ZoneInfo

from penstock.errors import OptionInvalid, ValueMalformed
from penstock.ticdc.schema_files import SinkColumn

# The text of each column, in the table's order; None for NULL.
Cells = tuple[bytes | None, ...]

_ZERO = "0000-00-00"


class Change(StrEnum):
    """The kind of change."""

    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"


@dataclass(frozen=True)
class RowChange:
    """A changed row: its old values, its new values, or both."""

    commit_ts: int
    change: Change
    before: Cells | None
    after: Cells | None


def utc_text(text: str, zone: ZoneInfo | None, column: SinkColumn) -> str:
    """Convert a TIMESTAMP from the time zone of TiCDC's server to UTC.

    Raises OptionInvalid if the zone is not set, ValueMalformed for a local time that occurs twice or never in
    the zone.
    """
    if zone is None:
        raise OptionInvalid(
            f"the column `{column.name}` is a TIMESTAMP, which TiCDC writes in its server's time zone",
            hint="Set ticdc.time_zone to the --tz of cdc server, such as UTC or Asia/Shanghai",
        )
    if text.startswith(_ZERO):
        return text
    try:
        local = datetime.fromisoformat(text)
    except ValueError as problem:
        raise ValueMalformed(
            f"the column `{column.name}` has {text[:40]!r}, which is not a TIMESTAMP"
        ) from problem
    if local.tzinfo is not None:
        raise ValueMalformed(f"the column `{column.name}` has {text[:40]!r}, a TIMESTAMP with a time zone")
    first, second = (local.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    if first != second:
        raise ValueMalformed(
            f"the column `{column.name}` has {text}, which the time zone {zone.key} has twice or never",
            hint="Run cdc server with --tz=UTC, set ticdc.time_zone to UTC, and begin a new changefeed",
        )
    fraction = text.partition(".")[2]
    return first.strftime("%Y-%m-%d %H:%M:%S") + (f".{fraction}" if fraction else "")


def check_fraction(text: str, column: SinkColumn, hint: str) -> None:
    """Raise ValueMalformed for a time of day with more fractional digits than its column has."""
    digits_max = column.fraction_digits
    if digits_max is not None and len(text.partition(".")[2].rstrip("0")) > digits_max:
        raise ValueMalformed(
            f"the column `{column.name}` has {text[:40]!r}, with more digits than {column.type_text}",
            hint=hint,
        )


def key_of(columns: Sequence[SinkColumn]) -> list[str]:
    """Return the names of the columns of the primary key."""
    return [column.name for column in columns if column.is_key]
