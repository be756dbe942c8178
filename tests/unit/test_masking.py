# SPDX-License-Identifier: Apache-2.0
"""Masked columns of an account: no response contains their values, and no request can query them."""

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from penstock.model import TableName, TablePatterns
from penstock.serve.masking import MaskedColumns, Masking, mask_part, without_masked
from penstock.serve.own_log import OwnSource
from penstock.source.logged_tables import LoggedTables
from penstock.source.reading import Batch, read_range
from penstock.source.row_history import plain_value
from penstock.source.source import ByteRange
from tests.support.binlog.events import QUERY, Event, assemble, events, query_body
from tests.support.binlog.forged_log import NAME, NOTES, forged_log, insert, keep_forged_log
from tests.support.daemon.console import console_of
from tests.support.daemon.served_log import INSTANCE, Answered, ServedLog, captured_log, serving
from tests.support.logstore.folders import open_log
from tests.support.suite.nonempty import each

WIDE = "fuzzed.wide"
# Shorter texts occur in every response by chance.
_TEXT_CHARS_MIN = 6


LISTED: dict[str, Any] = {"name": "listed", "token": "listed-token"}


def account(masked: dict[str, list[str]]) -> dict[str, Any]:
    return {"name": "support", "token": "support-token", "masked": masked}


@pytest.fixture(scope="module")
def whole() -> Iterator[ServedLog]:
    """A daemon whose account `support` may not see some columns of the table."""
    masked = {WIDE: ["I", "q"], "fuzzed.*": ["z"], "fuzzed.t": ["text"], "fuzzed.u": ["id"]}
    names = [name for name in string.ascii_lowercase if name not in "iqz"]
    shown = {WIDE: ["Id", *names], "fuzzed.t": ["id"], "fuzzed.u": ["number"]}
    accounts = [account(masked), {**LISTED, "columns": shown}]
    with captured_log() as log, serving(log, {"token": "a-token"}, accounts) as daemon:
        yield daemon


def batches_of(daemon: ServedLog, table: str) -> list[Batch]:
    source = OwnSource(INSTANCE, daemon.log)
    batches: list[Batch] = []
    for extent in daemon.log.extents():
        byte_range = ByteRange(extent.epoch, extent.file, extent.start, extent.end, aligned=True)
        batches += read_range(source, byte_range, None, LoggedTables(source))
    return [batch for batch in batches if batch.table == table]


def texts_of(value: Any) -> set[bytes]:
    """Return the forms of a value in a response: JSON, text and bytes."""
    texts = {json.dumps(plain_value(value)).strip('"').encode(), str(plain_value(value)).encode()}
    texts |= {value.encode()} if isinstance(value, str) else {value} if isinstance(value, bytes) else set()
    return {text for text in texts if len(text) >= _TEXT_CHARS_MIN}


def responses(daemon: ServedLog, token: str, columns: list[str]) -> list[Answered]:
    """Return every response about the rows of the table that the account can request."""

    def ask(method: str, path: str, body: Any = None) -> Answered:
        return daemon.ask(method, f"/v1/instances/{INSTANCE}/{path}", body, token=token)

    rows = [row for batch in batches_of(daemon, WIDE) for row in batch.to_arrow().to_pylist()]
    places = {f"{row['_metadata']['file']}:{row['_metadata']['offset']}" for row in rows}
    changes = {"tables": [WIDE], "start": "earliest", "until": "latest", "wait_seconds": 0}
    return [
        *(ask("POST", "history", {"table": WIDE, "key": [str(key)]}) for key in {row["id"] for row in rows}),
        *(ask("GET", f"transaction?position={place}") for place in places if place.startswith("mysql")),
        ask("POST", "as-of", {"table": WIDE, "at": "mysql-bin.000001:4020"}),
        ask("POST", "changes", changes),
        ask("POST", "changes", {**changes, "where": "id > 0", "shards": {"count": 1, "of": [0]}}),
        ask("POST", "changes", {**changes, "columns": columns}),
        *(ask("POST", "changes", {**changes, "format": name}) for name in ("canal_flat", "debezium")),
        ask("GET", "bytes?epoch=0&file=mysql-bin.000001&start=127"),
    ]


def test_masked_value_is_in_no_response() -> None:
    seeded = random.Random(15)
    with captured_log() as log, serving(log, {"token": "a-token"}) as daemon:
        (first, *_) = batches_of(daemon, WIDE)
        names = [name for name in first.to_arrow().schema.names if not name.startswith("_") and name != "id"]
        rows = [row for batch in batches_of(daemon, WIDE) for row in batch.to_arrow().to_pylist()]
        for _ in range(3):
            masked = seeded.sample(names, 8)
            values = {name: {text for row in rows for text in texts_of(row[name])} for name in names}
            shown = set().union(*(values[name] for name in names if name not in masked))
            hidden = set().union(*(values[name] for name in masked))
            hidden = {text for text in hidden if not any(text in other for other in shown)}
            assert hidden
            sent = b"".join(answer.body for answer in responses(daemon, "a-token", masked))
            assert any(text in sent for text in hidden), "the values are in the log"
            columns = [name.upper() for name in masked]
            shown_columns = ["ID", *(name.upper() for name in names if name not in masked)]
            accounts = [account({WIDE: columns}), {**LISTED, "columns": {"*.WIDE": shown_columns}}]
            with serving(log, {"token": "b-token"}, accounts) as guarded:
                for token in ("support-token", "listed-token"):
                    answers = responses(guarded, token, masked)
                    assert {answer.status for answer in answers} == {200, 403}
                    for answer in answers:
                        found = [text for text in hidden if text in answer.body]
                        assert found == [], (token, answer.status, answer.body[:200])
                    assert any(text in answer.body for answer in answers for text in shown), (
                        "others are shown"
                    )


