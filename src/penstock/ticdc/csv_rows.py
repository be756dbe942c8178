# SPDX-License-Identifier: Apache-2.0
"""TiCDC's CSV: a line for each row, with its kind, table, commit timestamp and values.

    "I","orders","shop",470639217768660992,false,1,"text",\\N

An update is two lines, the old row as D and the new row as I, both with `true` in the fifth column, which
only `output-old-value` writes. Bytes are in base64 or hexadecimal. Source: "TiCDC CSV Protocol" in TiDB's
documentation.
"""

import base64
import binascii
import re
from collections.abc import Sequence
from zoneinfo import ZoneInfo

from penstock.errors import EventMalformed, EventUnsupported, ValueMalformed
from penstock.settings.ticdc import CsvSettings
from penstock.ticdc.row_changes import Change, RowChange, check_fraction, utc_text
from penstock.ticdc.schema_files import SinkColumn

_FLAGS = {b"true": True, b"false": False}
_TIMESTAMP = re.compile(rb"\d{1,19}")
_HINT = "Set include-commit-ts, output-old-value and the separators in the changefeed as ticdc.csv expects"

_HINT_TYPES = "Compare the table's definition in TiDB with its schema file"

# The text of a field, and whether it was quoted.
_Field = tuple[bytes, bool]


class CsvRows:
    """Reads CSV lines for one version of a table."""

    def __init__(
        self,
        database: str,
        table: str,
        columns: Sequence[SinkColumn],
        zone: ZoneInfo | None,
        settings: CsvSettings,
    ) -> None:
        self._names = (table.encode(), database.encode())
        self._columns = columns
        self._zone = zone
        self._settings = settings
        self._null = settings.null.encode()
        self._heads = 6 if settings.output_handle_key else 5
        delimiter, quote = re.escape(settings.delimiter.encode()), re.escape(settings.quote.encode())
        self._quote = settings.quote.encode()
        # The pattern matches a quoted value in only one way, so the time for an unterminated value is linear.
        quoted = b"[^%b]*(?:%b%b[^%b]*)*" % (quote, quote, quote, quote)
        self._field = re.compile(
            rb"(?:%b(%b)%b|([^%b%b\r\n]*))(%b|\r?\n)" % (quote, quoted, quote, quote, delimiter, delimiter)
        )

    def read(self, content: bytes) -> tuple[list[RowChange], int]:
        """Return the rows of all complete lines, and the number of bytes that they occupy.

        Raises EventMalformed for a line in an unexpected format, EventUnsupported for an update without its
        old row, ValueMalformed, and OptionInvalid for a TIMESTAMP in an unknown zone.
        """
        rows: list[RowChange] = []
        # The end of the last complete row, and the end of the last complete line.
        taken = position = 0
        old: RowChange | None = None
        while (line := self._line(content, position)) is not None:
            fields, position = line
            row, is_update = self._row(fields)
            if old is not None:
                if not is_update or row.change is not Change.INSERT or row.commit_ts != old.commit_ts:
                    raise EventMalformed("an updated row has no new row after its old one", hint=_HINT)
                row, old = RowChange(row.commit_ts, Change.UPDATE, old.before, row.after), None
            elif is_update:
                if row.change is not Change.DELETE:
                    raise EventMalformed("an updated row has no old row before its new one", hint=_HINT)
                old = row
                continue
            rows.append(row)
            taken = position
        return rows, taken

    def _line(self, content: bytes, start: int) -> tuple[list[_Field], int] | None:
        """Return the fields of the line at an offset, and its end; None if it is not complete."""
        fields: list[_Field] = []
        position = start
        while match := self._field.match(content, position):
            quoted, bare, separator = match.groups()
            position = match.end()
            if quoted is None:
                fields.append((bare, False))
            else:
                fields.append((quoted.replace(self._quote * 2, self._quote), True))
            if separator.endswith(b"\n"):
                return fields, position
        rest = content[position:]
        if rest.startswith(self._quote) or self._field.match(rest.rstrip(b"\r") + b"\n") is not None:
            # The line is not complete: its value continues, or the line ends, in content that has not arrived
            # yet.
            return None
        raise EventMalformed(f"a line cannot be split into columns at {rest[:40]!r}", hint=_HINT)

    def _row(self, fields: list[_Field]) -> tuple[RowChange, bool]:
        """Return a line's row, as an insert or a delete, and whether the row is part of an update."""
        if len(fields) != self._heads + len(self._columns):
            raise EventMalformed(
                f"a line has {len(fields)} columns, not {self._heads} and the table's {len(self._columns)}",
                hint=f"{_HINT}; list virtual generated columns in ticdc.virtual_columns",
            )
        (kind, _), (table, _), (database, _), (commit_ts, _), (flag, _) = fields[:5]
        if (table, database) != self._names or not _TIMESTAMP.fullmatch(commit_ts) or flag not in _FLAGS:
            raise EventMalformed(f"a line begins with {[text for text, _ in fields[:5]]!r}", hint=_HINT)
        cells = tuple(map(self._cell, self._columns, fields[self._heads :]))
        if kind == b"I":
            return RowChange(int(commit_ts), Change.INSERT, None, cells), _FLAGS[flag]
        if kind == b"D":
            return RowChange(int(commit_ts), Change.DELETE, cells, None), _FLAGS[flag]
        if kind == b"U":
            raise EventUnsupported(
                "an update has no old row", hint="Set output-old-value to true in the changefeed"
            )
        raise EventMalformed(f"a line has the kind {kind!r}", hint=_HINT)

    def _cell(self, column: SinkColumn, field: _Field) -> bytes | None:
        text, is_quoted = field
        if not is_quoted and text == self._null:
            return None
        if column.is_binary:
            try:
                if self._settings.binary == "hex":
                    return binascii.unhexlify(text)
                return base64.b64decode(text, validate=True)
            except ValueError as problem:
                raise ValueMalformed(
                    f"the column `{column.name}` has a value that is no {self._settings.binary}",
                    hint="Set ticdc.csv.binary to binary-encoding-method of the changefeed",
                ) from problem
        if column.fraction_digits is None:
            return text
        moment = text.decode(errors="replace")
        check_fraction(moment, column, _HINT_TYPES)
        return utc_text(moment, self._zone, column).encode() if column.kind == "TIMESTAMP" else text
