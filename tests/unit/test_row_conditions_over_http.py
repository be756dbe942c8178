# SPDX-License-Identifier: Apache-2.0
"""An account with `where` gets its rows as typed changes, and no other response contains rows."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.client.fetch import BatchFrame, ChangesAnswer
from penstock.coordinate.backends.memory import MemoryStore
from penstock.errors import AccessDenied, OptionInvalid
from penstock.source.daemon_address import DaemonAddress
from penstock.source.daemon_client import DaemonClient
from tests.support.canal.client import CanalClient, Refused
from tests.support.daemon.console import Browser, console_of
from tests.support.daemon.served_log import INSTANCE, Answered, ServedLog, captured_log, serving
from tests.support.ptubes.client import PtubesClient
from tests.support.suite.nonempty import each
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tests.unit.test_masking import batches_of, texts_of

TABLE = "fuzzed.wide"
TOKEN = "support-token"
# The rows with other keys are hidden.
VISIBLE_KEY = 2
ACCOUNT: dict[str, Any] = {
    "name": "support",
    "token": TOKEN,
    "user": "support",
    "password": "support",
    "admin": True,
    "metrics": True,
    "where": {"FUZZED.*": f"Id = {VISIBLE_KEY}"},
}
EVERYTHING = {"start": "earliest", "until": "latest", "wait_seconds": 0}


@pytest.fixture(scope="module")
def daemon() -> Iterator[ServedLog]:
    accounts = [
        ACCOUNT,
        {"name": "nothing", "token": "nothing-token", "where": {"*.*": "FALSE"}},
        {"name": "listed", "token": "listed-token", "where": ACCOUNT["where"], "columns": {TABLE: ["A"]}},
    ]
    listen = {"canal": "127.0.0.1:0", "ptubes": "127.0.0.1:0", "token": "a-token"}
    with captured_log() as log, serving(log, listen, accounts, MemoryStore("row conditions")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def browser(daemon: ServedLog) -> Iterator[Browser]:
    with console_of(daemon) as browser:
        browser.post("/login", {"token": TOKEN})
        yield browser


def all_rows(daemon: ServedLog) -> list[dict[str, Any]]:
    return [row for batch in batches_of(daemon, TABLE) for row in batch.to_arrow().to_pylist()]


def secrets_of(daemon: ServedLog) -> set[bytes]:
    """Return the values that only hidden rows have, in every form in which a response may contain them."""
    by_visibility: dict[bool, set[bytes]] = {True: set(), False: set()}
    for row in all_rows(daemon):
        values = [value for name, value in row.items() if not name.startswith("_")]
        by_visibility[row["id"] == VISIBLE_KEY] |= set().union(*map(texts_of, values))
    hidden = by_visibility[False]
    return {text for text in hidden if not any(text in other for other in by_visibility[True])}


def received(daemon: ServedLog, token: str, **body: Any) -> list[dict[str, Any]]:
    address = DaemonAddress.parse(f"penstock://127.0.0.1:{daemon.port()}/{INSTANCE}", token=token)
    client = DaemonClient(address, address.base_urls[0])
    frames = ChangesAnswer(client, {**EVERYTHING, "tables": [TABLE], **body}, WAIT_SECONDS_MAX).frames()
    return [row for frame in frames if isinstance(frame, BatchFrame) for row in frame.to_arrow().to_pylist()]


def numbered(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with the numbers that a log of these rows alone would have in `_metadata.row`."""
    numbers: dict[int, set[int]] = {}
    for row in rows:
        numbers.setdefault(row["_commit_version"], set()).add(row["_metadata"]["row"])
    ranks = {version: sorted(known) for version, known in numbers.items()}
    return [
        {
            **row,
            "_metadata": {
                **row["_metadata"],
                "row": ranks[row["_commit_version"]].index(row["_metadata"]["row"]),
            },
        }
        for row in rows
    ]


def test_account_receives_the_rows_of_its_condition(daemon: ServedLog) -> None:
    whole = received(daemon, "a-token")
    visible = numbered([row for row in whole if row["id"] == VISIBLE_KEY])
    assert 0 < len(visible) < len(whole)
    assert received(daemon, TOKEN) == visible
    assert received(daemon, "nothing-token") == []


def test_column_of_the_condition_is_decoded_and_not_sent(daemon: ServedLog) -> None:
    whole = received(daemon, "a-token")
    expected = [{"a": row["a"]} for row in whole if row["id"] == VISIBLE_KEY]
    assert received(daemon, TOKEN, columns=["a"]) == expected
    with pytest.raises(OptionInvalid, match="has no column 'aa'"):
        received(daemon, TOKEN, columns=["aa"])


