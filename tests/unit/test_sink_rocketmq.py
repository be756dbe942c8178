# SPDX-License-Identifier: Apache-2.0
"""The RocketMQ sink without a broker: names, settings, frames, and a simulated server."""

import json
import pickle
import socket
import socketserver
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.changes import Changes
from penstock.errors import (
    AnswerTimedOut,
    AuthenticationFailed,
    ConnectionLost,
    OptionInvalid,
    PenstockError,
    PrivilegeMissing,
    SchemaChanged,
    ServerBusy,
    ServerUnsupported,
)
from penstock.model import Secret
from penstock.sinks.endpoint import Endpoint
from penstock.sinks.rocketmq.remoting import (
    Answer,
    Connection,
    Reply,
    Request,
    error_of,
    message_of,
    read_json,
    sign,
)
from penstock.sinks.sink import BatchMark, Evolution, Spread, Writer, make_sink, settings_of
from tests.support.pipeline.changes_made import changes_of, insert, target_of, update

ORDERS = target_of({"id": "int", "name": "varchar(20)"})
MARK = BatchMark("pipe", "g", 1)


def sink_of(**options: Any) -> Any:
    return make_sink("rocketmq", settings_of("rocketmq").model_validate(options))


class FakeServer:
    """A name server and broker at one address. It collects the messages of each queue."""

    def __init__(self) -> None:
        self.code = Answer.SUCCESS
        self.queues = 0
        self.messages: dict[int, list[bytes]] = defaultdict(list)
        self.garbage = self.garbage_for_messages = b""
        # Whether the server stores the requests; otherwise the requests wait.
        self.stores = threading.Event()
        self.stores.set()
        self.requests = 0
        fake = self

        class Client(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                waiting: list[tuple[int, int]] = []
                while head := self.request.recv(8, 0x100):
                    length, header_length = struct.unpack(">ii", head)
                    frame = self.request.recv(length - 4, 0x100)
                    if fake.garbage:
                        self.request.sendall(fake.garbage)
                        return
                    header = json.loads(frame[:header_length])
                    fields = header.get("extFields", {})
                    if header["code"] == Request.SEND_BATCH:
                        queue = int(fields["e"])
                        fake.requests += 1
                        fake.stores.wait()
                        if fake.garbage_for_messages:
                            self.request.sendall(fake.garbage_for_messages)
                            return
                        assert queue not in {of for of, _ in waiting}, "two requests of a queue are under way"
                        waiting.append((queue, header["opaque"]))
                        fake.messages[queue] += bodies(frame[header_length:])
                        # The requests are answered in reverse order once each queue has a request.
                        if len(waiting) == fake.queues:
                            for _, opaque in reversed(waiting):
                                self.reply(opaque, fake.code)
                            waiting = []
                        continue
                    self.reply(header["opaque"], *fake.answer(header["code"], fields))

            def reply(self, opaque: int, code: int, body: bytes = b"") -> None:
                header = json.dumps({"code": code, "flag": 1, "opaque": opaque, "remark": "told"}).encode()
                frame = struct.pack(">ii", 4 + len(header) + len(body), len(header))
                self.request.sendall(frame + header + body)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Client)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, code: int, fields: dict[str, str]) -> tuple[int, bytes]:
        # Older servers write numbers as keys without quotes.
        broker = f'{{"brokerName":"a","brokerAddrs":{{0:"{self.address}",1:"replica:1"}}}}'
        if code == Request.CREATE_TOPIC:
            self.queues = int(fields["writeQueueNums"])
            return Answer.SUCCESS, b""
        if code == Request.BROKERS:
            return Answer.SUCCESS, f'{{"brokerAddrTable":{{"a":{broker}}}}}'.encode()
        if not self.queues:
            return Answer.TOPIC_NOT_EXIST, b""
        queues = f'{{"brokerName":"a","perm":6,"writeQueueNums":{self.queues}}}'
        return Answer.SUCCESS, f'{{"brokerDatas":[{broker}],"queueDatas":[{queues}]}}'.encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def bodies(batch: bytes) -> list[bytes]:
    """Return the message bodies of a batch, as a broker reads them."""
    found = []
    while batch:
        length, _, _, _, body_length = struct.unpack_from(">iiiii", batch)
        found.append(batch[20 : 20 + body_length])
        [properties_length] = struct.unpack_from(">h", batch, 20 + body_length)
        assert length == 22 + body_length + properties_length
        batch = batch[length:]
    return found


