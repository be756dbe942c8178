# SPDX-License-Identifier: Apache-2.0
"""TiCDC's CSV: values, updates in two lines, incomplete last lines, and lines in an unknown format."""

import base64
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from penstock.errors import EventMalformed, EventUnsupported, StreamError, ValueMalformed
from penstock.settings.ticdc import CsvSettings
from penstock.ticdc.csv_rows import CsvRows
from penstock.ticdc.row_changes import Change
from penstock.ticdc.schema_files import SinkColumn

COLUMNS = (
    SinkColumn("id", "INT", "int", False, True),
    SinkColumn("name", "VARCHAR", "varchar(20)", True, False),
    SinkColumn("raw", "BLOB", "blob", True, False),
    SinkColumn("at", "TIMESTAMP", "timestamp", True, False),
)
RAW = base64.b64encode(b"\x00\xff").decode()
ROW = f'1,"a ""b"", c\r\nd","{RAW}","2026-11-23 08:00:00"'
CELLS = (b"1", b'a "b", c\r\nd', b"\x00\xff", b"2026-11-23 00:00:00")


def rows(**settings: Any) -> CsvRows:
    return CsvRows("shop", "t", COLUMNS, ZoneInfo("Asia/Shanghai"), CsvSettings.model_validate(settings))


def line(kind: str, values: str = ROW, commit_ts: int = 110, updated: bool = False) -> bytes:
    return f'"{kind}","t","shop",{commit_ts},{str(updated).lower()},{values}\r\n'.encode()


def test_values_have_the_types_of_their_columns() -> None:
    nulls = r"2,\N,\N,\N"
    text = r'3,"\N","",' + r"\N"
    content = line("I") + line("D", nulls, 120) + line("I", text, 130)
    (first, second, third), taken = rows().read(content)
    assert taken == len(content)
    assert (first.commit_ts, first.change, first.before, first.after) == (110, Change.INSERT, None, CELLS)
    assert (second.change, second.before) == (Change.DELETE, (b"2", None, None, None))
    assert third.after == (b"3", rb"\N", b"", None)


def test_update_is_two_lines() -> None:
    new = ROW.replace("1,", "1,", 1).replace("c\r\nd", "e")
    content = line("D", updated=True) + line("I", new, updated=True)
    (row,), taken = rows().read(content)
    assert (row.change, row.before, taken) == (Change.UPDATE, CELLS, len(content))
    assert row.after is not None
    assert row.after[1] == b'a "b", e'


def test_torn_end_is_left_for_the_next_piece() -> None:
    content = line("I") + line("D", updated=True) + line("I", updated=True) + line("D", commit_ts=120)
    whole, _ = rows().read(content)
    assert len(whole) == 3
    for end in range(len(content)):
        first, taken = rows().read(content[:end])
        assert taken <= end
        assert first + rows().read(content[taken:])[0] == whole


@pytest.mark.timeout(20)
@pytest.mark.parametrize("value", ["a" * 1000, '""' * 1000, 'a""' * 1000])
def test_long_value_without_its_end_is_left_for_the_next_piece(value: str) -> None:
    start = line("I", f'1,"{value}').removesuffix(b"\r\n")
    assert rows().read(start) == ([], 0)
    (row,), _ = rows().read(start + rb'",\N,\N' + b"\r\n")
    assert row.after == (b"1", value.replace('""', '"').encode(), None, None)


def test_separators_and_encodings_are_those_of_the_settings() -> None:
    content = b"'I'|'t'|'shop'|110|false|1|1|'it''s'|'00ff'|NULL\n"
    settings = {"delimiter": "|", "quote": "'", "null": "NULL", "binary": "hex", "output_handle_key": True}
    (row,), _ = rows(**settings).read(content)
    assert row.after == (b"1", b"it's", b"\x00\xff", None)


@pytest.mark.parametrize(
    ("content", "error", "why"),
    [
        (line("U"), EventUnsupported, "no old row"),
        (line("X"), EventMalformed, "kind"),
        (line("I", "1,2,3"), EventMalformed, "columns"),
        (line("I").replace(b'"t"', b'"u"'), EventMalformed, "begins with"),
        (line("I").replace(b",110,", b',"x",'), EventMalformed, "begins with"),
        (line("I").replace(b",false,", b",1,"), EventMalformed, "begins with"),
        (line("I", updated=True), EventMalformed, "no old row before"),
        (line("D", updated=True) + line("I"), EventMalformed, "no new row after"),
        (
            line("D", updated=True) + line("I", commit_ts=111, updated=True),
            EventMalformed,
            "no new row after",
        ),
        (line("I").replace(RAW.encode(), b"?"), ValueMalformed, "base64"),
        (b'I,t\x00"x,y\r\n', EventMalformed, "split"),
    ],
)
def test_line_of_another_form_is_refused(content: bytes, error: type[StreamError], why: str) -> None:
    with pytest.raises(error, match=why):
        rows().read(content)


@pytest.mark.parametrize("type_text", ["datetime(2)", "time(2)", "timestamp(2)"])
def test_fraction_that_its_column_would_cut_is_refused(type_text: str) -> None:
    column = SinkColumn("at", type_text.partition("(")[0].upper(), type_text, True, False)
    reader = CsvRows("shop", "t", [column], ZoneInfo("UTC"), CsvSettings())
    day = "" if type_text.startswith("time(") else "2026-11-23 "
    (row,), _ = reader.read(line("I", f'"{day}10:00:00.120"'))
    assert row.after == (f"{day}10:00:00.120".encode(),)
    with pytest.raises(ValueMalformed, match="more digits than"):
        reader.read(line("I", f'"{day}10:00:00.123"'))
