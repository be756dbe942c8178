# SPDX-License-Identifier: Apache-2.0
"""Encodes changes as messages of a dialect, for sinks that deliver messages."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow

from penstock import _native
from penstock.changes import Changes, Origin, Target

Format = Literal["debezium", "debezium_schema", "maxwell", "canal_flat", "canal", "json"]

DELETE = 2


@dataclass(frozen=True)
class Messages:
    """Messages in the order of their changes, as arrays of equal length.

    `value` and `key` are bytes; `key` is null for messages without a key. `row` is the index of the change at
    which a message ends. `kind` is 0 for an insert, 1 for an update, 2 for a delete.
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
    return target.row_key if form in ("debezium", "debezium_schema") else target.primary_key


def messages_of(changes: Changes, form: Format, key: Sequence[str] = (), *, lines: bool = False) -> Messages:
    """Return the messages of changes, with the values of the columns `key` as their keys.

    With `lines` each message ends with a newline, except for Canal's packets. Raises the kernel's errors:
    OptionInvalid for an unknown column, SchemaInvalid for rows that do not have the target's columns.
    """
    target = changes.target
    primary_key = key_of(target, form)
    encoded = pyarrow.record_batch(
        _native.encode_changes(
            changes.rows,
            target.declared,
            dialect=form,
            database=target.name.database,
            table=target.name.table,
            primary_key=primary_key,
            key=key,
            mariadb=target.mariadb,
            snapshot=changes.origin is Origin.LOAD,
            lines=lines,
        )
    )
    return Messages(*(encoded.column(name) for name in ("value", "key", "row", "kind")))
