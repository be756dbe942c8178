# SPDX-License-Identifier: Apache-2.0
"""Topics in the form that TiCDC writes, in a broker that the client library runs in this process."""

import json
from collections.abc import Sequence
from typing import Any, Self

import confluent_kafka

from tests.support.suite.patience import WAIT_SECONDS_MAX
from tests.support.ticdc.sink import message

TYPES = {"id": "int", "name": "varchar(20)"}
PARTITIONS = 4


class Topics:
    """A broker with Kafka's protocol. Its topics have four partitions. The broker ends with its producer."""

    def __init__(self, servers: str | None = None) -> None:
        own = {"test.mock.num.brokers": 1} if servers is None else {"bootstrap.servers": servers}
        self._producer = confluent_kafka.Producer(own | {"log_level": 0, "linger.ms": 0})
        (broker, *_) = self._producer.list_topics(timeout=WAIT_SECONDS_MAX).brokers.values()
        self.servers = f"{broker.host}:{broker.port}"

    def source(self, topic: str) -> str:
        """Return the source of an instance that reads a topic."""
        return f"ticdc+kafka://{self.servers}/{topic}"

    def send(self, topic: str, partition: int, *messages: str) -> Self:
        """Send messages to a partition, and wait until they can be read."""
        return self._send(topic, [(partition, text) for text in messages])

    def watermark(self, topic: str, commit_ts: int, *partitions: int) -> Self:
        """Send a watermark to partitions, by default to all."""
        text = watermark(commit_ts)
        return self._send(topic, [(partition, text) for partition in partitions or range(PARTITIONS)])

    def _send(self, topic: str, messages: Sequence[tuple[int, str]]) -> Self:
        for partition, text in messages:
            self._producer.produce(topic, text.encode(), partition=partition)
        assert self._producer.flush(WAIT_SECONDS_MAX) == 0
        return self


def watermark(commit_ts: int) -> str:
    """Return the message of a watermark."""
    values = dict.fromkeys(("pkNames", "sqlType", "mysqlType", "data", "old"))
    own = {"id": 0, "database": "", "table": "", "isDdl": False, "type": "TIDB_WATERMARK", "es": 0, "ts": 0}
    return json.dumps(own | {"sql": ""} | values | {"_tidb": {"watermarkTs": commit_ts}})


def statement(commit_ts: int, text: str, table: str = "t") -> str:
    """Return the message of a statement in `shop`."""
    values = dict.fromkeys(("pkNames", "sqlType", "mysqlType", "data", "old"))
    own = {"id": 0, "database": "shop", "table": table, "isDdl": True, "type": "QUERY", "es": 0, "ts": 0}
    return json.dumps(own | {"sql": text} | values | {"_tidb": {"commitTs": commit_ts}})


def row(commit_ts: int, kind: str, key: int, name: str = "n", old: str | None = None, **others: Any) -> str:
    """Return the message of a row of `shop.t`; the old row of an update has only the changed columns."""
    before = None if old is None else {"name": old}
    data = {"id": str(key), "name": name}
    return message(commit_ts, kind, data, before, **({"mysqlType": TYPES} | others))
