# SPDX-License-Identifier: Apache-2.0
"""Read the messages of a RocketMQ broker with RocketMQ's own consumer."""

import json
import os
import subprocess
from base64 import b64decode
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.maven import program
from tools.rocketmq import VERSIONS, RocketMQ, install

READER = Path(__file__).parent / "RocketReader.java"


class Message(NamedTuple):
    """A message as a consumer receives it."""

    queue: int
    offset: int
    body: bytes
    properties: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def rocketmq_messages(broker: RocketMQ, topic: str, tags: str = "*") -> list[Message]:
    """Return the messages of a topic with some tags, each queue in order."""
    # The client of version 4 reads from brokers of both versions.
    jars = f"{install(VERSIONS[0])}{os.sep}*"
    words = [program("java"), "-cp", jars, str(READER), f"127.0.0.1:{broker.name_server.port}", topic, tags]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    found = []
    for line in done.stdout.splitlines():
        kind, *fields = line.split("\t")
        if kind == "message":
            queue, offset, *texts = fields
            body, *encoded = map(b64decode, texts)
            pairs = zip(encoded[::2], encoded[1::2], strict=True)
            properties = {name.decode(): value.decode() for name, value in pairs}
            found.append(Message(int(queue), int(offset), body, properties))
    return found
