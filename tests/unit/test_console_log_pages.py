# SPDX-License-Identifier: Apache-2.0
"""One transaction, the segments and the definitions of a log: over HTTP, and as pages of the console."""

from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from penstock.errors import SourceMissing
from penstock.logstore.log import Log
from penstock.logstore.schemas import SchemaLog
from penstock.model import Position, TablePatterns
from penstock.schema.history import SchemaHistory
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.tokens import ServerSpelling
from penstock.serve.http import transactions
from penstock.serve.own_log import OwnSource
from penstock.source.source import ByteRange
from penstock.source.transaction import TableChange, changes_of, find_at, find_by_gtid
from penstock.source.walk import TransactionWalk
from tests.support.daemon.console import console_of
from tests.support.daemon.served_log import INSTANCE, Answered, ServedLog, captured_log, serving
from tests.support.suite.nonempty import each

HOSTILE = "<script>alert(1)</script>\"'&{{1234567*9}}"
ACCOUNTS: list[dict[str, Any]] = [
    {"name": "boss", "token": "boss-token", "admin": True},
    {"name": "guest", "token": "guest-token", "tables": ["fuzzed.u"]},
    {"name": "support", "token": "support-token", "masked": {"fuzzed.u": ["note"]}},
    {"name": "region", "token": "region-token", "where": {"fuzzed.u": "id = 1"}},
]


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with captured_log() as log:
        yield log


@pytest.fixture(scope="module")
def daemon(log: Log) -> Iterator[ServedLog]:
    with serving(log) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def guarded(log: Log) -> Iterator[ServedLog]:
    with serving(log, {"token": "a-token"}, ACCOUNTS) as daemon:
        yield daemon


def ask(daemon: ServedLog, call: str, token: str | None = None, **query: object) -> Answered:
    return daemon.ask("GET", f"/v1/instances/{INSTANCE}/{call}?{urlencode(query)}", token=token)


def logged_transactions(log: Log) -> list[dict[str, Any]]:
    """Return every transaction of the log, with its epoch."""
    source = OwnSource(INSTANCE, log)
    return [
        row | {"epoch": extent.epoch}
        for extent in log.extents()
        for batch in TransactionWalk(
            source, ByteRange(extent.epoch, extent.file, extent.start, extent.end, aligned=True)
        )
        for row in batch.to_pylist()
    ]


# --- One transaction --------------------------------------------------------------------------------


