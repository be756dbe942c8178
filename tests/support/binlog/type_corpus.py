# SPDX-License-Identifier: Apache-2.0
"""Values of every column type, written once for each flavor, and the texts that the server's client shows.

Readers of files, streams, loads and messages share the tables and their log files.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.model import Column, TableSchema
from tools.servers import FLAVORS, Server

DATABASE = "type_corpus"
RANDOM_ROWS = 40
DECIMALS = [(1, 0), (1, 1), (5, 2), (9, 0), (9, 9), (10, 2), (18, 9), (19, 4), (27, 9), (38, 0), (38, 30)]
WIDE_DECIMALS = [(39, 0), (50, 25), (65, 0), (65, 30)]
FSPS = range(7)
MANY_MEMBERS = ",".join(f"'m{number}'" for number in range(300))
ALL_MEMBERS = ",".join(f"'s{number}'" for number in range(64))


class Case(NamedTuple):
    """A table's column types, and the rows as SQL literals."""

    types: Sequence[str]
    rows: Sequence[Sequence[str]]
    flavors: Sequence[str] = FLAVORS


def same(types: Sequence[str], values: Sequence[str], *flavors: str) -> Case:
    """Return each value in every column."""
    rows = [[value] * len(types) for value in values]
    return Case(types, rows, flavors) if flavors else Case(types, rows)


def quoted(values: Sequence[str]) -> list[str]:
    return [f"'{value}'" for value in values]


def decimal_rows(shapes: Sequence[tuple[int, int]]) -> Iterator[list[str]]:
    """Return numbers of both signs: extremes, zero, the smallest fraction, and random digits."""
    chance = random.Random(65)

    def literal(digits: str, scale: int) -> str:
        whole, fraction = digits[: len(digits) - scale], digits[len(digits) - scale :]
        return f"{whole or 0}.{fraction}" if scale else whole

    fills: list[Callable[[int], str]] = [
        lambda precision: "9" * precision,
        lambda precision: "1".zfill(precision),
        lambda precision: "0" * precision,
        *[lambda precision: "".join(chance.choices("0123456789", k=precision))] * RANDOM_ROWS,
    ]
    for fill in fills:
        row = [literal(fill(precision), scale) for precision, scale in shapes]
        yield row
        yield [f"-{value}" for value in row]


def float_rows() -> Iterator[list[str]]:
    """Return numbers around the switch to exponent form, the extremes, and random numbers."""
    chance = random.Random(754)
    for point in (*range(-16, -12), *range(13, 19)):
        for count in (1, 2, 15, 16, 17):
            yield [f"{'12345678912345679'[:count]}e{point - count}"] * 2
    for single, double in [("3.4e38", "1.7976931348623157e308"), ("1.18e-38", "5e-324"), ("-0.0", "-0.0")]:
        yield [single, double]
    for _ in range(RANDOM_ROWS * 10):
        yield [
            repr(chance.uniform(-10, 10) * 10.0 ** chance.randint(-37, 36)),
            repr(chance.uniform(-10, 10) * 10.0 ** chance.randint(-300, 300)),
        ]


