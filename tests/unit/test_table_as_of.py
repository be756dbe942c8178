# SPDX-License-Identifier: Apache-2.0
"""A table as of a point in time, compared with a replay of the table's changes one by one."""

import csv
import io
import json
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from penstock import limits
from penstock.cli import as_of as as_of_verb
from penstock.errors import LimitExceeded, OptionInvalid, PositionInvalid
from penstock.logstore.log import Log
from penstock.model import Position, TableName, TablePatterns
from penstock.serve.http import as_of as as_of_routes
from penstock.serve.own_log import OwnSource
from penstock.source import table_as_of
from penstock.source.daemon_client import DaemonClient
from penstock.source.logged_tables import LoggedTables
from penstock.source.reading import LoggedStatement, Selection, read_in_order
from penstock.source.row_history import RowChange, changes_of_rows
from penstock.source.table_as_of import TableAsOf
from penstock.source.walk import TransactionWalk
from tests.support.daemon.console import console_of
from tests.support.daemon.served_log import INSTANCE, Answered, ServedLog, captured_log, serving
from tests.support.suite.nonempty import each
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until

HOSTILE = "<script>alert(1)</script>\"'&{{1234567*9}}"
T = TableName("fuzzed", "t")
ACCOUNTS: list[dict[str, Any]] = [
    {"name": "guest", "token": "guest-token", "tables": ["fuzzed.u"]},
    {"name": "support", "token": "support-token", "masked": {"fuzzed.t": ["text"], "fuzzed.u": ["id"]}},
    {"name": "cases", "token": "cases-token", "masked": {"FUZZED.T": ["TEXT"]}},
    {"name": "regex", "token": "regex-token", "masked": {"/Fuzzed\\.[A-Z]/": ["tExt"]}},
    {"name": "idle", "token": "idle-token", "masked": {"fuzzed.t": ["txet"], "*.*": ["secret"]}},
    {"name": "others", "token": "others-token", "masked": {"*.*": ["secret"], "fuzzed.u": ["secret"]}},
]


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with captured_log() as log:
        yield log


@pytest.fixture(scope="module")
def daemon(log: Log) -> Iterator[ServedLog]:
    with serving(log, {"token": "a-token"}, ACCOUNTS) as daemon:
        yield daemon


def as_of(log: Log, moment: str, table: TableName = T) -> TableAsOf:
    shown = TableAsOf(log, OwnSource(INSTANCE, log), table)
    shown.read(moment)
    return shown


def parts_of(log: Log, table: TableName) -> list[tuple[Position, RowChange | LoggedStatement]]:
    """Return every change and statement of a table in the order of the log, read without the index."""
    source = OwnSource(INSTANCE, log)
    parts: list[tuple[Position, RowChange | LoggedStatement]] = []
    for byte_range in source.split():
        selection = Selection(TablePatterns([table.sql]))
        for part in read_in_order(source, byte_range, selection, LoggedTables(source)):
            if isinstance(part, LoggedStatement):
                parts.append((part.position, part))
                continue
            rows = part.to_arrow()
            for _, change in changes_of_rows(rows, range(rows.num_rows), part.position.epoch):
                parts.append((change.position, change))
    return parts


def boundaries_of(log: Log) -> list[tuple[Position, int]]:
    """Return the start of each transaction, and its commit time."""
    source = OwnSource(INSTANCE, log)
    return [
        (
            Position(byte_range.epoch, row["file"], row["offset"]),
            int(row["commit_timestamp"].timestamp() * 1_000_000),
        )
        for byte_range in source.split()
        for batch in TransactionWalk(source, byte_range)
        for row in batch.to_pylist()
    ]


def replayed(parts: list[tuple[Position, RowChange | LoggedStatement]], at: Position) -> dict[int, Any]:
    """Return the rows at a position by key, as a reader that applies each change would have them."""
    rows: dict[int, Any] = {}
    seen: set[int] = set()
    is_complete = False
    for position, part in parts:
        if position >= at and (is_complete or isinstance(part, LoggedStatement)):
            break
        if isinstance(part, LoggedStatement):
            rows, seen = {}, set()
            is_complete = T in part.emptied | part.created
            continue
        before = None if part.before is None else part.before["id"]
        # A partial after image may lack the key too.
        after = None if part.after is None else part.after.get("id", before)
        if position < at:
            earlier = {**rows.pop(before, {}), **part.before} if part.before is not None else {}
            if after is not None:
                rows[after] = {**earlier, **part.after}
        elif before is not None and before not in seen:
            rows[before] = part.before
        seen |= {key for key in (before, after) if key is not None}
    return rows


