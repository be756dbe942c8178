# SPDX-License-Identifier: Apache-2.0
"""Encodes changes as messages of a format such as Debezium's or Maxwell's, for sinks that deliver
messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow
import pyarrow.compute as pc
from pydantic import Field, model_validator

from penstock import _native
from penstock.changes import Changes, Origin, Target
from penstock.errors import OptionInvalid
from penstock.settings.values import Section
from penstock.sinks.images import refuse_partial
from penstock.sinks.template import column_texts

Format = Literal[
    "debezium",
    "debezium_schema",
    "debezium_avro",
    "debezium_protobuf",
    "maxwell",
    "canal_flat",
    "canal",
    "json",
]
FlatField = Literal[
    "op",
    "db",
    "table",
    "gtid",
    "file",
    "pos",
    "row",
    "server_id",
    "thread",
    "snapshot",
    "ts_ms",
    "ts_us",
    "ts_ns",
    "source.db",
    "source.table",
    "source.gtid",
    "source.file",
    "source.pos",
    "source.row",
    "source.server_id",
    "source.thread",
    "source.snapshot",
    "source.ts_ms",
    "source.ts_us",
    "source.ts_ns",
]

DELETE = 2


class DebeziumForms(Section):
    """The formats of values in Debezium messages. The options are those of the Debezium connector's handling
    modes.
    """

    decimal: Literal["precise", "double", "string"] = Field(
        default="precise", description="DECIMAL: bytes of the unscaled number, the nearest double, or digits"
    )
    time: Literal["adaptive", "adaptive_time_microseconds", "connect", "microseconds"] = Field(
        default="adaptive_time_microseconds",
        description="units of TIME and DATETIME; adaptive and connect refuse a TIME that is no time of day",
    )
    bigint_unsigned: Literal["long", "precise"] = Field(
        default="long", description="BIGINT UNSIGNED: a long, negative from 2^63 on, or bytes of a decimal"
    )
    binary: Literal["bytes", "base64", "base64-url-safe", "hex"] = Field(
        default="bytes", description="BINARY, VARBINARY and BLOB: bytes, or a string"
    )
    flat: bool = Field(
        default=False, description="true: the row alone, as ExtractNewRecordState writes it; no envelope"
    )
    fields: tuple[FlatField, ...] = Field(
        default=(), description="fields that flat rows have besides their columns; op becomes __op"
    )
    deletes: Literal["tombstone", "rewrite", "rewrite-with-tombstone", "drop"] | None = Field(
        default=None,
        description="what a delete becomes in flat rows: a tombstone (the default); the row before it, with"
        " __deleted; both; or nothing",
    )

    @model_validator(mode="after")
    def _flat_alone(self) -> "DebeziumForms":
        if not self.flat and (self.fields or self.deletes is not None):
            raise ValueError("fields and deletes are for flat rows: set flat: true")
        return self

    @property
    def rewrites_deletes(self) -> bool:
        """Whether a delete is a flat row with `__deleted`."""
        return self.deletes in ("rewrite", "rewrite-with-tombstone")

    def options(self) -> list[tuple[str, str]]:
        """Return the message options as pairs of name and value for the kernel."""
        names = ("decimal", "time", "bigint_unsigned", "binary")
        flat = [("flat", ",".join(self.fields)), ("deleted", str(self.rewrites_deletes).lower())]
        return [(name, getattr(self, name)) for name in names] + (flat if self.flat else [])


@dataclass(frozen=True)
class Messages:
    """Messages in the order of their changes, as arrays of equal length.

    `value` and `key` are bytes; `key` is null for messages without a key. `row` is the index of the last
    change in a message. `kind` is 0 for an insert, 1 for an update, 2 for a delete.
    """

    value: pyarrow.Array
    key: pyarrow.Array
    row: pyarrow.Array
    kind: pyarrow.Array

    def __len__(self) -> int:
        return len(self.value)


def key_of(target: Target, form: Format) -> tuple[str, ...]:
    """Return the columns that a dialect uses as the key of a table's rows.

    Without a primary key, Debezium uses the first unique key without nulls. The other dialects use none.
    """
    return target.row_key if form.startswith("debezium") else target.primary_key


def messages_of(
    changes: Changes,
    form: Format,
    key: Sequence[str] = (),
    *,
    lines: bool = False,
    debezium: DebeziumForms | None = None,
    schema_ids: tuple[int, int] | None = None,
    counts: tuple[int, int, int] | None = None,
) -> Messages:
    """Return the messages of changes, with the values of the columns `key` as their keys.

    With `lines` each message ends with a newline, except for Canal's packets. `schema_ids` are the ids of the
    schemas of messages and of keys, which the formats with a registry need. With `counts`, Debezium messages
    have a transaction block. `counts` consists of the commit version of the transaction that is already open,
    the number of its messages so far, and how many of these belong to this table. Raises the kernel's errors:
    OptionInvalid for an unknown column, SchemaInvalid for rows that do not have the target's columns.
    """
    target = changes.target
    primary_key = key_of(target, form)
    options = [] if debezium is None else debezium.options()
    if schema_ids is not None:
        options.append((form.removeprefix("debezium_"), ",".join(map(str, schema_ids))))
    if counts is not None:
        options.append(("transactions", ",".join(map(str, counts))))
    encoded = pyarrow.record_batch(
        _native.encode_changes(
            changes.rows,
            target.declared,
            dialect="debezium" if schema_ids is not None else form,
            database=target.name.database,
            table=target.name.table,
            primary_key=primary_key,
            key=key,
            mariadb=target.mariadb,
            snapshot=changes.origin is Origin.LOAD,
            lines=lines,
            debezium=options,
        )
    )
    return Messages(*(encoded.column(name) for name in ("value", "key", "row", "kind")))


def headers_of(changes: Changes, messages: Messages) -> list[list[tuple[str, str]]]:
    """Return the headers of each message: its table, its kind in one letter, and its GTID if there is one."""
    name = changes.source
    shared = [("__db", name.database), ("__table", name.table)]
    insert = "r" if changes.origin is Origin.LOAD else "c"
    operations = dict(zip(range(3), (insert, "u", "d"), strict=True))
    gtids = pc.struct_field(changes.rows.column("_metadata"), "gtid").take(messages.row).to_pylist()
    return [
        [*shared, ("__op", operations[kind]), *([("__gtid", gtid)] if gtid else [])]
        for kind, gtid in zip(messages.kind.to_pylist(), gtids, strict=True)
    ]


def queues_of_rows(changes: Changes, partition_by: Sequence[str], count: int) -> pyarrow.Array:
    """Return the queue number of each row, from 0 to `count` - 1, by the hash of its key.

    `partition_by` replaces the primary key. Rows of a table without a key have the same queue. Raises
    ServerUnsupported if a row image is missing a column that is needed.
    """
    columns = partition_by or changes.target.primary_key
    if columns:
        refuse_partial(changes)
    texts = [pc.fill_null(column_texts(changes, name), "\0") for name in columns]
    same = pyarrow.repeat(str(changes.target.name), len(changes)).cast(pyarrow.string())
    keys = pc.binary_join_element_wise(*(texts or [same]), "\0")
    batch = pyarrow.record_batch([keys], ["key"])
    return pyarrow.array(_native.partitions(batch, count))


def check_columns(kind: str, target: Target, partition_by: Sequence[str]) -> None:
    """Raise OptionInvalid if a target does not have the columns that determine the queue of a row."""
    for name in partition_by:
        if name not in target.column_names:
            raise OptionInvalid(
                f"{target.name} has no column {name!r} for partition_by of the {kind} sink",
                hint=f"It has {', '.join(target.column_names)}",
            )
