# SPDX-License-Identifier: Apache-2.0
"""Third-party Canal clients, unmodified, receive the server's content."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.model import Position
from tests.support.canal.client import CanalClient
from tests.support.canal.peers import PEERS, entries_of, peer
from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import DaemonProcess
from tests.support.suite.fixture_types import MissingPart
from tools.servers import PartMissing, Server

USER, PASSWORD, TOKEN = "canal", "canal", "operator"
FLAVORS = ("mariadb", "mysql")

# A column's type, SQL that shows its value as Canal does, and its code in java.sql.Types.
TEXT, HEX, NUMBER = "CAST({0} AS CHAR)", "HEX({0})", "CAST({0} + 0 AS CHAR)"
COLUMNS = {
    "id": ("INT", TEXT, 4),
    "ti": ("TINYINT", TEXT, -6),
    "tiu": ("TINYINT UNSIGNED", TEXT, -6),
    "si": ("SMALLINT", TEXT, 5),
    "siu": ("SMALLINT UNSIGNED", TEXT, 5),
    "mi": ("MEDIUMINT", TEXT, 4),
    "miu": ("MEDIUMINT UNSIGNED", TEXT, 4),
    "i": ("INT", TEXT, 4),
    "iu": ("INT UNSIGNED", TEXT, 4),
    "bi": ("BIGINT", TEXT, -5),
    "biu": ("BIGINT UNSIGNED", TEXT, -5),
    "de": ("DECIMAL(30,10)", TEXT, 3),
    "b1": ("BIT(1)", NUMBER, -7),
    "b64": ("BIT(64)", NUMBER, -7),
    "ts": ("TIMESTAMP(3) NULL", TEXT, 93),
    "dt": ("DATETIME(6)", TEXT, 93),
    "dt0": ("DATETIME", TEXT, 93),
    "da": ("DATE", TEXT, 91),
    "tm": ("TIME(2)", TEXT, 92),
    "y": ("YEAR", TEXT, 12),
    "c": ("CHAR(10)", TEXT, 1),
    "v": ("VARCHAR(50)", TEXT, 12),
    "g": ("VARCHAR(20) CHARACTER SET gbk", TEXT, 12),
    "l1": ("VARCHAR(20) CHARACTER SET latin1", TEXT, 12),
    "tx": ("TEXT", TEXT, 2005),
    "bn": ("BINARY(4)", HEX, 2004),
    "vb": ("VARBINARY(10)", HEX, 2004),
    "bl": ("BLOB", HEX, 2004),
    "e": ("ENUM('a','b''c')", NUMBER, 4),
    "s": ("SET('x','y','z')", NUMBER, -7),
}
ROWS = (
    "1, -128, 255, -32768, 65535, -8388608, 16777215, -2147483648, 4294967295, -9223372036854775808,"
    " 18446744073709551615, -12345678901234567890.0123456789, b'1', 18446744073709551615,"
    " '2026-01-02 03:04:05.678', '9999-12-31 23:59:59.999999', '1000-01-01 00:00:00', '2026-02-28',"
    " '-838:59:58.99', 2155, 'char', 'Ünï 漢字 😀', '漢字', 'café', 'line\\nbreak \"quote\" \\\\',"
    " x'00ff80c3', x'0102', x'000102fffe', 'b''c', 'x,z'",
    "2, 127, 127, 32767, 32767, 8388607, 8388607, 2147483647, 2147483647, 9223372036854775807,"
    " 9223372036854775807, 0.0000000001, b'0', 0, '2038-01-19 03:14:07.000', '2026-07-01 12:00:00.000001',"
    " '2026-07-01 12:00:00', '0001-01-01', '00:00:00.01', 1901, '', '', '', '', '', x'01020304', '', '',"
    " 'a', ''",
    "3" + ", NULL" * (len(COLUMNS) - 1),
)
# True for the first row alone, and not for its nulls in the last row.
VISIBLE_KINDS = (
    "biu > 9223372036854775807 AND de < 0 AND g = '漢字' AND dt >= '2026-01-01' AND da < '2026-03-01'"
    " AND tm < '00:00:00' AND vb = X'0102' AND l1 LIKE 'caf_'"
)
# Values outside the signed type get a wider type; NULL keeps the declared type.
WIDER = {"tiu": 5, "siu": 4, "miu": 4, "iu": -5, "biu": 3}
NULL_TYPES = {"s": 2004}

# MySQL and MariaDB name these types differently.
DOCUMENTS = ('\'{"b": [1, 2.5, null, true], "a": {"x": "é 😀"}}\'', "'[]'", "NULL")
DOCUMENT_TYPES = {"mariadb": [2005, 2005, 2005], "mysql": [12, 12, 1111]}

# The text of `Float.toString` and `Double.toString` in Java.
FLOATS = {"1.5": "1.5", "-0.001": "-0.001", "1e10": "1.0E10", "12345.678": "12345.678", "0.0001": "1.0E-4"}


@dataclass
class Written:
    """What was written to a server for this module, and the output expected from a client."""

    instance: str
    database: str
    rows: list[dict[str, str | None]]
    documents: list[tuple[str | None, str]]


@pytest.fixture(scope="module")
def servers(server_of: Callable[[str], Server]) -> dict[str, Server]:
    return {flavor: server_of(flavor) for flavor in FLAVORS}


@pytest.fixture(scope="module")
def written(servers: dict[str, Server]) -> Iterator[dict[str, tuple[Position, Written]]]:
    """The position of each server's log before the writes, and the written content."""
    starts = {}
    for flavor, server in servers.items():
        start, database = head_of(server), f"canal_{flavor}"
        starts[flavor] = start, write(server, flavor, database)
    yield starts
    for flavor, server in servers.items():
        server.sql(f"DROP DATABASE canal_{flavor}")