def test_rows_at_every_boundary_equal_a_replay(log: Log) -> None:
    parts = parts_of(log, T)
    states = []
    for boundary, _ in each(boundaries_of(log)):
        shown = as_of(log, str(boundary))
        rows = {row.values["id"]: row.values for row in shown.rows()}
        assert rows == replayed(parts, boundary), str(boundary)
        states.append((len(rows), shown.is_complete))
    assert {count for count, _ in states} >= {0, 3}, "the table fills and empties"
    assert {True, False} == {is_complete for _, is_complete in states}


def test_time_is_the_end_of_what_was_committed_before_it(log: Log) -> None:
    boundaries = boundaries_of(log)
    for number in (0, len(boundaries) // 2, len(boundaries) - 1):
        _, time_us = boundaries[number]
        text = f"{pyarrow.scalar(time_us, pyarrow.timestamp('us')).as_py().isoformat()}Z"
        first = next(boundary for boundary, committed in boundaries if committed >= time_us)
        assert as_of(log, text).position == first
    assert as_of(log, "2100-01-01").position == log.visible


def test_moment_inside_a_transaction_is_refused(log: Log) -> None:
    with pytest.raises(OptionInvalid):
        as_of(log, "yesterday")
    with pytest.raises(PositionInvalid):
        as_of(log, "mysql-bin.000002:1000")


def test_rows_beyond_the_memory_are_refused(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits.AS_OF_BYTES_MAX > 1 << 20
    monkeypatch.setattr(table_as_of, "AS_OF_BYTES_MAX", 600)
    with pytest.raises(LimitExceeded):
        as_of(log, str(log.visible))


def test_changes_of_the_same_rows_need_the_memory_of_one(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch whose rows are all replaced is dropped, the other batches are merged, and rows keep their
    values.
    """
    boundary = boundaries_of(log)[-2][0]
    expected = [row.values for row in as_of(log, str(boundary)).rows()]
    known = table_as_of._Known
    add = known.add
    monkeypatch.setattr(
        TableAsOf,
        "_keep",
        lambda self, known, rows, batch: (known.compact(), add(known, rows, batch.position.epoch))[1],
    )
    assert [row.values for row in as_of(log, str(boundary)).rows()] == expected


def ask(daemon: ServedLog, token: str = "a-token", **body: Any) -> Answered:
    return daemon.ask("POST", f"/v1/instances/{INSTANCE}/as-of", {"table": "fuzzed.t", **body}, token=token)


def boundary_with_rows(log: Log) -> str:
    parts = parts_of(log, T)
    return next(str(place) for place, _ in reversed(boundaries_of(log)) if len(replayed(parts, place)) > 1)


def test_export_has_the_same_rows_in_every_format(daemon: ServedLog) -> None:
    at = boundary_with_rows(daemon.log)
    expected = [row["values"] for row in ask(daemon, at=at).json["rows"]]
    lines = [json.loads(line) for line in ask(daemon, at=at, format="jsonl").body.splitlines()]
    cells = list(csv.DictReader(io.StringIO(ask(daemon, at=at, format="csv").body.decode())))
    table = pyarrow.parquet.read_table(io.BytesIO(ask(daemon, at=at, format="parquet").body))
    assert len(expected) > 1
    columns = ("id", "text")
    assert [{name: line[name] for name in columns} for line in lines] == expected
    assert table.select(columns).to_pylist() == expected
    shown = [
        {"id": str(row["id"]), "text": "\\N" if row["text"] is None else row["text"]} for row in expected
    ]
    assert [{name: row[name] for name in columns} for row in cells] == shown


def test_limit_leaves_rows_out_and_counts_them(daemon: ServedLog) -> None:
    answer = ask(daemon, at=boundary_with_rows(daemon.log), limit=1).json
    assert (len(answer["rows"]), answer["count"] > 1) == (1, True)


def test_rights_on_tables_and_columns_hold(daemon: ServedLog) -> None:
    at = boundary_with_rows(daemon.log)
    assert ask(daemon, "guest-token", at=at).status == 403
    assert ask(daemon, "support-token", at=at, table="fuzzed.u").status == 403, "its key is masked"
    shown = ask(daemon, "support-token", at=at).json
    assert shown["columns"] == ["id"]
    assert all(set(row["values"]) == {"id"} for row in each(shown["rows"]))
    for file_format in ("jsonl", "csv", "parquet"):
        assert b"one" not in ask(daemon, "support-token", at=at, format=file_format).body


def test_mask_in_another_case_hides_and_a_mask_of_no_column_refuses(daemon: ServedLog) -> None:
    at = boundary_with_rows(daemon.log)
    for token in ("cases-token", "regex-token"):
        assert ask(daemon, token, at=at).json["columns"] == ["id"], token
        assert b"one" not in ask(daemon, token, at=at, format="csv").body
    for file_format in ("json", "jsonl"):
        refused = ask(daemon, "idle-token", at=at, format=file_format)
        assert (refused.status, b"one" in refused.body) == (403, False)
        assert "txet of fuzzed.t is masked" in refused.json["detail"]
    assert ask(daemon, "others-token", at=at).json["columns"] == ["id", "text"]


def test_second_table_waits_until_the_first_is_sent_or_its_client_has_left(
    daemon: ServedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    read = TableAsOf.read

    def read_late(self: TableAsOf, moment: str) -> None:
        begun.set()
        assert goes_on.wait(WAIT_SECONDS_MAX)
        read(self, moment)

    at = boundary_with_rows(daemon.log)
    monkeypatch.setattr(TableAsOf, "read", read_late)
    body = json.dumps({"table": "fuzzed.t", "at": at})
    client = HTTPConnection("127.0.0.1", daemon.port(), timeout=WAIT_SECONDS_MAX)
    client.request("POST", f"/v1/instances/{INSTANCE}/as-of", body, {"Authorization": "Bearer a-token"})
    assert begun.wait(WAIT_SECONDS_MAX)
    assert ask(daemon, at=at).status == 429
    client.close()
    monkeypatch.undo()
    assert ask(daemon, at=at).status == 429, "the thread of the client that left has its rows in memory"
    goes_on.set()
    wait_until(lambda: ask(daemon, at=at).status == 200)
    for moment, status in (("yesterday", 400), (at, 200)):
        assert ask(daemon, at=moment).status == status, "an error frees it too"


def test_client_that_does_not_read_gives_way_to_the_next_one(
    daemon: ServedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = boundary_with_rows(daemon.log)
    sent = 0

    def endless(*arguments: Any) -> Iterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield bytes(1 << 20)

    def is_blocked() -> bool:
        before = sent
        return before > 0 and ask(daemon, at=at).status == 429 and sent == before

    with monkeypatch.context() as patch:
        patch.setattr(as_of_routes, "export_rows", endless)
        body = json.dumps({"table": "fuzzed.t", "at": at, "format": "jsonl"})
        client = HTTPConnection("127.0.0.1", daemon.port(), timeout=WAIT_SECONDS_MAX)
        client.request("POST", f"/v1/instances/{INSTANCE}/as-of", body, {"Authorization": "Bearer a-token"})
        wait_until(is_blocked)
    monkeypatch.setattr(as_of_routes, "AS_OF_UNREAD_SECONDS_MAX", 0.0)
    assert ask(daemon, at=at).status == 200
    with pytest.raises(HTTPException):
        client.getresponse().read()
    monkeypatch.undo()
    assert ask(daemon, at=at).status == 200


def test_page_shows_the_rows_and_exports_them(daemon: ServedLog) -> None:
    at = boundary_with_rows(daemon.log)
    with console_of(daemon) as browser:
        browser.post("/login", {"token": "a-token"})
        form = browser.get("/as-of")
        page = browser.get("/as-of", table="fuzzed.t", at=at)
        wrong = browser.get("/as-of", table=HOSTILE, at=HOSTILE)
        file = browser.get("/as-of/export", table="fuzzed.t", at=at, format="csv")
        refused = browser.get("/as-of/export", table="fuzzed.t", at=HOSTILE, format="csv")
    assert "as they stood" in form.words
    assert "These are all rows that the log shows since the table was created or emptied at" in page.words
    assert "such as those of foreign keys' actions, are not among them" in page.words
    assert (wrong.status, "<script>alert" in wrong.text) == (200, False)
    assert f"{HOSTILE!r} is not a table name" in wrong.problem
    assert file.headers["content-disposition"] == 'attachment; filename="fuzzed.t.csv"'
    assert file.text == ask(daemon, at=at, format="csv").body.decode()
    assert (refused.status, "<script>alert" in refused.text) == (400, False)


def test_command_writes_what_the_daemon_shows(
    daemon: ServedLog,
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = boundary_with_rows(daemon.log)
    (tmp_path / "token").write_text("a-token")
    url = f"http://127.0.0.1:{daemon.port()}?token_file={tmp_path}/token"
    asked: list[str] = []
    post = DaemonClient.post
    monkeypatch.setattr(
        DaemonClient, "post", lambda self, call, *more: asked.append(call) or post(self, call, *more)
    )
    as_of_verb.run("fuzzed.t", at, url=url)
    assert asked == ["as-of"], "the log is read once"
    lines, note = capfdbinary.readouterr()
    assert lines == ask(daemon, at=at, format="jsonl").body
    assert note.decode().startswith(f"fuzzed.t at {at}: all rows of the table that the log shows since")
    assert b"foreign keys' actions, are not in it" in note
    as_of_verb.run("fuzzed.t", at, url=url, file_format="parquet", output=tmp_path / "t.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "t.parquet").num_rows > 1
    for options in ({"file_format": "parquet"}, {"file_format": "xlsx"}):
        with pytest.raises(OptionInvalid):
            as_of_verb.run("fuzzed.t", at, url=url, **options)
