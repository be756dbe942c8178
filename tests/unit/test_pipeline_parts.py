# SPDX-License-Identifier: Apache-2.0
"""Assign rows to parts, and pack rows into blobs."""

import datetime
import random
from decimal import Decimal
from typing import Any

import numpy
import pyarrow
import pytest

from penstock.changes import Changes, Origin, Target
from penstock.engine import parts as parts_module
from penstock.engine import task_rows
from penstock.engine.parts import Run, blob_of, changes_of, in_log_order, parts_of, slices
from penstock.engine.task_plan import COUNTS, ROWS
from penstock.engine.task_rows import Row, body_of, rows_in
from penstock.model import Column, TableName
from penstock.sinks.sink import Spread

METADATA = pyarrow.struct([("row", pyarrow.int32())])


def target_of(kind: str, *, charset: str | None = None) -> Target:
    columns = (Column("id", kind, charset, False), Column("other", "int"))
    return Target(TableName("shop", "t"), columns, ("id",))


def keys_of(values: list[Any], kind: pyarrow.DataType) -> pyarrow.RecordBatch:
    return pyarrow.record_batch({"id": pyarrow.array(values, kind)})


def changes(table: str, places: list[tuple[int, int, str]]) -> Changes:
    rows = pyarrow.record_batch(
        {
            "id": pyarrow.array([row for _, row, _ in places], pyarrow.int64()),
            "_change_type": [kind for _, _, kind in places],
            "_commit_version": pyarrow.array([version for version, _, _ in places], pyarrow.int64()),
            "_metadata": pyarrow.array([{"row": row} for _, row, _ in places], METADATA),
        }
    )
    name = TableName("shop", table)
    return Changes(Target(name, (Column("id", "bigint"),), ("id",)), rows, name, Origin.LOG)


@pytest.mark.parametrize(
    "same",
    [
        ["Code 7", "CODE 7", "code 7  ", "c\u00f6de 7", "co\u0301de 7", "\uff23ode \uff17", "code \u0667"],
        ["stra\u00dfe 12", "STRASSE 12", "strasse 12"],
        ["", " ", "\t"],
    ],
)
def test_texts_equal_under_a_collation_are_in_one_part(same: list[str]) -> None:
    rows = keys_of(same, pyarrow.string())
    parts = parts_of(target_of("varchar(40)", charset="utf8mb4"), rows, Spread.KEYS, 97, divided=True)
    assert len(set(numpy.atleast_1d(parts).tolist())) == 1


@pytest.mark.parametrize(
    ("kind", "arrow", "values"),
    [
        ("bigint", pyarrow.int64(), list(range(4000))),
        ("bigint unsigned", pyarrow.decimal128(20, 0), [Decimal(2**63 + number) for number in range(4000)]),
        ("varchar(20)", pyarrow.string(), [f"user-{number}" for number in range(4000)]),
        ("char(36)", pyarrow.string(), [f"{number * 7919:032x}" for number in range(4000)]),
        ("binary(16)", pyarrow.binary(), [(number * 7919).to_bytes(16) for number in range(4000)]),
        (
            "datetime",
            pyarrow.timestamp("us"),
            [datetime.datetime(2026, 1, 1) + datetime.timedelta(seconds=number) for number in range(4000)],
        ),
        ("date", pyarrow.date32(), [datetime.date.fromordinal(700000 + number) for number in range(4000)]),
    ],
)
def test_keys_of_every_type_spread_evenly(kind: str, arrow: pyarrow.DataType, values: list[Any]) -> None:
    parts = parts_of(target_of(kind), keys_of(values, arrow), Spread.KEYS, 8, divided=True)
    counts = numpy.bincount(parts, minlength=8)
    assert counts.min() > 250, counts
    # A slice of a column assigns its rows to the same parts as the whole column.
    sliced = parts_of(target_of(kind), keys_of(values, arrow).slice(100, 50), Spread.KEYS, 8, divided=True)
    assert sliced.tolist() == parts[100:150].tolist()


def test_rows_that_may_share_another_key_stay_together() -> None:
    rows = keys_of(list(range(100)), pyarrow.int64())
    assert isinstance(parts_of(target_of("bigint"), rows, Spread.KEYS, 8, divided=False), int)
    assert isinstance(parts_of(target_of("bigint"), rows, Spread.TABLES, 8, divided=True), int)
    assert parts_of(target_of("bigint"), rows, Spread.WHOLE, 8, divided=True) == 0


@pytest.mark.parametrize("seed", range(5))
def test_rows_arrive_equal_within_a_process_and_as_arrow(seed: int) -> None:
    chosen = random.Random(seed)
    tables = [
        changes(
            name,
            [
                (chosen.randint(1, 30), row, chosen.choice(["insert", "delete"]))
                for row in range(chosen.randint(1, 9))
            ],
        )
        for name in "abc"
    ]
    runs = in_log_order(tables) if chosen.random() < 0.7 else None
    plain = Row(0, 3, 1, ROWS, body_of(tables, runs, is_in_process=True))
    encoded = Row(0, 3, 1, ROWS, body_of(tables, runs, is_in_process=False))
    assert isinstance(plain.body, tuple)
    assert not isinstance(encoded.body, tuple)
    [read] = rows_in([encoded.to_arrow()])
    for row in (encoded, read, *rows_in([plain.to_arrow()]), *rows_in([read.to_arrow()])):
        assert row[:4] == plain[:4]
        for arrived, sent in zip(row.changes(), plain.changes(), strict=True):
            assert (arrived.target, arrived.source, arrived.origin) == (sent.target, sent.source, sent.origin)
            assert arrived.rows.equals(sent.rows)


def test_messages_arrive_equal_as_arrow() -> None:
    message = Row(0, -1, 2, COUNTS, b"counts")
    [read] = rows_in([message.to_arrow()])
    assert read == message
    assert [*rows_in([read.to_arrow()])] == [message]


def test_many_rows_are_compressed_within_a_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    few = changes("a", [(1, 0, "insert")])
    monkeypatch.setattr(task_rows, "_PLAIN_BYTES_MAX", few.rows.nbytes)
    assert isinstance(body_of([few], is_in_process=True), tuple)
    assert isinstance(body_of([few, few], is_in_process=True), bytes)


def test_blob_round_trips() -> None:
    comparison = changes("a", [(1, 0, "insert"), (2, 1, "insert"), (4, 0, "delete")])
    two = changes("b", [(2, 0, "insert"), (3, 0, "insert")])
    runs = in_log_order([comparison, two])
    assert runs == [Run(0, 0, 1), Run(1, 0, 1), Run(0, 1, 1), Run(1, 1, 1), Run(0, 2, 1)]
    parts = list(changes_of(blob_of([comparison, two], runs)))
    assert [(part.source.table, part.rows.column("_commit_version").to_pylist()) for part in parts] == [
        ("a", [1]),
        ("b", [2]),
        ("a", [2]),
        ("b", [3]),
        ("a", [4]),
    ]
    assert parts[0].target == comparison.target
    assert next(changes_of(blob_of([comparison]))).rows.equals(comparison.rows)


def test_large_batch_is_cut_only_between_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "BLOB_BYTES", 512)
    kinds = ["insert", "update_preimage", "update_postimage"] * 40
    whole = changes("a", [(number, number, kind) for number, kind in enumerate(kinds)])
    pieces = list(slices(whole))
    assert len(pieces) > 3
    assert all(piece.rows.column("_change_type")[0].as_py() != "update_postimage" for piece in pieces)
    joined = pyarrow.Table.from_batches([piece.rows for piece in pieces])
    assert joined.combine_chunks().to_batches()[0].equals(whole.rows)
