# SPDX-License-Identifier: Apache-2.0
"""Checks whether a target equals its source, with the servers' own clients and the lakes' own readers.

Penstock's decoding is not used. Both sides are converted to plain Python values by the source's declared
types, and compared as multisets of rows.

    wanted = source_rows(server, "shop", "orders")
    assert_same(wanted, delta_rows(path), key=("id",))

The rows on both sides are dicts, one for each row. Only the source's columns are compared, so a target's
extra columns (in Parquet, Delta and Iceberg) are ignored.
"""

import datetime
import decimal
import glob
import itertools
import json
import struct
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow
import pyarrow.parquet

from tools.servers import Server

Row = dict[str, Any]

SHOWN_MAX = 12
_HOUR = 3_600_000_000


class Source(list[Row]):
    """The rows of the source, with the declared type of each column. The types determine how the values of
    the target are read.
    """

    def __init__(self, rows: Iterable[Row], types: Mapping[str, str]) -> None:
        super().__init__(rows)
        self.types = dict(types)


# --- The source, and targets of the same kind ------------------------------------------------------------


def source_rows(
    server: Server, database: str, table: str, *, where: str = "TRUE", columns: Sequence[str] | None = None
) -> Source:
    """Return the rows of a table and their types according to the server's client.

    A date that does not exist in the calendar (it contains a zero) is None, because a target stores null for
    it.
    """
    connection = server.connect(database=database, conv={}, use_unicode=False)
    with connection, connection.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        cursor.execute(
            "SELECT COLUMN_NAME, COLUMN_TYPE FROM information_schema.COLUMNS"
            f" WHERE TABLE_SCHEMA = '{database}' AND TABLE_NAME = '{table}' ORDER BY ORDINAL_POSITION"
        )
        types = {_text(name): _text(kind).lower() for name, kind in cursor.fetchall()}
        if columns is not None:
            types = {name: types[name] for name in columns}
        shown = ", ".join(_shown(name, kind) for name, kind in types.items())
        cursor.execute(f"SELECT {shown} FROM `{database}`.`{table}` WHERE {where}")
        rows = [
            {name: value_of(types[name], value) for name, value in zip(types, row, strict=True)}
            for row in cursor.fetchall()
        ]
    return Source(rows, types)


def mysql_rows(server: Server, database: str, table: str) -> list[Row]:
    """Return the rows of a MySQL or MariaDB target."""
    return list(source_rows(server, database, table))


def _shown(name: str, kind: str) -> str:
    quoted = f"`{name}`"
    # The text of a FLOAT has only six digits; the text of a DOUBLE has all digits.
    return f"CAST({quoted} AS DOUBLE)" if kind.startswith("float") else quoted


# --- other targets ----------------------------------------------------------------------------------


def delta_rows(path: str) -> list[Row]:
    """Return the rows of a Delta table, read by the deltalake library."""
    import deltalake

    return _arrow_rows(pyarrow.table(deltalake.DeltaTable(str(path)).to_pyarrow_table()))


def parquet_rows(pattern: str) -> list[Row]:
    """Return the rows of the Parquet files that match a glob pattern, in the order of the file names."""
    files = sorted(glob.glob(str(pattern), recursive=True))
    return list(
        itertools.chain.from_iterable(_arrow_rows(pyarrow.parquet.read_table(file)) for file in files)
    )


def iceberg_rows(table: Any) -> list[Row]:
    """Return the rows of a table that pyiceberg has loaded."""
    return _arrow_rows(table.scan().to_arrow())


def postgres_rows(address: str, table: str) -> list[Row]:
    """Return the rows of a PostgreSQL table; `table` is quoted SQL, `address` is a libpq connection
    string.
    """
    import psycopg
    from psycopg.rows import dict_row
    from psycopg.types.json import set_json_loads

    with psycopg.connect(address, row_factory=dict_row) as connection:
        # psycopg returns None for SQL NULL and for the JSON document `null`. Mark the document.
        set_json_loads(
            lambda text: document if (document := json.loads(text)) is not None else ("json", None),
            connection,
        )
        connection.execute("SET TIME ZONE 'UTC'")
        return [dict(row) for row in connection.execute(f"SELECT * FROM {table}").fetchall()]


def clickhouse_rows(client: Any, table: str, *, final: bool = True) -> list[Row]:
    """Return the rows of a ClickHouse table by clickhouse-connect; `final` merges versions while reading."""
    answer = client.query(f"SELECT * FROM {table}{' FINAL' if final else ''}")
    return [dict(zip(answer.column_names, row, strict=True)) for row in answer.result_rows]