def write(server: Server, flavor: str, database: str) -> Written:
    declared = ", ".join(f"{name} {kind}" for name, (kind, _, _) in COLUMNS.items())
    floats = ", ".join(f"({number}, {text}, {text})" for number, text in enumerate(FLOATS))
    documents = ", ".join(f"({number}, {text}, POINT(1, 2))" for number, text in enumerate(DOCUMENTS))
    for statement in (
        f"CREATE DATABASE {database}",
        f"CREATE TABLE {database}.kinds ({declared}, PRIMARY KEY (id))",
        f"CREATE TABLE {database}.floats (id INT PRIMARY KEY, f FLOAT, d DOUBLE)",
        f"CREATE TABLE {database}.documents (id INT PRIMARY KEY, j JSON, p POINT)",
        f"CREATE TABLE {database}.other (a INT, b INT, PRIMARY KEY (b))",
        f"CREATE TABLE {database}.stop (a INT)",
        "SET time_zone = '+00:00'; BEGIN;"
        + "".join(f"INSERT INTO {database}.kinds VALUES ({row});" for row in ROWS)
        + f"INSERT INTO {database}.other VALUES (1, 10), (2, 20); COMMIT",
        f"INSERT INTO {database}.floats VALUES {floats}",
        f"INSERT INTO {database}.documents VALUES {documents}",
        f"UPDATE {database}.other SET a = 3 WHERE b = 10",
        f"DELETE FROM {database}.other WHERE b = 20",
        f"ALTER TABLE {database}.other ADD COLUMN c VARCHAR(9) DEFAULT 'new'",
        f"INSERT INTO {database}.other VALUES (5, 50, NULL)",
        f"TRUNCATE TABLE {database}.other",
        f"RENAME TABLE {database}.other TO {database}.others",
        f"DROP TABLE {database}.others",
        f"INSERT INTO {database}.stop VALUES (1)",
    ):
        server.sql(statement, database="mysql")
    shown = ", ".join(how.format(name) for name, (_, how, _) in COLUMNS.items())
    rows = server.sql(f"SET time_zone = '+00:00'; SELECT {shown} FROM {database}.kinds ORDER BY id")
    return Written(
        flavor,
        database,
        [dict(zip(COLUMNS, map(as_canal, zip(COLUMNS, row, strict=True)), strict=True)) for row in rows],
        [
            (document, bytes.fromhex(point).decode("latin-1"))
            for document, point in server.sql(
                f"SELECT CAST(j AS CHAR), HEX(p) FROM {database}.documents ORDER BY id"
            )
        ],
    )


def as_canal(column: tuple[str, Any]) -> str | None:
    """Convert a value that the server shows to Canal's form, in which bytes are Latin-1 characters."""
    name, value = column
    if value is None or COLUMNS[name][1] != HEX:
        return None if value is None else str(value)
    return bytes.fromhex(value).decode("latin-1")