@pytest.mark.parametrize("limited", ["support-token", "listed-token"])
def test_values_of_other_columns_are_shown_and_the_masked_ones_are_named(
    whole: ServedLog, limited: str
) -> None:
    def history(token: str) -> list[dict[str, Any]]:
        body = {"table": WIDE, "key": ["1"]}
        answer = whole.ask("POST", f"/v1/instances/{INSTANCE}/history", body, token=token)
        return [json.loads(line) for line in answer.body.splitlines()]

    lines = history(limited)
    changes = [line for line in lines if line["kind"] == "change"]
    expected = [line for line in history("a-token") if line["kind"] == "change"]
    for change, other in zip(changes, each(expected), strict=True):
        image = next(image for image in ("after", "before") if other[image] is not None)
        assert set(change["masked"]) == {"i", "q", "z"}
        assert change[image] == {k: v for k, v in other[image].items() if k not in ("i", "q", "z")}
    assert {line["text"] for line in lines if line["kind"] == "statement"} == {"(masked)"}


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "a condition": ("changes", {"tables": [WIDE], "where": "i = '5'"}),
    "a condition in another case": ("changes", {"tables": [WIDE], "where": "Q LIKE 'a%'"}),
    "a condition on any table": ("changes", {"where": "text = 'one'"}),
    "a column": ("changes", {"tables": [WIDE], "columns": ["id", "z"]}),
    "shards": ("changes", {"tables": [WIDE], "shards": {"count": 2, "of": [0], "columns": {WIDE: ["q"]}}}),
    "messages": ("changes", {"tables": ["fuzzed.t"], "format": "maxwell"}),
    "a search": ("history", {"table": WIDE, "key": ["x"], "columns": ["q"]}),
    "a search by the key": ("history", {"table": "fuzzed.u", "key": ["1"]}),
    "shards of the key": (
        "changes",
        {"tables": ["fuzzed.u"], "shards": {"count": 2, "of": [0]}, "start": "earliest", "until": "latest"},
    ),
}


@pytest.mark.parametrize("limited", ["support-token", "listed-token"])
def test_nothing_can_be_asked_about_a_masked_value(whole: ServedLog, limited: str) -> None:
    for case, (call, body) in each(REFUSED.items()):
        answer = whole.ask("POST", f"/v1/instances/{INSTANCE}/{call}", body, token=limited)
        # If the refusal depends on the key of the table, it arrives within a response that has already begun.
        assert answer.status == 403 or b'"AccessDenied"' in answer.body, (case, answer.body[:300])
        assert b'"kind":"change"' not in answer.body
        assert b'"kind":"batch"' not in answer.body


@pytest.mark.parametrize("limited", ["support-token", "listed-token"])
def test_shards_of_a_masked_key_are_refused_whichever_rows_they_have(whole: ServedLog, limited: str) -> None:
    """A response that depends on the shard would confirm a guess of the value."""
    body = {"tables": ["fuzzed.u"], "start": "earliest", "until": "latest", "wait_seconds": 0}
    bodies = set()
    for shard in range(8):
        shards = {"count": 8, "of": [shard]}
        answer = whole.ask(
            "POST", f"/v1/instances/{INSTANCE}/changes", {**body, "shards": shards}, token=limited
        )
        bodies.add(answer.body)
    (refused,) = bodies
    assert b'"AccessDenied"' in refused


@pytest.mark.parametrize("limits", [{"masked": {NOTES: ["note"]}}, {"where": {NOTES: "id = 1"}}])
def test_text_of_the_first_error_is_hidden(tmp_path: Path, limits: dict[str, Any]) -> None:
    description, previous, *_ = events(forged_log(0))
    transaction = insert(1, NOTES, 1, b"")
    change = Event(0, QUERY, 1, 0, 0, query_body("UPDATE shop.notes SET note = 'alice@x'"))
    content = assemble([description, previous, *transaction[:2], change, transaction[-1]])
    keep_forged_log(tmp_path / "log", content)
    body = {"tables": [NOTES], "start": {"position": f"{NAME}:{len(assemble([description, previous]))}"}}
    accounts = [{"name": "support", "token": "support-token", **limits}]
    with open_log(tmp_path / "log") as log, serving(log, {"token": "a-token"}, accounts) as daemon:
        path = f"/v1/instances/{INSTANCE}/changes"
        shown, hidden = (
            daemon.ask("POST", path, body, token=token) for token in ("a-token", "support-token")
        )
    assert shown.json["type"] == hidden.json["type"] == "StatementLogged"
    assert "alice@x" in shown.json["detail"] + str(shown.json["hint"])
    assert (hidden.json["detail"], hidden.json["hint"]) == ("(masked)", None)


