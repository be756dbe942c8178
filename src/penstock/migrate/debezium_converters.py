# SPDX-License-Identifier: Apache-2.0
"""The converters of a connector's keys and messages: JSON, or Avro or protobuf with a schema registry.

The names are those of Kafka Connect's JsonConverter, and of Confluent's AvroConverter and ProtobufConverter
(docs.confluent.io, "Configure Key and Value Converters" and "Schema Registry Client Configuration").
"""

from typing import Any

from penstock.migrate.output import Migration
from penstock.migrate.report import OriginalProperties, Rule, carried, missing, needless

_JSON = "org.apache.kafka.connect.json.JsonConverter"
_PROTOBUF = "io.confluent.connect.protobuf.ProtobufConverter"
# The converters that use a registry, and the format that each of them writes.
_FORMATS = {"io.confluent.connect.avro.AvroConverter": "debezium_avro", _PROTOBUF: "debezium_protobuf"}
_STRATEGIES = {
    "io.confluent.kafka.serializers.subject.TopicNameStrategy": "topic",
    "io.confluent.kafka.serializers.subject.RecordNameStrategy": "record",
    "io.confluent.kafka.serializers.subject.TopicRecordNameStrategy": "topic_record",
}
_PARTS = ("key", "value")
_ADJUSTMENTS = ("schema.name.adjustment.mode", "field.name.adjustment.mode")
_URL, _ACCOUNT = "schema.registry.url", "basic.auth.user.info"
_STRATEGY, _REGISTER = "subject.name.strategy", "auto.register.schemas"
_OPTIONAL = "optional.for.nullables"


def _rules_of(part: str) -> dict[str, Rule]:
    rules = {
        "": carried("sink.kafka.format"),
        ".schemas.enable": carried("sink.kafka.format"),
        f".{_URL}": carried("sink.kafka.registry.url"),
        f".{_ACCOUNT}": carried("sink.kafka.registry.user and password_file"),
        ".basic.auth.credentials.source": carried("sink.kafka.registry.user"),
        f".{part}.{_STRATEGY}": carried("sink.kafka.registry.subjects"),
        f".{_REGISTER}": carried("sink.kafka.registry.auto_register"),
        ".enhanced.avro.schema.support": missing("schemas are those without it", "false"),
        ".enhanced.protobuf.schema.support": missing("schemas are those without it", "false"),
        f".{_OPTIONAL}": carried("sink.kafka.registry.nullables"),
        ".wrapper.for.nullables": missing("fields that may be null have no wrappers", "false"),
        ".schema.registry.ssl.*": missing("write the authorities to a PEM file, and set registry.ca"),
        ".schemas.cache.config": needless("a writer keeps the ids of all its schemas"),
        ".schemas.cache.size": needless("a writer keeps the ids of all its schemas"),
        ".*": missing(f"an option that the {part}s of Penstock's messages do not have"),
    }
    return {f"{part}.converter{name}": rule for name, rule in rules.items()}


CONVERTERS: dict[str, Rule] = _rules_of("key") | _rules_of("value")


def format_of(migration: Migration, properties: OriginalProperties) -> dict[str, Any]:
    """Return the format of the kafka sink, with the registry that it needs."""
    converters = {part: properties.get(f"{part}.converter") or _JSON for part in _PARTS}
    form = _FORMATS.get(converters["value"])
    if form and converters["key"] == converters["value"] and properties.get(f"value.converter.{_URL}"):
        properties.carried("key.converter", "value.converter")
        adjusted = [name for name in _ADJUSTMENTS if properties.get(name) == "avro"]
        properties.carried(*adjusted, remark="names in these formats are always adjusted in this way")
        return {"format": form, "registry": _registry(migration, properties)}
    for part, converter in converters.items():
        if converter == _JSON:
            properties.carried(f"{part}.converter")
        else:
            remark = (
                "keys and messages are JSON; in Avro or protobuf both need Confluent's converter and its"
                " registry"
            )
            properties.not_carried(f"{part}.converter", remark=remark)
    return {"format": _json_format(properties, set(converters.values()) == {_JSON})}


def _json_format(properties: OriginalProperties, is_json: bool) -> str:
    """Return the format of the JSON converter. The converter writes schemas unless they are switched off."""
    if "value.converter" not in properties:
        properties.remind(
            "The connector has no value.converter of its own. The messages are JSON with schemas; set"
            " sink.kafka.format to debezium if Kafka Connect's worker has schemas.enable=false."
        )
    schemas = {part: properties.flag(f"{part}.converter.schemas.enable", default=True) for part in _PARTS}
    properties.carried(*(f"{part}.converter.schemas.enable" for part in _PARTS))
    if is_json and schemas["key"] != schemas["value"]:
        properties.changed(
            "key.converter.schemas.enable",
            remark="keys have a schema if messages have one",
            attention=True,
        )
    return "debezium_schema" if schemas["value"] else "debezium"


def _registry(migration: Migration, properties: OriginalProperties) -> dict[str, Any]:
    """Return the sink's section `registry`, from the converter of the message values. Keys use the same
    registry.
    """
    urls = [url.strip() for url in properties.get(f"value.converter.{_URL}").split(",") if url.strip()]
    registry: dict[str, Any] = {"url": urls[0]}
    if len(urls) > 1:
        properties.changed(
            f"value.converter.{_URL}", remark="sink.kafka.registry.url has the first of them", attention=True
        )
    if properties.get(f"value.converter.{_ACCOUNT}"):
        user, _, password = properties.get(f"value.converter.{_ACCOUNT}").partition(":")
        registry["user"] = user
        registry |= migration.secret("password", "registry.password", password)
    strategy = properties.get(f"value.converter.value.{_STRATEGY}")
    if strategy in _STRATEGIES:
        registry["subjects"] = _STRATEGIES[strategy]
    if not properties.flag(f"value.converter.{_REGISTER}", default=True):
        registry["auto_register"] = False
    names = [_URL, _ACCOUNT, "basic.auth.credentials.source", _REGISTER]
    if properties.get("value.converter") == _PROTOBUF:
        registry["nullables"] = "optional" if properties.flag(f"value.converter.{_OPTIONAL}") else "plain"
        names.append(_OPTIONAL)
    properties.carried(*(f"value.converter.{name}" for name in names))
    if strategy in _STRATEGIES or not strategy:
        properties.carried(f"value.converter.value.{_STRATEGY}")
    else:
        properties.not_carried(f"value.converter.value.{_STRATEGY}", remark="a strategy of your own")
    for name in (*names, f"key.{_STRATEGY}"):
        same = f"value.converter.{name.replace('key.', 'value.')}"
        option = f"key.converter.{name}"
        if properties.get(option) == properties.get(same):
            properties.carried(option)
        else:
            properties.changed(option, remark=f"keys have what {same} says", attention=True)
    return registry