def test_column_of_the_condition_may_be_masked(daemon: ServedLog) -> None:
    visible = numbered([row for row in received(daemon, "a-token") if row["id"] == VISIBLE_KEY])
    shown = [{name: value for name, value in row.items() if name == "a" or name[0] == "_"} for row in visible]
    assert received(daemon, "listed-token") == shown
    with pytest.raises(AccessDenied, match="may not use column id for where: it is masked"):
        received(daemon, "listed-token", where="id = 2")


def test_request_filters_are_evaluated_for_visible_rows_only(daemon: ServedLog) -> None:
    whole = received(daemon, "a-token")
    assert received(daemon, TOKEN, where=f"id <> {VISIBLE_KEY}") == []
    visible = numbered([row for row in whole if row["id"] == VISIBLE_KEY])
    inserts = [row for row in visible if row["_change_type"] == "insert"]
    assert received(daemon, TOKEN, changes=["insert"], where="id > 0") == inserts
    shards = [received(daemon, TOKEN, shards={"count": 3, "of": [shard]}) for shard in range(3)]
    assert {row["id"] for rows in shards for row in rows} == {VISIBLE_KEY}
    assert sum(map(len, shards)) == len([row for row in whole if row["id"] == VISIBLE_KEY])


def test_logged_updates_that_enter_and_leave_are_inserts_and_deletes(daemon: ServedLog) -> None:
    whole = all_rows(daemon)
    pairs = [
        (before, after)
        for before, after in itertools.pairwise(whole)
        if before["_change_type"] == "update_preimage"
    ]
    changed = [
        (name, before[name])
        for before, after in pairs
        for name in before
        if type(before[name]) is int and name[0] != "_" and before[name] != after[name]
    ]
    conditions: dict[str, Callable[[dict[str, Any]], bool]] = {
        **{
            f"{name} = {value}": lambda row, name=name, value=value: row[name] == value
            for name, value in changed
        },
        **{f"{name} IS NULL": lambda row, name=name: row[name] is None for name, _ in changed},
    }
    accounts = [{"name": text, "token": text, "where": {TABLE: text}} for text in conditions]
    kinds = Counter[str]()
    with serving(daemon.log, {"token": "a-token"}, accounts) as limited:
        for text, is_visible in each(conditions.items()):
            rows = [{**row} for row in whole]
            for before, after in itertools.pairwise(rows):
                if before["_change_type"] == "update_preimage" and is_visible(before) != is_visible(after):
                    before["_change_type"], after["_change_type"] = "delete", "insert"
                    kinds["leaves" if is_visible(before) else "enters"] += 1
            assert received(limited, text) == numbered([row for row in rows if is_visible(row)]), text
    assert min(kinds["leaves"], kinds["enters"]) >= 2


# --- The answers of all other calls ----------------------------------------------------------

# Calls that show neither rows nor texts of statements: positions, names, sizes, and actions.
SHOW_NO_ROWS = {
    *("/v1/status", "/v1/instances", "/v1/listeners", "/v1/fleet", "/v1/subscribers", "/v1/subscriptions"),
    *("/v1/account", "/v1/openapi.json", "/v1/alerts", "/v1/charts", "/metrics", "/livez", "/readyz"),
    *("/startupz", "/v1/pumps", "/v1/pumps/{instance}/decide"),
    *(
        f"/v1/instances/{{instance}}/{call}"
        for call in (
            *("status", "epochs", "extents", "disk", "head", "earliest", "locate", "gtid_set", "position"),
            *("holds", "holds/{reader}", "resume", "charts", "segments", "verify"),
            *(f"subscriptions/{{subscription}}/{action}" for action in ("reset", "pause", "resume", "move")),
            *(f"subscriptions/{{subscription}}/{action}" for action in ("resize", "set", "delete")),
        )
    ),
}
REFUSED = {
    *("/v1/jobs", "/v1/jobs/{job}", "/v1/settings", "/v1/events", "/v1/connections", "/v1/alerts/test"),
    *(f"/v1/jobs/{{job}}/{action}" for action in ("pause", "resume", "restart", "delete", "move")),
    *(f"/v1/fleet/members/{{member}}/{action}" for action in ("drain", "undrain")),
    *(
        f"/v1/instances/{{instance}}/{call}"
        for call in (
            *("head_bytes", "bytes", "export", "copy/listing", "copy/metadata", "copy/definitions"),
            *("transaction", "history", "as-of", "check"),
        )
    ),
}
# Calls that are in both sets, or that need a daemon with stored instances. Separate tests cover these calls.
OTHERS = {
    *("/v1/instances/{instance}/schema", "/v1/instances/{instance}/definitions"),
    *("/v1/instances/{instance}/changes", "/v1/stored-instances"),
    *("/v1/instances/{instance}", "/v1/instances/{instance}/forget"),
}
QUERY = {
    "transaction": "position=mysql-bin.000001:2739",
    "bytes": "epoch=0&file=mysql-bin.000001&start=127",
    "export": "to=mysql-bin.000001:9999999",
    "head_bytes": "epoch=0&file=mysql-bin.000001",
    "definitions": f"version=1&table={TABLE}",
    "schema": f"position=mysql-bin.000001:5101&table={TABLE}",
}
BODIES: dict[str, Any] = {
    "history": {"table": TABLE, "key": ["1"]},
    "as-of": {"table": TABLE, "at": "mysql-bin.000001:4020"},
}