STRINGS = [
    ("char(3)", ["'a '", "'äöü'", "''"]),
    ("char(255)", ["'€'", "repeat('😀', 255)", "' b '"]),
    ("varchar(10)", ["'x '", "repeat('€', 10)", "''"]),
    ("varchar(300)", ["repeat('ä', 300)", "'tab\\tline\\nzero\\0back\\\\'", "''"]),
    ("tinytext", ["'t'", "repeat('x', 255)", "''"]),
    ("text", ["repeat('é', 30000)", "'t'", "''"]),
    ("mediumtext", ["repeat('g', 70000)", "'m'", "''"]),
    ("longtext", ["repeat('g', 70000)", "'l'", "''"]),
    ("char(3) character set latin1", ["'äß'", "'€'", "''"]),
    ("varchar(20) character set gbk", ["'中文'", "'a丂'", "''"]),
    ("varchar(20) character set utf16", ["'😀a'", "'ü'", "''"]),
    ("char(200) character set utf8mb3", ["'ü'", "repeat('€', 200)", "''"]),
    ("char(0)", ["''", "''", "''"]),
    ("binary(5)", ["'a'", "x'00ff000000'", "''"]),
    ("binary(255)", ["repeat('a', 255)", "x'ff'", "''"]),
    ("char(10) character set binary", ["'1234567890'", "x'ff00'", "''"]),
    ("varbinary(20)", ["x'00ff00'", "'v'", "''"]),
    ("varbinary(300)", ["repeat('z', 300)", "x'00'", "''"]),
    ("tinyblob", ["x'00ff'", "repeat('x', 255)", "''"]),
    ("blob", ["repeat(x'00', 30000)", "x'0a0d5c'", "''"]),
    ("mediumblob", ["repeat('g', 70000)", "'m'", "''"]),
    ("longblob", ["repeat('g', 70000)", "'l'", "''"]),
]
DATES = ["0000-00-00", "2020-01-01", "9999-12-31", "0001-01-01", "0000-01-01", "2020-00-15", "2020-05-00"]
DATES += ["2021-02-31", "1969-12-31", "1900-03-01", "2000-02-29"]
CLOCKS = ["00:00:00", "23:59:59.999999", "01:02:03.4", "12:34:56.000001"]
TIMES = ["00:00:00", "-00:00:00.000001", "-838:59:59", "838:59:59", "-838:59:58.999999", "12:34:56.789012"]
TIMES += ["-12:34:56.789012", "-00:00:01", "-00:00:00.5", "100:00:00.01", "-01:00:00.1", "23:59:59.999999"]
TIMESTAMPS = ["1970-01-01 00:00:01", "2038-01-19 03:14:07", "2000-02-29 23:59:59.5", "0000-00-00 00:00:00"]
TIMESTAMPS += ["2024-12-31 23:59:59.999999", "2001-09-09 01:46:40.123456", "2020-06-30 12:00:00.000001"]
UUIDS = ["00000000-0000-0000-0000-000000000000", "6ccd780c-baba-1026-9564-5b8c656024db"]
UUIDS += ["01234567-89ab-4def-8123-456789abcd00", "01234567-89ab-7def-8123-456789abcdef"]
UUIDS += ["ffffffff-ffff-ffff-ffff-ffffffffffff", "01234567-89ab-1def-0123-456789abcd00"]
INET6S = ["::", "::1", "1::", "::ffff:1.2.3.4", "::1.2.3.4", "::0.1.0.0", "2001:db8::1", "2001:0:0:1::1"]
INET6S += ["1:0:0:2:0:0:3:4", "1:2:3:4:5:6:7:8", "::ffff:0:0", "1:0:2:3:4:5:6:7", "0:1:2:3:4:5:6:7"]
INET6S += ["1:2:3:4:5:6:7:0", "::abcd:0", "64:ff9b::1.2.3.4", "::fffe:1.2.3.4", "0:0:0:0:ffff::"]
POLYGON = "st_geomfromtext('POLYGON((0 0,1 0,1 1,0 0))')"
POINT = "st_geomfromtext('POINT(1.5 -2)')"

