# SPDX-License-Identifier: Apache-2.0
"""The settings of one read of a log: which log, which tables, from where to where."""

from dataclasses import dataclass

from penstock.limits import RANGE_BYTES_DEFAULT
from penstock.model import TablePatterns
from penstock.source.offsets import StartText
from penstock.source.source import SourceOptions

TYPED = "typed"
ENVELOPE = "envelope"


@dataclass(frozen=True)
class ReadSettings:
    """The settings of one read or stream. Can be pickled; holds a password only inside a `Secret`.

    `start` and `end` are each a bound, EARLIEST, LATEST, an `Offset`, or None if not set.
    """

    source: SourceOptions
    tables: TablePatterns
    mode: str
    columns: tuple[str, ...] | None = None
    start: StartText = None
    end: StartText = None
    rows_max: int | None = None
    bytes_max: int | None = None
    ranges_min: int = 1
    range_bytes: int = RANGE_BYTES_DEFAULT
    fail_on_data_loss: bool = True
    schemas: str | None = None
    schema_tracking: str | None = None

    @property
    def is_live(self) -> bool:
        """Whether a server or a daemon is read, not files."""
        return self.source.address is not None or self.source.daemon is not None
