# SPDX-License-Identifier: Apache-2.0
"""Changes over HTTP, requested by a client that shares no code with the daemon."""

import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from penstock.limits import WAIT_SECONDS_DEFAULT
from penstock.limits import WAIT_SECONDS_MAX as NEWS_SECONDS_MAX
from penstock.serve.http import fleet, fleet_control, instances, pumps, resume, server_check
from penstock.serve.http import settings as settings_routes
from penstock.serve.listener import make_app
from penstock.serve.ports import Ports
from penstock.serve.served import Arrivals, Served
from penstock.serve.telemetry import Telemetry
from tests.support.daemon.process import DaemonProcess, Refused
from tests.support.suite.fixture_types import LendServer
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")

Row = tuple[object, ...]

TABLE = """CREATE TABLE shop.orders (id INT PRIMARY KEY AUTO_INCREMENT, note VARCHAR(120) COLLATE utf8mb4_bin,
    price DECIMAL(10, 2), customer BIGINT, born DATETIME(3), span TIME, rate DOUBLE)"""
ALL = {"start": "earliest", "tables": ["shop.orders"], "wait_seconds": 0}


@dataclass
class Shop:
    """A server with one table that has undergone all kinds of changes, and a daemon that has captured
    them.
    """

    server: Server
    daemon: DaemonProcess


@dataclass
class Answer:
    """The frames of one response."""

    frames: list[tuple[dict[str, Any], bytes]] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [head for head, _ in self.frames if head["kind"] == kind]

    @property
    def why(self) -> str:
        (end,) = self.of("end")
        return str(end["why"])

    @property
    def position(self) -> str:
        return str(self.of("position")[-1]["position"])

    @property
    def batches(self) -> list[tuple[str, pyarrow.RecordBatch]]:
        return [
            (head["table"], pyarrow.ipc.open_stream(content).read_next_batch())
            for head, content in self.frames
            if head["kind"] == "batch"
        ]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for _, batch in self.batches for row in batch.to_pylist()]

    @property
    def lines(self) -> list[dict[str, Any]]:
        content = b"".join(content for head, content in self.frames if head["kind"] == "batch")
        return [json.loads(line) for line in content.splitlines()]


class Call:
    """One request whose response is read frame by frame."""

    def __init__(self, daemon: DaemonProcess, body: dict[str, Any], token: str | None = None) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=WAIT_SECONDS_MAX)
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._connection.request("POST", "/v1/instances/shop/changes", json.dumps(body), headers)
        self._answer = self._connection.getresponse()
        if self._answer.status != 200:
            raise Refused(self._answer.status, json.loads(self._answer.read()))
        assert self._answer.headers["Content-Type"] == "application/vnd.penstock.changes"

    def __iter__(self) -> Iterator[tuple[dict[str, Any], bytes]]:
        while length := self._answer.read(4):
            head = json.loads(self._answer.read(struct.unpack(">I", length)[0]))
            # An empty read would wait for the next bytes.
            yield head, self._answer.read(head["bytes"]) if head["bytes"] else b""

    def close(self) -> None:
        self._connection.close()


def changes(daemon: DaemonProcess, token: str | None = None, **asked: Any) -> Answer:
    return Answer(list(Call(daemon, {**ALL, **asked}, token)))


def caught_up(server: Server, daemon: DaemonProcess) -> None:
    statement = "SHOW MASTER STATUS" if server.family == "mariadb" else "SHOW BINARY LOG STATUS"
    file, offset = server.sql(statement)[0][:2]
    daemon.wait_for_head(file, offset)


