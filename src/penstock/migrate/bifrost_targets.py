# SPDX-License-Identifier: Apache-2.0
"""Converts Bifrost's targets into sinks, from the connection's address and account and from the
parameters.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from penstock.errors import OptionInvalid
from penstock.migrate.output import Migration
from penstock.migrate.report import OriginalProperties

_MYSQL = re.compile(r"(?:([^:@]*)(?::(.*))?@)?(?:tcp)?\(?([^()/]+?)\)?(?:/.*)?$")
_REDIS = re.compile(r"(?:(.*)@)?(?:tcp)?\(?([^()/]+?)\)?(?:/(\d+))?$")
_HTTP = re.compile(r"(?:([^:@/]*):(.*)@)?(https?://.*)$")
_TAG = re.compile(r"\{\$([^{}]+)\}")
_TAGS = {"SchemaName": "{database}", "TableName": "{table}", "EventType": "{_change_type}"}


def sink_of(
    migration: Migration, name: str, target: OriginalProperties, parameters: Sequence[OriginalProperties]
) -> dict[str, Any]:
    """Return the sink of a target. Its parameters come from the target's tables. Raises OptionInvalid."""
    plugin = target.get("PluginName").lower()
    make = _SINKS.get(plugin)
    if make is None:
        target.not_carried(
            "PluginName", "ConnUri", remark=f"no sink takes the place of {plugin}: rows go to standard output"
        )
        return {"stdout": {"format": "json"}}
    target.carried("PluginName", "ConnUri")
    kind = "elasticsearch" if plugin == "elasticsearch" else plugin
    return {kind: make(migration, name, target.get("ConnUri"), parameters)}


def _mysql(
    migration: Migration, name: str, uri: str, parameters: Sequence[OriginalProperties]
) -> dict[str, Any]:
    match = _matched(_MYSQL, uri, name)
    sink: dict[str, Any] = {"url": f"mysql://{match[3]}"} | ({"user": match[1]} if match[1] else {})
    sink |= migration.secret("password", f"{name}.password", match[2] or "")
    appends = _chosen_by_all(parameters, name, "SyncMode", "LogAppend")
    for properties in parameters:
        mode = properties.get("PluginParam.SyncMode", "Normal")
        if mode in ("Normal", "LogAppend"):
            properties.carried("PluginParam.SyncMode")
        else:
            properties.not_carried(
                "PluginParam.SyncMode", remark=f"{mode}: the target is a mirror; see the step `soft_delete`"
            )
    return sink | ({"mode": "feed"} if appends else {"mode": "mirror", "take_over": True})


def _clickhouse(
    migration: Migration, name: str, uri: str, parameters: Sequence[OriginalProperties]
) -> dict[str, Any]:
    parts = urlsplit(uri)
    query = parse_qs(parts.query)
    user, password = (query.get(key, [""])[0] for key in ("username", "password"))
    # Bifrost uses ClickHouse's native protocol and the sink uses HTTP, so the port differs.
    sink: dict[str, Any] = {"url": f"http://{parts.hostname}:8123"} | ({"user": user} if user else {})
    sink |= migration.secret("password", f"{name}.password", password)
    for properties in parameters:
        properties.carried("PluginParam.SyncType")
    appends = _chosen_by_all(parameters, name, "SyncType", "insertAll")
    migration.report.steps.append(
        f"{name}: the sink uses ClickHouse's HTTP port. Check that 8123 is the port of {parts.hostname}."
    )
    return sink | {"write": "append" if appends else "mirror", "take_over": True}


def _kafka(
    migration: Migration, name: str, uri: str, parameters: Sequence[OriginalProperties]
) -> dict[str, Any]:
    brokers, _, options = uri.partition("?")
    sink: dict[str, Any] = {"servers": brokers.split("/")[0]}
    query = {key: values[0] for key, values in parse_qs(options).items()}
    if user := query.get("net.sasl.user"):
        mechanism = query.get("net.sasl.mechanism", "PLAIN").upper()
        sink |= {"user": user, "mechanism": mechanism}
        sink |= migration.secret("password", f"{name}.password", query.get("net.sasl.password", ""))
    if query.get("net.tls.enabled", "").lower() == "true":
        sink["tls"] = True
    first = parameters[0]
    sink["topic"] = _template(first, "Topic", "{database}_{table}")
    _same(parameters, name, "Topic", "Key", "OtherObjectType")
    for properties in parameters:
        form = properties.get("PluginParam.OtherObjectType", "bifrost").lower()
        sink["format"] = "canal_flat" if form == "canal" else "json"
        if form == "canal":
            properties.carried("PluginParam.OtherObjectType")
        else:
            properties.changed(
                "PluginParam.OtherObjectType", remark="messages are Penstock's own JSON", attention=True
            )
        properties.carried("PluginParam.Topic")
        columns = _TAG.findall(properties.get("PluginParam.Key"))
        if columns and not set(columns) & set(_TAGS):
            sink["key"] = columns
            properties.changed(
                "PluginParam.Key", remark="sink.kafka.key: the columns as JSON", attention=True
            )
        elif properties.get("PluginParam.Key"):
            properties.not_carried("PluginParam.Key", remark="the key is the primary key")
    return sink


