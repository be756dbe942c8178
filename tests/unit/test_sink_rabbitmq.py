# SPDX-License-Identifier: Apache-2.0
"""The RabbitMQ sink without a broker: names, settings, and the errors in responses."""

import pickle
from typing import Any

import pika
import pika.exceptions
import pytest
from pydantic import ValidationError

from penstock.errors import (
    AuthenticationFailed,
    ConnectionLost,
    OptionInvalid,
    PenstockError,
    PrivilegeMissing,
    SchemaChanged,
    ServerBusy,
)
from penstock.sinks.rabbitmq.connection import error_of, parameters
from penstock.sinks.sink import Spread, make_sink, settings_of
from tests.support.pipeline.changes_made import target_of

ORDERS = target_of({"id": "int", "name": "varchar(20)"})


def sink_of(**options: Any) -> Any:
    return make_sink("rabbitmq", settings_of("rabbitmq").model_validate(options))


def test_table_has_a_routing_key_for_each_of_its_queues() -> None:
    assert sink_of().routing_keys(ORDERS) == ["shop.orders"]
    assert sink_of(queues=3, routing_key="cdc.{table}").routing_keys(ORDERS) == [
        "cdc.orders.0",
        "cdc.orders.1",
        "cdc.orders.2",
    ]
    # A binding with these letters would receive the messages of other tables.
    odd = target_of({"id": "int"}, name="shop.#")
    assert sink_of().routing_keys(odd) == ["shop._"]


@pytest.mark.parametrize(
    "options",
    [
        {"routing_key": "{name}"},
        {"routing_key": "x" * 255},
        {"routing_key": "amq.x"},
        {"partition_by": "nmae"},
    ],
)
def test_impossible_routing_key_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionInvalid):
        sink_of(**options).routing_keys(ORDERS)


@pytest.mark.parametrize(
    "options",
    [{"queues": 2, "order": "table"}, {"queues": 0}, {"dead_letter": "large"}, {"exchange": ""}],
)
def test_settings_that_contradict_each_other_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        sink_of(**options)


def test_writers_receive_what_must_stay_in_order() -> None:
    spreads = [sink_of(order=order).spread for order in ("key", "table", "commit")]
    assert spreads == [Spread.KEYS, Spread.TABLES, Spread.WHOLE]
    assert sink_of(partition_by="name", queues=2).spread is Spread.TABLES
    assert sink_of(partition_by="name", order="commit").spread is Spread.WHOLE


def test_url_names_hosts_virtual_host_and_account() -> None:
    sink = sink_of(url="amqps://loader:open-word@one:5673,[::1]/my%2Fshop")
    assert "open-word" not in repr(sink.settings)
    sink = pickle.loads(pickle.dumps(sink))
    first, second = parameters(sink.settings, sink.password)
    assert (first.host, first.port, first.virtual_host) == ("one", 5673, "my/shop")
    assert (second.host, second.port, second.ssl_options.server_hostname) == ("::1", 5671, "::1")
    assert first.credentials.username == "loader"
    [default] = parameters(sink_of().settings, None)
    assert (default.port, default.virtual_host, default.credentials.username) == (5672, "/", "guest")


@pytest.mark.parametrize("url", ["http://one", "amqp://one:many", "amqp://one:99999"])
def test_other_url_is_refused(url: str) -> None:
    with pytest.raises(OptionInvalid, match="is no RabbitMQ broker"):
        sink_of(url=url).check()


def test_broker_that_does_not_run_is_retryable() -> None:
    sink = sink_of(url="amqp://somebody:hunter2@127.0.0.1:1,127.0.0.1:2")
    for connect in (sink.check, sink.take_channel):
        with pytest.raises(ConnectionLost) as lost:
            connect()
        assert "hunter2" not in str(lost.value)


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (pika.exceptions.ProbableAuthenticationError("refused"), AuthenticationFailed),
        (pika.exceptions.ProbableAccessDeniedError("no vhost"), PrivilegeMissing),
        (pika.exceptions.ChannelClosedByBroker(403, "ACCESS_REFUSED"), PrivilegeMissing),
        (pika.exceptions.ChannelClosedByBroker(404, "NOT_FOUND - no exchange"), SchemaChanged),
        (pika.exceptions.ChannelClosedByBroker(405, "RESOURCE_LOCKED"), ServerBusy),
        (pika.exceptions.ChannelClosedByBroker(406, "message size is larger than"), OptionInvalid),
        (pika.exceptions.ConnectionBlockedTimeout("alarm"), ServerBusy),
        (pika.exceptions.ConnectionClosedByBroker(320, "CONNECTION_FORCED"), ConnectionLost),
        (pika.exceptions.StreamLostError("reset"), ConnectionLost),
    ],
)
def test_answer_becomes_the_error_of_its_code(problem: Exception, kind: type[PenstockError]) -> None:
    assert isinstance(error_of(problem), kind)