@pytest.fixture(scope="module", params=["mysql", "mariadb"])
def shop(
    request: pytest.FixtureRequest, lend_server: LendServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("shop")
    with lend_server(request.param, binlog_row_metadata="MINIMAL") as server:
        with server.connect() as connection, connection.cursor() as cursor:
            connection.autocommit(True)
            cursor.execute("CREATE DATABASE shop")
            cursor.execute(TABLE)
            cursor.execute("CREATE TABLE shop.other (id INT)")
            for number in range(1, 41):
                note = "NULL" if number % 7 == 0 else f"'Note {number} 100%'"
                born = f"'2026-01-{number % 28 + 1:02d} 10:00:00.500'"
                cursor.execute(
                    "INSERT INTO shop.orders (note, price, customer, born, span, rate) VALUES ("
                    f"{note}, {number}.25, {number % 5}, {born}, '-{number % 24:02d}:30:00', {number} / 3)"
                )
            cursor.execute("INSERT INTO shop.other VALUES (1), (2)")
            cursor.execute(
                "UPDATE shop.orders SET price = price + 100, customer = customer + 1 WHERE id <= 10"
            )
            cursor.execute("DELETE FROM shop.orders WHERE id > 38")
        settings = {"instances": {"shop": {"source": server.url(), "start": "earliest"}}}
        with DaemonProcess(folder, settings) as daemon:
            caught_up(server, daemon)
            yield Shop(server, daemon)


def key_of(row: dict[str, Any]) -> Row:
    return row["_commit_version"], row["_change_type"], row["id"], row["price"], row["note"]


def test_every_change_arrives_in_order_and_the_next_request_continues_after_it(shop: Shop) -> None:
    whole = changes(shop.daemon)
    kinds = [row["_change_type"] for row in whole.rows]
    assert kinds == ["insert"] * 40 + ["update_preimage", "update_postimage"] * 10 + ["delete"] * 2
    versions = [row["_commit_version"] for row in whole.rows]
    assert versions == sorted(versions)
    assert whole.why == "wait"
    last = whole.of("position")[-1]
    status = shop.daemon.status()
    assert (last["position"], last["behind_bytes"]) == (status["position"], 0)
    assert last["server_key"] == shop.daemon.get("/v1/instances/shop/epochs")["epochs"][0]["server_key"]
    assert changes(shop.daemon, start={"position": last["position"]}).of("batch") == []

    # Small credits in sequence give the same rows.
    rows, start = [], {"time": "2026-01-01"}
    for _ in range(100):
        part = changes(shop.daemon, start=start, credit_bytes=1, batch_rows=7)
        rows += part.rows
        assert all(head["rows"] <= 7 for head in part.of("batch"))
        if part.why == "wait":
            break
        start = {"position": part.position, "server_key": part.of("position")[-1]["server_key"]}
    assert [key_of(row) for row in rows] == [key_of(row) for row in whole.rows]


@pytest.mark.parametrize("batch_rows", [1, 2, 7])
def test_both_images_of_an_update_are_in_one_batch(shop: Shop, batch_rows: int) -> None:
    answer = changes(shop.daemon, batch_rows=batch_rows)
    assert len(answer.rows) == 62
    for _, batch in answer.batches:
        assert batch.num_rows <= max(batch_rows, 2)
        kinds = batch["_change_type"].to_pylist()
        assert kinds[0] != "update_postimage"
        assert kinds[-1] != "update_preimage"


def test_where_condition_selects_the_same_rows_as_the_server(shop: Shop) -> None:
    server, daemon = shop.server, shop.daemon
    for where in (
        "note LIKE '%1 100|%' ESCAPE '|'",
        "note IS NULL OR id < 3",
        "NOT (note = 'Note 3 100%' OR customer > 2)",
        "price BETWEEN 100 AND 105.25",
        "price = 11.25 OR price = '12.250'",
        "customer IN (1, 3, NULL)",
        "customer NOT IN (1, 3)",
        "born >= '2026-01-20' AND born < '2026-01-25 10:00:00.500'",
        "span < '-20:00:00'",
        "rate > 10 AND rate <= 11.5",
        "id = customer",
        "note <=> NULL",
        "LOWER(note) = 'note 5 100%' XOR id < 4",
        "UPPER(note) LIKE 'NOTE _ 100\\%'",
    ):
        wanted = [row[0] for row in server.sql(f"SELECT id FROM shop.orders WHERE {where} ORDER BY id")]
        newest: dict[int, bool] = {}
        passed = {key_of(row) for row in changes(daemon, where=where).rows}
        for row in changes(daemon).rows:
            if row["_change_type"] == "delete":
                newest.pop(row["id"])
            elif row["_change_type"] != "update_preimage":
                newest[row["id"]] = key_of(row) in passed
        # An update also passes if only its before image meets the condition, so only rows without updates are
        # compared.
        still = {row_id for row_id, passes in newest.items() if passes and row_id > 10}
        assert still == {row_id for row_id in wanted if row_id > 10}, where


def test_update_passes_whole_if_one_of_its_images_does(shop: Shop) -> None:
    rows = changes(shop.daemon, where="price > 100 AND price < 103").rows
    assert [(row["_change_type"], str(row["price"])) for row in rows] == [
        ("update_preimage", "1.25"),
        ("update_postimage", "101.25"),
        ("update_preimage", "2.25"),
        ("update_postimage", "102.25"),
    ]
    after = changes(
        shop.daemon, where="price > 100 AND price < 103", changes=["update_postimage"], columns=["id"]
    )
    assert after.rows == [{"id": 1}, {"id": 2}]


def test_shards_partition_the_rows_by_the_configured_columns(shop: Shop) -> None:
    # Compare the rows without their change types, because an update that moves a row to another shard is
    # delivered as a delete and an insert.
    whole = sorted(key_of(row | {"_change_type": ""}) for row in changes(shop.daemon).rows)
    for columns in ({}, {"shop.*": ["customer"]}):
        found: list[Row] = []
        home: dict[int, int] = {}
        for shard in range(4):
            shards = {"count": 4, "of": [shard], "columns": columns}
            part = changes(shop.daemon, shards=shards)
            for _, batch in part.batches:
                assert batch.schema.names[-1] == "_shard_slot"
            assert part.position == shop.daemon.status()["position"]
            for row in part.rows:
                assert row["_shard_slot"] % 4 == shard
                key = row["customer"] if columns else row["id"]
                if row["_change_type"] != "update_preimage":
                    assert home.setdefault(key, shard) == shard
                found.append(key_of(row | {"_change_type": ""}))
        assert sorted(found) == whole
        assert len(set(home.values())) > 1


def test_update_that_moves_a_row_is_a_delete_and_an_insert_for_its_two_shards(shop: Shop) -> None:
    shop.server.sql(
        "CREATE TABLE shop.moves (id INT PRIMARY KEY, customer INT, n INT);"
        " INSERT INTO shop.moves VALUES (1, 1, 0), (2, 2, 0);"
        # Customers 1 and 2 are in different shards of 2; 1 and 3 are in the same shard.
        " UPDATE shop.moves SET customer = 2 WHERE id = 1; UPDATE shop.moves SET customer = 3 WHERE id = 1;"
        " UPDATE shop.moves SET customer = 1 WHERE id = 1; UPDATE shop.moves SET n = 1"
    )
    caught_up(shop.server, shop.daemon)
    asked: dict[str, Any] = {"tables": ["shop.moves"], "subscriber": "moves"}
    columns = {"shop.moves": ["customer"]}

    def moved_rows(of: list[int], **more: Any) -> list[tuple[str, int, int]]:
        part = changes(shop.daemon, **asked, shards={"count": 2, "of": of, "columns": columns}, **more)
        return [(row["_change_type"], row["id"], row["customer"]) for row in part.rows]

    one, other = sorted((moved_rows([0]), moved_rows([1])), key=lambda rows: rows[0][1])
    assert one == [
        ("insert", 1, 1),
        ("delete", 1, 1),
        ("insert", 1, 3),
        ("update_preimage", 1, 3),
        ("update_postimage", 1, 1),
        ("update_preimage", 1, 1),
        ("update_postimage", 1, 1),
    ]
    assert other == [
        ("insert", 2, 2),
        ("insert", 1, 2),
        ("delete", 1, 2),
        ("update_preimage", 2, 2),
        ("update_postimage", 2, 2),
    ]
    assert sorted(moved_rows([0, 1])) == sorted(one + other)
    # A condition is evaluated on each half of an update separately; for `changes` both halves are still an
    # update.
    entered = [row for shard in (0, 1) for row in moved_rows([shard], where="customer = 2 AND id = 1")]
    assert sorted(entered) == [("delete", 1, 2), ("insert", 1, 2)]
    inserts = [row for shard in (0, 1) for row in moved_rows([shard], changes=["insert"])]
    assert sorted(inserts) == [("insert", 1, 1), ("insert", 2, 2)]
    moved = {
        shown["shards"]: shown["moved"]
        for shown in shop.daemon.get("/v1/subscribers")["subscribers"]
        if shown["subscriber"] == "moves"
    }
    # The update was requested once, so both its images arrived; the insert of customer 2 met the condition
    # too.
    assert sorted(moved.values()) == [1, 2, 2]


def test_update_with_a_partial_image_stays_in_the_shard_of_its_key(shop: Shop) -> None:
    statements = ["UPDATE shop.parts SET n = n + 1", "UPDATE shop.parts SET id = id + 100 WHERE id < 4"]
    shop.server.sql(
        "CREATE TABLE shop.parts (id INT PRIMARY KEY, n INT); SET SESSION binlog_row_image = MINIMAL;"
        " INSERT INTO shop.parts VALUES (1, 0), (2, 0), (3, 0), (4, 0), (5, 0);" + ";".join(statements)
    )
    caught_up(shop.server, shop.daemon)
    home: dict[int, int] = {}
    for shard in range(3):
        part = changes(shop.daemon, tables=["shop.parts"], shards={"count": 3, "of": [shard]}, columns=["id"])
        for row in part.rows:
            if row["id"] is not None:
                assert home.setdefault(row["id"], shard) == shard
    assert set(home) == {1, 2, 3, 4, 5, 101, 102, 103}
    counts = [
        len(changes(shop.daemon, tables=["shop.parts"], shards={"count": 3, "of": [shard]}).rows)
        for shard in range(3)
    ]
    # Five inserts, five updates with two images each, three moves.
    assert sum(counts) == 5 + 10 + 6
    assert min(counts) > 3
    by_other = {"count": 3, "of": [0], "columns": {"shop.parts": ["n"]}}
    (problem,) = changes(shop.daemon, tables=["shop.parts"], shards=by_other).of("problem")
    assert "binlog_row_image=FULL" in problem["hint"]


@pytest.mark.parametrize("format", ["debezium", "maxwell"])
def test_json_lines_pass_the_same_filter_as_rows(shop: Shop, format: str) -> None:
    daemon = shop.daemon
    whole = [line for line in changes(daemon, format=format).lines if is_change(line)]
    assert len(whole) == 40 + 10 + 2
    where = [line for line in changes(daemon, format=format, where="price > 100").lines if is_change(line)]
    assert where == [line for line in whole if (row_of(line).get("price") or "") in prices_over_100(whole)]
    assert len(where) == 10
    deleted = changes(daemon, format=format, changes=["delete"]).lines
    assert sum(map(is_change, deleted)) == 2
    parts = [
        line
        for shard in range(3)
        for line in changes(daemon, format=format, shards={"count": 3, "of": [shard]}).lines
        if is_change(line)
    ]
    assert sorted(row_of(line)["id"] for line in parts) == sorted(row_of(line)["id"] for line in whole)
    packed = changes(daemon, format=format, compression="zstd")
    content = b"".join(
        pyarrow.decompress(payload, head["plain_bytes"], "zstd", asbytes=True)
        for head, payload in packed.frames
        if head["kind"] == "batch"
    )
    assert [json.loads(line) for line in content.splitlines() if is_change(json.loads(line))] == whole


def is_change(line: dict[str, Any]) -> bool:
    return line.get("op") in ("c", "u", "d") or line.get("type") in ("insert", "update", "delete")


def row_of(line: dict[str, Any]) -> dict[str, Any]:
    found = line.get("data") or line.get("after") or line.get("before")
    assert isinstance(found, dict)
    return found


def prices_over_100(lines: list[dict[str, Any]]) -> set[Any]:
    updated = [line for line in lines if line.get("op") == "u" or line.get("type") == "update"]
    return {row_of(line)["price"] for line in updated}


def test_arrow_is_compressed_if_requested(shop: Shop) -> None:
    plain = changes(shop.daemon)
    for codec in ("lz4", "zstd"):
        packed = changes(shop.daemon, compression=codec)
        assert packed.rows == plain.rows


def test_errors_are_reported_as_a_problem_before_the_response_starts(shop: Shop) -> None:
    def refused(**asked: Any) -> tuple[int, str, str]:
        with pytest.raises(Refused) as problem:
            changes(shop.daemon, **asked)
        assert problem.value.problem["status"] == problem.value.status
        return problem.value.status, problem.value.problem["type"], problem.value.problem["detail"]

    status, kind, detail = refused(star="earliest")
    assert (status, kind) == (400, "OptionInvalid")
    assert "did you mean start" in detail
    assert "did you mean position" in refused(start={"positon": "a.000001:4"})[2]
    assert "exactly one" in refused(start={})[2]
    for rows in (0, 1 << 63):
        assert "batch_rows" in refused(batch_rows=rows)[2]
    for time_us in (1 << 63, -(10**30)):
        assert refused(start={"time": time_us})[:2] == (400, "OptionInvalid")
        assert refused(until={"time": time_us})[:2] == (400, "OptionInvalid")
    assert refused(where="id = ")[:2] == (400, "OptionInvalid")
    assert refused(tables=["shop"])[:2] == (400, "OptionInvalid")
    tried_long = ("/a?a?a?a?aaaa/", "/(a|a)(a|a)(a|a)(a|a)b/", "/(a+)+b/", r"/shop\..*x.*y.*z.*/")
    for slow in ("shop.*a*b*c*d", *tried_long):
        assert "very long" in refused(tables=[slow])[2]
        assert "very long" in refused(shards={"count": 1, "of": [0], "columns": {slow: ["id"]}})[2]
    assert changes(shop.daemon, tables=[r"/shop\.(orders|other[0-9]+)/", "s*p.or*e*s"]).of("batch")
    assert refused(shards={"count": 2, "of": [2]})[:2] == (400, "OptionInvalid")
    assert refused(format="debezium", columns=["id"])[:2] == (400, "OptionInvalid")
    file = shop.daemon.status()["position"].partition(":")[0]
    assert refused(start={"position": f"{file}:1"})[:2] == (410, "PositionPurged")
    assert refused(start={"position": f"{file}:99999999"})[:2] == (503, "ServerBusy")
    changed = refused(start={"position": f"{file}:400", "server_key": "mysql:nobody"})
    assert changed[:2] == (409, "ServerChanged")
    with pytest.raises(Refused) as missing:
        shop.daemon.fetch("/v1/instances/nothing/changes", method="POST")
    assert missing.value.status == 404


def test_missing_column_is_reported_at_its_table(shop: Shop) -> None:
    answer = changes(shop.daemon, tables=["shop.*"], where="price > 1")
    (problem,) = answer.of("problem")
    assert problem["type"] == "OptionInvalid"
    assert "no column 'price'" in problem["detail"]
    assert answer.of("end") == []


@pytest.mark.timing
def test_waiting_call_is_answered_when_a_row_arrives(shop: Shop) -> None:
    asked = {
        "start": "latest",
        "tables": ["shop.orders"],
        "wait_seconds": NEWS_SECONDS_MAX,
        "credit_bytes": 1,
    }
    for _ in range(5):
        call = Call(shop.daemon, asked)
        shop.server.sql("INSERT INTO shop.orders (note) VALUES ('news')")
        answer = Answer(list(call))
        assert [row["note"] for row in answer.rows] == ["news"]
        # A call that waits until its timeout ends with the reason "wait" and returns no row.
        assert answer.why == "credit"


def test_waiting_call_without_rows_times_out(shop: Shop) -> None:
    started = time.monotonic()
    assert changes(shop.daemon, start="latest", wait_seconds=0.3).why == "wait"
    assert 0.3 <= time.monotonic() - started < WAIT_SECONDS_DEFAULT


@pytest.mark.timing
def test_subscribers_are_listed_while_they_follow(shop: Shop) -> None:
    def shown() -> dict[str, Any] | None:
        found = shop.daemon.get("/v1/subscribers")["subscribers"]
        return next((one for one in found if one["subscriber"] == "cache/host-1"), None)

    assert shown() is None
    call = Call(shop.daemon, {**ALL, "subscriber": "cache/host-1", "wait_seconds": NEWS_SECONDS_MAX})
    head = next(iter(call))[0]
    while head.get("position") != shop.daemon.status()["position"]:
        head = next(iter(call))[0]
    here = shown()
    assert here is not None
    assert (here["instance"], here["protocol"], here["requests"]) == ("shop", "changes", 1)
    assert here["position"] == head["position"]
    assert here["rows"] > 60
    assert here["bytes"] > 1000
    assert shop.daemon.status()["subscribers"] >= 1
    call.close()
    # The client is silent; its disconnection is detected without sending to it.
    wait_until(lambda: (now := shown()) is None or not now["requests"])


@pytest.mark.timing
def test_client_that_reads_nothing_blocks_no_other_and_fills_no_memory(shop: Shop) -> None:
    server, daemon = shop.server, shop.daemon
    server.sql("CREATE TABLE shop.large (id INT PRIMARY KEY, filler TEXT)")
    rows = ", ".join(f"({{0}} + {number}, REPEAT('x', 5000))" for number in range(100))
    with server.connect() as connection, connection.cursor() as cursor:
        connection.autocommit(True)
        for first in range(0, 6000, 100):
            cursor.execute(f"INSERT INTO shop.large VALUES {rows.format(first)}")
    caught_up(server, daemon)
    asked = {**ALL, "tables": ["shop.large"], "credit_bytes": 1 << 40, "wait_seconds": 20}
    body = json.dumps({**asked, "subscriber": "stuck"}).encode()
    head = (
        f"POST /v1/instances/shop/changes HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    changes(daemon, tables=["shop.large"], credit_bytes=1 << 40)
    before = daemon.resident_bytes()
    stuck = []
    for _ in range(8):
        connection = socket.create_connection(("127.0.0.1", daemon.port))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(head.encode() + body)
        stuck.append(connection)
    wait_until(lambda: requests_of(daemon, "stuck") == 8)
    whole = changes(daemon, tables=["shop.large"], credit_bytes=1 << 40)
    assert sum(frame["rows"] for frame in whole.of("batch")) == 6000
    assert daemon.resident_bytes() - before < 200 << 20
    for connection in stuck:
        connection.close()
    server.sql("DROP TABLE shop.large")


def test_fifty_readers_at_the_head_receive_the_same_rows(shop: Shop) -> None:
    asked = {
        "subscriber": "fifty",
        "start": "latest",
        "tables": ["shop.orders"],
        "wait_seconds": NEWS_SECONDS_MAX,
    }
    found: list[list[str]] = []

    def follow() -> None:
        notes: list[str] = []
        for head, content in Call(shop.daemon, asked):
            if head["kind"] == "batch":
                batch = pyarrow.ipc.open_stream(content).read_next_batch()
                notes += batch["note"].to_pylist()
                if "last" in notes:
                    found.append(notes)
                    return

    threads = [threading.Thread(target=follow) for _ in range(50)]
    for thread in threads:
        thread.start()
    wait_until(lambda: requests_of(shop.daemon, "fifty") == 50)
    for number in range(20):
        shop.server.sql(f"INSERT INTO shop.orders (note) VALUES ('number {number}')")
    shop.server.sql("INSERT INTO shop.orders (note) VALUES ('last')")
    for thread in threads:
        thread.join(WAIT_SECONDS_MAX)
    assert found == [[*(f"number {number}" for number in range(20)), "last"]] * 50


def requests_of(daemon: DaemonProcess, subscriber: str) -> int:
    listed = daemon.get("/v1/subscribers")["subscribers"]
    return sum(client["requests"] for client in listed if client["subscriber"] == subscriber)


def test_openapi_description_lists_exactly_the_routes(shop: Shop) -> None:
    paths = (described := shop.daemon.get("/v1/openapi.json"))["paths"]
    calls = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    served = Served({}, Arrivals())
    more = Telemetry(served, Ports({})).routes() + fleet.routes(None, served.threads.reporting)
    more += settings_routes.routes(served, dict) + resume.routes(served, None)
    more += instances.routes(served, lambda name, document: 0) + fleet_control.routes(served, None)
    more += server_check.routes(served, lambda name: [], served.threads.searching)
    more += pumps.routes(served, {})
    routes: Any = make_app(served, {}, more).routes
    assert calls == {(method, each.path_format) for each in routes for method in each.methods - {"HEAD"}}
    properties = described["components"]["schemas"]["ChangesRequest"]["properties"]
    assert properties.keys() >= {"tables", "where", "shards", "start", "until", "credit_bytes"}


def test_error_during_a_response_follows_all_whole_transactions(mysql_server: Server, tmp_path: Path) -> None:
    mysql_server.sql("FLUSH BINARY LOGS")
    file, offset = mysql_server.sql("SHOW BINARY LOG STATUS")[0][:2]
    mysql_server.sql("CREATE DATABASE stops; CREATE TABLE stops.t (id INT PRIMARY KEY)")
    settings = {"instances": {"shop": {"source": mysql_server.url(), "start": f"{file}:{offset}"}}}
    with DaemonProcess(tmp_path, settings) as daemon:
        with mysql_server.connect() as connection, connection.cursor() as cursor:
            cursor.execute("INSERT INTO stops.t VALUES (1)")
            connection.commit()
            cursor.execute("SET SESSION binlog_format = STATEMENT")
            cursor.execute("INSERT INTO stops.t VALUES (2)")
            connection.commit()
        caught_up(mysql_server, daemon)
        answer = changes(daemon, tables=["stops.*"])
        assert [row["id"] for row in answer.rows] == [1]
        (problem,) = answer.of("problem")
        assert problem["type"] == "StatementLogged"
        # A repeated request from the last position gets the same error before a response starts.
        with pytest.raises(Refused) as refused:
            changes(daemon, tables=["stops.*"], start={"position": answer.position})
        assert refused.value.problem["type"] == "StatementLogged"
    mysql_server.sql("DROP DATABASE stops")


def test_account_follows_only_permitted_tables(shop: Shop, tmp_path: Path) -> None:
    account = {
        "name": "caches",
        "token": "caches-token",
        "instances": ["shop"],
        "subscriptions": ["cache"],
        "tables": ["shop.orders"],
    }
    settings = {
        "instances": {"shop": {"source": shop.server.url(), "start": "earliest"}},
        "access": [account],
    }
    with DaemonProcess(tmp_path, settings) as daemon:
        daemon.token = "caches-token"
        caught_up(shop.server, daemon)

        def refused(token: str | None, **asked: Any) -> tuple[int, str]:
            with pytest.raises(Refused) as problem:
                changes(daemon, token, **asked)
            return problem.value.status, problem.value.problem["type"]

        assert refused(None) == (401, "AuthenticationFailed")
        assert refused("another") == (401, "AuthenticationFailed")
        assert refused("caches-token", subscriber="search/1") == (403, "AccessDenied")
        assert refused("caches-token", tables=["shop.other"]) == (403, "AccessDenied")
        # Other tables that match a pattern are excluded.
        answer = changes(daemon, "caches-token", subscriber="cache/1", tables=["shop.*"])
        assert {table for table, _ in answer.batches} == {"shop.orders"}
