# SPDX-License-Identifier: Apache-2.0
"""`penstock inspect` and `penstock check` at the command line."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import make_app
from tests.support.binlog.decoding import run_logged
from tests.support.suite.fixture_types import LendServer, StartServer
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers import REPLICATION_PASSWORD, Server

PROGRAM = Path(sys.executable).with_name("penstock")


@dataclass(frozen=True)
class Ran:
    """A finished run of the program."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


def penstock(*words: object) -> Ran:
    """Run the program in this process, which avoids the cost of starting it."""
    done = CliRunner().invoke(make_app(), [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Ran(done.exit_code, done.stdout, done.stderr)


def process(*words: object, **variables: str) -> Ran:
    """Run the program in a separate process."""
    done = subprocess.run(
        [str(PROGRAM), *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS_MAX,
        env={**os.environ, "COLUMNS": "80", **variables},
    )
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def shop(lend_server: LendServer) -> Iterator[Server]:
    with lend_server() as server:
        server.sql(
            "CREATE DATABASE shop; CREATE TABLE shop.orders (id INT PRIMARY KEY, name VARCHAR(20), price"
            " DECIMAL(8,2), photo BLOB, at TIME(3)); CREATE TABLE shop.items (id INT PRIMARY KEY)"
        )
        server.sql(
            "INSERT INTO shop.orders VALUES (1, 'Zoë', 1.50, 0x00FF, '-25:00:01.5'), (2, NULL, 2, '', '1')"
        )
        server.sql("INSERT INTO shop.items VALUES (1)")
        server.sql("UPDATE shop.orders SET price = 3 WHERE id = 1")
        server.sql("FLUSH BINARY LOGS")
        server.sql("DELETE FROM shop.orders WHERE id = 2")
        yield server


# --- inspect --------------------------------------------------------------------------------


def test_events_are_the_default_view_with_one_line_each(shop: Server) -> None:
    ran = penstock("inspect", *shop.binlog_files())
    assert ran.code == 0, ran.err
    assert ran.lines[0].split() == ["position", "time", "type", "server", "bytes", "about"]
    first = ran.lines[1].split()
    assert first[0] == "mysql-bin.000001:4"
    assert first[1].endswith("Z")
    assert any("CREATE TABLE shop.orders" in line for line in ran.lines)
    assert sum("shop.orders 2 rows" in line for line in ran.lines) == 1


def test_events_agree_with_the_servers_own_list(shop: Server) -> None:
    file = shop.binlog_files()[0]
    listed = shop.sql(f"SHOW BINLOG EVENTS IN '{file.name}'")
    objects = penstock("inspect", file, "--json").objects
    assert [(row["offset"], row["end_offset"]) for row in objects] == [(row[1], row[4]) for row in listed]
    assert [row["server_id"] for row in objects] == [row[3] for row in listed]


def test_transactions_view_shows_the_changes(shop: Server) -> None:
    objects = penstock("inspect", *shop.binlog_files(), "--transactions", "--json").objects
    changed = [(row["tables"], row["rows"]) for row in objects if row["rows"]]
    assert changed == [("shop.orders", 2), ("shop.items", 1), ("shop.orders", 1), ("shop.orders", 1)]
    assert all(row["gtid"] for row in objects)
    assert any("CREATE TABLE shop.items" in (row["statement"] or "") for row in objects)


def test_rows_are_shown_in_commit_order_across_tables(shop: Server) -> None:
    objects = penstock("inspect", *shop.binlog_files(), "--rows", "--json").objects
    assert [(row["_metadata"]["table"], row["_change_type"], row["id"]) for row in objects] == [
        ("orders", "insert", 1),
        ("orders", "insert", 2),
        ("items", "insert", 1),
        ("orders", "update_preimage", 1),
        ("orders", "update_postimage", 1),
        ("orders", "delete", 2),
    ]
    assert objects[0]["price"] == "1.50"
    assert objects[0]["name"] == "Zoë"
    assert objects[0]["photo"] == "AP8="
    assert objects[0]["at"] == "-25:00:01.500000"
    assert objects[1]["name"] is None


def test_rows_are_readable(shop: Server) -> None:
    ran = penstock("inspect", *shop.binlog_files(), "--rows")
    assert ran.lines[1].endswith("id=1, name=Zoë, price=1.50, photo=0x00ff, at=-25:00:01.500000")
    assert "name=NULL" in ran.lines[2]


def test_live_server_shows_the_events_of_its_files(shop: Server) -> None:
    live = penstock("inspect", shop.url(), "--rows", "--json").objects
    files = penstock("inspect", *shop.binlog_files(), "--rows", "--json").objects
    for row in [*live, *files]:
        row["_metadata"].pop("instance")
    assert live == files


def test_tables_filter_every_view(shop: Server) -> None:
    files = shop.binlog_files()
    rows = penstock("inspect", *files, "--rows", "--json", "--tables", "shop.items").objects
    assert [row["_metadata"]["table"] for row in rows] == ["items"]
    transactions = penstock("inspect", *files, "--transactions", "--json", "--tables", "shop.it*").objects
    assert [row["tables"] for row in transactions] == ["shop.items"]
    events = penstock("inspect", *files, "--json", "--tables", "shop.items").objects
    assert {row["table"] for row in events} == {"items"}
    assert [row["rows"] for row in events if row["rows"]] == [1]


def test_positions_gtids_and_times_bound_every_view(shop: Server) -> None:
    files = shop.binlog_files()
    whole = penstock("inspect", *files, "--transactions", "--json").objects
    third = whole[3]
    position = f"{third['file']}:{third['offset']}"
    gtid = third["gtid"]
    for start in (position, third["commit_timestamp"]):
        assert penstock("inspect", *files, "--transactions", "--json", "--start", start).objects == whole[3:]
    for end in (position, third["commit_timestamp"]):
        assert penstock("inspect", *files, "--transactions", "--json", "--end", end).objects == whole[:3]
    upto = f"{gtid.split(':')[0]}:1-{gtid.split(':')[1]}"
    after = penstock("inspect", *files, "--transactions", "--json", "--start", upto).objects
    assert after == whole[4:]
    assert penstock("inspect", *files, "--transactions", "--json", "--end", upto).objects == whole[:4]
    events = penstock("inspect", *files, "--json", "--start", position).objects
    assert all(row["offset"] >= third["offset"] or row["file"] > third["file"] for row in events)


def test_limit_cuts_the_view_and_reports_it(shop: Server) -> None:
    assert len(penstock("inspect", *shop.binlog_files(), "--json", "--limit", 3).objects) == 3
    assert len(penstock("inspect", *shop.binlog_files(), "--limit", 3).lines) == 4


def test_schema_file_names_columns_missing_from_the_log(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("mysql", binlog_row_metadata="MINIMAL")
    server.sql("CREATE DATABASE shop; CREATE TABLE shop.orders (id INT PRIMARY KEY, total INT)")
    server.sql("FLUSH BINARY LOGS; INSERT INTO shop.orders VALUES (1, 2)")
    last = server.binlog_files()[-1]
    ran = penstock("inspect", last, "--rows", "--json")
    assert ran.code == 3
    assert "SchemaUnknown" in ran.err
    schemas = tmp_path / "shop.sql"
    schemas.write_text("USE shop; CREATE TABLE orders (id INT PRIMARY KEY, total INT) CHARACTER SET utf8mb4")
    (row,) = penstock("inspect", last, "--rows", "--json", "--schemas", schemas).objects
    assert (row["id"], row["total"]) == (1, 2)


# --- Errors and secrets ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "name"),
    [
        (["inspect", "/nowhere/bin.000001"], 2, "SourceMissing"),
        (["inspect", "/etc/passwd"], 3, "MagicInvalid"),
        (["inspect", "/etc/passwd", "--start", "yesterday"], 2, "OptionInvalid"),
        (["inspect", "/etc/passwd", "--rows", "--events"], 2, "OptionInvalid"),
        (["inspect", "mysql://repl@127.0.0.1:1"], 4, "ConnectionLost"),
        (["check", "/etc/passwd"], 2, "OptionInvalid"),
    ],
)
def test_error_has_a_message_a_position_and_a_hint(words: list[str], code: int, name: str) -> None:
    ran = process(*words)
    assert ran.code == code, ran
    assert ran.err.startswith(f"{name}: ")
    assert "Traceback" not in ran.err
    assert ran.out == ""


def test_whole_transactions_are_shown_before_the_error(shop: Server, tmp_path: Path) -> None:
    first = shop.binlog_files()[0]
    whole = process("inspect", first, "--rows", "--json").lines
    cut = tmp_path / first.name
    cut.write_bytes(first.read_bytes()[:-60])
    ran = process("inspect", cut, "--rows", "--json")
    assert ran.code == 3
    assert ran.err.startswith("FileTruncated: ")
    assert f"at    {first.name}:" in ran.err
    assert ran.lines == whole[: len(ran.lines)]
    assert ran.lines


def test_password_comes_from_the_environment_or_a_file_and_is_never_shown(
    shop: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"mysql://repl@127.0.0.1:{shop.port}"
    file = tmp_path / "password"
    file.write_text(REPLICATION_PASSWORD + "\n")
    by_file = penstock("inspect", url, "--limit", 1, "--password-file", file)
    monkeypatch.setenv("PENSTOCK_PASSWORD", REPLICATION_PASSWORD)
    by_variable = penstock("inspect", url, "--limit", 1)
    assert by_variable.code == by_file.code == 0, by_variable.err + by_file.err
    wrong = process("inspect", url, PENSTOCK_PASSWORD="not-the-password")
    assert wrong.code == 2
    assert "AuthenticationFailed" in wrong.err
    in_url = penstock("check", f"mysql://repl:not-the-password@127.0.0.1:{shop.port}")
    assert in_url.code == 2
    for ran in (by_variable, by_file, wrong, in_url):
        assert REPLICATION_PASSWORD not in ran.out + ran.err
        assert "not-the-password" not in ran.out + ran.err


# --- check ----------------------------------------------------------------------------------


def test_check_passes_a_server_that_is_ready(shop: Server) -> None:
    ran = penstock("check", shop.url())
    assert ran.code == 0, ran
    assert "0 errors" in ran.lines[-1]
    assert "binlog_format" in ran.out


def test_check_reports_statement_format_and_prints_the_fixing_statement(start_server: StartServer) -> None:
    server = start_server("mysql", binlog_format="STATEMENT", binlog_row_metadata="MINIMAL")
    ran = penstock("check", server.url())
    assert ran.code == 1, ran
    assert ran.lines[0].startswith("ERROR")
    checks = {row["check"]: row for row in penstock("check", server.url(), "--json").objects}
    assert checks["binlog_format"]["severity"] == "error"
    assert checks["row_metadata"]["severity"] == "warning"
    # Each statement fixes its finding when it is run unchanged.
    for name in ("binlog_format", "row_metadata"):
        server.sql(checks[name]["statement"])
    assert penstock("check", server.url()).code == 0


def test_every_verb_exists_and_explains_itself() -> None:
    listed = process("--help")
    assert listed.code == 0
    for verb in ("inspect", "check"):
        assert verb in listed.out
        assert penstock(verb, "--help").code == 0
    assert penstock("--version").out.strip()
    assert process("nonsense").code == 2


def test_verb_imports_no_other_verb() -> None:
    program = (
        "import sys\nfrom typer.testing import CliRunner\nfrom penstock.cli.app import make_app\n"
        "assert 'log' in CliRunner().invoke(make_app(), ['--help']).output\n"
        "assert 'daemon' in CliRunner().invoke(make_app(), ['status', '--help']).output\n"
        "print(sorted(name for name in sys.modules if name.startswith('penstock.cli.')"
        " and 'shared' not in name))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['penstock.cli.app', 'penstock.cli.status']"


def test_passwords_in_statements_are_hidden(mysql_server: Server, mariadb_server: Server) -> None:
    for server in (mysql_server, mariadb_server):
        file = run_logged(
            server, "CREATE USER hidden@localhost IDENTIFIED BY 'hunter2'", "DROP USER hidden@localhost"
        )
        for view in ("--events", "--transactions"):
            for words in ((), ("--json",)):
                shown = penstock("inspect", file, view, *words).out
                assert "IDENTIFIED" in shown
                assert "'***'" in shown
                # MySQL logs the hash, which begins with $A$.
                assert not {text for text in ("hunter2", "$A$", "'*") if text in shown.replace("'***'", "")}
