# SPDX-License-Identifier: Apache-2.0
"""The batches of a subscriber: rows of one table and one shard, as Arrow, or as objects on request."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow

from penstock.client.flow import Place
from penstock.model import Position
from penstock.source.reading import SYSTEM_COLUMNS

_PREIMAGE, _POSTIMAGE = "update_preimage", "update_postimage"


@dataclass(frozen=True, slots=True)
class Row:
    """One change: `change_type` is insert, update or delete.

    `before` and `after` map column names to values. An insert has no `before`, and a delete has no `after`.
    An update has only the images that the subscription includes. `commit_timestamp` is a datetime.
    """

    table: str
    change_type: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    commit_version: int
    commit_timestamp: Any
    key_columns: tuple[str, ...] = field(repr=False, default=())

    @property
    def key(self) -> tuple[Any, ...]:
        """The values of the primary key, from the image after the change if there is one; () without a
        primary key.
        """
        image = self.after if self.after is not None else self.before
        return tuple((image or {}).get(name) for name in self.key_columns)

    def __getitem__(self, column: str) -> Any:
        """Return a column's value, from the image after the change if there is one. Raises KeyError."""
        image = self.after if self.after is not None else self.before
        return (image or {})[column]


class ChangeBatch:
    """Rows of one table and one shard, in commit order. Implements Arrow's C data interface.

    `position` is where reading continues once this batch and all earlier batches are acked: the end of the
    batch, or the start of its transactions if they continue in later batches. `gtid_set` is the set of all
    GTIDs before `position`. `token` is a fencing token that increases whenever the shard's owner changes, so
    a store that rejects smaller tokens blocks former owners. `number` increases by one with each batch of a
    shard, and `round` with each rollback. `key` names the primary key columns, () if the table has no primary
    key.
    """

    __slots__ = (
        "_ack",
        "_place",
        "_rows",
        "key",
        "number",
        "round",
        "schema_version",
        "shard",
        "table",
        "token",
    )

    def __init__(
        self,
        table: str,
        rows: pyarrow.RecordBatch,
        place: Place,
        ack: Callable[[], None],
        *,
        shard: int = 0,
        token: int = 0,
        number: int = 0,
        round: int = 0,
        schema_version: int = 0,
        key: tuple[str, ...] = (),
    ) -> None:
        self.table = table
        self.shard = shard
        self.token = token
        self.number = number
        self.round = round
        self.schema_version = schema_version
        self.key = key
        self._rows = rows
        self._place = place
        self._ack = ack

    @property
    def position(self) -> Position:
        """Where reading continues once this batch and all earlier batches are acked."""
        return self._place.position

    @property
    def gtid_set(self) -> str:
        """All GTIDs before `position`, "" if the server has no GTIDs."""
        return self._place.gtid_set

    def to_arrow(self) -> pyarrow.RecordBatch:
        """Return the rows, without copying them."""
        return self._rows

    def rows(self) -> Iterator[Row]:
        """Yield the changes as objects; the two images of an update form one object."""
        names = [name for name in self._rows.schema.names if name not in SYSTEM_COLUMNS]
        columns = [self._rows.column(name).to_pylist() for name in names]
        images = zip(*columns, strict=True) if columns else iter([()] * len(self))
        system = (
            self._rows.column(name).to_pylist() if name in self._rows.schema.names else [None] * len(self)
            for name in SYSTEM_COLUMNS[:3]
        )
        before: dict[str, Any] | None = None
        for values, (kind, version, committed) in zip(images, zip(*system, strict=True), strict=True):
            image = dict(zip(names, values, strict=True))
            if kind == _PREIMAGE:
                if before is not None:
                    # The subscription requests only preimages.
                    yield self._row("update", before, None, version, committed)
                before = image
                continue
            if kind == _POSTIMAGE:
                yield self._row("update", before, image, version, committed)
                before = None
            elif kind == "delete":
                yield self._row(kind, image, None, version, committed)
            else:
                yield self._row(kind, None, image, version, committed)
        if before is not None:
            yield self._row("update", before, None, version, committed)

    def _row(
        self,
        kind: str,
        before: dict[str, Any] | None,
        after: dict[str, Any] | None,
        version: int,
        committed: Any,
    ) -> Row:
        return Row(self.table, kind, before, after, version, committed, self.key)

    def ack(self) -> None:
        """Mark the batch as consumed. Acks may come in any order and take effect in order.

        Raises LeaseLost if this member has lost the shard, OptionInvalid after a rollback.
        """
        self._ack()

    def __arrow_c_array__(self, requested_schema: Any = None) -> Any:
        return self._rows.__arrow_c_array__(requested_schema)

    def __len__(self) -> int:
        return int(self._rows.num_rows)

    def __repr__(self) -> str:
        return (
            f"ChangeBatch({self.table!r}, rows={len(self)}, shard={self.shard}, token={self.token}, "
            f"position={str(self.position)!r})"
        )
