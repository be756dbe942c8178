# SPDX-License-Identifier: Apache-2.0
"""The RocketMQ sink on real brokers. The messages are read with RocketMQ's own consumer."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.changes import Changes
from penstock.errors import (
    AnswerTimedOut,
    AuthenticationFailed,
    OptionInvalid,
    PrivilegeMissing,
    TlsFailed,
    TransientError,
)
from penstock.sinks.rocketmq.producer import Servers
from penstock.sinks.sink import BatchMark, Delivery, Evolution, Receipt, Sink, Writer, make_sink, settings_of
from tests.conftest import ROOT
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update
from tests.support.programs.write_keys import ORDERS, ROWS, batch
from tests.support.sinks.rocketmq_reading import rocketmq_messages
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.patience import wait_until
from tools.rocketmq import VERSIONS, RocketMQ
from tools.servers import PartMissing, certificate

MARK = BatchMark("pipe", "g", 1)
ACCOUNTS = """
accounts:
- {accessKey: loader-key, secretKey: loader-secret, admin: true, defaultTopicPerm: PUB|SUB}
- {accessKey: reader-key, secretKey: reader-secret, admin: false, defaultTopicPerm: SUB}
"""


def started(missing_part: MissingPart, version: str = VERSIONS[0], **options: Any) -> RocketMQ:
    try:
        return RocketMQ(version, **options).start()
    except PartMissing as error:
        missing_part("rocketmq", str(error))


@pytest.fixture(scope="module", params=VERSIONS)
def broker(request: pytest.FixtureRequest, missing_part: MissingPart) -> Iterator[RocketMQ]:
    """A broker of each version for this file."""
    broker = started(missing_part, request.param)
    yield broker
    broker.close()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic for this test only."""
    return "".join(letter if letter.isalnum() else "_" for letter in request.node.name)[:100]


def sink_of(broker: RocketMQ, topic: str, **more: Any) -> Sink:
    return make_sink("rocketmq", settings_of("rocketmq")(**{"url": broker.url, "topic": topic, **more}))


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


@pytest.mark.deep(guard="tests/unit/test_sink_rocketmq.py::test_changes_of_a_key_are_in_one_queue_in_order")
def test_consumer_receives_the_changes_of_each_key_in_order(broker: RocketMQ, topic: str) -> None:
    sink = sink_of(broker, topic, queues=3, tag="{table}.{kind}", headers=True)
    assert sink.delivery is Delivery.AT_LEAST_ONCE
    assert list(sink.check()) == []
    rows = [insert(1, i, id=i, name="a") for i in range(3000)]
    changed = [update(2, {"id": i, "name": "a"}, {"id": i, "name": "ä"}, i) for i in range(3000)]
    moved = [update(3, {"id": i, "name": "ä"}, {"id": i + 5000, "name": "ä"}, i) for i in range(30)]
    receipt = write(sink, changes_of(ORDERS, *rows, *changed), changes_of(ORDERS, *moved))
    assert receipt.rows == 3000 + 2 * 3000 + 2 * 30
    assert sink.plan(ORDERS, Evolution.EVOLVE) == []
    by_key: dict[str, list[tuple[int, str]]] = {}
    received = rocketmq_messages(broker, topic)
    for message in received:
        assert message.properties.items() >= {"__db": "shop", "__table": "orders"}.items()
        assert message.properties["TAGS"] == f"orders.{message.json['type'].lower()}"
        for row in message.json["data"]:
            by_key.setdefault(row["id"], []).append((message.queue, message.json["type"]))
    assert {message.queue for message in received} == {0, 1, 2}
    for key, events in by_key.items():
        assert len({queue for queue, _ in events}) == 1, key
        assert [kind for _, kind in events][:2] == ["INSERT", "UPDATE"] or int(key) >= 5000
    assert sum(kind == "DELETE" for events in by_key.values() for _, kind in events) > 0
    inserts = rocketmq_messages(broker, topic, "orders.insert || orders.none")
    assert {message.json["type"] for message in inserts} == {"INSERT"}
    sink.close()