CASES: dict[str, Case] = {
    "integers": Case(
        ["tinyint", "smallint", "mediumint", "int", "bigint", "int(5) zerofill"],
        [
            ["-128", "-32768", "-8388608", "-2147483648", "-9223372036854775808", "12345"],
            ["127", "32767", "8388607", "2147483647", "9223372036854775807", "4294967295"],
            ["-1", "-1", "-1", "-1", "-1", "99999"],
        ],
    ),
    "unsigned integers": Case(
        [f"{name} unsigned" for name in ("tinyint", "smallint", "mediumint", "int", "bigint")],
        [["255", "65535", "16777215", "4294967295", "18446744073709551615"], ["0"] * 5, ["128"] * 5],
    ),
    "decimals": Case([f"decimal({p},{s})" for p, s in DECIMALS], list(decimal_rows(DECIMALS))),
    "wide decimals": Case([f"decimal({p},{s})" for p, s in WIDE_DECIMALS], list(decimal_rows(WIDE_DECIMALS))),
    "floats": Case(["float", "double"], list(float_rows())),
    "bits": Case(
        ["bit(1)", "bit(7)", "bit(8)", "bit(9)", "bit(33)", "bit(63)", "bit(64)"],
        [
            ["0"] * 7,
            ["1", "127", "255", "511", "8589934591", "9223372036854775807", "18446744073709551615"],
            ["1", "65", "66", "300", "4311744512", "1", "9223372036854775809"],
        ],
    ),
    "years": same(["year"], ["0", "1901", "2155", "1970"]),
    "dates": same(["date"], quoted(DATES)),
    "times": same([f"time({fsp})" for fsp in FSPS], quoted(TIMES)),
    "datetimes": same(
        [f"datetime({fsp})" for fsp in FSPS],
        quoted([f"{day} {clock}" for day in DATES if day != "9999-12-31" for clock in CLOCKS]),
    ),
    "timestamps": same([f"timestamp({fsp}) null" for fsp in FSPS], quoted(TIMESTAMPS)),
    "strings": Case(
        [name for name, _ in STRINGS], list(zip(*(values for _, values in STRINGS), strict=True))
    ),
    "enums": Case(
        [r"enum('it''s','b\\c','d\ne','é')", f"enum({MANY_MEMBERS})", "enum('ö','中') character set gbk"],
        [["'it''s'", "'m0'", "'中'"], ["2", "300", "'ö'"], ["3", "256", "1"], ["'é'", "255", "2"]],
    ),
    "sets": Case(
        ["set('x','Ä','%_')", "set('a','b','c','d','e','f','g','h','i')", f"set({ALL_MEMBERS})"],
        [["''", "'i,a'", "'s63,s0'"], ["7", "511", "18446744073709551615"], ["'Ä,x'", "256", "''"]],
    ),
    "geometry": Case(
        ["geometry", "point", "polygon"],
        [[POINT, POINT, POLYGON], ["st_geomfromtext('LINESTRING(1 2,3 4)', 4326)", POINT, POLYGON]],
    ),
    "vectors of MySQL": Case(
        ["vector(3)", "vector"], [["to_vector('[1,2.5,-3]')", "to_vector('[0.1,1e10]')"]], ["mysql"]
    ),
    "vectors of MariaDB": Case(
        ["vector(3) not null", "vector(100) not null"],
        [["vec_fromtext('[1,2.5,-3]')", f"vec_fromtext('{[0.1] * 100}')"]],
        ["mariadb11"],
    ),
    "uuids": same(["uuid"], quoted(UUIDS), "mariadb", "mariadb11"),
    "addresses": Case(
        ["inet6", "inet4"],
        [[f"'{text}'", f"'{number}.0.{255 - number}.0'"] for number, text in enumerate(INET6S)],
        ["mariadb", "mariadb11"],
    ),
    "compressed strings": Case(
        [
            "varchar(255) compressed character set latin1",
            "varchar(64) compressed",
            "text compressed",
            "varbinary(300) compressed",
            "longblob compressed",
        ],
        [
            ["'äx'", "repeat('ü', 64)", "repeat('hello€', 5000)", "repeat('z', 300)", "repeat('y', 70000)"],
            ["repeat('ä', 255)", "'a'", "'b'", "x'00'", "x'ff'"],
            ["''", "''", "''", "''", "''"],
        ],
        ["mariadb", "mariadb11"],
    ),
}

# MariaDB logs values of these types as plain strings, so a decoder needs the table's definition.
OF_MARIADB = {name for name, case in CASES.items() if "mysql" not in case.flavors}

DOCUMENTS: dict[str, Case] = {
    "documents": Case(
        ["json"],
        [
            ['\'{"a": [1, 2.5, true, null, "x\\\\\\\\y"], "é": {}}\''],
            ["""'{"b": 1.50, "a": [1e3, null, true, "ü\\\\n"]}'"""],
            ["'[]'"],
            ["'\"text\"'"],
            ["'18446744073709551615'"],
            ["'1e-7'"],
            ["json_object('at', cast('2024-02-29 01:02:03' as datetime), 'd', cast(1.50 as decimal(5,2)))"],
        ],
        ["mysql"],
    ),
    "documents of MariaDB": same(["json"], ["""'{"b": 1.50}'""", "'[ ]'"], "mariadb", "mariadb11"),
}

# Numbers that the server rounds or pads when it stores or shows them.
NUMBERS: dict[str, Case] = {
    "rounded numbers": Case(
        ["float(10,2)", "double(10,2)", "float(30)", "float(5,0)", "double(20,15)", "double unsigned"],
        [
            ["12345678.91", "12345678.91", "0.1234567891234567", "99999", "0.1", "1e-300"],
            ["-0.05", "-0.05", "-1e-300", "-1", "-99999.123456789012345", "0"],
            ["0.1", "0.1", "3.3333333333333333", "0", "3.141592653589793", "1.7976931348623157e308"],
        ],
    ),
    "padded numbers": Case(
        ["decimal(10,3) zerofill", "decimal(50,3) zerofill", "bigint(20) zerofill", "tinyint zerofill"],
        [
            ["0", "0", "0", "0"],
            ["1.5", "1.5", "7", "7"],
            ["9999999.999", "12345678901234567890.5", "42", "255"],
        ],
    ),
    "years of two digits": same(["year(2)"], ["0", "69", "70", "99", "1"], "mariadb", "mariadb11"),
}