def write_all(writer: Writer, changes: Changes) -> int:
    writer.write(changes)
    return writer.finish().rows


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def test_changes_of_a_key_are_in_one_queue_in_order(server: FakeServer) -> None:
    # The first name server does not answer.
    sink = sink_of(url=f"rocketmq://127.0.0.1:1,{server.address}", queues=3, format="json")
    assert sink.plan(ORDERS, Evolution.EVOLVE) == ["create topic shop_orders"]
    sink.prepare(ORDERS, Evolution.EVOLVE)
    mark = replace(MARK, shared=json.loads(json.dumps(sink.begin([ORDERS]))))
    rows = 5000
    inserted = changes_of(ORDERS, *(insert(1, i, id=i, name="a") for i in range(rows)))
    changed = [update(2, {"id": i, "name": "a"}, {"id": i, "name": "b"}, i) for i in range(rows)]
    writer = sink.open(mark, 0)
    for piece in (inserted, changes_of(ORDERS, *changed)):
        writer.write(piece)
    writer.finish()
    by_queue = [[json.loads(body) for body in server.messages[queue]] for queue in range(3)]
    assert sum(map(len, by_queue)) == 2 * rows
    keys = [{message["after"]["id"] for message in messages} for messages in by_queue]
    assert sum(map(len, keys)) == rows
    assert min(map(len, keys)) > rows // 5
    for messages in by_queue:
        assert [message["change"] for message in messages] == sorted(
            message["change"] for message in messages
        )
    [producer] = sink._idle
    assert producer.is_open
    sink.close()