@pytest.mark.deep(guard="tests/unit/test_sink_messages.py::test_rows_become_messages_of_their_kind")
@pytest.mark.parametrize("form", ["debezium", "maxwell", "json", "canal"])
def test_messages_have_the_form_of_their_dialect(broker: RocketMQ, topic: str, form: str) -> None:
    sink = sink_of(broker, topic, format=form, queues=1, tag="{kind}")
    write(sink, changes_of(ORDERS, insert(5, id=1, name="a"), delete(6, id=1, name="a")))
    received = rocketmq_messages(broker, topic)
    assert [message.properties["TAGS"] for message in received] == ["insert", "delete"]
    if form != "canal":
        kinds = [
            message.json.get("op") or message.json.get("type") or message.json["change"]
            for message in received
        ]
        assert tuple(kinds) in {("c", "d"), ("insert", "delete")}
    sink.close()


@pytest.mark.deep(guard="tests/unit/test_sink_rocketmq.py::test_refused_batch_raises_the_error_of_its_answer")
@pytest.mark.parametrize("version", VERSIONS)
def test_batch_completes_once_the_broker_returns(missing_part: MissingPart, version: str, topic: str) -> None:
    broker = started(missing_part, version)
    try:
        sink = sink_of(broker, topic, queues=2, format="json")
        changes = [changes_of(ORDERS, *(insert(1, i, id=i) for i in range(k, k + 3000))) for k in (0, 3000)]
        write(sink, changes_of(ORDERS, insert(1, id=-1)))
        writer = sink.open(MARK, 0)
        writer.write(changes[0])
        broker.kill()
        with pytest.raises(TransientError):
            finish_after(writer, *changes)
        writer.abort()
        with pytest.raises(TransientError):
            write(sink, *changes)
        broker.start()
        wait_until(lambda: goes_through(sink, *changes))
        ids = {message.json["after"]["id"] for message in rocketmq_messages(broker, topic)}
        assert ids == set(range(-1, 6000))
        sink.close()
    finally:
        broker.close()


@pytest.mark.deep(
    guard="tests/unit/test_sink_rocketmq.py::test_batch_is_sent_again_only_once_its_first_request_is_answered"
)
def test_broker_that_hangs_stores_no_batch_after_a_later_one(
    broker: RocketMQ, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"queues": 1, "format": "json"}
    write(sink_of(broker, topic, **options), changes_of(ORDERS, insert(1, id=0)))
    with monkeypatch.context() as patched:
        patched.setattr("penstock.sinks.rocketmq.remoting._ANSWER_SECONDS_MAX", 0.5)
        sink = sink_of(broker, topic, **options)
        # The connection exists before the broker hangs.
        write(sink, changes_of(ORDERS, insert(1, id=0)))
        writer = sink.open(MARK, 0)
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            with pytest.raises(AnswerTimedOut):
                finish_after(writer, changes_of(ORDERS, insert(2, id=1)))
            writer.abort()
            sink.close()
            with pytest.raises(AnswerTimedOut):
                finish_after(
                    sink_of(broker, topic, **options).open(MARK, 0), changes_of(ORDERS, insert(2, id=1))
                )
        finally:
            os.kill(broker.pid, signal.SIGCONT)
    for i in (1, 2):
        write(sink_of(broker, topic, **options), changes_of(ORDERS, insert(2, id=i)))
    ids = [message.json["after"]["id"] for message in rocketmq_messages(broker, topic)]
    assert ids == [0, 0, 1, 1, 2]


