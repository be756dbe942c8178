# SPDX-License-Identifier: Apache-2.0
"""Looks up in a schema registry the schema ids that messages contain.

Each id is requested once per process.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from penstock.changes import Target
from penstock.model import Secret
from penstock.sinks.kafka.avro_schemas import avro_schema
from penstock.sinks.kafka.connect_schemas import row_schemas
from penstock.sinks.kafka.protobuf_schemas import message_name, protobuf_schema
from penstock.sinks.kafka.registry import Registry, RegistryClient, SchemaKind
from penstock.sinks.messages import DebeziumForms


class RegisteredSchemas:
    """The schemas of a sink's messages. Its methods propagate errors from `RegistryClient`."""

    def __init__(
        self, registry: Registry, password: Secret | None, forms: DebeziumForms | None, kind: SchemaKind
    ) -> None:
        self._registry = registry
        self._kind: SchemaKind = kind
        self._client = RegistryClient(registry, password)
        self._forms = forms
        # The ids of the schemas of messages and keys, by target, instance and topic.
        self._of_rows: dict[tuple[Target, str, str | None], tuple[int, int]] = {}
        # Other schemas with their ids: the last schema of each topic, part and name.
        self._of_records: dict[tuple[str, str, str], tuple[Mapping[str, Any], int]] = {}

    def check(self) -> None:
        """Raise Penstock errors if the registry cannot be used."""
        self._client.check(self._kind)

    def of_rows(
        self, target: Target, instance: str, key: Sequence[str], topic: str | None
    ) -> tuple[int, int]:
        """Return the ids of the schemas of a target's messages and keys."""
        if (target, instance, topic) not in self._of_rows:
            value, key_schema = row_schemas(target, instance, tuple(key), self._forms)
            # Messages without a key have no key schema.
            key_id = 0
            value_id = self._id_of(topic, "value", value)
            if key_schema is not None:
                key_id = self._id_of(topic, "key", key_schema)
            self._of_rows[target, instance, topic] = value_id, key_id
        return self._of_rows[target, instance, topic]

    def of_record(self, topic: str, part: Literal["key", "value"], schema: Mapping[str, Any]) -> int:
        """Return the id of a Kafka Connect schema."""
        key = topic, part, schema["name"]
        known = self._of_records.get(key)
        # Most records share one schema object. Comparing the objects is cheaper than comparing their fields.
        if known is None or not (known[0] is schema or known[0] == schema):
            known = self._of_records[key] = schema, self._id_of(topic, part, schema)
        return known[1]

    def _id_of(self, topic: str | None, part: Literal["key", "value"], schema: Mapping[str, Any]) -> int:
        subject = self._registry.subject(topic, message_name(schema), part)
        if self._kind == "PROTOBUF":
            text = protobuf_schema(schema, self._registry.nullables)
        else:
            text = json.dumps(avro_schema(schema), separators=(",", ":"))
        return self._client.schema_id(subject, text, self._kind)