def ask(daemon: ServedLog, method: str, path: str, token: str = TOKEN) -> Answered:
    """Send a request that an administrator without limits could send."""
    fields = {"instance": INSTANCE, "subscription": "s", "reader": "r", "job": "j", "member": "m"}
    call = path.rpartition("/")[2]
    address = f"{path.format_map(fields)}?{QUERY.get(call, '')}"
    return daemon.ask(method, address, BODIES.get(call, {} if method == "POST" else None), token=token)


def test_every_call_is_refused_or_shows_no_rows(daemon: ServedLog) -> None:
    """A new call must be added to one of the sets, which enforces a decision."""
    paths: dict[str, Any] = ask(daemon, "GET", "/v1/openapi.json").json["paths"]
    assert paths.keys() == SHOW_NO_ROWS | REFUSED | OTHERS
    secrets = secrets_of(daemon)
    assert secrets
    shown = set()
    for path in each(paths):
        for method in paths[path]:
            if path in OTHERS:
                continue
            answer = ask(daemon, method.upper(), path)
            assert [text for text in secrets if text in answer.body] == [], (method, path)
            if path in REFUSED:
                assert (answer.status, answer.json["type"]) == (403, "AccessDenied"), (path, answer.body)
            else:
                assert answer.status != 403, (path, answer.body)
                shown |= {path} if answer.status == 200 else set()
    assert {"/v1/status", "/v1/instances/{instance}/segments"} <= shown


def test_rows_and_raw_bytes_have_the_secrets_for_an_account_without_limits(daemon: ServedLog) -> None:
    """The refused calls would otherwise show hidden rows."""
    secrets = secrets_of(daemon)
    for call in ("history", "as-of", "transaction", "bytes", "export"):
        method = "POST" if call in BODIES else "GET"
        answer = ask(daemon, method, f"/v1/instances/{{instance}}/{call}", "a-token")
        assert answer.status == 200, (call, answer.body[:300])
        assert any(text in answer.body for text in secrets), call


@pytest.mark.parametrize("name", ["debezium", "debezium_schema", "maxwell", "canal_flat"])
def test_messages_are_refused(daemon: ServedLog, name: str) -> None:
    body = {**EVERYTHING, "format": name}
    answer = daemon.ask("POST", f"/v1/instances/{INSTANCE}/changes", body, token=TOKEN)
    assert (answer.status, answer.json["type"]) == (403, "AccessDenied")
    assert "does not see every row" in answer.json["detail"]
    assert "Read typed changes" in answer.json["hint"]


def test_definitions_cannot_be_set(daemon: ServedLog) -> None:
    path = f"/v1/instances/{INSTANCE}/definitions"
    # Another definition could rename the column that the condition uses.
    body = {"table": TABLE, "position": "mysql-bin.000001:127", "create_table": "CREATE TABLE wide (id INT)"}
    settings = [
        daemon.ask("POST", path, body, token=TOKEN),
        daemon.ask("POST", f"/v1/instances/{INSTANCE}/schema?{QUERY['schema']}", {}, token=TOKEN),
    ]
    for answer in settings:
        assert (answer.status, "does not see every value" in answer.json["detail"]) == (403, True)