def test_every_transaction_is_found_by_its_gtid_and_by_each_of_its_positions(log: Log) -> None:
    source = OwnSource(INSTANCE, log)
    counts: Counter[str] = Counter()
    for logged in each(logged_transactions(log)):
        start = Position(logged["epoch"], logged["file"], logged["offset"])
        end = logged["end_offset"]
        for offset in (start.offset, (start.offset + end) // 2, end - 1):
            found = find_at(log, source, Position(start.epoch, start.file, offset))
            assert (found.start, found.end.offset) == (start, end)
        if logged["gtid"] is not None:
            assert find_by_gtid(log, source, logged["gtid"]).start == start
            counts["gtid"] += 1
    assert counts["gtid"]
    with pytest.raises(SourceMissing):
        find_by_gtid(log, source, "0-1-99999999")


def test_rows_of_a_transaction_are_those_that_readers_get(log: Log, daemon: ServedLog) -> None:
    source = OwnSource(INSTANCE, log)
    balance = 0
    for logged in logged_transactions(log):
        position = Position(logged["epoch"], logged["file"], logged["offset"])
        changes = list(changes_of(source, find_at(log, source, position), TablePatterns()))
        rows = [change for change in changes if isinstance(change, TableChange)]
        # The rows of a prepared XA transaction are decoded at its commit, so only one of the two transactions
        # has rows.
        assert len(rows) == logged["rows"] or 0 in (len(rows), logged["rows"]), position
        balance += len(rows) - logged["rows"]
        answer = ask(daemon, "transaction", position=position, limit=5000).json
        assert len(answer["changes"]) == len(rows)
        assert answer["transaction"]["rows"] == logged["rows"]
        assert {change["commit_version"] for change in answer["changes"]} <= {logged["commit_version"]}
        numbers = [change["row"] for change in answer["changes"]]
        assert numbers == sorted(numbers)
    assert balance == 0


def largest(log: Log) -> Position:
    """Return the position of the transaction with the most rows."""
    logged = max(logged_transactions(log), key=lambda row: row["rows"])
    return Position(logged["epoch"], logged["file"], logged["offset"])


def test_transaction_is_cut_at_the_limit_and_says_so(
    log: Log, daemon: ServedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ask(daemon, "transaction", position=largest(log), limit=5000).json
    assert whole["more"] is False
    part = ask(daemon, "transaction", position=largest(log), limit=1).json
    assert (len(part["changes"]), part["more"]) == (1, True)
    monkeypatch.setattr(transactions, "_TEXT_BYTES_MAX", -1)
    assert ask(daemon, "transaction", position=largest(log)).json["more"] is True


def test_account_sees_the_rows_of_its_tables_in_a_transaction(log: Log, guarded: ServedLog) -> None:
    hidden = 0
    for logged in logged_transactions(log):
        position = Position(logged["epoch"], logged["file"], logged["offset"])
        whole = ask(guarded, "transaction", token="boss-token", position=position, limit=5000).json
        shown = ask(guarded, "transaction", token="guest-token", position=position, limit=5000).json
        assert shown["changes"] == [row for row in whole["changes"] if row["table"] == "fuzzed.u"]
        assert (shown["transaction"]["tables"], shown["transaction"]["statement"]) == (None, None)
        hidden += len(whole["changes"]) - len(shown["changes"])
    assert hidden


@pytest.mark.parametrize(
    ("query", "status"),
    [({}, 400), ({"gtid": "0-1-5", "position": "a.1:4"}, 400), ({"gtid": HOSTILE}, 400)],
    ids=["neither", "both", "no-gtid"],
)
def test_transaction_without_a_place_is_refused(
    daemon: ServedLog, query: dict[str, str], status: int
) -> None:
    assert ask(daemon, "transaction", **query).status == status


def test_transaction_page_shows_rows_before_and_after(log: Log, daemon: ServedLog) -> None:
    position = largest(log)
    answer = ask(daemon, "transaction", position=position).json
    with console_of(daemon) as browser:
        page = browser.get("/transaction", place=str(position))
        by_gtid = browser.get("/transaction", place=answer["transaction"]["gtid"])
        nowhere = browser.get("/transaction", place="mysql-bin.000009:4")
        hostile = browser.get("/transaction", place=HOSTILE, limit=HOSTILE)
        history = browser.get("/history", table="fuzzed.t", key="1")
    assert page.text.count("<article") == len(answer["changes"])
    assert by_gtid.text.count("<article") == len(answer["changes"])
    assert nowhere.status == 200
    assert nowhere.problem.startswith("the log begins with mysql-bin.000001:127")
    assert "<script>alert" not in hostile.text
    assert HOSTILE in hostile.words or "&lt;script&gt;" in hostile.text
    assert "/transaction?daemon=" in history.text, "each change of a row leads to its transaction"


# --- The segments ---------------------------------------------------------------------------------


def test_segments_are_listed_with_the_totals_of_the_log(log: Log, daemon: ServedLog) -> None:
    answer = ask(daemon, "segments", limit=3).json
    assert answer["count"] == len(log.segments)
    assert sum(total["segments"] for total in answer["totals"].values()) == answer["count"]
    assert [segment["segment"] for segment in answer["segments"]] == [
        f"{record.version:019d}" for record in reversed(log.segments[-3:])
    ]
    newest, before, *_ = answer["segments"]
    assert log.visible is not None
    assert (newest["state"], newest["end"], newest["transactions"]) == ("open", log.visible.offset, None)
    assert before["end"] > before["start"]
    stored = sum(total["bytes"] for total in answer["totals"].values())
    assert stored == sum(extent.end - extent.start for extent in log.extents()) + sum(
        record.head_bytes for record in log.segments
    )


def test_log_page_shows_segments_holds_and_the_disk(daemon: ServedLog) -> None:
    earliest = daemon.log.earliest()
    path = f"/v1/instances/{INSTANCE}/position?reader=orders-cache&position={earliest}"
    assert daemon.ask("POST", path).status == 200
    with console_of(daemon) as browser:
        url = f"http://127.0.0.1:{daemon.port()}"
        page = browser.get("/log", daemon=url, instance=INSTANCE)
    assert page.status == 200
    assert "orders-cache" in page.words
    assert "1.0 TiB free" in page.words
    assert "mysql-bin.000001" in page.words


# --- The definitions ------------------------------------------------------------------------------


def at(offset: int) -> Position:
    return Position(0, "mysql-bin.000001", offset)


@pytest.fixture
def altered() -> Iterator[ServedLog]:
    """A log that keeps the definitions of a table that was created, altered, dropped and created again."""
    with captured_log() as log, serving(log, {"token": "a-token"}, ACCOUNTS) as daemon:
        schemas = SchemaLog(log.folder, SchemaHistory.from_json, log.disk)
        defaults = ServerDefaults(ServerSpelling(), "utf8mb4", {"fuzzed": "utf8mb4"}, False)
        schemas.seed(SchemaHistory(defaults), at(4))
        schemas.apply("CREATE TABLE u (id INT PRIMARY KEY, note VARCHAR(20), gone INT)", "fuzzed", at(100))
        # Add another snapshot. The definition in force is in both snapshots.
        schemas.seed(schemas.at(at(150)), at(150))
        schemas.apply("ALTER TABLE u ADD total DECIMAL(10,2), MODIFY note TEXT, DROP gone", "fuzzed", at(200))
        schemas.apply("DROP TABLE u", "fuzzed", at(300))
        schemas.apply("CREATE TABLE `<b>x` (id INT PRIMARY KEY)", "fuzzed", at(350))
        schemas.apply("CREATE TABLE u (id BIGINT PRIMARY KEY)", "fuzzed", at(400))
        schemas.close()
        yield daemon


def test_each_definition_is_listed_once_with_its_statement(altered: ServedLog) -> None:
    versions = ask(altered, "definitions", token="a-token", table="fuzzed.u").json["versions"]
    assert [version["since"] for version in versions] == [str(at(offset)) for offset in (100, 200, 300, 400)]
    assert [version["dropped"] for version in versions] == [False, False, True, False]
    assert "ADD total" in versions[1]["statement"]
    assert [column["name"] for column in versions[1]["columns"]] == ["id", "note", "total"]
    assert ask(altered, "definitions", token="a-token", table="fuzzed.never").json["versions"] == []


def test_definitions_show_no_passwords_of_connections(altered: ServedLog) -> None:
    schemas = SchemaLog(altered.log.folder, SchemaHistory.from_json, altered.log.disk)
    table = "CREATE TABLE far (id INT PRIMARY KEY)"
    schemas.apply(f"{table} ENGINE=FEDERATED CONNECTION='mysql://u:hunter2@h/d/t'", "fuzzed", at(500))
    schemas.apply("ALTER TABLE far ENGINE=SPIDER COMMENT='password \"hunter2\"'", "fuzzed", at(600))
    schemas.close()
    answer = ask(altered, "definitions", token="a-token", table="fuzzed.far")
    assert [version["statement"] for version in answer.json["versions"]] == [
        f"{table} ENGINE=FEDERATED CONNECTION='***'"
    ]
    with console_of(altered) as browser:
        browser.post("/login", {"token": "a-token"})
        page = browser.get("/definitions", table="fuzzed.far")
    assert "CONNECTION='***'" in page.words
    assert "hunter2" not in page.text


def test_account_sees_the_definitions_of_its_tables_alone(altered: ServedLog) -> None:
    assert ask(altered, "definitions", token="a-token").json["tables"] == ["fuzzed.`<b>x`", "fuzzed.u"]
    assert ask(altered, "definitions", token="guest-token").json["tables"] == ["fuzzed.u"]
    shown = ask(altered, "definitions", token="guest-token", table="fuzzed.u").json["versions"]
    assert {version["statement"] for version in shown} == {None}, "a statement may name other tables"
    shown = ask(altered, "definitions", token="support-token", table="fuzzed.u").json["versions"]
    assert {version["statement"] for version in shown} == {None}, "a statement may quote a masked value"
    shown = ask(altered, "definitions", token="region-token", table="fuzzed.u").json["versions"]
    assert {version["statement"] for version in shown} == {None}, "a statement may quote a hidden row"
    assert ask(altered, "definitions", token="guest-token", table="fuzzed.t").status == 403


def test_definition_page_shows_what_each_statement_changed(altered: ServedLog) -> None:
    with console_of(altered) as browser:
        browser.post("/login", {"token": "a-token"})
        page = browser.get("/definitions", table="fuzzed.u")
        names = browser.get("/definitions")
        hostile = browser.get("/definitions", table=HOSTILE)
    rows = [row.split("</tr>")[0] for row in page.text.split("<tr ")[1:]]
    marks = {row.split('"')[1]: row for row in rows if row.startswith('class="') and row.split('"')[1]}
    assert "total" in marks["added"]
    assert "gone" in marks["removed"]
    assert "note" in marks["changed"]
    assert "varchar(20)" in marks["changed"]
    assert "dropped or renamed here" in page.words
    assert "<b>x" in names.words
    assert "<b>x" not in names.text
    assert "<script>alert" not in hostile.text


def test_log_without_definitions_says_where_they_are(daemon: ServedLog) -> None:
    assert ask(daemon, "definitions").json["tables"] == []
    with console_of(daemon) as browser:
        assert "binlog_row_metadata=FULL" in browser.get("/definitions").words
