# SPDX-License-Identifier: Apache-2.0
"""A mistyped table name, or a masked column that a table does not have, is reported by name instead of being
ignored.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.check.facts import Facts
from penstock.check.tables import TABLE_CHECKS
from penstock.cli import check, tail
from penstock.errors import AccessDenied, OptionInvalid
from penstock.logstore.log import Log
from penstock.logstore.schemas import SchemaLog
from penstock.model import Position, TableName, TablePatterns
from penstock.mysql.connection import MYSQL, ServerIdentity
from penstock.narrowed_patterns import nearest_table
from penstock.schema.history import SchemaHistory
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.tokens import ServerSpelling
from penstock.serve.masking import Masking
from penstock.serve.own_log import OwnSource
from penstock.source import logged_tables
from penstock.source.daemon_address import DaemonAddress
from penstock.source.logged_tables import prove_table_known
from tests.support.daemon.served_log import INSTANCE, Answered, ServedLog, captured_log, serving
from tests.support.suite.nonempty import each

T = TableName("fuzzed", "t")
ORDERS = "shop.orders"
ACCOUNTS: list[dict[str, Any]] = [
    {"name": "guest", "token": "guest-token", "tables": ["fuzzed.u*"]},
    {"name": "typo", "token": "typo-token", "masked": {"fuzzed.t": ["text", "txet"]}},
    {"name": "idle", "token": "idle-token", "masked": {"fuzzed.t": ["txet"]}},
    {"name": "wide", "token": "wide-token", "masked": {"fuzzed.t*": ["text", "txet"]}},
    {"name": "renamed", "token": "renamed-token", "masked": {"fuzzed.t": ["text", "body"]}},
]


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    """A log whose table `t` had a column `body`; its rows were logged with the column `text` instead."""
    with captured_log() as log:
        schemas = SchemaLog(log.folder, SchemaHistory.from_json, log.disk)
        start = log.earliest()
        assert start is not None
        defaults = ServerDefaults(ServerSpelling(), "utf8mb4", {"fuzzed": "utf8mb4"}, False)
        schemas.seed(SchemaHistory(defaults), start)
        tables = ("t (id INT PRIMARY KEY, body TEXT)", "u (id INT PRIMARY KEY)", "secret_t (id INT)")
        for offset, table in enumerate(tables, 1):
            place = Position(start.epoch, start.file, start.offset + offset)
            schemas.apply(f"CREATE TABLE {table}", "fuzzed", place)
        place = Position(start.epoch, start.file, start.offset + 9)
        schemas.apply("ALTER TABLE t CHANGE body text TEXT", "fuzzed", place)
        schemas.close()
        yield log


@pytest.fixture(scope="module")
def daemon(log: Log) -> Iterator[ServedLog]:
    with serving(log, {"token": "a-token"}, ACCOUNTS) as daemon:
        yield daemon


def ask(daemon: ServedLog, call: str, token: str = "a-token", **body: Any) -> Answered:
    return daemon.ask("POST", f"/v1/instances/{INSTANCE}/{call}", body, token=token)


def last_of(answer: Answered) -> dict[str, Any]:
    return dict(json.loads(answer.body.splitlines()[-1]))


def test_unknown_table_is_refused_with_the_one_that_may_be_meant(daemon: ServedLog) -> None:
    assert last_of(ask(daemon, "history", table="fuzzed.t", key=["4711"])) == {"kind": "end", "why": "whole"}
    for name in each(("fuzzed.tt", "fuzed.t")):
        ended = last_of(ask(daemon, "history", table=name, key=["1"]))
        assert (ended["kind"], ended["hint"]) == ("problem", "Did you mean fuzzed.t?")
        refused = ask(daemon, "as-of", table=name, at="2100-01-01")
        assert (refused.status, refused.json["hint"]) == (400, "Did you mean fuzzed.t?")
        assert f"the log knows no table {name}" in refused.json["detail"]


def test_hint_names_no_table_that_the_account_may_not_read(daemon: ServedLog) -> None:
    for name in each(("fuzzed.u_secret_t", "fuzzed.u0123456789012345")):
        refused = ask(daemon, "as-of", "guest-token", table=name, at="2100-01-01")
        assert refused.status == 400
        hint = refused.json["hint"].replace(name, "")
        assert "secret" not in hint


def test_hint_lists_the_known_tables_if_no_name_is_similar(daemon: ServedLog) -> None:
    for call, body in each((("history", {"key": ["1"]}), ("as-of", {"at": "2100-01-01"}))):
        answer = ask(daemon, call, table="elsewhere.unlike_any", **body)
        hint = (last_of(answer) if call == "history" else answer.json)["hint"]
        assert hint.startswith("It knows "), hint
        assert "fuzzed.t" in hint
    many = [TableName("shop", f"t{number:02}") for number in range(30)]
    assert logged_tables._hint_of(TableName("shop", "unlike_any"), [TableName("crm", "a"), *many]) == (
        f"It knows {', '.join(map(str, many[:10]))}, and 21 more"
    )


def test_log_without_definitions_refuses_no_table() -> None:
    with captured_log() as log:
        prove_table_known(OwnSource(INSTANCE, log), TableName("fuzzed", "nowhere"))


def test_masked_name_that_no_definition_has_is_refused(daemon: ServedLog) -> None:
    for token in each(("typo-token", "idle-token")):
        for answer in (
            ask(daemon, "as-of", token, table="fuzzed.t", at="2100-01-01"),
            ask(daemon, "history", token, table="fuzzed.t", key=["1"]),
        ):
            problem = last_of(answer)
            assert problem["type"] == "AccessDenied", problem
            assert "txet of fuzzed.t is masked" in problem["detail"]
            assert "Did you mean text?" in problem["hint"]
            assert b"one" not in answer.body
    # Masks under a pattern may name columns of other tables, and a renamed column has two names, so both
    # masks are accepted.
    for token in ("wide-token", "renamed-token"):
        shown = ask(daemon, "as-of", token, table="fuzzed.t", at="2100-01-01").json
        assert shown["columns"] == ["id"]
        assert last_of(ask(daemon, "history", token, table="fuzzed.t", key=["1"]))["kind"] == "end"


def test_changes_and_transactions_show_no_value_under_an_idle_mask(daemon: ServedLog) -> None:
    body = {"tables": ["fuzzed.t"], "start": "earliest", "until": "latest", "wait_seconds": 0}
    answer = ask(daemon, "changes", "idle-token", **body)
    assert (b'"AccessDenied"' in answer.body, b'"kind":"batch"' in answer.body) == (True, False)
    with capture_logs() as lines:
        for _ in range(2):
            assert b'"kind":"batch"' in ask(daemon, "changes", "typo-token", **body).body
    assert [line["columns"] for line in lines if "a mask names columns" in line["event"]] == ["txet"]
    history = ask(daemon, "history", table="fuzzed.t", key=["1"]).body.splitlines()
    place = next(part["position"] for part in map(json.loads, history) if part["kind"] == "change")
    path = f"/v1/instances/{INSTANCE}/transaction?position={place}"
    for change in each(daemon.ask("GET", path, token="idle-token").json["changes"]):
        assert set(change["masked"]) == {"id", "text"}


def test_rule_must_name_as_many_columns_as_elsewhere() -> None:
    masking = Masking.of_settings({"fuzzed.t": ["mail", "Phone"]})
    now, then = ("id", "MAIL", "phone"), ("id", "e_mail", "phone")
    masking.prove_all_apply(T, now, [now, then])
    with pytest.raises(AccessDenied, match=r"mail of fuzzed\.t is masked .* no such column then"):
        masking.prove_all_apply(T, then, [now, then])
    Masking.of_settings({"fuzzed.t": ["mail", "e_mail", "phone"]}).prove_all_apply(T, then, [now, then])
    with pytest.raises(AccessDenied):
        masking.prove_all_apply(T, then, [])


class ToldTables:
    """A session on a simulated server that has these tables."""

    def identity(self) -> ServerIdentity:
        return ServerIdentity(MYSQL, (8, 0, 41), "8.0.41", 1, "uuid", None, "ON")

    def variables(self, *names: str) -> dict[str, str]:
        return {}

    def query(self, sql: str, arguments: Any = None) -> list[dict[str, Any]]:
        is_list = "information_schema.TABLES" in sql
        return [{"database": "shop", "table": "orders", "engine": "InnoDB"}] if is_list else []


def test_check_names_a_pattern_that_matches_no_table() -> None:
    facts = Facts(ToldTables(), TablePatterns("shop.orders,shop.ordrs,crm.*"))  # type: ignore[arg-type]
    (mistyped, foreign) = TABLE_CHECKS["tables"](facts)
    assert (mistyped.severity, foreign.severity) == ("warning", "warning")
    assert mistyped.what == "no table that this account sees matches shop.ordrs. Did you mean shop.orders?"
    assert "crm.*" in foreign.what
    assert list(TABLE_CHECKS["tables"](Facts(ToldTables(), None))) == []  # type: ignore[arg-type]


def test_check_of_a_cluster_refuses_tables() -> None:
    for server in each(("tidb://pd1:2379", "ticdc+file:///changes")):
        with pytest.raises(OptionInvalid, match="--tables is for MySQL and MariaDB"):
            check.run(server, tables=ORDERS)


def test_nearest_table_is_found_among_many_of_its_database() -> None:
    others = [TableName("crm", f"orders_{number}") for number in range(20_000)]
    assert nearest_table("shop.ordrs", [*others, TableName("shop", "orders")]) == f"Did you mean {ORDERS}?"


def test_tail_names_a_pattern_that_matches_no_table_yet(
    daemon: ServedLog, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", "a-token")
    address = DaemonAddress.parse(f"penstock://127.0.0.1:{daemon.port()}/{INSTANCE}")
    tail._note_unmatched(address, ["fuzzed.t", "fuzzed.*", "fuzzed.tt"])
    assert capsys.readouterr().err == (
        "no table that you may read matches fuzzed.tt yet. Did you mean fuzzed.t?\n"
    )
    nowhere = DaemonAddress.parse(f"penstock://127.0.0.1:1/{INSTANCE}")
    tail._note_unmatched(nowhere, ["fuzzed.tt"])
    assert capsys.readouterr().err == ""


def test_unknown_table_of_a_folder_is_an_error(log: Log) -> None:
    with pytest.raises(OptionInvalid, match=r"the log knows no table fuzzed\.tt"):
        prove_table_known(OwnSource(INSTANCE, log), TableName("fuzzed", "tt"))
