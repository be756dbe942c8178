# SPDX-License-Identifier: Apache-2.0
"""Canal's entries as consumers see them: a position in the log, and values by column name.

The field numbers are from Canal's `EntryProtocol` and `CanalProtocol`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.model import TablePatterns
from penstock.protobuf import Message
from penstock.source.source import file_number

_ROWDATA, _TRANSACTIONEND = 2, 3
_KINDS = dict(
    enumerate(
        "INSERT UPDATE DELETE CREATE ALTER ERASE QUERY TRUNCATE RENAME CINDEX DINDEX GTID XACOMMIT"
        " XAROLLBACK".split(),
        1,
    )
)
# Statements that change neither rows nor table definitions. Both systems deliver only some of them.
_IGNORED = {"QUERY", "GTID", "XACOMMIT", "XAROLLBACK"}

LogOrder = tuple[int, int]


@dataclass(frozen=True)
class Entry:
    """A rows event or a statement.

    `fields` maps paths to values; an absent column has no value. `end` is the offset where the event ends.
    `ends_transaction` marks the last entry of a transaction.
    """

    file: str
    offset: int
    end: int
    ends_transaction: bool
    kind: str
    table: str
    rows: int
    fields: Mapping[str, Any]

    @property
    def at(self) -> LogOrder:
        """The sort key of entries in a log."""
        return file_number(self.file), self.offset

    @property
    def is_compared(self) -> bool:
        """Whether the entry is a change of rows or of a table definition."""
        return bool(self.kind) and self.kind not in _IGNORED

    def __str__(self) -> str:
        return f"{self.file}:{self.offset} {self.kind} {self.table}"


def entries_of(contents: Iterable[memoryview], tables: TablePatterns) -> Iterator[Entry]:
    """Yield entries. Entries of other tables have only a position. Raises EventMalformed."""
    for content in contents:
        message = Message(content)
        header, entry_kind = message.message(1), message.signed(2)
        offset = header.signed(3)
        change = message.message(3) if entry_kind == _ROWDATA else Message(b"")
        is_definition = bool(change.unsigned(10))
        is_selected = entry_kind == _ROWDATA and tables.matches(header.text(8), header.text(9))
        is_rows = is_selected and not is_definition
        yield Entry(
            header.text(2),
            offset,
            offset + header.signed(10),
            entry_kind == _TRANSACTIONEND or is_definition,
            _KINDS.get(header.signed(11), "") if is_selected else "",
            f"{header.text(8)}.{header.text(9)}",
            len(change.views(12)) if is_rows else 0,
            dict(_values(change)) if is_rows else {},
        )


def _values(change: Message) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(change.messages(12)):
        for image, columns in (("before", row.messages(1)), ("after", row.messages(2))):
            for column in columns:
                path = f"row {number} {image}.{column.text(3)}"
                yield path, None if column.unsigned(6) else column.text(8)
                yield f"{path} type", column.text(10)
                yield f"{path} sqlType", column.signed(2)
                yield f"{path} isKey", bool(column.unsigned(4))
                if image == "after":
                    yield f"{path} updated", bool(column.unsigned(5))
