# SPDX-License-Identifier: Apache-2.0
"""The messages of a connector that do not carry rows: statements, transactions, truncated tables,
heartbeats.
"""

from typing import Any

from penstock.migrate.report import OriginalProperties

_STATEMENTS, _TRANSACTIONS, _HEARTBEATS = (
    "include.schema.changes",
    "provide.transaction.metadata",
    "heartbeat.interval.ms",
)
_HEARTBEAT_PREFIX = "__debezium-heartbeat"
_HEARTBEAT_PREFIXES = ("topic.heartbeat.prefix", "heartbeat.topics.prefix")
_NAMES = ("topic.transaction", "topic.heartbeat.name", *_HEARTBEAT_PREFIXES)


def topics_of(properties: OriginalProperties, prefix: str, *, flat: bool) -> dict[str, Any]:
    """Return the settings of the topics for these messages, in the section `debezium` of the kafka sink.

    `prefix` is the connector's topic.prefix. ExtractNewRecordState, which makes rows `flat`, drops truncates.
    """
    delimiter = properties.get("topic.delimiter", ".")
    topics: dict[str, Any] = {}
    skipped = [name.strip() for name in properties.get("skipped.operations", "t").split(",")]
    if "t" not in skipped and not flat:
        topics["truncates"] = True
    if properties.flag(_STATEMENTS):
        topics["schema_topic"] = prefix
    elif _STATEMENTS not in properties:
        properties.remind(
            f"The connector writes statements (DDL) to the topic {prefix}, which is its default. The pipeline"
            " does not, so that several tasks can write. If consumers read it, set"
            f" sink.kafka.debezium.schema_topic: {prefix}"
        )
    if properties.flag(_TRANSACTIONS):
        names = (prefix, properties.get("topic.transaction", "transaction"))
        topics["transaction_topic"] = delimiter.join(names)
        properties.carried("topic.transaction")
    if milliseconds := _heartbeat_milliseconds(properties):
        heartbeats = next(filter(None, map(properties.get, _HEARTBEAT_PREFIXES)), _HEARTBEAT_PREFIX)
        topics["heartbeat"] = {
            "topic": properties.get("topic.heartbeat.name") or delimiter.join((heartbeats, prefix)),
            "server": prefix,
            "interval": f"{max(100, milliseconds)}ms",
        }
        properties.carried("topic.heartbeat.name", *_HEARTBEAT_PREFIXES)
    properties.carried(_STATEMENTS, _TRANSACTIONS, _HEARTBEATS)
    remark = "the connector does not write to this topic"
    properties.not_carried(*_NAMES, remark=remark, attention=False)
    return topics


def leave_out_topics(properties: OriginalProperties) -> None:
    """If there is an outbox, account for the topics of all other messages as not carried: a sink with an
    outbox writes only outbox events.
    """
    remark = "a sink with an outbox writes its events alone"
    for name in (_STATEMENTS, _TRANSACTIONS):
        properties.not_carried(name, remark=remark, attention=properties.flag(name))
    properties.not_carried(_HEARTBEATS, remark=remark, attention=_heartbeat_milliseconds(properties) > 0)
    properties.not_carried(*_NAMES, remark=remark, attention=False)


def _heartbeat_milliseconds(properties: OriginalProperties) -> int:
    """Return the interval of heartbeats, 0 if there are none."""
    text = properties.get(_HEARTBEATS)
    return int(text) if text.isdecimal() else 0
