# SPDX-License-Identifier: Apache-2.0
"""Converts a connector's outbox event router into the section `outbox` of the kafka sink."""

from typing import Any

from penstock.migrate.debezium_forms import transforms_of
from penstock.migrate.report import OriginalProperties

_ROUTER = "io.debezium.transforms.outbox.EventRouter"
_ROUTED_VALUE = "${routedByValue}"
_COLUMNS = {
    "table.field.event.id": ("id", "id"),
    "table.field.event.key": ("key", "aggregateid"),
    "table.field.event.payload": ("payload", "payload"),
}
_INVALID = {"warn": "skip", "error": "skip", "fatal": "stop"}


def outbox_of(properties: OriginalProperties) -> dict[str, Any] | None:
    """Return the settings `topic` and `outbox` of the sink, None if the connector has no event router."""
    routers = [
        name for name in transforms_of(properties) if properties.get(f"transforms.{name}.type") == _ROUTER
    ]
    if len(routers) != 1:
        return None
    prefix = f"transforms.{routers[0]}."
    properties.carried(f"{prefix}type", remark="sink.kafka.outbox")
    if transforms_of(properties) == routers:
        properties.carried("transforms", remark="sink.kafka.outbox")
    outbox: dict[str, Any] = {
        setting: properties.get(prefix + name, default) for name, (setting, default) in _COLUMNS.items()
    }
    properties.carried(*(prefix + name for name in _COLUMNS), remark="sink.kafka.outbox")
    invalid = properties.get(f"{prefix}table.op.invalid.behavior", "warn").lower()
    outbox["updates"] = _INVALID.get(invalid, "stop")
    properties.carried(f"{prefix}table.op.invalid.behavior", remark="sink.kafka.outbox.updates")
    if headers := _headers(properties, f"{prefix}table.fields.additional.placement"):
        outbox["headers"] = headers
    column = properties.get(f"{prefix}route.by.field", "aggregatetype")
    replacement = properties.get(f"{prefix}route.topic.replacement", f"outbox.event.{_ROUTED_VALUE}")
    before, _, after = replacement.partition(_ROUTED_VALUE)
    topic = f"{before}{{{column}}}{after}" if _ROUTED_VALUE in replacement else replacement
    properties.carried(
        f"{prefix}route.by.field", f"{prefix}route.topic.replacement", remark="sink.kafka.topic"
    )
    return {"topic": topic, "outbox": outbox}


def _headers(properties: OriginalProperties, name: str) -> dict[str, str]:
    """Return the mapping from header name to column, for the additional fields that are placed in headers."""
    headers: dict[str, str] = {}
    left_out = []
    for rule in filter(None, (part.strip() for part in properties.get(name).split(","))):
        column, placement, alias = [*rule.split(":"), "", ""][:3]
        if placement == "header":
            headers[alias or column] = column
        else:
            left_out.append(column)
    if left_out:
        properties.changed(
            name, remark=f"sink.kafka.outbox.headers, without {', '.join(left_out)}", attention=True
        )
    properties.carried(name, remark="sink.kafka.outbox.headers")
    return headers
