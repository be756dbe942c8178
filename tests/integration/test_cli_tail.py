# SPDX-License-Identifier: Apache-2.0
"""`penstock tail` on a real daemon and server: its output, its start and its end."""

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.cli.app import make_app
from penstock.source.daemon_address import DaemonAddress
from tests.support.capture.captured_log import head_of
from tests.support.daemon.console import console_of
from tests.support.daemon.process import PENSTOCK, ROOT, DaemonProcess
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_for_next_second, wait_until
from tools.servers import Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")


@pytest.fixture(scope="module")
def server(server_of: Callable[[str], Server]) -> Server:
    return server_of("mysql")


@pytest.fixture(scope="module")
def daemon(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    settings = {"instances": {"shop": {"source": server.url(), "start": str(head_of(server))}}}
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), settings) as running:
        yield running


class Shop:
    """A separate database for one test, and the command line that follows it."""

    def __init__(self, server: Server, daemon: DaemonProcess, database: str) -> None:
        self.server = server
        self.daemon = daemon
        self.database = database
        self.begin = ""

    def sql(self, text: str) -> None:
        self.server.sql(text, database=self.database)

    def here(self) -> str:
        """Return the end of the server's log, once the daemon has captured it."""
        head = head_of(self.server)
        self.daemon.wait_for_head(head.file, head.offset)
        return str(head)

    def gtid_set(self) -> str:
        actual_rows: str = self.server.sql("SELECT @@gtid_executed")[0][0]
        return actual_rows.replace("\n", "")

    def words(self, *words: str) -> list[str]:
        return ["tail", "shop", *words, "--url", f"penstock://127.0.0.1:{self.daemon.port}"]

    def tail(self, *words: str) -> Result:
        """Run the command over all changes since the test began, and return the finished run."""
        arguments = [*words] if "--from" in words else ["--from", self.begin, *words]
        self.here()
        until = [] if "--until" in arguments or "--count" in arguments else ["--until", "latest"]
        return CliRunner().invoke(make_app(), self.words(f"{self.database}.*", *arguments, *until))

    def lines(self, *words: str) -> list[str]:
        """Return the output lines of the command, which must succeed."""
        result = self.tail(*words)
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()

    def shown(self, *words: str) -> list[list[str]]:
        """Return the table, change and values on each line after the heading."""
        heading, *lines = self.lines(*words) or [""]
        assert not lines or heading.split()[:4] == ["time", "position", "table", "change"]
        return [line.split(maxsplit=4)[2:] for line in lines]

    def objects(self, form: str, *words: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines("--format", form, *words)]

    def follow(self, *words: str, **more: Any) -> "subprocess.Popen[str]":
        """Run the command in a separate process."""
        command = [*PENSTOCK, *self.words(f"{self.database}.*", *words)]
        return subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
        )


@pytest.fixture
def shop(server: Server, daemon: DaemonProcess, fresh_database: FreshDatabase) -> Shop:
    opened = Shop(server, daemon, fresh_database(server))
    opened.sql("CREATE TABLE orders (id INT PRIMARY KEY, customer VARCHAR(20), amount DECIMAL(8, 2))")
    opened.begin = opened.here()
    return opened


def wait_for_line(following: "subprocess.Popen[str]", text: str) -> str:
    """Return the next line that has a text in it."""
    assert following.stdout is not None
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    for line in following.stdout:
        if text in line:
            return line
        assert time.monotonic() < deadline
    assert following.stderr is not None
    raise AssertionError(f"it ended: {following.stderr.read()}")


# --- What is shown --------------------------------------------------------------------------


def test_line_shows_the_key_and_the_changed_columns(shop: Shop) -> None:
    shop.sql("INSERT INTO orders VALUES (1, 'ann', 9.50), (2, NULL, 0)")
    shop.sql("UPDATE orders SET amount = 10 WHERE id = 1")
    shop.sql("UPDATE orders SET id = 3 WHERE id = 2")
    shop.sql("DELETE FROM orders WHERE id = 1")
    orders = f"{shop.database}.orders"
    assert shop.shown() == [
        [orders, "insert", "id=1, customer=ann, amount=9.50"],
        [orders, "insert", "id=2, customer=NULL, amount=0.00"],
        [orders, "update", "id=1, amount=9.50→10.00"],
        [orders, "update", "id=2→3"],
        [orders, "delete", "id=1, customer=ann, amount=10.00"],
    ]


