# SPDX-License-Identifier: Apache-2.0
"""Detects a batch that makes no progress: its tasks request preparations that have already been made."""

from collections.abc import Sequence

from penstock.engine.task_plan import OF_CHUNK, Surprise
from penstock.errors import SchemaChanged
from penstock.pipeline.record import BatchRecord, RangeWork
from penstock.pipeline.state import table_key


def asks_again(surprises: Sequence[Surprise], before: Sequence[Surprise]) -> bool:
    """Return whether a round of a batch requested exactly the same preparations as the previous round, and so
    made no progress.

    Tables that are altered while a chunk of them is read are counted elsewhere.
    """
    if any(surprise.what == OF_CHUNK for surprise in surprises):
        return False
    return {_subject(surprise) for surprise in surprises} == {_subject(surprise) for surprise in before}


def no_progress(record: BatchRecord, surprise: Surprise) -> SchemaChanged:
    """Return the error for a batch that makes no progress although every surprise was prepared for."""
    work = record.works[surprise.work]
    position = f"{work.byte_range.file}:{work.byte_range.start}" if isinstance(work, RangeWork) else None
    match surprise.what:
        case "definition":
            position = str(surprise.value["position"])
        case "statement":
            position = str(surprise.value.position)
    _, source, subject = _subject(surprise)
    return SchemaChanged(
        f"batch {record.number} makes no progress: its tasks ask again and again for the {surprise.what}"
        f" {subject} of source {source}, which was prepared",
        position=position,
        hint="Set errors.table: skip_table to go on without the table, or begin again: penstock pipelines"
        " reset. Please report it with the table's CREATE TABLE",
    )


def _subject(surprise: Surprise) -> tuple[str, str, str]:
    value = surprise.value
    match surprise.what:
        case "definition":
            subject = f"{value['table']} number {value['version']}"
        case "statement":
            subject = f"{value.position} {value.text[:200]!r}"
        case "target":
            _, target = value
            columns = ", ".join(f"{column.name} {column.type_text}" for column in target.columns)
            subject = f"{target.name} ({columns})"
        case "chunk":
            subject = table_key(surprise.source, value[0])
        case _:
            subject = str(value)
    return surprise.what, surprise.source, subject