def test_schema_of_a_table_that_an_admin_may_not_read_cannot_be_set() -> None:
    access = [{"name": "boss", "token": TOKEN, "admin": True, "tables": ["shop.*"]}]
    with captured_log() as log, serving(log, access=access) as daemon:
        for path, body in (
            (f"/v1/instances/{INSTANCE}/schema?{QUERY['schema']}", {}),
            (
                f"/v1/instances/{INSTANCE}/definitions",
                {
                    "table": TABLE,
                    "position": "mysql-bin.000001:127",
                    "create_table": "CREATE TABLE t (id INT)",
                },
            ),
        ):
            answer = daemon.ask("POST", path, body, token=TOKEN)
            assert (answer.status, answer.json["type"]) == (403, "AccessDenied"), path
            assert "may not read" in answer.json["detail"]


def test_clients_of_canal_and_ptubes_are_refused(daemon: ServedLog) -> None:
    client = CanalClient(daemon.port("canal"), INSTANCE).log_in("support", "support")
    with pytest.raises(Refused, match="does not see every row, and Canal's entries may show the others"):
        client.subscribe()
    with PtubesClient(daemon.port("ptubes"), [TABLE]) as ptubes, capture_logs() as logs:
        answer = ptubes.call("/v1/subscribe", ptubes.config, {"Authorization": f"Bearer {TOKEN}"})
    assert answer == b"fail"
    (refusal,) = [line for line in logs if line["event"] == "a subscription is refused"]
    assert "Ptubes' events may show the others" in str(refusal)


def test_account_shows_the_patterns_without_the_conditions(daemon: ServedLog) -> None:
    answer = ask(daemon, "GET", "/v1/account")
    assert answer.json["where"] == ["FUZZED.*"]
    assert b"Id =" not in answer.body


# --- The console ----------------------------------------------------------------------------


def test_console_hides_the_pages_of_rows_and_pipelines(daemon: ServedLog, browser: Browser) -> None:
    overview = browser.get("/")
    assert 'href="/tail' in overview.text
    assert 'href="/history' not in overview.text
    fields = {"daemon": f"http://127.0.0.1:{daemon.port()}", "instance": INSTANCE}
    tabs = browser.get("/log", **fields)
    assert 'href="/tail' in tabs.text
    assert not [page for page in ("/history?", "/as-of?") if f'href="{page}' in tabs.text]
    for path in ("/pipelines", "/tables", "/dead-letters", "/dead-letters/entry", "/compare"):
        page = browser.get(path, store="0", name="x", entry="y")
        assert (page.status, "an admin with limits" in page.problem) == (403, True), path


def test_console_shows_no_hidden_row(daemon: ServedLog, browser: Browser) -> None:
    fields = {"daemon": f"http://127.0.0.1:{daemon.port()}", "instance": INSTANCE}
    # Even without rows, the page contains the names of the languages.
    form = browser.get("/history", **fields).text.encode()
    secrets = {text for text in secrets_of(daemon) if text not in form}
    assert secrets
    pages = {
        "/history": {"table": TABLE, "key": "1"},
        "/as-of": {"table": TABLE, "at": "mysql-bin.000001:4020"},
        "/as-of/export": {"table": TABLE, "at": "mysql-bin.000001:5101", "format": "csv"},
        "/transaction": {"place": "mysql-bin.000001:2739"},
    }
    for path, query in pages.items():
        page = browser.get(path, **fields, **query)
        assert "does not see every row" in page.text, (path, page.status, page.words)
        assert [text for text in secrets if text in page.text.encode()] == [], path


def test_events_are_refused_to_an_admin_who_does_not_see_every_row(browser: Browser) -> None:
    assert "may name any instance and table" in browser.get("/events").text


# --- Errors ---------------------------------------------------------------------------------


def test_condition_on_a_missing_column_refuses_the_table_by_name() -> None:
    account = {"name": "wrong", "token": TOKEN, "where": {TABLE: "nothing = 1"}}
    with captured_log() as log, serving(log, {"token": "a-token"}, [account]) as daemon:
        body = {**EVERYTHING, "tables": [TABLE]}
        answer = daemon.ask("POST", f"/v1/instances/{INSTANCE}/changes", body, token=TOKEN)
        assert f"the rows of {TABLE} that this account sees depend on column nothing" in answer.body.decode()
        assert b'"AccessDenied"' in answer.body
        assert b'"kind":"batch"' not in answer.body
        assert json.dumps("nothing = 1").encode() not in answer.body
        others = daemon.ask(
            "POST", f"/v1/instances/{INSTANCE}/changes", {**EVERYTHING, "tables": ["fuzzed.t"]}, token=TOKEN
        )
        assert b'"kind":"batch"' in others.body
