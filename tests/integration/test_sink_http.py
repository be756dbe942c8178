# SPDX-License-Identifier: Apache-2.0
"""Changes as requests to a real HTTP server."""

import gzip
import hashlib
import hmac
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.changes import Changes
from penstock.errors import (
    AccessDenied,
    AuthenticationFailed,
    ConnectionLost,
    OptionInvalid,
    PenstockError,
    ServerBusy,
)
from penstock.model import TableName
from penstock.sinks.sink import BatchMark, Evolution, Receipt, Sink, Spread, make_sink, settings_of
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update
from tests.support.sinks.http_endpoint import HttpEndpoint, Received

MARK = BatchMark("hooks", "1", 7)


@pytest.fixture
def endpoint() -> Iterator[HttpEndpoint]:
    with HttpEndpoint() as served:
        yield served


def sink_of(endpoint: HttpEndpoint, path: str = "/hook", **settings: Any) -> Sink:
    return make_sink("http", settings_of("http")(**{"url": f"{endpoint.url}{path}"} | settings))


def some(rows: int = 3) -> Changes:
    target = target_of({"id": "int", "status": "varchar(20)"})
    inserted = [insert(1, row, id=row, status="new") for row in range(rows)]
    paid = update(2, {"id": 0, "status": "new"}, {"id": 0, "status": "paid"})
    return changes_of(target, *inserted, paid, delete(3, id=1, status="new"))


def write(sink: Sink, *changes: Changes, mark: BatchMark = MARK) -> Receipt:
    writer = sink.open(mark, 0)
    for change in changes:
        writer.write(change)
    return writer.finish()


def messages_of(request: Received) -> list[Any]:
    """Return the messages of a request with one message per line."""
    assert request.headers["Content-Type"] == "application/x-ndjson"
    return [json.loads(line) for line in request.body.splitlines()]


def test_messages_arrive_in_order_and_within_bounds(endpoint: HttpEndpoint) -> None:
    receipt = write(sink_of(endpoint, rows=4), some(10))
    assert [len(messages_of(request)) for request in endpoint.received] == [4, 4, 4]
    messages = [message for request in endpoint.received for message in messages_of(request)]
    assert [message["change"] for message in messages] == [*["insert"] * 10, "update", "delete"]
    assert [message["after"]["id"] for message in messages[:10]] == list(range(10))
    assert (receipt.rows, receipt.bytes) == (13, sum(len(request.body) for request in endpoint.received))
    assert {(request.method, request.path) for request in endpoint.received} == {("POST", "/hook")}


def test_requests_are_bounded_in_bytes(endpoint: HttpEndpoint) -> None:
    write(sink_of(endpoint, bytes=700), some(20))
    assert len(endpoint.received) > 3
    assert all(len(request.body) <= 700 for request in endpoint.received)
    endpoint.received.clear()
    # A larger message is sent alone.
    write(sink_of(endpoint, bytes=1), some(2))
    assert [len(messages_of(request)) for request in endpoint.received] == [1] * 4


def test_bodies_have_the_configured_format(endpoint: HttpEndpoint) -> None:
    write(sink_of(endpoint, body="array", format="maxwell", method="PUT"), some())
    write(sink_of(endpoint, body="each", format="debezium"), some())
    array, *each = endpoint.received
    assert array.method == "PUT"
    assert [load["type"] for load in json.loads(array.body)] == ["insert"] * 3 + ["update", "delete"]
    assert [json.loads(request.body)["op"] for request in each] == ["c", "c", "c", "u", "d"]
    assert {request.headers["Content-Type"] for request in endpoint.received} == {"application/json"}
    endpoint.received.clear()
    write(sink_of(endpoint, compression="gzip"), some())
    (packed,) = endpoint.received
    assert packed.headers["Content-Encoding"] == "gzip"
    assert len(gzip.decompress(packed.body).splitlines()) == 5


def test_urls_are_rendered_from_names_and_columns(endpoint: HttpEndpoint) -> None:
    write(sink_of(endpoint, "/{database}/{table}/{status}"), some())
    assert [(request.path, len(messages_of(request))) for request in endpoint.received] == [
        ("/shop/orders/new", 3),
        ("/shop/orders/paid", 1),
        ("/shop/orders/new", 1),
    ]


