# SPDX-License-Identifier: Apache-2.0
"""The deliveries of a subscription's member since it started, as the member records them in the store."""

import json
from dataclasses import asdict, dataclass
from typing import Self

from penstock.coordinate.store import HINT_RECORD, Record, reading_record


@dataclass(frozen=True)
class MemberStatistics:
    """The counts and the lag of a member at `updated_us`, in microseconds since 1970, UTC.

    `rows` counts the rows passed to the program, counting them again after a rollback. `errors` counts failed
    calls. After a failed call, the batch was retried (counted in `retries`) or skipped (counted in
    `skipped`), or the member stopped. `behind_bytes` is the size of the part of the log that has not been
    received. None means unknown.
    """

    rows: int = 0
    rows_per_second: float = 0.0
    errors: int = 0
    retries: int = 0
    skipped: int = 0
    behind_bytes: int | None = None
    lag_seconds: float | None = None
    updated_us: int = 0

    def encode(self) -> bytes:
        """Return the value of the record."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, record: Record) -> Self:
        """Read a record; fields of later versions are ignored. Raises SchemaInvalid."""
        with reading_record("the statistics of a member", HINT_RECORD):
            values = json.loads(record.value)
            return cls(**{name: values[name] for name in asdict(cls()) if name in values})
