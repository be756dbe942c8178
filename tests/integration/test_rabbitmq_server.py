# SPDX-License-Identifier: Apache-2.0
"""The RabbitMQ sink on a real broker: order, confirmations, refusals, and interruptions."""

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest

from penstock.changes import Changes
from penstock.errors import (
    AuthenticationFailed,
    ConnectionLost,
    OptionInvalid,
    PrivilegeMissing,
    ServerBusy,
    TlsFailed,
    TransientError,
)
from penstock.sinks.sink import BatchMark, Delivery, Evolution, Receipt, Sink, Writer, make_sink, settings_of
from tests.conftest import ROOT
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update
from tests.support.programs.write_keys import ORDERS, ROWS, batch
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.own_servers import started
from tests.support.suite.patience import wait_until
from tools.rabbitmq import RabbitMQ
from tools.servers import PartMissing, certificate

MARK = BatchMark("pipe", "g", 1)
KEPT = 1 << 20


def _account(name: str, password: str, tags: str) -> dict[str, str]:
    salt = b"salt"
    digest = base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()
    algorithm = "rabbit_password_hashing_sha256"
    return {"name": name, "password_hash": digest, "hashing_algorithm": algorithm, "tags": tags}


@pytest.fixture(scope="module")
def broker(missing_part: MissingPart, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitMQ]:
    """A broker for this file, with the accounts guest and limited."""
    definitions = tmp_path_factory.mktemp("rabbitmq") / "definitions.json"
    rights = {"vhost": "/", "configure": ".*", "write": ".*", "read": ".*"}
    users = [_account("guest", "guest", "administrator"), _account("limited", "secret", "")]
    permissions = [
        {"user": "guest", **rights},
        {"user": "limited", **rights, "configure": "^$", "write": "^$"},
    ]
    content = {"users": users, "vhosts": [{"name": "/"}], "permissions": permissions}
    definitions.write_text(json.dumps(content))
    with started(
        RabbitMQ(f"load_definitions = {definitions}", f"max_message_size = {KEPT}"), "rabbitmq", missing_part
    ) as broker:
        yield broker