def test_condition_on_a_column_that_is_masked_elsewhere_is_accepted(whole: ServedLog) -> None:
    body = {"tables": ["fuzzed.u"], "where": "number = 1", "start": "earliest", "until": "latest"}
    answer = whole.ask("POST", f"/v1/instances/{INSTANCE}/changes", body, token="support-token")
    assert (answer.status, b"number" in answer.body) == (200, True)


def test_texts_of_unrepresentable_values_are_masked_with_their_column(whole: ServedLog) -> None:
    rows = batches_of(whole, WIDE)[0].to_arrow().slice(0, 2)
    metadata = rows.column("_metadata")
    number = metadata.type.get_field_index("unrepresentable")
    fields = [metadata.field(index) for index in range(metadata.type.num_fields)]
    fields[number] = pyarrow.array([[("O", "secret"), ("m", "0000-00-00")], None], fields[number].type)
    changed = pyarrow.StructArray.from_arrays(fields, fields=list(metadata.type))
    noted = rows.set_column(rows.schema.get_field_index("_metadata"), rows.schema.field("_metadata"), changed)
    masked = without_masked(noted, MaskedColumns(frozenset({"o"})))
    shown = [row["_metadata"]["unrepresentable"] for row in masked.to_pylist()]
    assert shown == [[("m", "0000-00-00")], None]
    assert "o" not in masked.schema.names
    assert without_masked(noted, MaskedColumns()) is noted


def test_errors_about_the_data_are_hidden_and_others_are_not() -> None:
    masked = frozenset({"email"})
    data = {"kind": "problem", "type": "SchemaMismatch", "detail": "secret", "hint": "secret"}
    refused = {"kind": "problem", "type": "OptionInvalid", "detail": "no such column", "hint": None}
    assert mask_part(data, masked)["detail"] == "(masked)"
    assert mask_part(refused, masked) == refused


def test_every_matching_pattern_masks() -> None:
    masking = Masking.of_settings({"shop.*": ["Email"], "*.users": ["phone"]})
    assert masking.columns(TableName("shop", "users")) == MaskedColumns(frozenset({"email", "phone"}))
    assert masking.columns(TableName("crm", "orders")) == MaskedColumns()
    assert masking.masked_among(["EMAIL"], TablePatterns(["crm.orders"])) == []
    assert masking.masked_among(["EMAIL", "id"], TablePatterns(["crm.orders", "sh*.x"])) == ["EMAIL"]
    assert not Masking()


def test_column_is_shown_only_if_every_matching_list_has_it() -> None:
    masking = Masking.of_settings(
        {"shop.users": ["phone"]}, {"shop.*": ["Id", "phone", "name"], "*.users": ["id"]}
    )
    users, orders, others = (
        masking.columns(TableName.parse(name)) for name in ("SHOP.Users", "shop.orders", "crm.x")
    )
    assert [name for name in ("id", "phone", "name", "email") if name not in users] == ["id"]
    assert [name for name in ("id", "phone", "name", "email") if name not in orders] == [
        "id",
        "phone",
        "name",
    ]
    assert not others
    assert [name for name in ("id", "phone", "name") if name not in masking.all_columns] == ["id"]
    assert masking.masked_among(["ID", "Name", "_metadata"], TablePatterns(["shop.users"])) == ["Name"]
    assert masking.masked_among(["ID", "Name", "_change_type"], TablePatterns(["shop.orders"])) == []
    assert masking.masked_among(["Name"], TablePatterns(["shop.o*"])) == ["Name"]
    assert masking.hidden_among(TableName("shop", "users"), ["id", "phone", "note"]) == {"phone", "note"}
    assert masking
    assert Masking.of_settings({}, {"shop.*": ["id"]})


def test_columns_that_a_response_adds_are_shown_unless_a_mask_names_them(whole: ServedLog) -> None:
    rows = batches_of(whole, WIDE)[0].to_arrow().slice(0, 2)
    rows = rows.append_column("_shard_slot", pyarrow.array([1, 2]))
    added = ["_change_type", "_commit_version", "_commit_timestamp", "_metadata", "_shard_slot"]
    listed = MaskedColumns(shown=frozenset({"id"}))
    assert without_masked(rows, listed).schema.names == ["id", *added]
    named = listed | MaskedColumns(frozenset({"_metadata"}))
    assert without_masked(rows, named).schema.names == [
        "id",
        *(name for name in added if name != "_metadata"),
    ]
    assert "_Metadata".casefold() in listed, "a column of the table is not one that the response adds"


def test_console_shows_that_values_are_masked_and_no_rejected_rows(whole: ServedLog) -> None:
    with console_of(whole) as browser:
        browser.post("/login", {"token": "support-token"})
        page = browser.get("/history", table=WIDE, key="1")
        assert "i (masked) (masked)" in page.words
        assert browser.get("/dead-letters", store="0", name="x").status == 403
        assert browser.get("/pipelines").status == 403
