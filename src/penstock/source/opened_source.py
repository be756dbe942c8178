# SPDX-License-Identifier: Apache-2.0
"""Methods that need only a source's bytes, and therefore work for every kind of source."""

from penstock.model import Position
from penstock.source.prepared import PreparedSearch
from penstock.source.source import ByteRange, Source, SourceOptions
from penstock.source.walk import walk


class OpenedSource:
    """The methods that file, server and kept-log sources share; see `penstock.source.source.Source`."""

    options: SourceOptions
    _prepared: PreparedSearch

    @property
    def instance(self) -> str:
        """The name that rows of this source carry."""
        return self.options.instance

    def find_prepared(self, xid: str, before: Position) -> ByteRange | None:
        """Return the range where an XA transaction that commits at a position was prepared."""
        return self._prepared.find(xid, before)

    def walk(
        self: Source,
        start: Position,
        end: Position,
        rows_max: int | None = None,
        bytes_max: int | None = None,
    ) -> Position:
        """Return the last transaction end within the limits, including at least one transaction after the
        start.
        """
        return walk(self, start, end, rows_max, bytes_max)
