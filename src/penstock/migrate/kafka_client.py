# SPDX-License-Identifier: Apache-2.0
"""Translates options of Kafka's Java clients into settings of the kafka sink.

The names are from Kafka's producer configuration (kafka.apache.org/documentation, "Producer Configs"). Each
of the systems that are migrated adds its own prefix to them.
"""

import re
from typing import Any

from penstock.migrate.output import Migration
from penstock.migrate.report import OriginalProperties, Rule, carried, missing, needless

_JAAS = re.compile(r"""\b(username|password)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([^\s;"']+))""")
_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
# Options with the same name in the Java client and in librdkafka.
_SAME_NAMES = ("linger.ms", "batch.size", "client.id", "metadata.max.age.ms", "request.timeout.ms")

PRODUCER_OPTIONS: dict[str, Rule] = {
    "bootstrap.servers": carried("sink.kafka.servers"),
    "compression.type": carried("sink.kafka.compression"),
    "max.request.size": carried("sink.kafka.options: message.max.bytes"),
    **{name: carried(f"sink.kafka.options: {name}") for name in _SAME_NAMES},
    "acks": needless("every batch is written with acks=all"),
    "retries": needless("every batch is retried, see errors.retry_for"),
    "enable.idempotence": needless("the producer is always idempotent"),
    "max.in.flight.requests.per.connection": needless("the idempotent producer keeps the order"),
    "buffer.memory": needless("memory is bounded by batch.bytes"),
    "max.block.ms": needless("see errors.retry_for"),
    "delivery.timeout.ms": needless("see errors.retry_for"),
    "key.serializer": needless("the sink serializes messages itself"),
    "value.serializer": needless("the sink serializes messages itself"),
    "security.protocol": carried("sink.kafka.tls, user"),
    "sasl.mechanism": carried("sink.kafka.mechanism"),
    "sasl.jaas.config": carried("sink.kafka.user and password_file"),
    "ssl.truststore.*": missing("write the authorities to a PEM file, and set sink.kafka.ca"),
    "ssl.keystore.*": missing("set ssl.certificate.location and ssl.key.location under sink.kafka.options"),
    "ssl.key.*": missing("set ssl.key.location under sink.kafka.options"),
    "ssl.endpoint.identification.algorithm": missing(
        "set it under sink.kafka.options if it is empty on purpose", "https"
    ),
    "kerberos.enable": missing("the kafka sink has PLAIN and SCRAM", "false"),
    "kerberos.krb5.file": needless("only for Kerberos"),
    "kerberos.jaas.file": needless("only for Kerberos"),
}


def options_below(prefix: str) -> dict[str, Rule]:
    """Return the rules for a producer's options with a prefix. Options without a rule of their own are not
    carried.
    """
    rules = {f"{prefix}{name}": rule for name, rule in PRODUCER_OPTIONS.items()}
    return rules | {f"{prefix}*": missing("an option of Kafka's Java client that librdkafka may not have")}


def kafka_settings(
    migration: Migration, properties: OriginalProperties, prefix: str, secret_name: str
) -> dict[str, Any]:
    """Return the cluster's part of a kafka sink's settings, and account for the options used."""

    def value_of(name: str) -> str:
        return properties.get(prefix + name)

    settings: dict[str, Any] = {"servers": value_of("bootstrap.servers")}
    properties.carried(f"{prefix}bootstrap.servers")
    compression = value_of("compression.type").lower()
    if compression in ("none", "gzip", "snappy", "lz4", "zstd"):
        settings["compression"] = compression
        properties.carried(f"{prefix}compression.type")
    options = {name: value_of(name) for name in _SAME_NAMES if value_of(name)}
    if value_of("max.request.size"):
        options["message.max.bytes"] = value_of("max.request.size")
    properties.carried(f"{prefix}max.request.size", *(prefix + name for name in options))
    if options:
        settings["options"] = options
    return settings | _security(migration, properties, prefix, secret_name)


def _security(
    migration: Migration, properties: OriginalProperties, prefix: str, secret_name: str
) -> dict[str, Any]:
    protocol = properties.get(f"{prefix}security.protocol").upper()
    if not protocol:
        return {}
    settings: dict[str, Any] = {"tls": True} if protocol.endswith("SSL") else {}
    properties.carried(f"{prefix}security.protocol")
    if not protocol.startswith("SASL_"):
        return settings
    mechanism = properties.get(f"{prefix}sasl.mechanism", "GSSAPI").upper()
    if mechanism not in _MECHANISMS:
        remark = f"the kafka sink has {', '.join(_MECHANISMS)}"
        properties.not_carried(f"{prefix}sasl.mechanism", f"{prefix}sasl.jaas.config", remark=remark)
        return settings
    account = {
        match[1]: next(text for text in match.groups()[1:] if text is not None)
        for match in _JAAS.finditer(properties.get(f"{prefix}sasl.jaas.config"))
    }
    settings |= {"mechanism": mechanism}
    properties.carried(f"{prefix}sasl.mechanism")
    if "username" in account:
        settings["user"] = account["username"]
        settings |= migration.secret("password", secret_name, account.get("password", ""))
        properties.carried(f"{prefix}sasl.jaas.config")
    else:
        properties.not_carried(
            f"{prefix}sasl.jaas.config", remark="it has no username: set sink.kafka.user and password_file"
        )
    return settings
