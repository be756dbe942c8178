# SPDX-License-Identifier: Apache-2.0
"""Ptubes' protobuf messages, transcribed from the message description for the `protobuf` package.

This module shares no code with the product, so if both agree, the description is correct.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "com.meituan.ptubes.sdk.protocol"

_ENUMS = {
    "MessageType": "COMPAT PARTITIONEDMESSAGE MESSAGE ERROR",
    "EventType": "COMPAT INSERT UPDATE DELETE CREATE ALTER ERASE QUERY TRUNCATE RENAME CINDEX DINDEX GTID"
    " XACOMMIT XAROLLBACK TRANSACTIONBEGIN TRANSACTIONEND HEARTBEAT",
    "SourceType": "COMPAT MYSQL",
    "PositionType": "COMPAT GTIDOFFSET BINLOGOFFSET TIMESTAMP",
}

# A field is "number name type". * after the number puts it into its own oneof, + repeats it, and
# map<key,value> is a map.
_MESSAGES = {
    "Pair": "1 key string;2 value string",
    "Checkpoint": "1 uuid string;2 transactionId int64;3 eventIndex int64;4 serverId int32;"
    "5 binlogFile int32;6 binlogOffset int64;7 timestamp int64;8* positionType .PositionType;"
    "9 versionTs int64",
    "Column": "1 index int32;2 sqlType int32;3 name string;4 isKey bool;5 updated bool;6* isNull bool;"
    "7+ props .Pair;8 value string;9 length int32;10 mysqlType string",
    "RowData": "1 beforeColumns map<string,.Column>;2 afterColumns map<string,.Column>;3+ props .Pair",
    "RdsHeader": "1* version int32;2 checkpoint .Checkpoint;3 encode string;4 executeTime int64;"
    "5* sourceType .SourceType;6 tableName string;7 tableId int64;8 partitionKey string;9+ props .Pair;"
    "10 primaryKey string",
    "RdsEvent": "1 header .RdsHeader;2* isDdl bool;3* eventType .EventType;4 rowData .RowData;5+ props .Pair;"
    "6 ddlSchemaName string;7 sql string;8 comment string",
    "RdsMessage": "1 messageCount int32;2 messageSize int64;3+ messages bytes;4+ props .Pair",
    "RdsPartitionedMessage": "1 partitionMessages map<int32,.RdsMessage>;2+ props .Pair",
    "RdsEnvelope": "1* version int32;2* messageType .MessageType;3 message bytes;4* error_code int32;"
    "5 error_message string;6 totalEventCount int64;7+ props .Pair;8 latestCheckpoint .Checkpoint",
}


def _described() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="rds_packet.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        # The value names of proto3 enums are scoped to the file, so each enum is nested in its own message.
        holder = file.message_type.add(name=f"{name}s")
        enum = holder.enum_type.add(name=name)
        for number, value in enumerate(values.split()):
            enum.value.add(name=value, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split(";"):
            _add_field(message, name, *field.split(" ", 2))
    return file


def _add_field(message: Any, owner: str, number: str, name: str, kind: str) -> None:
    field = message.field.add(name=name, number=int(number.strip("*+")), label=1)
    if number.endswith("*"):
        message.oneof_decl.add(name=f"{name}_present")
        field.oneof_index = len(message.oneof_decl) - 1
    if number.endswith("+"):
        field.label = 3
    if kind.startswith("map<"):
        key, value = kind[4:-1].split(",")
        entry_name = name[0].upper() + name[1:] + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        _set_kind(entry.field.add(name="key", number=1, label=1), key)
        _set_kind(entry.field.add(name="value", number=2, label=1), value)
        field.label = 3
        field.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{owner}.{entry_name}"
    else:
        _set_kind(field, kind)


def _set_kind(field: Any, kind: str) -> None:
    if not kind.startswith("."):
        field.type = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind.upper()}")
        return
    name = kind[1:]
    field.type_name = f".{_PACKAGE}.{name}s.{name}" if name in _ENUMS else f".{_PACKAGE}.{name}"
    if name in _ENUMS:
        field.type = descriptor_pb2.FieldDescriptorProto.TYPE_ENUM
    else:
        field.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_described())


def _class_of(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


Checkpoint = _class_of("Checkpoint")
RdsEvent = _class_of("RdsEvent")
RdsMessage = _class_of("RdsMessage")
RdsEnvelope = _class_of("RdsEnvelope")
RdsPartitionedMessage = _class_of("RdsPartitionedMessage")

EVENT_TYPES = _ENUMS["EventType"].split()
PARTITIONED, ERROR = 1, 3


def shards_of(envelope: Any) -> dict[int, list[Any]]:
    """Return the decoded events of each shard of an envelope, after checking its counts."""
    packet = RdsPartitionedMessage.FromString(envelope.message)
    events_by_shard = {}
    for shard, message in packet.partitionMessages.items():
        assert message.messageCount == len(message.messages)
        assert message.messageSize == sum(len(this_message) for this_message in message.messages)
        events_by_shard[shard] = [RdsEvent.FromString(this_message) for this_message in message.messages]
    assert envelope.totalEventCount == sum(len(events) for events in events_by_shard.values())
    return events_by_shard
