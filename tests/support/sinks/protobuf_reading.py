# SPDX-License-Identifier: Apache-2.0
"""Reads protobuf messages with Google's library, using a schema given as text.

The schemas are those of Kafka Connect's structs: messages with fields, and messages within messages.
"""

import re
import struct
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

DECIMAL = """syntax = "proto3";
package confluent.type;
message Decimal {
  bytes value = 1;
  uint32 precision = 2;
  int32 scale = 3;
}
"""

_FIELD = re.compile(r"(?:(optional|repeated) )?([\w.]+) (\w+) = (\d+)(?: \[.*\])?;")
_SCALARS = {
    name: getattr(FieldDescriptor, f"TYPE_{name.upper()}")
    for name in ("bool", "int32", "uint32", "int64", "float", "double", "bytes", "string")
}


def record_of(message: bytes, schema: str) -> tuple[int, Any]:
    """Return the schema id of a message in a schema registry's wire format, and its fields without nulls."""
    magic, schema_id, place = struct.unpack_from(">bIb", message)
    assert (magic, place) == (0, 0)
    parsed = class_of(schema).FromString(message[6:])
    assert len(UnknownFieldSet(parsed)) == 0
    return schema_id, plain(parsed)


def class_of(schema: str) -> type[Message]:
    """Return the class of the first message of a schema."""
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file_of("confluent/type/decimal.proto", DECIMAL))
    file = file_of("schema.proto", schema)
    pool.Add(file)
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName(f"{file.package}.{file.message_type[0].name}")
    )


def file_of(name: str, schema: str) -> descriptor_pb2.FileDescriptorProto:
    """Return the text of a schema as a descriptor."""
    file = descriptor_pb2.FileDescriptorProto(name=name, syntax="proto3")
    open_messages: list[Any] = []
    for line in map(str.strip, schema.splitlines()):
        if line.startswith("package "):
            file.package = line.removeprefix("package ").rstrip(";")
        elif line.startswith("import ") and "meta" not in line:
            file.dependency.append(line.split('"')[1])
        elif line.startswith("message "):
            parent = open_messages[-1].nested_type if open_messages else file.message_type
            open_messages.append(parent.add(name=line.split()[1]))
        elif line == "}":
            open_messages.pop()
        elif match := _FIELD.fullmatch(line):
            _add_field(open_messages, *match.groups())
        else:
            assert not line or line.startswith(("syntax", "import")), line
    return file


def _add_field(open_messages: list[Any], label: str | None, kind: str, name: str, number: str) -> None:
    message = open_messages[-1]
    field = message.field.add(name=name, number=int(number))
    field.label = field.LABEL_REPEATED if label == "repeated" else field.LABEL_OPTIONAL
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type_name = kind
        field.type = FieldDescriptor.TYPE_MESSAGE
    if label == "optional":
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def plain(message: Message) -> dict[str, Any]:
    """Return the fields of a message that are set, and the fields that do not track presence."""
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        is_message = field.type == FieldDescriptor.TYPE_MESSAGE
        if field.is_repeated:
            fields[field.name] = [plain(item) if is_message else item for item in value]
        elif not field.has_presence or message.HasField(field.name):
            fields[field.name] = plain(value) if is_message else value
    return fields