def test_messages_of_many_queues_wait_within_a_bound(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sinks.rocketmq.producer._WAITING_BYTES_MAX", 1000)
    sink = sink_of(url=f"rocketmq://{server.address}", queues=1, format="json")
    sink.prepare(ORDERS, Evolution.EVOLVE)
    writer = sink.open(MARK, 0)
    writer.write(changes_of(ORDERS, *(insert(1, i, id=i) for i in range(100))))
    assert len(server.messages[0]) > 50
    writer.finish()
    assert [json.loads(body)["after"]["id"] for body in server.messages[0]] == list(range(100))
    sink.close()


def test_refused_batch_raises_the_error_of_its_answer(server: FakeServer) -> None:
    sink = sink_of(url=f"rocketmq://{server.address}", queues=1)
    sink.prepare(ORDERS, Evolution.EVOLVE)
    server.code = Answer.REPLICA_IS_MISSING
    writer = sink.open(MARK, 0)
    writer.write(changes_of(ORDERS, insert(1, id=1)))
    with pytest.raises(ServerBusy, match="code 11"):
        writer.finish()
    writer.abort()
    assert not sink._idle


def test_batch_is_sent_again_only_once_its_first_request_is_answered(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # If the server stored a request after the retry and later batches, the request would undo them.
    monkeypatch.setattr("penstock.sinks.rocketmq.remoting._ANSWER_SECONDS_MAX", 0.05)
    options = {"url": f"rocketmq://{server.address}", "queues": 1, "format": "json"}
    sink_of(**options).prepare(ORDERS, Evolution.EVOLVE)
    server.stores.clear()
    for _ in range(2):
        # The engine closes a failed sink, and creates another.
        sink = sink_of(**options)
        writer = sink.open(MARK, 0)
        with pytest.raises(AnswerTimedOut, match="has not answered for"):
            write_all(writer, changes_of(ORDERS, insert(1, id=1)))
        writer.abort()
        sink.close()
    assert server.requests == 1
    server.stores.set()
    monkeypatch.setattr("penstock.sinks.rocketmq.remoting._ANSWER_SECONDS_MAX", 10.0)
    sink = sink_of(**options)
    for i in (1, 2):
        write_all(sink.open(MARK, 0), changes_of(ORDERS, insert(1, id=i)))
    assert [json.loads(body)["after"]["id"] for body in server.messages[0]] == [1, 1, 2]
    sink.close()


def test_batch_is_sent_again_once_the_broker_has_ended_the_connection_of_the_first(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_of(url=f"rocketmq://{server.address}", queues=1, format="json")
    sink.prepare(ORDERS, Evolution.EVOLVE)
    server.garbage_for_messages = b"\xff" * 8
    writer = sink.open(MARK, 0)
    with pytest.raises(ServerUnsupported):
        write_all(writer, changes_of(ORDERS, insert(1, id=1)))
    writer.abort()
    server.garbage_for_messages = b""
    assert write_all(sink.open(MARK, 0), changes_of(ORDERS, insert(1, id=1))) == 1
    sink.close()


def test_closing_a_connection_discards_what_is_not_sent_yet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        connection = Connection(address, Endpoint(url=f"rocketmq://{address}"), None, tls=False)
        accepted, _ = listener.accept()
        connection.send(Request.BROKERS, {})
        assert accepted.recv(1 << 16)
        connection.close()
        with accepted, pytest.raises(ConnectionResetError):
            accepted.recv(1)


def test_missing_queues_stop_a_batch_until_they_return(server: FakeServer) -> None:
    sink = sink_of(url=f"rocketmq://{server.address}", queues=4)
    sink.prepare(ORDERS, Evolution.EVOLVE)
    assert len(sink.begin([ORDERS])["queues"]["shop_orders"]) == 4
    server.queues = 2
    with pytest.raises(ServerBusy, match="no queues on a now"):
        sink.begin([ORDERS])
    server.queues = 6
    assert len(sink.begin([ORDERS])["queues"]["shop_orders"]) == 6


@pytest.mark.parametrize(
    "garbage",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 8, b"\0\0\0\x10", struct.pack(">ii", 7, 3) + b"{x}"],
)
def test_server_of_another_protocol_is_reported(server: FakeServer, garbage: bytes) -> None:
    server.garbage = garbage
    with pytest.raises((ServerUnsupported, ConnectionLost)):
        sink_of(url=f"rocketmq://{server.address}").check()


def test_topic_and_tags_are_named_by_the_table() -> None:
    assert sink_of().topic(ORDERS) == "shop_orders"
    assert sink_of().tags(ORDERS) == ["orders"] * 3
    tags = sink_of(tag="{database}.{table}.{kind}").tags(ORDERS)
    assert tags == ["shop.orders.insert", "shop.orders.update", "shop.orders.delete"]
    odd = target_of({"id": "int"}, name="shop.a|b c")
    assert (sink_of().topic(odd), sink_of().tags(odd)[0]) == ("shop_a_b_c", "a_b_c")


@pytest.mark.parametrize(
    "options",
    [
        {"topic": "{name}"},
        {"topic": "x" * 200},
        {"tag": "{id}"},
        {"tag": "{kind}" + "x" * (16 << 10)},
        {"partition_by": "nmae"},
    ],
)
def test_impossible_name_is_refused(options: dict[str, Any]) -> None:
    sink = sink_of(**options)
    with pytest.raises(OptionInvalid):
        (sink.topic(ORDERS), sink.tags(ORDERS))


@pytest.mark.parametrize(
    "options", [{"queues": 0}, {"order": "table", "partition_by": "id"}, {"format": "xml"}]
)
def test_settings_that_contradict_each_other_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        sink_of(**options)


def test_writers_receive_what_must_stay_in_order() -> None:
    spreads = [sink_of(order=order).spread for order in ("key", "table", "commit")]
    assert spreads == [Spread.KEYS, Spread.TABLES, Spread.WHOLE]
    assert sink_of(partition_by="name").spread is Spread.TABLES


@pytest.mark.parametrize("url", ["http://one", "rocketmq://one:many", "rocketmq://", "rocketmq://one/topic"])
def test_other_url_is_refused(url: str) -> None:
    with pytest.raises(OptionInvalid, match="is no name server of RocketMQ"):
        sink_of(url=url).check()


def test_name_server_that_does_not_run_is_retryable() -> None:
    sink = pickle.loads(pickle.dumps(sink_of(url="rocketmq://somebody:hunter2@127.0.0.1:1,127.0.0.1:2")))
    assert "hunter2" not in repr(sink.settings)
    with pytest.raises(ConnectionLost) as lost:
        sink.check()
    assert "hunter2" not in str(lost.value)


def test_request_is_signed_over_its_fields_and_body() -> None:
    signed = sign({"topic": "t", "a": "1"}, b"body", "key-1", Secret("secret-1"))
    # The content is "key-1" + "1" + "t" + "body": the values, sorted by their names.
    assert signed["Signature"] == "RRl9maRkIc6dnKdNgmiKh6AeNAU="
    assert signed["AccessKey"] == "key-1"


def test_maps_with_numbers_as_keys_are_read() -> None:
    assert read_json(b'{"a":{0:"10.0.0.1:10911",-1:"b:2"}}') == {"a": {"0": "10.0.0.1:10911", "-1": "b:2"}}


def test_message_of_a_batch_has_its_properties() -> None:
    message = message_of(b"body", {"TAGS": "orders", "__db": "shop"})
    assert message.endswith(b"\x00\x16TAGS\x01orders\x02__db\x01shop\x02")
    assert bodies(message) == [b"body"]


def test_properties_beyond_the_bound_of_their_size_are_refused() -> None:
    assert bodies(message_of(b"body", {"TAGS": "x" * 32_761})) == [b"body"]
    with pytest.raises(OptionInvalid, match="32768 bytes: its tag"):
        message_of(b"body", {"TAGS": "x" * 32_762})


ACL = "org.apache.rocketmq.acl"
MANAGER = f"{ACL}.plain.PlainPermissionManager"


@pytest.mark.parametrize(
    ("code", "remark", "kind"),
    [
        (2, "[TIMEOUT_CLEAN_QUEUE]broker busy", ServerBusy),
        (12, "slave wait timeout", ServerBusy),
        (17, "topic[t] not exist", SchemaChanged),
        (13, "the message is illegal", OptionInvalid),
        (16, "the broker sending message is forbidden", PrivilegeMissing),
        *(
            (1, f"{ACL}.common.AclException: {text}, {MANAGER}.{method}(PlainPermissionManager.java:1)", kind)
            for text, method, kind in [
                ("Check signature failed for accessKey=x", "validate", AuthenticationFailed),
                ("No acl config for permission", "validate", AuthenticationFailed),
                ("No acl config for a, b.c(d), e", "validate", AuthenticationFailed),
                ("Need admin permission for request code=17", "checkPerm", PrivilegeMissing),
                ("No default permission for user_signature", "checkPerm", PrivilegeMissing),
            ]
        ),
        (
            1,
            "java.lang.RuntimeException: message body size exceeded,"
            " org.apache.rocketmq.store.MessageExtEncoder.encode(MessageExtEncoder.java:290)",
            OptionInvalid,
        ),
        (1, "java.io.IOException: no permission for the user, java.io.File.open(File.java:1)", ServerBusy),
        (1, "the signature of the accessKey is late", ServerBusy),
        (1, "[PC_SYNCHRONIZED]broker busy, start flow control for a while", ServerBusy),
        (1, "create mapped file failed, server is busy or broken.", ServerBusy),
        (1, "in-sync replicas not enough", ServerBusy),
        (3, "request type 320 not supported", ServerUnsupported),
    ],
)
def test_answer_becomes_the_error_of_its_code(code: int, remark: str, kind: type[PenstockError]) -> None:
    assert isinstance(error_of(Reply(code, remark, b"")), kind)
