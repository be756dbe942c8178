# SPDX-License-Identifier: Apache-2.0
"""JSON documents equal the server's output, whether logged whole or as partial updates."""

import json
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

import penstock
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tools.servers import Server

RANDOM_DOCUMENTS = 200
RANDOM_CHANGES = 300
DEPTH_MAX = 5

EDGES = [
    *("null", "true", "false", '""', "[]", "{}", "-0.0", "1.0", "1e20", "1e15", "1e14", "1e-7", "1.5"),
    *(str(sign * 2**bits + step) for bits in (7, 15, 16, 31, 32, 63) for sign in (1, -1) for step in (-1, 0)),
    "18446744073709551615",
    "123456789012345678901234567890",
    "3730473413730304.5",
    r'"a\u0001\u001f\b\f\n\r\t\"\\/\u007f é€😀 \u2028"',
    '{"b": 1, "a": 2, "aa": 3, "é": 4, "": 5, "A\\"\\n": true, "10": [1.0, 2.50, -1e-10]}',
    json.dumps(["q" * size for size in (127, 128, 16383, 16384, 70000)]),
    json.dumps({f"k{number}": number * 1000 for number in range(3000)}),
    json.dumps(list(range(-40000, 40000, 7))),
]
# Values of types that JSON does not have.
FOREIGN = [
    *("cast('2020-01-01' as date)", "cast('-12:34:56.789' as time(6))", "cast('838:59:59' as time)"),
    *("cast('2020-01-01 01:02:03.4' as datetime(6))", "timestamp'9999-12-31 23:59:59.999999'"),
    *("cast(1.10 as decimal(10,2))", "cast(-12345678901234567890.123456789 as decimal(40,15))"),
    # The server pads the digits before the point to whole groups of nine, so the numbers have 66, 72 and 65
    # digits.
    f"cast(-{'9' * 35}.{'9' * 30} as decimal(65,30))",
    f"cast({'9' * 64}.1 as decimal(65,1))",
    f"cast({'9' * 65} as decimal(65,0))",
    *(
        "cast(0 as decimal(5,0))",
        "x'00ff41'",
        "b'101'",
        "cast(2020 as year)",
        "0.1e0",
        "1.5",
        "_latin1 x'e4'",
    ),
    *(f"repeat(x'ab', {size})" for size in (0, 1, 2, 3, 56, 57, 58, 114, 115, 1000)),
]


def random_value(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.random()
    if depth >= DEPTH_MAX or kind < 0.4:
        return chance.choice(
            [
                None,
                True,
                chance.randint(-(2**63), 2**64 - 1),
                chance.randint(-100, 100),
                chance.uniform(-1e3, 1e3) * 10.0 ** chance.randint(-300, 300),
                round(chance.uniform(-1e6, 1e6), chance.randint(0, 6)),
                "".join(chr(chance.randint(1, 0xD7FF)) for _ in range(chance.randint(0, 20))),
            ]
        )
    if kind < 0.7:
        return [random_value(chance, depth + 1) for _ in range(chance.randint(0, 8))]
    return {random_key(chance): random_value(chance, depth + 1) for _ in range(chance.randint(0, 8))}


def random_key(chance: random.Random) -> str:
    return chance.choice(["a", "b", "cc", "d e", 'q"', "ä", str(chance.randint(0, 10_000))])


def documents_of(batches: Iterator[penstock.Batch], change_type: str) -> list[str | None]:
    """Return the documents of the rows of one change type, in commit order."""
    rows = [row for batch in batches for row in batch.to_arrow().to_pylist()]
    rows.sort(key=lambda row: (row["_commit_version"], row["_metadata"]["row"]))
    return [row["document"] for row in rows if row["_change_type"] == change_type]


def shown_by_client(server: Server, table: str) -> list[str]:
    # The backslash is the only character in a document's text that batch output escapes.
    printed = server.client(f"SELECT document FROM {table} ORDER BY id", "--skip-raw", "--skip-column-names")
    return [line.replace("\\\\", "\\") for line in printed.removesuffix("\n").split("\n")]


def new_table(server: Server, database: str) -> str:
    table = f"{database}.documents"
    server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY AUTO_INCREMENT, document JSON)")
    server.sql("FLUSH BINARY LOGS")
    return table


