# SPDX-License-Identifier: Apache-2.0
"""Checks TiCDC's topics before they are read: their partitions, and the first messages of each partition."""

from collections.abc import Iterator

from penstock.check.facts import Finding
from penstock.errors import PenstockError
from penstock.ticdc.kafka_messages import KafkaMessages, SinkRow, Watermark
from penstock.ticdc.kafka_reader import HINT_WATERMARKS, KafkaReader


def precheck_topics(reader: KafkaReader, messages: KafkaMessages) -> Iterator[Finding]:
    """Yield the findings. An error has the message with which the instance would stop."""
    problems: dict[str, Finding] = {}
    tables, keyless, has_watermark = set[str](), set[str](), False
    try:
        partitions = reader.partitions()
        yield Finding("topics", "ok", f"there are {len(partitions)} partitions")
        for content in reader.first_contents():
            try:
                message = messages.read(content)
            except PenstockError as problem:
                problems.setdefault(
                    problem.message, Finding("messages", "error", problem.message, problem.hint)
                )
                continue
            has_watermark |= isinstance(message, Watermark)
            if isinstance(message, SinkRow):
                name = f"{message.schema.database}.{message.schema.table}"
                tables.add(name)
                if not any(column.is_key for column in message.schema.columns):
                    keyless.add(name)
    except PenstockError as problem:
        yield Finding("topics", "error", problem.message, problem.hint)
        return
    yield from problems.values()
    if not problems:
        yield Finding("messages", "ok", f"the first messages can be read, of {len(tables)} tables")
    for name in sorted(keyless):
        yield Finding(
            "key",
            "warning",
            f"{name} has no primary key: reading stops if a transaction has equal rows of it",
        )
    if not has_watermark:
        yield Finding(
            "watermarks",
            "warning",
            "no watermark is among the first messages",
            HINT_WATERMARKS,
        )