@pytest.mark.deep(guard="tests/unit/test_sink_rocketmq.py::test_changes_of_a_key_are_in_one_queue_in_order")
def test_killed_writer_loses_no_message_once_its_batch_is_retried(broker: RocketMQ, topic: str) -> None:
    options: dict[str, Any] = {"url": broker.url, "topic": topic, "format": "json", "queues": 1}
    sink = sink_of(broker, **options)
    sink.prepare(ORDERS, Evolution.EVOLVE)
    words = [sys.executable, "-m", "tests.support.programs.write_keys", "rocketmq", json.dumps(options)]
    with subprocess.Popen(words, cwd=ROOT) as writer:
        wait_until(lambda: broker.stored(topic, 0) > ROWS // 20)
        writer.kill()
    write(sink, *batch())
    ids = [message.json["after"]["id"] for message in rocketmq_messages(broker, topic)]
    # The last messages are those of the complete batch, in order.
    assert ids[-ROWS:] == list(range(ROWS))
    assert len(ids) > ROWS
    sink.close()


@pytest.mark.deep(guard="tests/unit/test_sink_rocketmq.py::test_answer_becomes_the_error_of_its_code")
def test_account_without_rights_is_refused(missing_part: MissingPart, topic: str) -> None:
    broker = started(missing_part, accounts=ACCOUNTS)
    try:
        loader = sink_of(broker, topic, user="loader-key", password="loader-secret")
        assert write(loader, changes_of(ORDERS, *(insert(5, i, id=i) for i in range(10)))).rows == 10
        for user, password, kind in [
            ("loader-key", "wrong-word", AuthenticationFailed),
            ("nobody-key", "wrong-word", AuthenticationFailed),
            (None, None, AuthenticationFailed),
        ]:
            sink = sink_of(broker, topic, user=user, password=password)
            with pytest.raises(kind) as refused:
                write(sink, changes_of(ORDERS, insert(6, id=1)))
            assert "wrong-word" not in str(refused.value)
        other = sink_of(broker, f"{topic}_new", user="reader-key", password="reader-secret")
        with pytest.raises(PrivilegeMissing):
            other.prepare(ORDERS, Evolution.EVOLVE)
        loader.close()
    finally:
        broker.close()


@pytest.mark.deep(
    guard="tests/integration/test_sink_redis.py::test_encrypted_connection_verifies_its_authority"
)
def test_encrypted_connection_verifies_its_authority(
    missing_part: MissingPart, topic: str, tmp_path: Path
) -> None:
    folder = tmp_path / "tls"
    certificate.make(folder)
    broker = started(missing_part, tls=folder)
    try:
        sink = sink_of(broker, topic, ca=folder / "authority.pem", queues=1)
        write(sink, changes_of(ORDERS, insert(5, id=1)))
        sink.close()
        assert len(rocketmq_messages(broker, topic)) == 1
        with pytest.raises(TlsFailed):
            sink_of(broker, topic).check()
    finally:
        broker.close()


@pytest.mark.deep(guard="tests/unit/test_sink_claim_check.py::test_reference_names_the_file_of_the_message")
def test_message_over_the_brokers_bound_stops_or_becomes_a_file(
    broker: RocketMQ, topic: str, tmp_path: Path
) -> None:
    target = target_of({"id": "int", "name": "text"})
    large = "x" * (5 << 20)
    rows = changes_of(target, insert(5, id=1, name="a"), insert(5, 1, id=2, name=large))
    with pytest.raises(OptionInvalid, match=r"\(code 13?\)"):
        write(sink_of(broker, topic, format="json"), rows)
    claimed = f"{topic}_claimed"
    claim_check = {"above": "1MiB", "path": str(tmp_path)}
    sink = sink_of(broker, claimed, format="json", queues=1, claim_check=claim_check)
    write(sink, rows)
    first, reference = rocketmq_messages(broker, claimed)
    assert first.json["after"]["id"] == 1
    stored = json.loads(Path(reference.json["claim_check"]["path"]).read_bytes())
    assert stored["after"]["name"] == large
    sink.close()


@pytest.mark.deep(guard="tests/unit/test_sink_rocketmq.py::test_changes_of_a_key_are_in_one_queue_in_order")
def test_topic_of_another_width_keeps_its_queues(broker: RocketMQ, topic: str) -> None:
    sink: Any = sink_of(broker, topic, queues=8)
    servers = Servers(sink.settings, None)
    servers.create(topic, 5)
    wait_until(lambda: len(servers.queues(topic)) == 5)
    write(sink, changes_of(ORDERS, *(insert(5, i, id=i) for i in range(200))))
    assert {message.queue for message in rocketmq_messages(broker, topic)} == set(range(5))
    sink.close()