def test_line_shows_commit_time_and_position(shop: Shop) -> None:
    shop.sql("INSERT INTO orders VALUES (1, 'ann', 1)")
    (line,) = shop.lines()[1:]
    moment, position = line.split()[:2]
    assert moment.endswith("Z")
    file, _, offset = position.partition(":")
    assert file == shop.begin.partition(":")[0]
    assert int(shop.begin.partition(":")[2]) < int(offset) < int(shop.here().partition(":")[2])


def test_changes_of_several_tables_are_in_commit_order(shop: Shop) -> None:
    shop.sql("CREATE TABLE other (id INT PRIMARY KEY)")
    for key in range(1, 6):
        shop.sql(
            f"BEGIN; INSERT INTO orders VALUES ({key}, 'a', 1); INSERT INTO other VALUES ({key}); COMMIT"
        )
    tables = [table.rpartition(".")[2] for table, _, _ in shop.shown()]
    assert tables == ["orders", "other"] * 5


@pytest.mark.parametrize(
    ("form", "path"),
    [
        ("debezium", ["after", "id"]),
        ("debezium-schema", ["payload", "after", "id"]),
        ("maxwell", ["data", "id"]),
        ("canal-flat", ["data", 0, "id"]),
    ],
)
def test_every_json_format_is_one_object_per_line(shop: Shop, form: str, path: list[str | int]) -> None:
    for key in range(1, 4):
        shop.sql(f"INSERT INTO orders VALUES ({key}, 'ann', 1)")
    ids = []
    for value in shop.objects(form):
        for step in path:
            value = value[step]  # type: ignore[index]
        ids.append(int(value))  # type: ignore[call-overload]
    assert ids == [1, 2, 3]


@pytest.mark.parametrize("form", ["maxwell", "canal-flat"])
def test_statements_show_no_passwords_of_connections(shop: Shop, form: str) -> None:
    shop.sql('CREATE TABLE far (`sql` TEXT) COMMENT=\'user "é", password "hunter2"\'')
    shop.sql("INSERT INTO far VALUES ('SET PASSWORD = \"hunter3\"')")
    created, inserted = shop.objects(form)
    assert created["sql"] == "CREATE TABLE far (`sql` TEXT) COMMENT='***'"
    assert "hunter3" in json.dumps(inserted), "values are not statements"


def test_page_of_a_transaction_shows_no_passwords(shop: Shop) -> None:
    user = f"{shop.database}_hidden@localhost"
    shop.sql(f"CREATE USER {user} IDENTIFIED BY 'hunter2'; DROP USER {user}")
    shop.here()
    with console_of(DaemonAddress.parse(f"penstock://127.0.0.1:{shop.daemon.port}/shop")) as browser:
        page = browser.get("/transaction", place=shop.begin)
    assert "IDENTIFIED" in page.words
    assert "'***'" in page.words
    assert not {text for text in ("hunter2", "$A$") if text in page.text}


# --- Filters --------------------------------------------------------------------------------


def test_only_selected_changes_are_shown(shop: Shop) -> None:
    shop.sql("INSERT INTO orders VALUES (1, 'ann', 5), (2, 'bob', 50), (3, 'ann', 500)")
    shop.sql("DELETE FROM orders WHERE id = 2")
    assert [values for _, _, values in shop.shown("--where", "amount >= 50 AND customer = 'ann'")] == [
        "id=3, customer=ann, amount=500.00"
    ]
    assert [change for _, change, _ in shop.shown("--changes", "delete")] == ["delete"]
    assert [values for _, _, values in shop.shown("--columns", "id,amount", "--changes", "insert")] == [
        "id=1, amount=5.00",
        "id=2, amount=50.00",
        "id=3, amount=500.00",
    ]
    assert [line["op"] for line in shop.objects("debezium", "--changes", "delete")] == ["d"]
    assert len(shop.lines("--count", "2")) == 1 + 2
    assert len(shop.lines("--count", "2", "--format", "maxwell")) == 2


def test_all_shards_together_are_complete(shop: Shop) -> None:
    shop.sql("INSERT INTO orders VALUES " + ", ".join(f"({key}, 'c{key % 5}', 1)" for key in range(1, 41)))
    parts = [{values for _, _, values in shop.shown("--shard", f"{part}/3")} for part in range(3)]
    assert sum(len(part) for part in parts) == 40
    assert len(set.union(*parts)) == 40
    assert all(parts)
    two = {values for _, _, values in shop.shown("--shard", "0,2/3")}
    assert two == parts[0] | parts[2]
    chosen = ("--shard-columns", f"{shop.database}.orders=customer")
    by_customer = [shop.objects("maxwell", "--shard", f"{part}/2", *chosen) for part in range(2)]
    customers = [{message["data"]["customer"] for message in part} for part in by_customer]
    assert customers[0] | customers[1] == {f"c{at}" for at in range(5)}
    assert not customers[0] & customers[1]


