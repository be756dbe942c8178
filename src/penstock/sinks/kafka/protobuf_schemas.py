# SPDX-License-Identifier: Apache-2.0
"""The protobuf schemas of Debezium's messages, made from their Kafka Connect schemas.

Packages, messages, field numbers and types are the same as in the output of Confluent's `ProtobufData`.
Characters that protobuf does not allow in names become underscores, as in `avro_schemas`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from penstock.errors import OptionInvalid
from penstock.sinks.kafka.avro_schemas import valid_name

# Whether a nullable field has the label `optional`; otherwise it looks like a required field.
Nullables = Literal["optional", "plain"]

_TYPES = {
    "boolean": "bool",
    "int16": "int32",
    "int32": "int32",
    "int64": "int64",
    "float": "float",
    "double": "double",
    "bytes": "bytes",
    "string": "string",
}
_DECIMAL = "org.apache.kafka.connect.data.Decimal"
_DECIMAL_TYPE, _DECIMAL_FILE = "confluent.type.Decimal", "confluent/type/decimal.proto"
_META, _META_FILE = "confluent.field_meta", "confluent/meta.proto"
# The names that the two files above define in Confluent's package. Generated packages must not use these
# names.
_CONFLUENT = "confluent"
_CONFLUENT_NAMES = frozenset(
    f"{_CONFLUENT}.{name}"
    for name in (
        *("Meta", "Rule", "type.Decimal"),
        *(f"{kind}_meta" for kind in ("file", "message", "field", "enum", "enum_value")),
    )
)


def protobuf_schema(connect: Mapping[str, Any], nullables: Nullables) -> str:
    """Return the schema of a Kafka Connect struct, given as parsed JSON.

    Raises OptionInvalid if two fields get the same name, or the package has the name of one of Confluent's
    messages.
    """
    package, _, name = message_name(connect).rpartition(".")
    text = "\n".join(_message(name, connect, nullables, 0))
    known = ((_META_FILE, _META), (_DECIMAL_FILE, _DECIMAL_TYPE))
    used = [file for file, name in known if name in text]
    if used:
        _refuse_confluents_names(package)
    if _CONFLUENT in package.split(".")[1:]:
        # Without the leading dot, compilers would search an inner package of this name, such as that of a
        # database.
        text = text.replace(f"{_CONFLUENT}.", f".{_CONFLUENT}.")
    head = ['syntax = "proto3";', f"package {package};", "", *(f'import "{file}";' for file in used)]
    return "\n".join([*head, *([""] if used else []), text, ""])


def message_name(connect: Mapping[str, Any]) -> str:
    """Return the full name of a struct's message."""
    return ".".join(valid_name(part) for part in connect["name"].split("."))


def _message(name: str, connect: Mapping[str, Any], nullables: Nullables, depth: int) -> Iterator[str]:
    indent = "  " * depth
    nested: dict[str, Mapping[str, Any]] = {}
    yield f"{indent}message {name} {{"
    names = [valid_name(field["field"]) for field in connect["fields"]]
    _refuse_equal_names(name, names)
    for number, (field_name, field) in enumerate(zip(names, connect["fields"], strict=True), 1):
        is_array = field["type"] == "array"
        item = field["items"] if is_array else field
        label = "repeated " if is_array else ""
        if not is_array and nullables == "optional" and field["optional"]:
            label = "optional "
        if item["type"] == "struct":
            kind = message_name(item).rpartition(".")[2]
            # A nested message and a field of the same message cannot have the same name.
            kind += "Message" if kind == field_name else ""
            nested[kind] = item
        else:
            kind = _DECIMAL_TYPE if item.get("name") == _DECIMAL else _TYPES[item["type"]]
        yield f"{indent}  {label}{kind} {field_name} = {number}{_parameters(item)};"
    for kind, item in nested.items():
        yield from _message(kind, item, nullables, depth + 1)
    yield f"{indent}}}"


def _parameters(connect: Mapping[str, Any]) -> str:
    """Return the details that protobuf's own types do not express, as an option of the field."""
    parameters: dict[str, str] = {}
    if connect.get("name") == _DECIMAL:
        own = connect["parameters"]
        parameters = {"precision": own["connect.decimal.precision"], "scale": own["scale"]}
    elif connect["type"] == "int16":
        parameters = {"connect.type": "int16"}
    if not parameters:
        return ""
    pairs = ", ".join(f'{{key: "{key}", value: "{value}"}}' for key, value in parameters.items())
    return f" [({_META}) = {{params: [{pairs}]}}]"


def _refuse_confluents_names(package: str) -> None:
    if taken := sorted(name for name in _CONFLUENT_NAMES if f"{package}.".startswith(f"{name}.")):
        raise OptionInvalid(
            f"the package {package} of a table's messages is impossible in protobuf: Confluent's schemas"
            f" define {taken[0]}",
            hint="Name the instance other than `confluent`, or take the format debezium_avro",
        )


def _refuse_equal_names(message: str, names: Sequence[str]) -> None:
    if equal := sorted(name for name, count in Counter(names).items() if count > 1):
        raise OptionInvalid(
            f"the message {message} would have several fields {equal[0]!r}: names in protobuf have only ASCII"
            " letters, digits and underscores",
            hint="Rename one of the columns with a `map` step, or take the format debezium_schema",
        )
