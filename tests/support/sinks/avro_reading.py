# SPDX-License-Identifier: Apache-2.0
"""Reads Avro's binary encoding by a schema, independently of the code that writes it.

Source of facts: Avro's specification, "Binary Encoding".
"""

import struct
from collections.abc import Mapping
from typing import Any


def record_of(message: bytes, schema: Any) -> tuple[int, Any]:
    """Return the schema id and the record of a message in a schema registry's wire format. All bytes must be
    read.
    """
    magic, schema_id = struct.unpack_from(">bI", message)
    assert magic == 0
    reader = _Reader(message[5:])
    reader.define(schema, "")
    record = reader.value(schema, "")
    assert reader.rest == b""
    return schema_id, record


class _Reader:
    def __init__(self, rest: bytes) -> None:
        self.rest = rest
        self._defined: dict[str, Any] = {}

    def define(self, schema: Any, namespace: str) -> None:
        """Collect the records of a schema by their names, because bytes may refer to any of them."""
        match schema:
            case list():
                for branch in schema:
                    self.define(branch, namespace)
            case {"type": "array", "items": items}:
                self.define(items, namespace)
            case {"type": "record", "name": name, "fields": fields}:
                namespace = schema.get("namespace", namespace)
                self._defined[f"{namespace}.{name}"] = {**schema, "namespace": namespace}
                for field in fields:
                    self.define(field["type"], namespace)

    def value(self, schema: Any, namespace: str) -> Any:
        if isinstance(schema, list):
            return self.value(schema[self._long()], namespace)
        name = schema if isinstance(schema, str) else schema["type"]
        match name:
            case "null":
                return None
            case "boolean":
                return self._take(1) == b"\1"
            case "int" | "long":
                return self._long()
            case "float":
                return struct.unpack("<f", self._take(4))[0]
            case "double":
                return struct.unpack("<d", self._take(8))[0]
            case "bytes":
                return self._take(self._long())
            case "string":
                return self._take(self._long()).decode()
            case "array":
                return self._items(schema["items"], namespace)
            case "record":
                return self._record(schema, namespace)
        return self._record(self._defined[name if "." in name else f"{namespace}.{name}"], namespace)

    def _record(self, schema: Mapping[str, Any], enclosing: str) -> dict[str, Any]:
        namespace = schema.get("namespace", enclosing)
        return {field["name"]: self.value(field["type"], namespace) for field in schema["fields"]}

    def _items(self, schema: Any, namespace: str) -> list[Any]:
        items = []
        while (count := self._long()) != 0:
            items += [self.value(schema, namespace) for _ in range(count)]
        return items

    def _long(self) -> int:
        zigzag = shift = 0
        while True:
            (byte,) = self._take(1)
            zigzag |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return zigzag >> 1 ^ -(zigzag & 1)

    def _take(self, length: int) -> bytes:
        taken, self.rest = self.rest[:length], self.rest[length:]
        assert len(taken) == length
        return taken