class TypeTable:
    """A table with the rows of a case, and a row of NULLs if the types allow it.

    Ids count from 0. `file` is a closed binlog file that contains the rows but not the CREATE TABLE.
    """

    def __init__(self, server: Server, database: str, case: Case, name: str = "matrix") -> None:
        self.server = server
        self.case = case
        self.name = f"{database}.{name}"
        columns = ", ".join(f"c{number} {type_text}" for number, type_text in enumerate(case.types))
        takes_nulls = not any("not null" in type_text for type_text in case.types)
        rows = [*case.rows, *([["NULL"] * len(case.types)] if takes_nulls else [])]
        with server.connect() as connection, connection.cursor() as cursor:
            cursor.execute("SET sql_mode = 'ALLOW_INVALID_DATES', time_zone = '+00:00'")
            cursor.execute(f"CREATE TABLE {self.name} (id INT PRIMARY KEY, {columns})")
            cursor.execute("FLUSH BINARY LOGS")
            for number, row in enumerate(rows):
                cursor.execute(f"INSERT INTO {self.name} VALUES ({number}, {', '.join(row)})")
            cursor.execute("FLUSH BINARY LOGS")
        self.file: Path = server.binlog_files()[-2]

    @cached_property
    def schemas(self) -> Mapping[str, TableSchema]:
        """The definition, as information_schema describes it."""
        return definition(self.server, self.name)

    @cached_property
    def texts(self) -> Sequence[Sequence[str | None]]:
        """The client's output for each row."""
        return shown_by_client(self.server, self.name, self.case.types)


class TypeCorpus:
    """The tables of the cases, on a separate server. Each table is written when it is first used."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._tables: dict[tuple[str, ...], TypeTable] = {}
        server.sql(f"CREATE DATABASE {DATABASE}")

    def table(self, name: str, **settings: str) -> TypeTable:
        """Return the table of a case, written under these global settings. Tests must not change it."""
        key = name, *chain(*sorted(settings.items()))
        if key not in self._tables:
            with self._globals(settings):
                case, number = {**CASES, **DOCUMENTS, **NUMBERS}[name], len(self._tables)
                self._tables[key] = TypeTable(self._server, DATABASE, case, f"t{number}")
        return self._tables[key]

    @contextmanager
    def _globals(self, settings: Mapping[str, str]) -> Iterator[None]:
        """Set global variables for the connections of the block."""
        before = {name: self._server.sql(f"SELECT @@global.{name}")[0][0] for name in settings}
        self._set_globals(settings)
        try:
            yield
        finally:
            self._set_globals(before)

    def _set_globals(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._server.sql(f"SET GLOBAL {name} = %s", value)


CorpusOf = Callable[[str], TypeCorpus]


def on_each(cases: Mapping[str, Case], flavors: Sequence[str] = FLAVORS) -> pytest.MarkDecorator:
    """Parametrize a test with each case, on each of these servers that supports the case's types."""
    pairs = [(flavor, name) for name, case in cases.items() for flavor in case.flavors if flavor in flavors]
    return pytest.mark.parametrize(("flavor", "name"), pairs)


def definition(server: Server, table: str) -> dict[str, TableSchema]:
    """Return the table as information_schema describes it."""
    database, _, name = table.partition(".")
    columns = server.sql(
        "SELECT column_name, column_type, character_set_name FROM information_schema.columns"
        " WHERE table_schema = %s AND table_name = %s ORDER BY ordinal_position",
        database,
        name,
    )
    described = tuple(Column(column, text, charset) for column, text, charset in columns)
    return {table: TableSchema(database, name, described)}


def unescaped(text: str) -> str:
    """Undo the escapes of the client's batch output."""
    parts = text.split("\\\\")
    for escape, letter in (("\\t", "\t"), ("\\n", "\n"), ("\\0", "\0")):
        parts = [part.replace(escape, letter) for part in parts]
    return "\\".join(parts)


def shown_by_client(server: Server, table: str, types: Sequence[str]) -> list[list[str | None]]:
    """Return the client's output for each row: binary as 0x..., FLOAT as its DOUBLE value, NULL as None."""
    columns = [f"c{number}{' + 0e0' if name == 'float' else ''}" for number, name in enumerate(types)]
    nulls = [f"c{number} IS NULL" for number in range(len(types))]
    printed = server.client(
        f"SET time_zone = '+00:00'; SELECT {', '.join(chain(*zip(nulls, columns, strict=True)))} FROM {table}"
        " ORDER BY id",
        "--skip-raw",
        "--skip-column-names",
        "--binary-as-hex",
    )
    rows = [line.split("\t") for line in printed.split("\n") if line]
    return [
        [None if null == "1" else unescaped(text) for null, text in zip(row[::2], row[1::2], strict=True)]
        for row in rows
    ]