def test_request_is_retried_under_the_same_idempotency_key(endpoint: HttpEndpoint) -> None:
    endpoint.answer(503, 0, 429)
    sink = sink_of(endpoint, rows=3)
    write(sink, some())
    keys = [request.headers["Idempotency-Key"] for request in endpoint.received]
    assert len(endpoint.received) == 5
    assert len(set(keys[:4])) == 1
    assert keys[4] != keys[0]
    # The retried batch has the same idempotency keys, another batch has different keys.
    endpoint.received.clear()
    write(sink, some())
    assert [request.headers["Idempotency-Key"] for request in endpoint.received] == keys[3:]
    write(sink, some(), mark=BatchMark("hooks", "1", 8))
    assert not set(keys) & {request.headers["Idempotency-Key"] for request in endpoint.received[2:]}


def test_retried_batch_without_a_table_keeps_the_idempotency_keys_of_the_others(
    endpoint: HttpEndpoint,
) -> None:
    kept = some()
    left_out = replace(kept, target=replace(kept.target, name=TableName("shop", "gone")))
    endpoint.answer(200, 404)
    writer = sink_of(endpoint, "/{table}").open(MARK, 0)
    writer.write(kept)
    with pytest.raises(OptionInvalid):
        writer.write(left_out)
    assert writer.at == left_out.target.name
    endpoint.received.clear()
    write(sink_of(endpoint, "/{table}"), left_out, kept)
    keys = {request.path: request.headers["Idempotency-Key"] for request in endpoint.received}
    endpoint.received.clear()
    write(sink_of(endpoint, "/{table}"), kept)
    assert [request.headers["Idempotency-Key"] for request in endpoint.received] == [keys["/orders"]]


def test_retry_after_header_is_honored(endpoint: HttpEndpoint) -> None:
    endpoint.answer(503, Retry_After="3600")
    with pytest.raises(ServerBusy, match="503: no, thank you"):
        write(sink_of(endpoint, retry=2), some())
    assert len(endpoint.received) == 1


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, OptionInvalid),
        (401, AuthenticationFailed),
        (403, AccessDenied),
        (413, OptionInvalid),
        (302, OptionInvalid),
        (500, ServerBusy),
        (0, ConnectionLost),
    ],
)
def test_refusal_is_reported_by_its_kind(
    endpoint: HttpEndpoint, status: int, error: type[PenstockError]
) -> None:
    endpoint.answer(status)
    with pytest.raises(error) as raised:
        write(sink_of(endpoint, retry=0), some())
    assert type(raised.value) is error
    assert raised.value.hint
    assert len(endpoint.received) == 1


def test_requests_are_signed_and_secrets_are_hidden(endpoint: HttpEndpoint) -> None:
    sink = sink_of(endpoint, token="t0psecret", signing_key="k3y")
    write(sink, some())
    (request,) = endpoint.received
    assert request.headers["Authorization"] == "Bearer t0psecret"
    time, _, signature = request.headers["Penstock-Signature"].partition(",sha256=")
    signed = time.removeprefix("t=").encode() + b"." + request.body
    assert signature == hmac.new(b"k3y", signed, hashlib.sha256).hexdigest()
    shown = repr(sink.__dict__)
    assert "t0psecret" not in shown
    assert "k3y" not in shown
    url = endpoint.url.replace("http://", "http://me:hidden@")
    account = make_sink("http", settings_of("http")(**{"url": url}))
    assert "hidden" not in repr(account.__dict__)
    write(account, some())
    assert endpoint.received[1].headers["Authorization"] == "Basic bWU6aGlkZGVu"
    with pytest.raises(ValidationError, match="show in logs"):
        sink_of(endpoint, headers={"Authorization": "x"})


def test_endpoint_is_checked_before_the_start(endpoint: HttpEndpoint) -> None:
    assert sink_of(endpoint, order="commit").spread is Spread.WHOLE
    assert list(sink_of(endpoint).check()) == []
    endpoint.answer(401)
    (finding,) = sink_of(endpoint).check()
    assert finding.fatal
    with pytest.raises(ConnectionLost):
        make_sink("http", settings_of("http")(**{"url": "http://127.0.0.1:1/{table}"})).check()
    with pytest.raises(OptionInvalid, match="nothing"):
        sink_of(endpoint, "/{nothing}").plan(some().target, Evolution.EVOLVE)
    assert endpoint.received == []
