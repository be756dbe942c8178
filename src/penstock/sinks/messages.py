# SPDX-License-Identifier: Apache-2.0
"""Changes as messages of a dialect, for the sinks that hand messages on."""

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
    """Messages in the order of their changes. Arrays of the same length.

    `value` and `key` are bytes, `key` null where there is none; `row` is the row of the changes that a
    message ends at, `kind` 0 for an insert, 1 for an update, 2 for a delete.
    """

    value: pyarrow.Array
    key: pyarrow.Array
    row: pyarrow.Array
    kind: pyarrow.Array

    def __len__(self) -> int:
        return len(self.value)


def key_of(target: Target, form: Format) -> tuple[str, ...]:
    """Return the columns that a dialect takes for the key of a table's rows.

    Debezium takes the first unique key without nulls where there is no primary key, the others take none.
    """
    return target.row_key if form in ("debezium", "debezium_schema") else target.primary_key


def messages_of(changes: Changes, form: Format, key: Sequence[str] = (), *, lines: bool = False) -> Messages:
    """Return the messages of changes, with the values of the columns `key` as their keys.

    With `lines` each ends its line; Canal's packets have none. Raises the kernel's errors: OptionInvalid for
    a column that is not there, SchemaInvalid for rows that are not of the target's columns.
    """
    target = changes.target
    primary_key = key_of(target, form)
    made = pyarrow.record_batch(
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
    return Messages(*(made.column(name) for name in ("value", "key", "row", "kind")))
