# SPDX-License-Identifier: Apache-2.0
"""Every column type decodes to the text of the server's own client, on every server."""

import re
import struct
from collections.abc import Iterator, Mapping
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple

import pyarrow
import pytest

import penstock
from penstock.errors import SchemaUnknown
from tests.support.binlog.type_corpus import CASES, OF_MARIADB, Case, CorpusOf, TypeTable, on_each

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")

DIFFERENCES_SHOWN_MAX = 8
EPOCH = datetime(1970, 1, 1)
HOUR_US = 3_600_000_000

# --- Values from Penstock -------------------------------------------------------------------------------


def shown(value: Any, arrow_type: pyarrow.DataType, type_text: str) -> str:
    """Return an Arrow value in the client's notation."""
    fsp = re.search(r"\((\d)\)", type_text)
    digits = int(fsp[1]) if fsp else 0
    match value:
        case bytes():
            return f"0x{value.hex().upper()}"
        case list():
            return f"0x{struct.pack(f'<{len(value)}f', *value).hex().upper()}"
        case int() if type_text.startswith("bit"):
            return f"0x{value:0{(int(type_text[4:-1]) + 7) // 8 * 2}X}"
        case Decimal() if type_text.startswith("bit"):
            return f"0x{int(value):016X}"
        case int() if type_text == "year":
            return f"{value:04}"
        case int() if type_text.endswith("zerofill"):
            return f"{value:05}"
        case Decimal():
            return f"{value:f}"
        case date() if not isinstance(value, datetime):
            return value.isoformat()
    if pyarrow.types.is_timestamp(arrow_type):
        return f"{EPOCH + timedelta(microseconds=value):%4Y-%m-%d %H:%M:%S.%f}"[: 19 + digits + (digits > 0)]
    if pyarrow.types.is_duration(arrow_type):
        clock = f"{EPOCH + timedelta(microseconds=abs(value) % HOUR_US):%M:%S.%f}"
        return f"{'-' * (value < 0)}{abs(value) // HOUR_US:02}:{clock[: 5 + digits + (digits > 0)]}"
    return str(value)


def is_same(value: Any, text: str | None, arrow_type: pyarrow.DataType, type_text: str) -> bool:
    """Return whether an Arrow value equals the client's output; floats are compared exactly as numbers."""
    if value is None or text is None:
        return value is None and text is None
    if isinstance(value, float):
        return struct.pack("<d", value + 0.0) == struct.pack("<d", float(text) + 0.0)
    return shown(value, arrow_type, type_text) == text


class Decoded(NamedTuple):
    """The rows of one table in the order of their ids, and the Arrow types of its columns."""

    rows: list[dict[str, Any]]
    types: dict[str, pyarrow.DataType]


def decoded(batches: Iterator[penstock.Batch]) -> Decoded:
    rows: list[dict[str, Any]] = []
    types: dict[str, pyarrow.DataType] = {}
    for batch in batches:
        table = batch.to_arrow()
        types = {field.name: field.type for field in table.schema}
        columns = {}
        for name, column in zip(table.schema.names, table.columns, strict=True):
            wide = pyarrow.types.is_timestamp(column.type) or pyarrow.types.is_duration(column.type)
            columns[name] = (column.cast(pyarrow.int64()) if wide else column).to_pylist()
        rows += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return Decoded(sorted(rows, key=lambda row: row["id"]), types)


def differences(case: Case, decoded: Decoded, wanted: list[list[str | None]]) -> Iterator[str]:
    assert len(decoded.rows) == len(wanted)
    for row, texts in zip(decoded.rows, wanted, strict=True):
        refused: Mapping[str, str] = dict(row["_metadata"]["unrepresentable"] or ())
        for number, (type_text, text) in enumerate(zip(case.types, texts, strict=True)):
            name = f"c{number}"
            if name in refused:
                assert row[name] is None
                if refused[name] != text:
                    yield f"{type_text}: {refused[name]!r} is refused, the client shows {text!r}"
            elif not is_same(row[name], text, decoded.types[name], type_text):
                yield f"{type_text}: {row[name]!r}, the client shows {text!r}"


# --- The tests ------------------------------------------------------------------------------


def check(table: TypeTable, batches: Iterator[penstock.Batch]) -> None:
    differing = list(differences(table.case, decoded(batches), table.texts))
    assert not differing, "\n".join([f"{len(differing)} differ", *differing[:DIFFERENCES_SHOWN_MAX]])


@on_each(CASES)
def test_every_value_equals_the_clients_text(type_corpus: CorpusOf, flavor: str, name: str) -> None:
    table = type_corpus(flavor).table(name, binlog_row_metadata="MINIMAL")
    url, start = table.server.url(), f"{table.file.name}:4"
    check(table, penstock.read_binlog(str(table.file), table.name, schemas=table.schemas))
    check(table, penstock.read_binlog(url, table.name, start=start))


@on_each({name: case for name, case in CASES.items() if name not in OF_MARIADB})
def test_log_alone_is_enough_with_full_metadata(type_corpus: CorpusOf, flavor: str, name: str) -> None:
    table = type_corpus(flavor).table(name)
    check(table, penstock.read_binlog(str(table.file), table.name))


@pytest.mark.parametrize("name", ["dates", "times", "datetimes", "timestamps"])
@pytest.mark.parametrize("flavor", ["mariadb", "mariadb11"])
def test_mariadb_fractions_before_5_6_are_read_by_the_declared_type(
    type_corpus: CorpusOf, flavor: str, name: str
) -> None:
    table = type_corpus(flavor).table(name, mysql56_temporal_format="OFF")
    check(table, penstock.read_binlog(str(table.file), table.name, schemas=table.schemas))
    if name != "dates":
        with pytest.raises(SchemaUnknown):
            list(penstock.read_binlog(str(table.file), table.name))
