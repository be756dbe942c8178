# SPDX-License-Identifier: Apache-2.0
"""The files of a table as of a point in time: their text, their names, and their completeness."""

import csv
import io
import json
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from penstock.cli.shared.whole_file import write_whole
from penstock.errors import ConnectionLost, DiskFailed
from penstock.model import Position
from penstock.source import table_export
from penstock.source.table_as_of import RowAsOf
from penstock.source.table_export import FORMATS, export_rows

TEXTS = ['say "hi"', "a,b", "two\nlines", "two\r\nlines", "", "\\N", "plain", "ü", None]


def row(values: dict[str, Any], missing: tuple[str, ...] = ()) -> RowAsOf:
    return RowAsOf(values, missing, Position(0, "mysql-bin.000001", 4), 1_700_000_000_000_001, False)


def content(rows: list[RowAsOf], file_format: str, **columns: pyarrow.DataType) -> bytes:
    return b"".join(export_rows(lambda: iter(rows), pyarrow.schema(list(columns.items())), file_format))


def test_csv_tells_null_from_every_text_and_from_what_is_missing() -> None:
    rows = [row({"id": number, "text": text}) for number, text in enumerate(TEXTS)]
    text = content(
        [*rows, row({"id": 9}, ("text",))], "csv", id=pyarrow.int64(), text=pyarrow.string()
    ).decode()
    assert text.startswith("id,text,_position,_time,_missing\r\n")
    ours = 'mysql-bin.000001:4,2023-11-14T22:13:20.000001+00:00,""\r\n'
    assert f'0,"say ""hi""",{ours}1,"a,b",{ours}2,"two\nlines",{ours}' in text
    assert f'4,"",{ours}5,"\\N",{ours}6,plain,{ours}' in text
    assert f"8,\\N,{ours}" in text
    assert text.endswith("9,,mysql-bin.000001:4,2023-11-14T22:13:20.000001+00:00,text\r\n")
    read = [line["text"] for line in csv.DictReader(io.StringIO(text, newline=""))]
    assert read == [*TEXTS[:-1], "\\N", ""]


def test_csv_has_no_formulas_and_keeps_numbers() -> None:
    texts = ["=cmd|' /C calc'!A0", "@x", "+a", "-1+1", "'=1", "\t=1", "-5.00", "+1e5", "it's", "'quoted'"]
    written = content([row({"=id": text}) for text in texts], "csv", **{"=id": pyarrow.string()}).decode()
    header, *lines = csv.reader(io.StringIO(written, newline=""))
    cells = [line[0] for line in lines]
    assert header[0] == "'=id"
    assert cells == [f"'{text}" for text in texts[:6]] + texts[6:]
    # A reader removes the added apostrophe.
    assert [re.sub(r"^'(?='*[=+\-@\t\r])", "", cell) for cell in cells] == texts


def test_time_has_the_text_of_the_server() -> None:
    texts = {
        "-838:59:59": -timedelta(hours=838, minutes=59, seconds=59),
        "08:00:00": timedelta(hours=8),
        "34:00:00.000120": timedelta(hours=34, microseconds=120),
    }
    rows = [row({"t": value}) for value in texts.values()]
    lines = content(rows, "jsonl", t=pyarrow.duration("us")).splitlines()
    assert [json.loads(line)["t"] for line in lines] == list(texts)
    written = content(rows, "csv", t=pyarrow.duration("us")).decode()
    assert [line["t"] for line in csv.DictReader(io.StringIO(written, newline=""))] == list(texts)


@pytest.mark.parametrize("file_format", FORMATS)
def test_columns_with_our_names_keep_them(file_format: str, tmp_path: Path) -> None:
    columns = {"_position": pyarrow.int64(), "_TIME": pyarrow.int64(), "__time": pyarrow.int64()}
    written = content([row({"_position": 1, "_TIME": 2, "__time": 3})], file_format, **columns)
    expected = {
        "_position": 1,
        "_TIME": 2,
        "__time": 3,
        "__position": "mysql-bin.000001:4",
        "___time": "2023-11-14T22:13:20.000001+00:00",
        "_missing": [],
    }
    if file_format == "parquet":
        table = pyarrow.parquet.read_table(io.BytesIO(written))
        assert table.column_names == list(expected)
        assert table.drop_columns(["___time"]).to_pylist() == [
            {name: value for name, value in expected.items() if name != "___time"}
        ]
    elif file_format == "csv":
        (line,) = csv.DictReader(io.StringIO(written.decode(), newline=""))
        assert line == {name: "" if value == [] else str(value) for name, value in expected.items()}
    else:
        assert json.loads(written) == expected


def test_parquet_column_is_text_in_every_row_group_if_a_value_has_another_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table_export, "_GROUP_ROWS", 2)
    values = [1, 2, 3, "0000-00-00", None]
    written = content(
        [row({"v": value, "w": 7}) for value in values], "parquet", v=pyarrow.int64(), w=pyarrow.int8()
    )
    file = pyarrow.parquet.ParquetFile(io.BytesIO(written))
    assert file.num_row_groups == 3
    assert file.read().column("v").to_pylist() == ["1", "2", "3", "0000-00-00", None]
    assert file.schema_arrow.field("w").type == pyarrow.int8()


@pytest.mark.parametrize("file_format", FORMATS)
def test_file_is_made_in_pieces_while_its_rows_are_read(
    file_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_export, "_GROUP_ROWS", 10)
    monkeypatch.setattr(table_export, "_PIECE_ROWS", 10)
    read = 0

    def rows() -> Iterator[RowAsOf]:
        nonlocal read
        read = 0
        for number in range(100):
            read += 1
            yield row({"id": number})

    pieces = export_rows(rows, pyarrow.schema([("id", pyarrow.int64())]), file_format)
    assert next(pieces)
    assert read <= 10
    assert len(list(pieces)) >= 9


def test_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "orders.csv"

    def breaking_off() -> Iterator[bytes]:
        yield b"half"
        raise ConnectionLost("the daemon broke off")

    with pytest.raises(ConnectionLost):
        write_whole(path, breaking_off())
    assert os.listdir(tmp_path) == []
    write_whole(path, [b"a", b"b"])
    with pytest.raises(ConnectionLost):
        write_whole(path, breaking_off())
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"ab", ["orders.csv"])
    (tmp_path / "link").symlink_to(path)
    write_whole(tmp_path / "link", [b"c"])
    assert ((tmp_path / "link").is_symlink(), path.read_bytes()) == (True, b"c")
    write_whole(Path("/dev/null"), [b"x"])
    assert Path("/dev/null").is_char_device()
    with pytest.raises(DiskFailed):
        write_whole(tmp_path / "nowhere" / "orders.csv", [b"x"])


def test_file_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "orders.csv"
    path.touch()
    path.chmod(0o600)
    write_whole(path, [b"id\r\n"])
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"id\r\n", 0o600)
