# SPDX-License-Identifier: Apache-2.0
"""A request to read a table again, as stored in the state of its pipeline."""

import json
from dataclasses import asdict, dataclass
from typing import Self

from penstock.coordinate.store import reading_record
from penstock.model import TableName

HINT_STATE = "Use the version that wrote it, or begin again: penstock pipelines reset"


@dataclass(frozen=True)
class Resnapshot:
    """A request to read a table again, or some of its rows.

    `state` is asked, running, done or failed. `where` is a condition in the server's SQL, None for all rows.
    With `remove`, rows of the requested range that exist only in the target are deleted. `by_pipeline` is
    true for a pipeline's own requests. Times are in microseconds since 1970, UTC.
    """

    number: str
    source: str
    table: TableName
    where: str | None = None
    remove: bool = True
    state: str = "asked"
    what: str = ""
    asked_us: int = 0
    ended_us: int = 0
    by_pipeline: bool = False

    @property
    def is_of_statement(self) -> bool:
        """Whether the request's number is derived from its reason, so that a repeated statement does not
        create another request.
        """
        return "-" not in self.number

    def covers(self, other: Self) -> bool:
        """Return whether this request has not begun and includes everything that another request asks for."""
        return (
            self.state == "asked"
            and not self.is_of_statement
            and (self.source, self.table, self.by_pipeline) == (other.source, other.table, other.by_pipeline)
            and self.where in (None, other.where)
            and self.remove >= other.remove
        )

    def encode(self) -> bytes:
        """Return the record's value."""
        return json.dumps(asdict(self) | {"table": [self.table.database, self.table.table]}).encode()

    @classmethod
    def decode(cls, value: bytes) -> Self:
        """Read what `encode` wrote. Raises SchemaInvalid for a record of another version of Penstock."""
        with reading_record("the request of a resnapshot", HINT_STATE):
            fields = json.loads(value)
            # Version 0.1 did not record `by_pipeline`. It gave requests of users a number with a hyphen.
            by_pipeline = fields.get("by_pipeline", "-" not in fields["number"])
            return cls(**{**fields, "table": TableName(*fields["table"]), "by_pipeline": by_pipeline})