# --- Start and end --------------------------------------------------------------------------


def test_tail_starts_and_ends_at_its_bounds(shop: Shop) -> None:
    shop.sql("INSERT INTO orders VALUES (1, 'a', 1)")
    middle, gtid_set = shop.here(), shop.gtid_set()
    wait_for_next_second()
    moment = shop.server.sql("SELECT DATE_FORMAT(UTC_TIMESTAMP(6), '%Y-%m-%dT%H:%i:%s.%fZ')")[0][0]
    shop.sql("INSERT INTO orders VALUES (2, 'a', 1)")
    shop.here()

    def ids(*words: str) -> list[str]:
        return [values[3] for _, _, values in shop.shown(*words)]

    for bound in (middle, gtid_set, moment):
        assert ids("--from", bound) == ["2"], bound
        assert ids("--until", bound) == ["1"], bound
    assert ids("--from", "earliest") == ["1", "2"]
    assert ids("--from", "latest") == []


def test_tail_follows_commits_until_it_is_interrupted(shop: Shop) -> None:
    following = shop.follow("--from", shop.begin)
    for key in range(1, 4):
        shop.sql(f"INSERT INTO orders VALUES ({key}, 'a', 1)")
        assert "insert" in wait_for_line(following, f"id={key},")
    following.send_signal(signal.SIGINT)
    _, errors = following.communicate(timeout=WAIT_SECONDS_MAX)
    assert (following.returncode, errors) == (0, "")


def test_closed_pipe_ends_tail_quietly(shop: Shop) -> None:
    shop.sql("INSERT INTO orders VALUES (1, 'a', 1)")
    following = shop.follow("--from", shop.begin, "--format", "canal-flat")
    wait_for_line(following, '"id":')
    assert following.stdout is not None
    following.stdout.close()
    keys = itertools.count(2)

    def ends_after_another_row() -> bool:
        shop.sql(f"INSERT INTO orders VALUES ({next(keys)}, 'a', 1)")
        return following.poll() is not None

    wait_until(ends_after_another_row)
    assert following.stderr is not None
    assert (following.returncode, following.stderr.read()) == (0, "")


def test_tail_resumes_when_the_daemon_returns(shop: Shop, server: Server, tmp_path: Path) -> None:
    settings = {"instances": {"shop": {"source": server.url(), "start": shop.begin}}}
    with DaemonProcess(tmp_path, settings) as own:
        shop.daemon = own
        following = shop.follow("--from", shop.begin, "--format", "maxwell", "--count", "4")
        shop.sql("INSERT INTO orders VALUES (1, 'a', 1), (2, 'a', 1)")
        first = wait_for_line(following, '"id":1')
        own.kill()
        own.start()
        shop.sql("INSERT INTO orders VALUES (3, 'a', 1), (4, 'a', 1)")
        assert following.stdout is not None
        rest = following.stdout.read()
    assert [json.loads(line)["data"]["id"] for line in (first + rest).splitlines()] == [1, 2, 3, 4]
    assert following.wait(WAIT_SECONDS_MAX) == 0


# --- Refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shard", "3/3"], "counted from 0"),
        (["--shard", "one"], "no shard"),
        (["--shard-columns", "shop.orders=a"], "without --shard"),
        (["--shard", "0/2", "--shard-columns", "orders"], "names no columns"),
        (["--columns", "id", "--format", "maxwell"], "--format table"),
        (["--changes", "upsert"], "changes"),
        (["--where", "amount >"], "where"),
        (["--from", "yesterday"], "yesterday"),
    ],
)
def test_unusable_source_is_refused_by_name(shop: Shop, words: list[str], message: str) -> None:
    result = shop.tail(*words)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_missing_instance_or_daemon_is_reported_at_once(shop: Shop) -> None:
    nobody = [*shop.words()[:1], "nobody", *shop.words()[2:], "--until", "latest"]
    assert CliRunner().invoke(make_app(), nobody).exit_code == 2
    silent = CliRunner().invoke(make_app(), ["tail", "penstock://127.0.0.1:1/shop", "--from", "earliest"])
    assert silent.exit_code == 4
    assert "does not answer" in silent.stderr


def test_settings_file_provides_the_daemon_address(shop: Shop) -> None:
    shop.sql("INSERT INTO orders VALUES (1, 'a', 1)")
    shop.here()
    words = ["tail", "shop", f"{shop.database}.orders", "--from", shop.begin, "--count", "1", "--config"]
    result = CliRunner().invoke(make_app(), [*words, os.fspath(shop.daemon.config)])
    assert "id=1, customer=a" in result.stdout, result.output