def _redis(
    migration: Migration, name: str, uri: str, parameters: Sequence[OriginalProperties]
) -> dict[str, Any]:
    match = _matched(_REDIS, uri, name)
    if "," in match[2]:
        raise OptionInvalid(
            f"{name}: the redis sink writes to one server, and {match[2]} are several",
            hint="Name one server in the export, or leave this target out of it",
        )
    sink: dict[str, Any] = {"url": f"redis://{match[2]}/{match[3] or 0}"}
    sink |= migration.secret("password", f"{name}.password", match[1] or "")
    _same(parameters, name, "KeyConfig", "ValConfig", "Type", "Expir", "DataType")
    first = parameters[0]
    sink["key"] = _template(first, "KeyConfig", "{database}:{table}")
    if first.get("PluginParam.Type").lower() == "list":
        sink |= {"write": "list", "push": "left"}
    if first.get("PluginParam.DataType", "string").lower() == "string" and first.get("PluginParam.ValConfig"):
        sink["value"] = _template(first, "ValConfig", "")
    if first.get("PluginParam.Expir") not in ("", "0"):
        sink["expire"] = f"{first.get('PluginParam.Expir')}s"
    for properties in parameters:
        properties.carried(
            *(f"PluginParam.{option}" for option in ("KeyConfig", "ValConfig", "Type", "Expir", "DataType"))
        )
    return sink


def _elasticsearch(
    migration: Migration, name: str, uri: str, parameters: Sequence[OriginalProperties]
) -> dict[str, Any]:
    address, _, options = uri.partition("?")
    query = {key: values[0] for key, values in parse_qs(options).items()}
    sink: dict[str, Any] = {"url": address} | ({"user": query["user"]} if query.get("user") else {})
    sink |= migration.secret("password", f"{name}.password", query.get("password", ""))
    _same(parameters, name, "EsIndexName")
    sink["index"] = _template(parameters[0], "EsIndexName", "{database}.{table}")
    for properties in parameters:
        properties.carried("PluginParam.EsIndexName")
    return sink


def _http(
    migration: Migration, name: str, uri: str, parameters: Sequence[OriginalProperties]
) -> dict[str, Any]:
    match = _matched(_HTTP, uri, name)
    sink: dict[str, Any] = {"url": match[3], "body": "each"} | ({"user": match[1]} if match[1] else {})
    sink |= migration.secret("password", f"{name}.password", match[2] or "")
    for properties in parameters:
        properties.carried("PluginParam.Timeout")
    if timeout := parameters[0].get("PluginParam.Timeout"):
        sink["timeout"] = f"{timeout}s"
    migration.report.steps.append(f"{name}: requests have Penstock's own JSON, and not Bifrost's.")
    return sink


_SINKS: dict[str, Callable[[Migration, str, str, Sequence[OriginalProperties]], dict[str, Any]]] = {
    "mysql": _mysql,
    "clickhouse": _clickhouse,
    "kafka": _kafka,
    "redis": _redis,
    "elasticsearch": _elasticsearch,
    "http": _http,
}


def _matched(expression: re.Pattern[str], uri: str, name: str) -> re.Match[str]:
    match = expression.match(uri)
    if match is None:
        # The address may hold a password, so it is not shown.
        raise OptionInvalid(
            f"{name}: ConnUri is not an address of its plugin", hint="Check the target in Bifrost"
        )
    return match


def _same(parameters: Sequence[OriginalProperties], name: str, *options: str) -> None:
    """Refuse tables of one target with different parameters, because one sink cannot have both."""
    for option in options:
        if len({properties.get(f"PluginParam.{option}") for properties in parameters}) > 1:
            raise _different_values(name, option)


def _chosen_by_all(parameters: Sequence[OriginalProperties], name: str, option: str, value: str) -> bool:
    """Return whether an option has this value for all tables of a target. Raises OptionInvalid if it has the
    value for only some.
    """
    choices = {properties.get(f"PluginParam.{option}") == value for properties in parameters}
    if len(choices) > 1:
        raise _different_values(name, option)
    return choices == {True}


def _different_values(name: str, option: str) -> OptionInvalid:
    return OptionInvalid(
        f"{name}: its tables have different values of {option}",
        hint="Give each value a target of its own in Bifrost, and export again",
    )


def _template(properties: OriginalProperties, option: str, default: str) -> str:
    """Return a template with Bifrost's tags as placeholders. Raises OptionInvalid for a tag without a
    placeholder.
    """
    text = properties.get(f"PluginParam.{option}")
    if not text:
        return default
    pieces = []
    for index, piece in enumerate(_TAG.split(text)):
        if index % 2 == 0:
            pieces.append(piece.replace("{", "{{").replace("}", "}}"))
        elif piece in _TAGS:
            pieces.append(_TAGS[piece])
        elif re.fullmatch(r"\w+", piece) and not re.match(r"(Bifrost|Binlog)|(Timestamp|GTID)$", piece):
            pieces.append(f"{{{piece}}}")
        else:
            raise OptionInvalid(
                f"{properties.location}: {option} has the tag {json.dumps(piece)}, which has no placeholder",
                hint="Change it in Bifrost, and export again",
            )
    return "".join(pieces)