@pytest.fixture
def channel(broker: RabbitMQ) -> Iterator[Any]:
    """A channel of a reader."""
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        yield connection.channel()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A unique name for queues of the test."""
    return str(request.node.name)[:60].replace("[", ".").replace("]", "")


def sink_of(broker: RabbitMQ, name: str, **more: Any) -> Sink:
    options = {"url": broker.url, "routing_key": name, "queue": name, **more}
    return make_sink("rabbitmq", settings_of("rabbitmq")(**options))


def write(sink: Sink, *changes: Changes) -> Receipt:
    writer = sink.open(MARK, 0)
    try:
        for change in changes:
            sink.prepare(change.target, Evolution.EVOLVE)
            writer.write(change)
        return writer.finish()
    except BaseException:
        writer.abort()
        raise


def goes_through(sink: Sink, *changes: Changes) -> bool:
    """Retry a batch, as a pipeline does while its broker is unavailable; return whether that succeeds."""
    try:
        write(sink, *changes)
    except TransientError:
        return False
    return True


def finish_after(writer: Writer, *changes: Changes) -> None:
    for change in changes:
        writer.write(change)
    writer.finish()


def messages(channel: Any, queue: str) -> list[Any]:
    """Take all messages of a queue."""
    taken = []
    while True:
        method, properties, body = channel.basic_get(queue, auto_ack=True)
        if method is None:
            return taken
        assert properties.delivery_mode == 2
        taken.append(json.loads(body))


def taken(channel: Any, queue: str, count: int) -> list[Any]:
    """Consume a number of messages, with up to 2,000 of them unacknowledged."""
    bodies = []
    channel.basic_qos(prefetch_count=2000)
    for method, _, body in channel.consume(queue, inactivity_timeout=30):
        assert method is not None, f"{queue} has only {len(bodies)} messages"
        bodies.append(json.loads(body))
        if len(bodies) % 1000 == 0 or len(bodies) == count:
            channel.basic_ack(method.delivery_tag, multiple=True)
        if len(bodies) == count:
            break
    channel.cancel()
    return bodies


@pytest.mark.deep(
    guard="tests/unit/test_sink_rabbitmq.py::test_table_has_a_routing_key_for_each_of_its_queues"
)
def test_queue_has_the_changes_of_its_keys_in_order(broker: RabbitMQ, channel: Any, name: str) -> None:
    sink = sink_of(broker, name, queues=3)
    assert sink.delivery is Delivery.AT_LEAST_ONCE
    assert [finding for finding in sink.check() if finding.fatal] == []
    assert len(sink.plan(ORDERS, Evolution.EVOLVE)) == 3
    rows = [insert(1, i, id=i, name="a") for i in range(3000)]
    changed = [update(2, {"id": i, "name": "a"}, {"id": i, "name": "b"}, i) for i in range(3000)]
    moved = [update(3, {"id": i, "name": "b"}, {"id": i + 5000, "name": "b"}, i) for i in range(30)]
    receipt = write(sink, changes_of(ORDERS, *rows, *changed), changes_of(ORDERS, *moved))
    assert receipt.rows == 3000 + 2 * 3000 + 2 * 30
    assert sink.plan(ORDERS, Evolution.EVOLVE) == []
    by_key: dict[str, list[tuple[int, str]]] = {}
    sizes = []
    for number in range(3):
        queue = messages(channel, f"{name}.{number}")
        sizes.append(len(queue))
        for message in queue:
            assert (message["database"], message["table"]) == ("shop", "orders")
            for row in message["data"]:
                by_key.setdefault(row["id"], []).append((number, message["type"]))
    assert min(sizes) > 1500
    for key, events in by_key.items():
        assert len({number for number, _ in events}) == 1, key
        kinds = [kind for _, kind in events]
        assert kinds[:2] == ["INSERT", "UPDATE"] or int(key) >= 5000
    moves = [events[2:] if int(key) < 30 else events for key, events in by_key.items() if len(events) != 2]
    assert {kind for events in moves for _, kind in events} <= {"DELETE", "INSERT", "UPDATE"}
    assert any(kind == "DELETE" for events in moves for _, kind in events)
    sink.close()


@pytest.mark.deep(guard="tests/unit/test_sink_messages.py::test_rows_become_messages_of_their_kind")
@pytest.mark.parametrize("form", ["debezium", "maxwell", "json"])
def test_messages_have_the_form_of_their_dialect(
    broker: RabbitMQ, channel: Any, name: str, form: str
) -> None:
    sink = sink_of(broker, name, format=form)
    write(sink, changes_of(ORDERS, insert(5, id=1, name="a"), delete(6, id=1, name="a")))
    kinds = {
        "debezium": lambda message: message.get("payload", message)["op"],
        "maxwell": lambda message: message["type"],
        "json": lambda message: message["change"],
    }
    inserted, deleted = map(kinds[form], messages(channel, name))
    assert (inserted, deleted) in {("c", "d"), ("insert", "delete")}
    sink.close()


@pytest.mark.deep(guard="tests/unit/test_sink_rabbitmq.py::test_broker_that_does_not_run_is_retryable")
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_batch_completes_once_the_broker_returns(
    missing_part: MissingPart, monkeypatch: pytest.MonkeyPatch, queue_type: str
) -> None:
    # A quorum queue that has lost its leader may confirm nothing on older connections, even after it has a
    # leader again.
    monkeypatch.setattr("penstock.sinks.rabbitmq.connection._CONFIRM_SECONDS_MAX", 5.0)
    broker = RabbitMQ()
    try:
        broker.start()
    except PartMissing as error:
        missing_part("rabbitmq", str(error))
    try:
        sink = sink_of(broker, "away", queues=2, queue_type=queue_type)
        changes = [changes_of(ORDERS, *(insert(1, i, id=i) for i in range(k, k + 3000))) for k in (0, 3000)]
        write(sink, changes_of(ORDERS, insert(1, id=-1)))
        writer = sink.open(MARK, 0)
        writer.write(changes[0])
        if queue_type == "quorum":
            # If RabbitMQ 3.10 is killed within seconds of the declaration, it leaves the queue without a
            # leader.
            broker.stop()
        else:
            broker.kill()
        with pytest.raises(ConnectionLost):
            finish_after(writer, *changes)
        writer.abort()
        with pytest.raises(TransientError):
            write(sink, *changes)
        broker.start()
        wait_until(lambda: goes_through(sink, *changes))
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            queues = [messages(connection.channel(), f"away.{number}") for number in range(2)]
        ids = {int(row["id"]) for queue in queues for message in queue for row in message["data"]}
        assert ids == set(range(-1, 6000))
        sink.close()
    finally:
        broker.close()


@pytest.mark.deep(guard="tests/unit/test_sink_rabbitmq.py::test_broker_that_does_not_run_is_retryable")
def test_killed_writer_loses_no_message_once_its_batch_is_retried(
    broker: RabbitMQ, channel: Any, name: str
) -> None:
    sink: Any = sink_of(broker, name, format="json")
    sink.prepare(ORDERS, Evolution.EVOLVE)
    settings = {"url": broker.url, "routing_key": name, "queue": name, "format": "json"}
    words = [sys.executable, "-m", "tests.support.programs.write_keys", "rabbitmq", json.dumps(settings)]

    def count() -> int:
        return int(channel.queue_declare(name, passive=True).method.message_count)

    with subprocess.Popen(words, cwd=ROOT) as writer:
        wait_until(lambda: count() > ROWS // 10)
        writer.kill()
    write(sink, *batch())
    bodies = taken(channel, name, count())
    ids = [message["after"]["id"] for message in bodies]
    # The last messages are those of the complete batch, in order.
    assert ids[-ROWS:] == list(range(ROWS))
    assert len(ids) > ROWS
    sink.close()


@pytest.mark.deep(guard="tests/unit/test_sink_rabbitmq.py::test_answer_becomes_the_error_of_its_code")
def test_account_that_cannot_write_is_refused(broker: RabbitMQ, name: str) -> None:
    wrong = broker.url.replace("guest:guest", "guest:wrong-word")
    for url, kind in [
        (wrong, AuthenticationFailed),
        (broker.url.replace("guest:guest", "limited:secret"), PrivilegeMissing),
        (f"{broker.url}/absent", PrivilegeMissing),
    ]:
        sink: Any = sink_of(broker, name, url=url)
        with pytest.raises(kind) as refused:
            sink.prepare(ORDERS, Evolution.EVOLVE)
        assert "wrong-word" not in str(refused.value)
    with pytest.raises(AuthenticationFailed):
        sink_of(broker, name, url=wrong).take_channel()  # type: ignore[attr-defined]


@pytest.mark.deep(guard="tests/unit/test_sink_claim_check.py::test_reference_names_the_file_of_the_message")
def test_message_over_the_brokers_bound_stops_or_becomes_a_dead_letter(
    broker: RabbitMQ, channel: Any, name: str, tmp_path: Path
) -> None:
    target = target_of({"id": "int", "name": "text"})
    rows = changes_of(target, insert(5, id=1, name="a"), insert(5, 1, id=2, name="x" * 2 * KEPT))
    with pytest.raises(OptionInvalid, match="larger than"):
        write(sink_of(broker, name), rows)
    messages(channel, name)
    claim_check = {"above": "1000KiB", "path": str(tmp_path)}
    sink = sink_of(broker, name, claim_check=claim_check, dead_letter=f"{name}.large")
    write(sink, rows)
    assert [message["data"][0]["id"] for message in messages(channel, name)] == ["1"]
    [reference] = messages(channel, f"{name}.large")
    stored = json.loads(Path(reference["claim_check"]["path"]).read_bytes())
    assert stored["data"][0]["name"] == "x" * 2 * KEPT
    sink.close()


@pytest.mark.deep(guard="tests/unit/test_sink_rabbitmq.py::test_answer_becomes_the_error_of_its_code")
def test_message_that_no_queue_takes_stops_the_batch(broker: RabbitMQ, channel: Any, name: str) -> None:
    sink = sink_of(broker, name)
    write(sink, changes_of(ORDERS, insert(5, id=1)))
    channel.queue_delete(name)
    writer = sink.open(MARK, 0)
    with pytest.raises(OptionInvalid, match="no queue for the routing key"):
        finish_after(writer, changes_of(ORDERS, insert(6, id=2)))
    writer.abort()
    write(sink_of(broker, name, queue=None, unroutable="drop"), changes_of(ORDERS, insert(6, id=2)))
    # Preparing the table again declares its queue again.
    write(sink, changes_of(ORDERS, insert(7, id=3)))
    assert [message["data"][0]["id"] for message in messages(channel, name)] == ["3"]
    sink.close()


@pytest.mark.deep(guard="tests/unit/test_sink_rabbitmq.py::test_answer_becomes_the_error_of_its_code")
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_full_queue_is_retryable(broker: RabbitMQ, channel: Any, name: str, queue_type: str) -> None:
    arguments = {"x-max-length": 10, "x-overflow": "reject-publish", "x-queue-type": queue_type}
    channel.queue_declare(name, durable=True, arguments=arguments)
    sink = sink_of(broker, name, order="table")
    many = changes_of(ORDERS, *(insert(5, i, id=i) for i in range(100)))
    # A quorum queue accepts messages that are in flight when it reaches its limit.
    wait_until(lambda: not goes_through(sink, many))
    with pytest.raises(ServerBusy, match="rejected"):
        write(sink, many)
    channel.queue_purge(name)
    write(sink, changes_of(ORDERS, insert(5, id=1)))
    assert len(messages(channel, name)) == 1
    sink.close()


@pytest.mark.deep(
    guard="tests/unit/test_sink_rabbitmq.py::test_table_has_a_routing_key_for_each_of_its_queues"
)
def test_queue_of_another_type_is_refused(broker: RabbitMQ, channel: Any, name: str) -> None:
    sink = sink_of(broker, name, queue_type="quorum", format="json")
    for number in range(2):
        write(
            sink, changes_of(ORDERS, *(insert(5, i, id=i) for i in range(3000 * number, 3000 * (number + 1))))
        )
    bodies = taken(channel, name, 6000)
    assert [message["after"]["id"] for message in bodies] == list(range(6000))
    other = sink_of(broker, name, queue_type="classic")
    with pytest.raises(OptionInvalid, match="x-queue-type"):
        other.prepare(ORDERS, Evolution.EVOLVE)
    # Without a type, the queue is used as it is.
    write(sink_of(broker, name), changes_of(ORDERS, insert(6, id=1)))
    sink.close()
    declared = sink_of(broker, f"{name}.declared")
    declared.prepare(ORDERS, Evolution.EVOLVE)
    sink_of(broker, f"{name}.declared", queue_type="classic").prepare(ORDERS, Evolution.EVOLVE)
    with pytest.raises(OptionInvalid, match="x-queue-type"):
        sink_of(broker, f"{name}.declared", queue_type="quorum").prepare(ORDERS, Evolution.EVOLVE)


@pytest.mark.deep(guard="tests/unit/test_sink_rabbitmq.py::test_broker_that_does_not_run_is_retryable")
def test_many_messages_are_under_way_within_their_bounds(broker: RabbitMQ, channel: Any, name: str) -> None:
    sink: Any = sink_of(broker, name)
    target = target_of({"id": "int", "name": "text"})
    large = [insert(5, i, id=i, name="y" * 500_000) for i in range(100)]
    receipt = write(sink, changes_of(target, *large))
    assert receipt.bytes > 50_000_000
    write(sink, *(changes_of(target, *(insert(6, i, id=i) for i in range(10_000))) for _ in range(2)))
    assert len(taken(channel, name, 20_100)) == 20_100
    # The connection of the last batch is kept.
    [kept] = sink._idle
    assert kept.is_open
    sink.close()


@pytest.mark.deep(
    guard="tests/integration/test_sink_redis.py::test_encrypted_connection_verifies_its_authority"
)
def test_encrypted_connection_verifies_its_authority(
    missing_part: MissingPart, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "tls"
    certificate.make(folder)
    broker = RabbitMQ(tls=folder)
    try:
        broker.start()
    except PartMissing as error:
        missing_part("rabbitmq", str(error))
    try:
        url = f"amqps://guest:guest@127.0.0.1:{broker.tls_port}"
        sink = sink_of(broker, name, url=url, ca=folder / "authority.pem")
        write(sink, changes_of(ORDERS, *(insert(5, i, id=i) for i in range(5000))))
        sink.close()
        with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
            assert len(taken(connection.channel(), name, 5000)) == 5000
        sink = sink_of(broker, name, url=url)
        for connect in (sink.check, sink.take_channel):  # type: ignore[attr-defined]
            with pytest.raises(TlsFailed):
                connect()
    finally:
        broker.close()