@pytest.fixture(scope="module")
def daemon(
    tmp_path_factory: pytest.TempPathFactory,
    servers: dict[str, Server],
    written: dict[str, tuple[Position, Written]],
) -> Iterator[DaemonProcess]:
    """A daemon with credentials that captures both servers from before the writes."""
    settings = {
        "listen": {"canal": "127.0.0.1:0", "canal_accept_plain": True, "token": TOKEN},
        "access": [{"name": "fleet", "user": USER, "password": PASSWORD}],
        "instances": {
            flavor: {"source": server.url(), "start": str(written[flavor][0])}
            for flavor, server in servers.items()
        },
    }
    with DaemonProcess(tmp_path_factory.mktemp("canal"), settings) as running:
        running.token = TOKEN
        for flavor, server in servers.items():
            head = head_of(server)
            running.wait_for_head(head.file, head.offset, flavor)
        yield running


@pytest.fixture(scope="module")
def limited_daemon(
    tmp_path_factory: pytest.TempPathFactory,
    servers: dict[str, Server],
    written: dict[str, tuple[Position, Written]],
) -> Iterator[DaemonProcess]:
    """A daemon whose destinations show a part of the rows and columns."""
    settings = {
        "listen": {"canal": "127.0.0.1:0", "canal_accept_plain": True, "token": TOKEN},
        "access": [{"name": "fleet", "user": USER, "password": PASSWORD}],
        "instances": {
            flavor: {
                "source": server.url(),
                "start": str(written[flavor][0]),
                "canal_where": {
                    f"canal_{flavor}.kinds": VISIBLE_KINDS,
                    f"canal_{flavor}.floats": "FALSE",
                    f"canal_{flavor}.o*": "a <= 2",
                },
                "canal_columns": {f"canal_{flavor}.other": ["b", "c"]},
            }
            for flavor, server in servers.items()
        },
    }
    with DaemonProcess(tmp_path_factory.mktemp("limited"), settings) as running:
        running.token = TOKEN
        for flavor, server in servers.items():
            head = head_of(server)
            running.wait_for_head(head.file, head.offset, flavor)
        yield running


@pytest.mark.deep(
    guard="tests/unit/test_canal_limits.py"
    "::test_destination_shows_what_a_log_of_its_visible_rows_and_columns_has"
)
@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("name", PEERS)
def test_client_of_a_limited_destination_receives_the_visible_rows_and_columns(
    name: str,
    flavor: str,
    limited_daemon: DaemonProcess,
    written: dict[str, tuple[Position, Written]],
    missing_part: MissingPart,
) -> None:
    try:
        client = peer(name)
    except PartMissing as problem:
        missing_part(f"{name} client of Canal", str(problem))
    wanted, port = written[flavor][1], limited_daemon.ports["canal"]
    with CanalClient(port, flavor) as before:
        before.log_in(USER, PASSWORD).unsubscribe()
    entries = entries_of(client.start(port, flavor, USER, PASSWORD, f"{wanted.database}\\..*"))
    own = [entry for entry in entries if entry["schema"] == wanted.database]
    rows = [row for entry in own for row in tell_rows(entry)]

    assert [row[3] for row in rows if row[:2] == ("INSERT", "kinds")] == wanted.rows[:1]
    assert [row for row in rows if row[1] in ("other", "stop", "floats")] == [
        ("INSERT", "other", {}, {"b": "10"}),
        ("INSERT", "other", {}, {"b": "20"}),
        # The update takes the row out of the condition.
        ("DELETE", "other", {"b": "10"}, {}),
        ("DELETE", "other", {"b": "20"}, {}),
        ("INSERT", "stop", {}, {"a": "1"}),
    ]
    assert [(row[3]["j"], row[3]["p"]) for row in rows if row[1] == "documents"] == wanted.documents
    statements = [entry["event"] for entry in own if not entry["rows"] and entry["event"] != "QUERY"]
    assert statements == [*["CREATE"] * 5, "ALTER", "TRUNCATE", "RENAME", "ERASE"]