def mongodb_rows(collection: Any) -> list[Row]:
    """Return the documents of a collection, by pymongo."""
    return [
        {name: value for name, value in document.items() if name != "_id"} for document in collection.find()
    ]


def elasticsearch_rows(client: Any, index: str) -> list[Row]:
    """Return the documents of an index, by the Elasticsearch client."""
    from elasticsearch.helpers import scan

    client.indices.refresh(index=index)
    return [dict(hit["_source"]) for hit in scan(client, index=index)]


def redis_rows(client: Any, pattern: str, *, kind: str = "hash") -> list[Row]:
    """Return the values at the keys that match a pattern in Redis: hashes, or strings of JSON."""
    rows: list[Row] = []
    for key in client.scan_iter(match=pattern, count=1000):
        if kind == "hash":
            rows.append({_text(name): _text(value) for name, value in client.hgetall(key).items()})
        else:
            rows.append(json.loads(client.get(key), parse_float=decimal.Decimal))
    return rows


def _arrow_rows(table: pyarrow.Table) -> list[Row]:
    return list(table.to_pylist())


def replayed(feed: Iterable[Row], key: Sequence[str]) -> list[Row]:
    """Return the rows that remain after a feed of changes: for each key, the last upsert in commit order.

    Keys are compared by their bytes. If a row is deleted under one key and inserted under another, both keys
    count.
    """
    order = sorted(feed, key=lambda row: (row["_commit_version"], row["_metadata"]["row"]))
    state: dict[tuple[Any, ...], Row] = {}
    for row in order:
        named = tuple(_hashable(row[name]) for name in key)
        if row["_change_type"] in ("delete", "update_preimage"):
            state.pop(named, None)
        else:
            state[named] = row
    return list(state.values())


def net_rows(feed: Iterable[Row], source: Source) -> list[Row]:
    """Return the rows that remain after a feed of changes, with the columns of the source.

    No key is needed: each delete and each before image removes one row that is equal in every column. Raises
    AssertionError if no such row was added before.
    """
    counts: Counter[tuple[Any, ...]] = Counter()
    for row in feed:
        values = tuple(_hashable(value_of(kind, row[name])) for name, kind in source.types.items())
        counts[values] += -1 if row["_change_type"] in ("delete", "update_preimage") else 1
    removed = [_describe_row(list(source.types), values) for values, count in counts.items() if count < 0]
    assert not removed, f"{len(removed)} rows were removed that were never added:\n" + "\n".join(
        removed[:SHOWN_MAX]
    )
    return [dict(zip(source.types, values, strict=True)) for values in counts.elements()]


# --- comparison -------------------------------------------------------------------------------------


def assert_same(wanted: Source, actual: Sequence[Row], *, key: Sequence[str] = ()) -> None:
    """Assert that a target's rows equal the source's as multisets; differences are reported by `key`."""
    differing = differences(wanted, actual, key=key)
    assert not differing, f"{len(differing)} rows differ, of {len(wanted)} and {len(actual)}:\n" + "\n".join(
        differing[:SHOWN_MAX]
    )


def differences(wanted: Source, actual: Sequence[Row], *, key: Sequence[str] = ()) -> list[str]:
    """Return a line for each row that is missing, unexpected or changed."""
    names = list(wanted.types)
    if actual and (lost := [name for name in names if name not in actual[0]]):
        return [f"the target has no column {', '.join(lost)}: it has {', '.join(actual[0])}"]
    mine = Counter(tuple(_hashable(row[name]) for name in names) for row in wanted)
    actual_counts = Counter(
        tuple(_hashable(value_of(wanted.types[name], row[name])) for name in names) for row in actual
    )
    missing, besides = list((mine - actual_counts).elements()), list((actual_counts - mine).elements())
    places = [names.index(name) for name in key]
    if not places:
        return [f"missing: {_describe_row(names, row)}" for row in missing] + [
            f"not in the source: {_describe_row(names, row)}" for row in besides
        ]
    by_key = {tuple(row[position] for position in places): row for row in besides}
    lines = []
    for row in missing:
        other = by_key.pop(tuple(row[position] for position in places), None)
        if other is None:
            lines.append(f"missing: {_describe_row(names, row)}")
        else:
            changed = [
                f"{name} {left!r} is {two!r}"
                for name, left, two in zip(names, row, other, strict=True)
                if left != two
            ]
            where = ", ".join(f"{names[position]}={row[position]!r}" for position in places)
            lines.append(f"changed: {where}: {'; '.join(changed)}")
    # Report two rows of one key in the target separately.
    left = Counter(besides) - Counter(row for row in besides if row not in by_key.values())
    return lines + [f"not in the source: {_describe_row(names, row)}" for row in left.elements()]


