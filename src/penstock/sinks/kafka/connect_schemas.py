# SPDX-License-Identifier: Apache-2.0
"""The Kafka Connect schemas, as parsed JSON, of Debezium messages that do not carry rows.

Source: Debezium's `SchemaFactory` and `ConnectTableChangeSerializer`, version 3.
"""

import json
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

from penstock import _native
from penstock.changes import Target
from penstock.sinks.messages import DebeziumForms

Schema = dict[str, Any]


def _field(name: str, shape: str, *, optional: bool = False) -> Schema:
    return {"type": shape, "optional": optional, "field": name}


def _struct(name: str, *fields: Schema, optional: bool = False) -> Schema:
    versioned = {"version": 1}
    return {"type": "struct", "fields": list(fields), "optional": optional, "name": name} | versioned


def _array(items: Schema, *, optional: bool = False) -> Schema:
    return {"type": "array", "items": items, "optional": optional}


_TEXT: Schema = {"type": "string", "optional": False}
_COMMON = "io.debezium.connector.common"

HEARTBEAT_KEY = _struct(f"{_COMMON}.ServerNameKey", _field("serverName", "string"))
HEARTBEAT_VALUE = _struct(f"{_COMMON}.Heartbeat", _field("ts_ms", "int64"))

TRANSACTION_KEY = _struct(f"{_COMMON}.TransactionMetadataKey", _field("id", "string"))
TRANSACTION_VALUE = _struct(
    f"{_COMMON}.TransactionMetadataValue",
    _field("status", "string"),
    _field("id", "string"),
    _field("event_count", "int64", optional=True),
    _array(
        _struct(
            "event.collection",
            _field("data_collection", "string"),
            _field("event_count", "int64"),
            optional=True,
        ),
        optional=True,
    )
    | {"field": "data_collections"},
    _field("ts_ms", "int64"),
)

_COLUMN = _struct(
    "io.debezium.connector.schema.Column",
    _field("name", "string"),
    _field("jdbcType", "int32"),
    _field("nativeType", "int32", optional=True),
    _field("typeName", "string"),
    _field("typeExpression", "string", optional=True),
    _field("charsetName", "string", optional=True),
    _field("length", "int32", optional=True),
    _field("scale", "int32", optional=True),
    _field("position", "int32"),
    _field("optional", "boolean", optional=True),
    _field("autoIncremented", "boolean", optional=True),
    _field("generated", "boolean", optional=True),
    _field("comment", "string", optional=True),
    _field("defaultValueExpression", "string", optional=True),
    _array(_TEXT, optional=True) | {"field": "enumValues"},
)
_TABLE = _struct(
    "io.debezium.connector.schema.Table",
    _field("defaultCharsetName", "string", optional=True),
    _array(_TEXT, optional=True) | {"field": "primaryKeyColumnNames"},
    _array(_COLUMN) | {"field": "columns"},
    _field("comment", "string", optional=True),
    optional=True,
)
_CHANGE = _struct(
    "io.debezium.connector.schema.Change",
    _field("type", "string"),
    _field("id", "string"),
    _TABLE | {"field": "table"},
)

STATEMENT_KEY = _struct("io.debezium.connector.mysql.SchemaChangeKey", _field("databaseName", "string"))


@cache
def statement_value() -> Schema:
    """Return the schema of messages about statements. Its source block is the same as that of rows."""
    rows = json.loads(
        _native.debezium_schemas([("id", "int", None, False)], instance="", database="", table="", key=())[0]
    )
    return _struct(
        "io.debezium.connector.mysql.SchemaChangeValue",
        field_of(rows, "source"),
        _field("ts_ms", "int64"),
        _field("databaseName", "string", optional=True),
        _field("schemaName", "string", optional=True),
        _field("ddl", "string", optional=True),
        _array(_CHANGE) | {"field": "tableChanges"},
    )


@lru_cache
def row_schemas(
    target: Target, instance: str, key: tuple[str, ...], forms: DebeziumForms | None
) -> tuple[Schema, Schema | None]:
    """Return the schemas of a target's messages and of their keys; None for messages without keys.

    `instance` is the name of the cluster, which becomes the prefix of schema names. Callers must not modify
    the schemas. Raises the kernel's errors: OptionInvalid for an unknown column, SchemaInvalid.
    """
    value, key_schema = _native.debezium_schemas(
        target.declared,
        instance=instance,
        database=target.name.database,
        table=target.name.table,
        key=key,
        mariadb=target.mariadb,
        debezium=[] if forms is None else forms.options(),
    )
    return json.loads(value), None if key_schema is None else json.loads(key_schema)


def field_of(schema: Mapping[str, Any], name: str) -> Schema:
    """Return a field of a struct."""
    return next(dict(field) for field in schema["fields"] if field["field"] == name)