@pytest.mark.deep(keep=("python-mysql",))
@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("name", PEERS)
def test_client_receives_every_type_and_statement_as_on_the_server(
    name: str,
    flavor: str,
    daemon: DaemonProcess,
    written: dict[str, tuple[Position, Written]],
    missing_part: MissingPart,
) -> None:
    try:
        client = peer(name)
    except PartMissing as problem:
        missing_part(f"{name} client of Canal", str(problem))
    wanted, port = written[flavor][1], daemon.ports["canal"]
    with CanalClient(port, flavor) as before:
        # The clients share one client id, so each client starts over.
        before.log_in(USER, PASSWORD).unsubscribe()
    entries = entries_of(client.start(port, flavor, USER, PASSWORD, f"{wanted.database}\\..*"))
    own = [entry for entry in entries if entry["schema"] == wanted.database]
    rows = [row for entry in own for row in tell_rows(entry)]

    assert [row[3] for row in rows if row[:2] == ("INSERT", "kinds")] == wanted.rows
    assert [row for row in rows if row[1] in ("other", "stop")] == [
        ("INSERT", "other", {}, {"a": "1", "b": "10"}),
        ("INSERT", "other", {}, {"a": "2", "b": "20"}),
        ("UPDATE", "other", {"a": "1", "b": "10"}, {"a": "3", "b": "10"}),
        ("DELETE", "other", {"a": "2", "b": "20"}, {}),
        ("INSERT", "other", {}, {"a": "5", "b": "50", "c": None}),
        ("INSERT", "stop", {}, {"a": "1"}),
    ]
    floats = [row[3] for row in rows if row[1] == "floats"]
    assert [row["d"] for row in floats] == list(FLOATS.values())
    assert [row["f"] for row in floats] == list(FLOATS.values())
    assert [(row[3]["j"], row[3]["p"]) for row in rows if row[1] == "documents"] == wanted.documents
    [documents] = [row["rows"] for row in own if row["table"] == "documents" and row["rows"]]
    assert [row["after"]["j"]["sqlType"] for row in documents] == DOCUMENT_TYPES[flavor]
    assert {row["after"]["p"]["sqlType"] for row in documents} == {2004}
    assert_types(own)
    assert_transactions(entries, wanted.database)


def tell_rows(entry: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    """Yield an entry's rows: event type, table, and the values before and after the change."""
    for row in entry["rows"]:
        before, after = ({name: column["value"] for name, column in row[side].items()} for side in row)
        yield entry["event"], entry["table"], before, after


def assert_types(own: list[dict[str, Any]]) -> None:
    """Assert the type, key flag and update flag of every column."""
    inserted = [row for this_row in own if this_row["table"] == "kinds" for row in this_row["rows"]]
    types = {name: number for name, (_, _, number) in COLUMNS.items()}
    assert [{name: column["sqlType"] for name, column in row["after"].items()} for row in inserted] == [
        types | WIDER,
        types,
        types | NULL_TYPES,
    ]
    declared = {name: column["mysqlType"].lower() for name, column in inserted[0]["after"].items()}
    assert declared["de"] == "decimal(30,10)"
    assert declared["e"] == "enum('a','b''c')"
    assert declared["v"] == "varchar(50)"
    assert declared["biu"].startswith("bigint")
    assert declared["biu"].endswith("unsigned")
    assert [name for name, column in inserted[0]["after"].items() if column["isKey"]] == ["id"]
    assert all(column["updated"] for row in inserted for column in row["after"].values())
    [update] = [row["rows"][0] for row in own if row["event"] == "UPDATE"]
    assert {name: column["updated"] for name, column in update["after"].items()} == {"a": True, "b": False}
    assert not any(column["updated"] for column in update["before"].values())


def assert_transactions(entries: list[dict[str, Any]], database: str) -> None:
    """Assert that rows are inside their transaction, and statements outside of transactions."""
    open_rows: list[str] | None = None
    transactions, statements = [], []
    for entry in entries:
        if entry["entry"] == "TRANSACTIONBEGIN":
            assert open_rows is None
            open_rows = []
        elif entry["entry"] == "TRANSACTIONEND":
            transactions.append(open_rows)
            open_rows = None
        elif entry["rows"]:
            assert open_rows is not None, entry
            open_rows.append(entry["table"])
        elif entry["schema"] == database and entry["event"] not in ("INSERT", "UPDATE", "DELETE"):
            assert open_rows is None, entry
            statements.append((entry["event"], entry["table"]))
    assert open_rows is None
    assert transactions[0] == ["kinds", "kinds", "kinds", "other"]
    assert transactions[1:] == [["floats"], ["documents"], ["other"], ["other"], ["other"], ["stop"]]
    tables = [("CREATE", name) for name in ("kinds", "floats", "documents", "other", "stop")]
    changes = [("ALTER", "other"), ("TRUNCATE", "other"), ("RENAME", "others"), ("ERASE", "others")]
    assert [statement for statement in statements if statement[0] != "QUERY"] == [*tables, *changes]
