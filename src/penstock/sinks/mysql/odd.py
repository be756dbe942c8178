# SPDX-License-Identifier: Apache-2.0
"""Handles source values that a session in strict mode rejects.

An ENUM may contain the empty string that stands for an invalid member. A string may contain bytes that are
invalid in its character set. A target column with an 8-bit character set may accept such bytes unchanged;
other columns never do.
"""

import re
from dataclasses import dataclass

import pyarrow
import pyarrow.compute as pc

from penstock.changes import BROKEN_TEXT, Target
from penstock.errors import ValueMalformed
from penstock.sinks.mysql.connection import SQL_MODE, Session
from penstock.sinks.sql.rows import WriteCounts

STRICT = f"SET SESSION sql_mode='{SQL_MODE}'".encode()
LENIENT = b"SET SESSION sql_mode='ALLOW_INVALID_DATES,NO_AUTO_VALUE_ON_ZERO'"

_EMPTY_MEMBER = re.compile(r"[(,]''[,)]")
_NO_MEMBER = 1265


@dataclass(frozen=True)
class DividedRows:
    """The rows of a batch, in three groups: rows that any session accepts, rows with an invalid ENUM member,
    and rows with invalid text.
    """

    plain: pyarrow.RecordBatch
    unnamed: pyarrow.RecordBatch
    broken: pyarrow.RecordBatch


def divide_rows(batch: pyarrow.RecordBatch, target: Target) -> DividedRows:
    """Divide rows by the kind of odd value that they contain."""
    none = pyarrow.array([False] * batch.num_rows, pyarrow.bool_())
    unnamed = broken = none
    for column in target.columns:
        if column.type_text.startswith("enum") and not _EMPTY_MEMBER.search(column.type_text):
            unnamed = pc.or_(unnamed, pc.fill_null(pc.equal(batch.column(column.name), ""), False))
    texts = pc.struct_field(batch.column("_metadata"), "unrepresentable")
    if texts.null_count < len(texts):
        has_broken_text = [
            any(text.startswith(BROKEN_TEXT) for _, text in exact_values or ())
            for exact_values in texts.to_pylist()
        ]
        broken = pyarrow.array(has_broken_text, pyarrow.bool_())
    if not pc.any(pc.or_(unnamed, broken)).as_py():
        return DividedRows(batch, batch.slice(0, 0), batch.slice(0, 0))
    unnamed = pc.and_not(unnamed, broken)
    plain = pc.invert(pc.or_(unnamed, broken))
    return DividedRows(batch.filter(plain), batch.filter(unnamed), batch.filter(broken))


def without_broken_texts(
    row: pyarrow.RecordBatch, target: Target, counted: WriteCounts
) -> pyarrow.RecordBatch:
    """Return a row in which invalid text is null, or "" in NOT NULL columns, and count these values."""
    metadata = row.column("_metadata").to_pylist()[0]
    exact_texts = dict(metadata["unrepresentable"])
    for name, text in exact_texts.items():
        if text.startswith(BROKEN_TEXT):
            counted.count_lost(target, name, 1)
            index = row.schema.get_field_index(name)
            if index >= 0 and not target.column(name).nullable:
                row = row.set_column(index, row.schema.field(index), pyarrow.array([""], pyarrow.string()))
    kept = [(name, text) for name, text in exact_texts.items() if not text.startswith(BROKEN_TEXT)]
    index = row.schema.get_field_index("_metadata")
    field = row.schema.field(index)
    return row.set_column(index, field, pyarrow.array([metadata | {"unrepresentable": kept}], field.type))


def refuse_other_changes(session: Session) -> None:
    """Raise ValueMalformed if the last statement changed more than an invalid ENUM member."""
    for _, number, message in session.run("SHOW WARNINGS"):
        if int(number) != _NO_MEMBER:
            raise ValueMalformed(
                f"{session.address}: {message} (server error {number})",
                hint="The target's column takes other values than the source's: change its type",
            )