def _describe_row(names: Sequence[str], row: Sequence[Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in zip(names, row, strict=True))[:400]


def _hashable(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_hashable(part) for part in value)
    if isinstance(value, dict):
        return tuple(sorted((name, _hashable(part)) for name, part in value.items()))
    return value


# --- values -----------------------------------------------------------------------------------------


def value_of(kind: str, value: Any) -> Any:
    """Return a value of a declared type as a plain Python value, whichever client or lake it comes from.

    Integers and BIT: int. DECIMAL: Decimal. FLOAT and DOUBLE: float. TIME: microseconds. DATETIME and
    TIMESTAMP: datetime without a zone, in UTC. JSON: the parsed document. Bytes: bytes. All else: str.
    """
    if value is None:
        return None
    word = kind.split("(")[0].split()[0]
    reader: Callable[[Any], Any] = _READERS.get(word, _text)
    return reader(value)


def _text(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode()
    return str(value)


def _integer(value: Any) -> int:
    return int(_text(value)) if isinstance(value, bytes | str) else int(value)


def _bits(value: Any) -> int:
    # A server sends a BIT value as bytes; a lake has the number or its digits.
    return int.from_bytes(value) if isinstance(value, bytes) else int(value)


def _decimal(value: Any) -> decimal.Decimal:
    read = value if isinstance(value, decimal.Decimal) else decimal.Decimal(_text(value))
    # Ignore trailing zeros and the sign of zero.
    return read + 0 if read == 0 else read


def _float(value: Any) -> float:
    return float(_text(value)) if isinstance(value, bytes | str) else float(value)


def _single(value: Any) -> float:
    read: float = struct.unpack("<f", struct.pack("<f", _float(value)))[0]
    return read


def _date(value: Any) -> datetime.date | None:
    if isinstance(value, datetime.datetime):
        return value.date()
    if isinstance(value, datetime.date):
        return value
    year, month, day = (int(part) for part in _text(value)[:10].split("-"))
    return datetime.date(year, month, day) if year and month and day else None


def _moment(value: Any) -> datetime.datetime | None:
    if isinstance(value, datetime.datetime):
        return value.astimezone(datetime.UTC).replace(tzinfo=None) if value.tzinfo else value
    if isinstance(value, int):
        return datetime.datetime(1970, 1, 1) + datetime.timedelta(microseconds=value)
    text = _text(value).replace("T", " ").removesuffix("Z").removesuffix("+00:00")
    if text.startswith("0000") or "-00" in text[:10]:
        return None
    return datetime.datetime.fromisoformat(text)


def _time(value: Any) -> int:
    if isinstance(value, datetime.timedelta):
        return value // datetime.timedelta(microseconds=1)
    if isinstance(value, datetime.time):
        whole = datetime.timedelta(
            hours=value.hour, minutes=value.minute, seconds=value.second, microseconds=value.microsecond
        )
        return whole // datetime.timedelta(microseconds=1)
    if isinstance(value, int):
        return value
    text = _text(value)
    sign = -1 if text.startswith("-") else 1
    hours, minutes, seconds = text.lstrip("-").split(":")
    whole_seconds, _, fraction = seconds.partition(".")
    micros = int(hours) * _HOUR + int(minutes) * 60_000_000 + int(whole_seconds) * 1_000_000
    return sign * (micros + int(fraction.ljust(6, "0") or 0))


def _json(value: Any) -> tuple[str, Any]:
    # The marker distinguishes parsed values, because a JSON document may itself be a text.
    if isinstance(value, tuple):
        return "json", value[1]
    return "json", _hashable(value if isinstance(value, dict | list) else json.loads(_text(value)))


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _floats(value: Any) -> tuple[float, ...]:
    if isinstance(value, bytes):
        return struct.unpack(f"<{len(value) // 4}f", value)
    if isinstance(value, str):
        value = json.loads(value)
    return tuple(_single(number) for number in value)


def _uuid(value: Any) -> str:
    return str(value if isinstance(value, uuid.UUID) else uuid.UUID(_text(value)))


_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("tinyint", "smallint", "mediumint", "int", "bigint", "year"), _integer),
    **dict.fromkeys(("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"), _bytes),
    **dict.fromkeys(("geometry", "point", "linestring", "polygon", "geometrycollection"), _bytes),
    **dict.fromkeys(("multipoint", "multilinestring", "multipolygon", "geomcollection"), _bytes),
    **dict.fromkeys(("datetime", "timestamp"), _moment),
    "bit": _bits,
    "decimal": _decimal,
    "float": _single,
    "double": _float,
    "date": _date,
    "time": _time,
    "json": _json,
    "vector": _floats,
    "uuid": _uuid,
}