def last_file(server: Server) -> str:
    return str(server.binlog_files()[-1])


def test_documents_equal_the_clients_text(server: Server, fresh_database: FreshDatabase) -> None:
    chance = random.Random(8259)
    table = new_table(server, fresh_database(server))
    # The deepest document that each server accepts.
    depth = 100 if server.family == "mysql" else 31
    texts = [*EDGES, "[" * depth + "]" * depth]
    texts += [json.dumps(random_value(chance)) for _ in range(RANDOM_DOCUMENTS)]
    with closing(server.connect()) as connection, connection.cursor() as cursor:
        cursor.executemany(f"INSERT INTO {table} (document) VALUES (%s)", [[text] for text in texts])
    documents = documents_of(penstock.read_binlog(last_file(server), table), "insert")
    assert documents == shown_by_client(server, table)


def test_values_without_a_json_type_equal_the_clients_text(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    table = new_table(mysql_server, fresh_database(mysql_server))
    for value in FOREIGN:
        mysql_server.sql(
            f"INSERT INTO {table} (document) VALUES (json_array({value})), (json_object('k', {value}))"
        )
    documents = documents_of(penstock.read_binlog(last_file(mysql_server), table), "insert")
    assert documents == shown_by_client(mysql_server, table)


def random_path(chance: random.Random, value: Any) -> str:
    """Return a path into a document, or a path that leads one step outside it."""
    path = "$"
    while isinstance(value, list | dict) and value and chance.random() < 0.8:
        if isinstance(value, list):
            slot = chance.randrange(len(value))
            path, value = f"{path}[{slot}]", value[slot]
        else:
            key = chance.choice(list(value))
            path, value = f"{path}.{json.dumps(key, ensure_ascii=False)}", value[key]
    if chance.random() < 0.4:
        path += f".{json.dumps(random_key(chance), ensure_ascii=False)}" if isinstance(value, dict) else "[1]"
    return path


@pytest.mark.parametrize("metadata", ["FULL", "MINIMAL"])
def test_partial_updates_return_the_whole_document(
    module_server_of: StartServer, fresh_database: FreshDatabase, metadata: str
) -> None:
    chance = random.Random(39)
    wanted: list[str] = []
    server = module_server_of(binlog_row_metadata=metadata)
    with closing(server.connect()) as connection:
        cursor = connection.cursor()
        table = new_table(server, fresh_database(server))
        cursor.execute("SET binlog_row_value_options = 'PARTIAL_JSON'")
        first = {"a": {"b": [1, 2, {"cc": "x" * 300}]}, "d e": [[], {}], "ä": "y" * 300}
        cursor.execute(f"INSERT INTO {table} (document) VALUES (%s)", [json.dumps(first)])

        def ask() -> str:
            cursor.execute(f"SELECT document FROM {table}")
            return str(cursor.fetchone()[0])

        before = ask()
        for _ in range(RANDOM_CHANGES):
            path = random_path(chance, json.loads(before))
            verb = chance.choice(
                ["JSON_SET", "JSON_REPLACE", "JSON_REMOVE", "JSON_INSERT", "JSON_ARRAY_INSERT"]
            )
            if verb == "JSON_REMOVE" or (verb == "JSON_ARRAY_INSERT" and not path.endswith("]")):
                verb, values = "JSON_REMOVE", []
            else:
                values = [json.dumps(random_value(chance, DEPTH_MAX - 1))]
            if verb == "JSON_REMOVE" and path == "$":
                continue
            cast = ", CAST(%s AS JSON)" * len(values)
            cursor.execute(f"UPDATE {table} SET document = {verb}(document, %s{cast})", [path, *values])
            after = ask()
            if after != before:
                wanted.append(after)
                before = after
    schemas = {table: {"id": "int", "document": "json"}} if metadata == "MINIMAL" else None
    batches = penstock.read_binlog(last_file(server), table, schemas=schemas)
    assert documents_of(batches, "update_postimage") == wanted
    assert len(wanted) > RANDOM_CHANGES // 3
