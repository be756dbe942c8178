# SPDX-License-Identifier: Apache-2.0
"""Encodes values of Kafka Connect schemas as messages in JSON, Avro or protobuf.

Meant for the few messages that do not carry rows. Supports only the types that occur in `connect_schemas` and
in a source block: structs, arrays, strings, integers, booleans.
"""

import json
from collections.abc import Mapping
from typing import Any

from penstock.protobuf import encode

# The first byte of a message whose schema is in a registry, and the index of a message's type in its schema.
_MAGIC = _FIRST_TYPE = b"\0"


def in_json(value: Any, schema: Mapping[str, Any] | None = None) -> bytes:
    """Return a value as JSON, with its schema if there is one."""
    document = value if schema is None else {"schema": schema, "payload": value}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def in_avro(value: Any, schema: Mapping[str, Any], schema_id: int) -> bytes:
    """Return a value in Avro's binary encoding, with the prefix that schema registries require."""
    return _MAGIC + schema_id.to_bytes(4, "big") + _avro(value, schema)


def in_protobuf(value: Any, schema: Mapping[str, Any], schema_id: int) -> bytes:
    """Return a value in protobuf, with the prefix that schema registries require. The message has the first
    type of the schema.
    """
    return _MAGIC + schema_id.to_bytes(4, "big") + _FIRST_TYPE + _protobuf(value, schema)


def _protobuf(value: Mapping[str, Any], schema: Mapping[str, Any]) -> bytes:
    """Return the fields of a struct, numbered from 1, without null fields."""
    fields: list[tuple[int, Any]] = []
    for number, field in enumerate(schema["fields"], 1):
        own = value[field["field"]]
        is_array = field["type"] == "array"
        of_item = field["items"] if is_array else field
        items = (own or ()) if is_array else () if own is None else (own,)
        is_struct = of_item["type"] == "struct"
        fields += [(number, _protobuf(item, of_item) if is_struct else item) for item in items]
    return encode(*fields)


def _avro(value: Any, schema: Mapping[str, Any]) -> bytes:
    if not schema["optional"]:
        return _avro_present(value, schema)
    # A union: null is its second branch if the schema has a default, as in `avro_schemas`.
    has_default = "default" in schema
    if value is None:
        return _long(int(has_default))
    return _long(int(not has_default)) + _avro_present(value, schema)


def _avro_present(value: Any, schema: Mapping[str, Any]) -> bytes:
    match schema["type"]:
        case "struct":
            return b"".join(_avro(value[field["field"]], field) for field in schema["fields"])
        case "array":
            items = b"".join(_avro(item, schema["items"]) for item in value)
            return (_long(len(value)) + items if value else b"") + _long(0)
        case "string":
            encoded = value.encode()
            return _long(len(encoded)) + bytes(encoded)
        case "boolean":
            return bytes([value])
    assert schema["type"] in ("int16", "int32", "int64"), "these messages have no other types"
    return _long(value)


def _long(value: int) -> bytes:
    """Return an integer as a zigzag varint: seven bits per byte, lowest first."""
    zigzag = value << 1 ^ value >> 63
    written = bytearray()
    while zigzag > 0x7F:
        written.append(zigzag & 0x7F | 0x80)
        zigzag >>= 7
    written.append(zigzag)
    return bytes(written)
