# SPDX-License-Identifier: Apache-2.0
"""Values that a source has and a strict session refuses.

An ENUM may have the empty text that stands for no member. A text may have bytes that are none of its
character set; such bytes a column of an 8-bit set may take as they are, and others do not take in any way.
"""

import re
from dataclasses import dataclass

import pyarrow
import pyarrow.compute as pc

from penstock.changes import Target
from penstock.errors import ValueMalformed
from penstock.sinks.mysql.connection import SQL_MODE, Session
from penstock.sinks.sql.rows import Counted

STRICT = f"SET SESSION sql_mode='{SQL_MODE}'".encode()
LENIENT = b"SET SESSION sql_mode='ALLOW_INVALID_DATES,NO_AUTO_VALUE_ON_ZERO'"

_EMPTY_MEMBER = re.compile(r"[(,]''[,)]")
_NO_MEMBER = 1265
# How the text of bytes that are none of their character set begins.
BROKEN_TEXT = "0x"


@dataclass(frozen=True)
class Divided:
    """Rows that any session takes, rows with no member in an ENUM, and rows with bytes that are no text."""

    plain: pyarrow.RecordBatch
    unnamed: pyarrow.RecordBatch
    broken: pyarrow.RecordBatch


def divided(batch: pyarrow.RecordBatch, target: Target) -> Divided:
    """Return rows by what is odd about them."""
    none = pyarrow.array([False] * batch.num_rows, pyarrow.bool_())
    unnamed = broken = none
    for column in target.columns:
        if column.type_text.startswith("enum") and not _EMPTY_MEMBER.search(column.type_text):
            unnamed = pc.or_(unnamed, pc.fill_null(pc.equal(batch.column(column.name), ""), False))
    texts = pc.struct_field(batch.column("_metadata"), "unrepresentable")
    if texts.null_count < len(texts):
        told = [any(text.startswith(BROKEN_TEXT) for _, text in one or ()) for one in texts.to_pylist()]
        broken = pyarrow.array(told, pyarrow.bool_())
    if not pc.any(pc.or_(unnamed, broken)).as_py():
        return Divided(batch, batch.slice(0, 0), batch.slice(0, 0))
    unnamed = pc.and_not(unnamed, broken)
    plain = pc.invert(pc.or_(unnamed, broken))
    return Divided(batch.filter(plain), batch.filter(unnamed), batch.filter(broken))


def without_broken_texts(row: pyarrow.RecordBatch, target: Target, counted: Counted) -> pyarrow.RecordBatch:
    """Return a row with null for bytes that are no text, or with "" where null may not stand; counts them."""
    metadata = row.column("_metadata").to_pylist()[0]
    spares = dict(metadata["unrepresentable"])
    for name, text in spares.items():
        if text.startswith(BROKEN_TEXT):
            counted.lose(target, name, 1)
            place = row.schema.get_field_index(name)
            if place >= 0 and not target.column(name).nullable:
                row = row.set_column(place, row.schema.field(place), pyarrow.array([""], pyarrow.string()))
    kept = [(name, text) for name, text in spares.items() if not text.startswith(BROKEN_TEXT)]
    place = row.schema.get_field_index("_metadata")
    field = row.schema.field(place)
    return row.set_column(place, field, pyarrow.array([metadata | {"unrepresentable": kept}], field.type))


def refuse_other_changes(session: Session) -> None:
    """Raise ValueMalformed where the last statement changed more than a text that stands for no member."""
    for _, number, message in session.run("SHOW WARNINGS"):
        if int(number) != _NO_MEMBER:
            raise ValueMalformed(
                f"{session.address}: {message} (server error {number})",
                hint="The target's column takes other values than the source's: change its type",
            )
