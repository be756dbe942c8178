# SPDX-License-Identifier: Apache-2.0
"""Random tables with random rows are written to real servers. The values that are read from the log, and the
rows that result from replaying it, equal the server's.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import penstock
from tests.support.binlog.decoding import Row, place_in_log, replay, run_logged
from tests.support.suite.fixture_types import StartServer
from tools.servers import FLAVORS, Server

EXAMPLES = 150 if os.environ.get("PENSTOCK_LONG") else 8
TABLES_PER_LOG = 5


@dataclass(frozen=True)
class Kind:
    """A column type, and a strategy for SQL expressions of its values."""

    text: str
    values: st.SearchStrategy[str] = field(repr=False)


def quoted(text: str) -> str:
    """Return a text as a literal that is independent of the SQL mode and of the session charset."""
    return f"CONVERT(x'{text.encode().hex()}' USING utf8mb4)" if text else "''"


def texts(length: int, alphabet: str | None = None) -> st.SearchStrategy[str]:
    characters = alphabet or "".join(
        ["aZ09 _'\"`\\%\t\n\r\x00\x1a", "äßéñ", "€中文字", "\U0001f600\U00010000", "\u200b\ufeff"]
    )
    return st.text(st.sampled_from(characters), max_size=length).map(quoted)


def integers(bits: int, signed: bool) -> st.SearchStrategy[str]:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return st.one_of(st.sampled_from([low, high, 0, 1]), st.integers(low, high)).map(str)


def decimals(digits: int, scale: int) -> st.SearchStrategy[str]:
    top = 10**digits - 1

    def render(number: int) -> str:
        sign, plain = ("-" if number < 0 else ""), str(abs(number)).rjust(scale + 1, "0")
        return f"{sign}{plain[: len(plain) - scale]}.{plain[len(plain) - scale :]}0".rstrip("0").rstrip(".")

    return st.one_of(st.sampled_from([0, top, -top]), st.integers(-top, top)).map(render)


def moments(first: int, last: int, fsp: int) -> st.SearchStrategy[str]:
    def render(year: int, second: int, fraction: int) -> str:
        day, rest = divmod(second, 86_400)
        clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
        tail = f".{fraction:06}"[: fsp + 1] if fsp else ""
        return f"'{year:04}-{day // 28 % 12 + 1:02}-{day % 28 + 1:02} {clock}{tail}'"

    seconds, fractions = st.integers(0, 86_400 * 336 - 1), st.integers(0, 999_999)
    return st.builds(render, st.integers(first, last), seconds, fractions)


def times(fsp: int) -> st.SearchStrategy[str]:
    def render(negative: bool, second: int, fraction: int) -> str:
        clock = f"{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}"
        return f"'{'-' if negative else ''}{clock}" + (f".{fraction:06}"[: fsp + 1] if fsp else "") + "'"

    return st.builds(render, st.booleans(), st.integers(0, 838 * 3600 + 3598), st.integers(0, 999_999))


def blobs(length: int) -> st.SearchStrategy[str]:
    return st.binary(max_size=length).map(lambda data: f"x'{data.hex()}'")


KINDS = [
    *(
        Kind(f"{name}{'' if signed else ' UNSIGNED'}", integers(bits, signed))
        for name, bits in (("TINYINT", 8), ("SMALLINT", 16), ("MEDIUMINT", 24), ("INT", 32), ("BIGINT", 64))
        for signed in (True, False)
    ),
    *(
        Kind(f"DECIMAL({digits},{scale})", decimals(digits, scale))
        for digits, scale in ((1, 0), (9, 9), (10, 2), (19, 4), (38, 10), (38, 38 - 9), (65, 30))
    ),
    Kind("DOUBLE", st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False).map(repr)),
    *(Kind(f"BIT({bits})", integers(bits, False)) for bits in (1, 9, 63)),
    Kind("YEAR", st.integers(1901, 2155).map(str)),
    Kind("DATE", moments(1000, 9999, 0).map(lambda text: f"{text[:11]}'")),
    *(Kind(f"DATETIME({fsp})", moments(1000, 9999, fsp)) for fsp in (0, 1, 3, 6)),
    *(Kind(f"TIME({fsp})", times(fsp)) for fsp in (0, 2, 5, 6)),
    *(Kind(f"VARCHAR({length})", texts(length)) for length in (1, 60, 300)),
    Kind("CHAR(7)", texts(7, "abc€中\U0001f600")),
    Kind("CHAR(255)", texts(40, "abcé ").map(lambda text: f"TRIM({text})")),
    Kind("LONGTEXT", texts(400)),
    Kind("VARCHAR(20) CHARACTER SET latin1", texts(20, "aé€ÿ'\\")),
    Kind("TEXT CHARACTER SET gbk", texts(30, "a中文字")),
    Kind("VARCHAR(20) CHARACTER SET utf16", texts(20, "aé中\U0001f600")),
    Kind("VARBINARY(300)", blobs(300)),
    Kind("BINARY(5)", blobs(5)),
    Kind("MEDIUMBLOB", blobs(600)),
    Kind("ENUM('a','b,c','d''e','')", st.sampled_from(["'a'", "'b,c'", "'d''e'", "''"])),
    Kind("SET('p','q','r s')", st.sampled_from(["''", "'p'", "'p,r s'", "'q,p,r s'"])),
]

NAMES = st.text(st.sampled_from("abzAZ09_$ .-,;'\"\\@%#/äöß中文é"), min_size=1, max_size=20).filter(
    lambda name: name == name.strip() and not name.startswith("_") and name not in ("id", "n")
)


@dataclass(frozen=True)
class Table:
    """A table's name and columns, and the statements that change its rows."""

    name: str
    columns: list[tuple[str, Kind]]
    statements: list[str]


