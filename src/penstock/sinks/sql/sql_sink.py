# SPDX-License-Identifier: Apache-2.0
"""The code shared by the sinks that write tables of an SQL server."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid, SchemaChanged
from penstock.model import TableName
from penstock.settings.values import Bytes, validate_option
from penstock.sinks.endpoint import Endpoint
from penstock.sinks.images import LastImages, refuse_partial
from penstock.sinks.sink import Delivery, Sink, Spread, Writer
from penstock.sinks.sql.row_buffer import RowBuffer
from penstock.sinks.sql.rows import WriteCounts, feed_target


def _check_table(text: str) -> str:
    validate_option(lambda: TableName.parse(text))
    return text


TableText = Annotated[str, AfterValidator(_check_table)]


class SqlSettings(Endpoint):
    """A server, and how tables are written there."""

    mode: Literal["mirror", "feed"] = Field(
        default="mirror", description="mirror: the current rows of the source; feed: every change as a row"
    )
    apply: Literal["parallel", "serial"] | None = Field(
        default=None,
        description="serial: write a batch in one transaction, so that readers never see a partial source"
        " transaction; default: the pipeline's `apply`",
    )
    positions: TableText = Field(
        default="penstock.positions",
        description="database.table for batch numbers; created if missing",
    )
    held_bytes: Bytes = Field(
        default=64 << 20, ge=1024, description="approximate bytes that one writer buffers before it writes"
    )
    take_over: bool = Field(
        default=False,
        description="true: take over tables that another pipeline created, and alter them",
    )


class SqlSink(Sink):
    """Writes to the tables of a server. A batch's number is stored in the same commit as its rows."""

    delivery = Delivery.EXACTLY_ONCE
    metadata_read = ("absent", "unrepresentable")
    load_spread = Spread.RANGES

    def __init__(self, settings: SqlSettings) -> None:
        self.settings = settings
        self._feed = settings.mode == "feed"
        self._whole = settings.apply == "serial"
        self.spread = Spread.WHOLE if self._whole else Spread.RANGES if self._feed else Spread.KEYS
        self.keeps_state = not self._feed

    @property
    def positions(self) -> TableName:
        """The table with the numbers of batches."""
        return TableName.parse(self.settings.positions)

    def _columns_not_in(
        self, targets: Sequence[Target], columns_of: Callable[[Target], Collection[str]]
    ) -> dict[TableName, list[str]]:
        """Return the columns that existing tables do not have. `columns_of` is empty for a missing table."""
        missing: dict[TableName, list[str]] = {}
        for target in targets:
            existing = columns_of(target)
            names = (feed_target(target) if self._feed else target).column_names
            if existing and (absent := [name for name in names if name not in existing]):
                missing[target.name] = absent
        return missing

    def _refuse_feed(self) -> None:
        if self._feed:
            raise OptionInvalid(
                "a feed keeps changes, not the rows of a table", hint="Compare a sink with mode: mirror"
            )


class SqlWriter(Writer):
    """Buffers the rows of one part of one batch until they are written."""

    def __init__(self, held_bytes: int, *, feed: bool) -> None:
        self._buffered = RowBuffer(held_bytes, self._write_held, feed=feed)
        self._counted = WriteCounts()

    def write(self, changes: Changes) -> None:
        with self.working_on(changes.target.name):
            refuse_partial(changes)
            self._counted.add(changes)
            self._buffered.add(changes)
        if self._buffered.is_full():
            self._write_all()

    def _write_all(self) -> None:
        for target, images in self._buffered.take().items():
            with self.working_on(target.name):
                self._write_held(target, images)

    @abstractmethod
    def _write_held(self, target: Target, images: LastImages) -> None:
        """Write the buffered rows of a table."""


def table_missing(target: Target, hint: str) -> SchemaChanged:
    """Return the error for a table that the target does not have."""
    return SchemaChanged(f"the target has no table {target.name}", hint=hint)
