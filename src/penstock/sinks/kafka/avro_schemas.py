# SPDX-License-Identifier: Apache-2.0
"""The Avro schemas of Debezium's messages, made from their Kafka Connect schemas.

Types and properties are mapped in the same way as in Confluent's `AvroData` with default settings. Names are
adjusted in the same way as in the connector with `schema.name.adjustment.mode` and
`field.name.adjustment.mode` set to `avro`. A reader's schema that was generated from the connector's messages
can therefore also read these messages.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import OptionInvalid

_PRIMITIVES = {
    "boolean": "boolean",
    "int16": "int",
    "int32": "int",
    "int64": "long",
    "float": "float",
    "double": "double",
    "bytes": "bytes",
    "string": "string",
}
_DECIMAL = "org.apache.kafka.connect.data.Decimal"
_LOGICAL_TYPES = {
    _DECIMAL: "decimal",
    "org.apache.kafka.connect.data.Date": "date",
    "org.apache.kafka.connect.data.Time": "time-millis",
    "org.apache.kafka.connect.data.Timestamp": "timestamp-millis",
}
_NAME_LETTERS = re.compile(r"[^A-Za-z0-9_]")


def avro_schema(connect: Mapping[str, Any]) -> Any:
    """Return the Avro schema of a Kafka Connect schema. Both are parsed JSON.

    Raises OptionInvalid if two columns of a table get the same name.
    """
    return _Conversion().type_of(connect, namespace="")


class _Conversion:
    """Converts one schema, in which a record is defined once and then referred to by its name."""

    def __init__(self) -> None:
        self._defined: set[str] = set()

    def type_of(self, connect: Mapping[str, Any], namespace: str) -> Any:
        """Return the Avro type of a schema, as a union with null if the schema is optional. `namespace` is
        that of the enclosing record.
        """
        match connect["type"]:
            case "struct":
                own = self._record(connect, namespace)
            case "array":
                items = self.type_of(connect["items"], namespace)
                own = {"type": "array", "items": items} | _properties(connect)
            case name:
                own = _primitive(name, connect)
        if not connect["optional"]:
            return own
        # In Avro, the default of a field belongs to the first branch of its union.
        return [own, "null"] if "default" in connect else ["null", own]

    def _record(self, connect: Mapping[str, Any], enclosing: str) -> Any:
        full_name = ".".join(valid_name(part) for part in connect["name"].split("."))
        namespace, _, name = full_name.rpartition(".")
        if full_name in self._defined:
            return name if namespace == enclosing else full_name
        self._defined.add(full_name)
        fields = [self._field(field, namespace) for field in connect["fields"]]
        _refuse_equal_names(full_name, [field["name"] for field in fields])
        record: dict[str, Any] = {"type": "record", "name": name}
        if namespace != enclosing:
            record["namespace"] = namespace
        return record | {"fields": fields} | _properties({**connect, "name": full_name})

    def _field(self, connect: Mapping[str, Any], namespace: str) -> dict[str, Any]:
        field = {"name": valid_name(connect["field"]), "type": self.type_of(connect, namespace)}
        return field | ({"default": connect.get("default")} if connect["optional"] else {})


def _primitive(name: str, connect: Mapping[str, Any]) -> Any:
    own: dict[str, Any] = {"type": _PRIMITIVES[name]}
    semantic = connect.get("name")
    if semantic == _DECIMAL:
        parameters = connect["parameters"]
        own |= {
            "scale": int(parameters["scale"]),
            "precision": int(parameters["connect.decimal.precision"]),
        }
    own |= _properties(connect)
    if name == "int16":
        own["connect.type"] = name
    if semantic in _LOGICAL_TYPES:
        own["logicalType"] = _LOGICAL_TYPES[semantic]
    return own if len(own) > 1 else own["type"]


def _properties(connect: Mapping[str, Any]) -> dict[str, Any]:
    """Return the details that Avro's own types do not express, as properties that other readers ignore."""
    names = ("version", "parameters", "default", "name")
    return {f"connect.{name}": connect[name] for name in names if name in connect}


def valid_name(name: str) -> str:
    """Return a name for Avro: an underscore replaces each letter that Avro does not allow, and precedes a
    leading digit.
    """
    valid = _NAME_LETTERS.sub("_", name)
    return f"_{valid}" if not valid or valid[0].isdigit() else valid


def _refuse_equal_names(record: str, names: Sequence[str]) -> None:
    if equal := sorted(name for name, count in Counter(names).items() if count > 1):
        raise OptionInvalid(
            f"the record {record} would have several fields {equal[0]!r}: names in Avro have only ASCII"
            " letters, digits and underscores",
            hint="Rename one of the columns with a `map` step, or take the format debezium_schema",
        )