def identifier(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


@st.composite
def tables(draw: st.DrawFn) -> Table:
    name = draw(NAMES)
    columns = draw(st.lists(st.tuples(NAMES, st.sampled_from(KINDS)), min_size=1, max_size=12))
    # Column names are case-insensitive, and accent-insensitive in some collations.
    columns = [(f"{column}{index}", kind) for index, (column, kind) in enumerate(columns)]
    statements: list[str] = []
    for key in range(draw(st.integers(1, 6))):
        values = [draw(st.one_of(st.just("NULL"), kind.values)) for _, kind in columns]
        statements.append(f"INSERT INTO {{0}} VALUES ({key}, {', '.join(values)})")
    for _ in range(draw(st.integers(0, 5))):
        key = draw(st.integers(0, 5))
        match draw(st.integers(0, 3)):
            case 0:
                statements.append(f"DELETE FROM {{0}} WHERE id = {key}")
            case 1:
                statements.append(
                    f"UPDATE {{0}} SET id = id + {draw(st.sampled_from([100, 1000]))} WHERE id = {key}"
                )
            case _:
                column, kind = draw(st.sampled_from(columns))
                value = draw(st.one_of(st.just("NULL"), kind.values))
                statements.append(f"UPDATE {{0}} SET {identifier(column)} = {value} WHERE id >= {key}")
    return Table(name, columns, statements)


def write(server: Server, database: str, made: list[Table]) -> Any:
    """Write the tables' rows into one log; return its file."""
    statements = []
    for number, table in enumerate(made):
        columns = ", ".join(f"{identifier(name)} {kind.text}" for name, kind in table.columns)
        name = identifier(f"{table.name}{number}")
        statements.append(f"CREATE TABLE {name} (id INT PRIMARY KEY, {columns}) CHARACTER SET utf8mb4")
        # A literal's braces stay unchanged; only the placeholder of the table is replaced.
        statements += [statement.replace("{0}", name, 1) for statement in table.statements]
    server.sql(f"CREATE DATABASE {database}")
    # The SQL mode is not strict, so that truncated texts and rounded numbers are ordinary values.
    modes = "SET sql_mode = 'NO_BACKSLASH_ESCAPES'"
    return run_logged(server, modes, *statements, database=database)


def comparable(value: Any, kind: str) -> Any:
    """Return a value in the client library's form: BIT as bytes, SET and ENUM as text on both sides."""
    if kind.startswith("BIT") and value is not None:
        return int.from_bytes(value) if isinstance(value, bytes) else value
    if kind.startswith("DECIMAL(65") and value is not None:
        return f"{Decimal(value):f}"
    return value


def check(server: Server, database: str, made: list[Table], read: Callable[[str], list[Row]]) -> None:
    for number, table in enumerate(made):
        name = f"{table.name}{number}"
        kinds = ["INT", *(kind.text for _, kind in table.columns)]
        held = [
            tuple(comparable(value, kind) for value, kind in zip(row, kinds, strict=True))
            for row in server.sql(f"SELECT * FROM {identifier(database)}.{identifier(name)} ORDER BY id")
        ]
        rows = sorted(read(name), key=place_in_log)
        actual_rows = [
            tuple(comparable(value, kind) for value, kind in zip(row, kinds, strict=True))
            for row in replay(rows, ["id"])
        ]
        assert len(actual_rows) == len(held), table
        for mine, stored in zip(actual_rows, held, strict=True):
            for value, wanted, kind in zip(mine, stored, kinds, strict=True):
                assert value == wanted, (
                    f"{kind} of {name!r}, id {mine[0]}: {value!r} is {wanted!r} on the server"
                )
        if rows:
            wanted = ["id", *(column for column, _ in table.columns)]
            assert [column for column in rows[0] if not column.startswith("_")] == wanted


@pytest.mark.deep(keep=("mysql-FULL", "mariadb-MINIMAL"))
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("metadata", ["FULL", "MINIMAL"])
@pytest.mark.parametrize("flavor", FLAVORS)
def test_random_tables_are_read_back_equal(flavor: str, metadata: str, module_server_of: StartServer) -> None:
    server = module_server_of(flavor, binlog_row_metadata=metadata)
    number = iter(range(1, 1 << 30))

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )
    @given(st.lists(tables(), min_size=1, max_size=TABLES_PER_LOG))
    def prove(made: list[Table]) -> None:
        database = f"random_{metadata.lower()}_{next(number)}"
        path = write(server, database, made)
        # If the log has no column names, its CREATE TABLE statements provide them.
        schemas: dict[str, Any] | None = None if metadata == "FULL" else {}
        gathered: dict[str, list[Row]] = {}
        for batch in penstock.read_binlog([str(path)], f"{database}.*", schemas=schemas):
            arrow = batch.to_arrow()
            for row in arrow.to_pylist():
                gathered.setdefault(row["_metadata"]["table"], []).append(row)
        check(server, database, made, lambda name: gathered.get(name, []))
        server.sql(f"DROP DATABASE {database}")

    prove()
