# SPDX-License-Identifier: Apache-2.0
"""The rows that an account sees: each image is judged by its own values, and no response depends on hidden
rows.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pyarrow
import pytest

from penstock.errors import AccessDenied
from penstock.model import Position, TableName, TablePatterns
from penstock.predicate import Predicate
from penstock.serve.pieces import Piece, View
from penstock.serve.row_conditions import RowConditions
from penstock.serve.sieve import Sieve, Sifted, sieve_of
from penstock.source.reading import Batch
from penstock.source.rows_filter import ShardSet
from tests.support.suite.nonempty import each

TABLE = "shop.orders"
REGIONS = ("eu", "us", "EU", None)
METADATA = pyarrow.struct(
    [
        ("absent", pyarrow.list_(pyarrow.string())),
        ("unrepresentable", pyarrow.map_(pyarrow.string(), pyarrow.string())),
        ("row", pyarrow.int32()),
    ]
)
SCHEMA = pyarrow.schema(
    [
        ("id", pyarrow.int64()),
        ("region", pyarrow.string()),
        ("amount", pyarrow.int64()),
        ("_change_type", pyarrow.string()),
        ("_commit_version", pyarrow.int64()),
        ("_metadata", METADATA),
    ]
)


@dataclass(frozen=True)
class TableBatch:
    """The part of a batch that a sieve uses."""

    table: str = TABLE
    key: tuple[str, ...] = ("id",)
    columns: tuple[Any, ...] = ()


Image = dict[str, Any]
Change = tuple[Image | None, Image | None]


def image_of(seeded: random.Random, number: int) -> Image:
    return {"id": number, "region": seeded.choice(REGIONS), "amount": seeded.choice([None, *range(-3, 4)])}


def random_changes(seeded: random.Random) -> list[Change]:
    """Return inserts, deletes, and updates that move rows in, out and between keys."""
    changes: list[Change] = []
    for _ in range(seeded.randrange(1, 40)):
        before, after = (image_of(seeded, seeded.randrange(10)) for _ in range(2))
        changes.append(seeded.choice([(None, after), (before, None), (before, after), (before, after)]))
    return changes


def rows_of(changes: list[Change], versions: Sequence[int] = ()) -> list[Image]:
    """Return the images of changes in transactions with these commit versions, one for all by default."""
    rows = []
    counted: Counter[int] = Counter()
    for (before, after), version in zip(changes, versions or [1] * len(changes), strict=True):
        kinds = ("update_preimage", "update_postimage") if before and after else ("delete", "insert")
        metadata = {"absent": None, "unrepresentable": None, "row": counted[version]}
        counted[version] += 1
        rows += [
            {"_change_type": kind, "_commit_version": version, "_metadata": metadata, **image}
            for kind, image in zip(kinds, (before, after), strict=True)
            if image
        ]
    return rows


def batch_of(rows: list[Image]) -> pyarrow.RecordBatch:
    unmarked = {"absent": None, "unrepresentable": None, "row": 0}
    return pyarrow.RecordBatch.from_pylist([{"_metadata": unmarked, **row} for row in rows], schema=SCHEMA)


def piece_of(changes: list[Change], versions: Sequence[int] = ()) -> Piece:
    arrow = batch_of(rows_of(changes, versions))
    start = Position(0, "binlog.000001", 4)
    batches = (cast(Batch, TableBatch()),) if arrow.num_rows else ()
    piece = Piece(start, start, batches, arrow.num_rows, arrow.nbytes, "", 0, start)
    piece.derived["arrow"] = (arrow,) if arrow.num_rows else ()
    return piece


# Conditions, each with an equivalent Python function.
TRUTHS: dict[str, Any] = {
    "region = 'eu'": lambda image: image["region"] == "eu",
    "Region IN ('eu', 'us') AND amount >= 0": lambda image: (
        image["region"] in ("eu", "us") and image["amount"] is not None and image["amount"] >= 0
    ),
    "region IS NULL OR amount < 0": lambda image: (
        image["region"] is None or (image["amount"] is not None and image["amount"] < 0)
    ),
    "NOT region = 'eu'": lambda image: image["region"] not in ("eu", None),
    "id BETWEEN 3 AND 6": lambda image: 3 <= image["id"] <= 6,
    "FALSE": lambda image: False,
    "TRUE": lambda image: True,
}


def visible_changes(
    changes: list[Change], versions: Sequence[int], conditions: list[str]
) -> tuple[list[Change], list[int]]:
    """Return the changes that a log with the visible images alone would have, and their commit versions."""

    def shown(image: Image | None) -> Image | None:
        return image if image is not None and all(TRUTHS[text](image) for text in conditions) else None

    visible = [(shown(before), shown(after)) for before, after in changes]
    kept = [number for number, change in enumerate(visible) if change != (None, None)]
    return [visible[number] for number in kept], [versions[number] for number in kept]


def listed(sifted: list[Sifted]) -> list[Image]:
    return [row for part in sifted for row in part.arrow.to_pylist()]


REQUESTS: list[dict[str, Any]] = [
    {},
    {"shards": ShardSet(4, frozenset({1}))},
    {"shards": ShardSet(4, frozenset({0, 3}))},
    {"where": Predicate.compile("amount > 0")},
    {"where": Predicate.compile("amount > 0"), "shards": ShardSet(3, frozenset({2}))},
    {"changes": ("insert",)},
    {"changes": ("update_postimage",), "columns": ("id", "_change_type")},
    {"changes": ("delete", "update_preimage"), "columns": ("amount",), "shards": ShardSet(2, frozenset({1}))},
    {"columns": ("id",), "where": Predicate.compile("region = 'us'")},
]


def test_account_receives_what_a_log_of_its_visible_rows_would_send() -> None:
    seeded = random.Random(16)
    shown = hidden = 0
    for _ in range(60):
        changes = random_changes(seeded)
        versions = sorted(seeded.randrange(1, 9) for _ in changes)
        texts = seeded.sample(list(TRUTHS), seeded.choice([1, 1, 2]))
        patterns = ("shop.*", "*.ORDERS")
        conditions = RowConditions.of_settings(dict(zip(patterns, texts, strict=False)))
        visible = visible_changes(changes, versions, texts)
        for request in REQUESTS:
            filters = {name: request[name] for name in ("shards", "where") if name in request}
            selected = {name: request[name] for name in ("changes", "columns") if name in request}
            sieve = sieve_of(replace(View("typed"), **selected), **filters, conditions=conditions)
            assert (sieve.is_open, sieve.view.columns, sieve.view.changes) == (False, None, None)
            received = listed(sieve.sift(piece_of(changes, versions), {}))
            expected = listed(Sieve(View("typed"), **filters, **selected).sift(piece_of(*visible), {}))
            assert received == expected, (texts, request)
            shown += len(received)
            hidden += not received
    assert shown > 1000
    assert hidden > 50


def test_update_with_one_visible_image_is_a_delete_or_an_insert_without_the_other() -> None:
    eu, us = ({"id": 1, "region": region, "amount": 5} for region in ("eu", "us"))
    conditions = RowConditions.of_settings({TABLE: "region = 'eu'"})
    piece = piece_of([(eu, us), (us, eu), (us, us), (eu, eu)])
    rows = listed(sieve_of(View("typed"), conditions=conditions).sift(piece, {}))
    assert [(row["_change_type"], row["region"]) for row in rows] == [
        ("delete", "eu"),
        ("insert", "eu"),
        ("update_preimage", "eu"),
        ("update_postimage", "eu"),
    ]


def test_rows_of_all_tables_are_numbered_together_without_the_hidden_rows() -> None:
    """A gap would show that a transaction has hidden changes."""
    tables = {"shop.orders": [(1, 7), (1, 9), (2, 1), (2, 4)], "shop.users": [(1, 1), (2, 0), (2, 5)]}
    batches, arrow = [], []
    for name, numbers in tables.items():
        rows = [
            {
                "id": number,
                "_change_type": "insert",
                "_commit_version": version,
                "_metadata": {"absent": None, "unrepresentable": None, "row": number},
            }
            for version, number in numbers
        ]
        batches.append(cast(Batch, TableBatch(name)))
        arrow.append(batch_of(rows))
    start = Position(0, "binlog.000001", 4)
    for part, numbered in ((0, [[0, 1, 1, 2], [0, 3]]), (1, [[7, 8, 1, 2], [0, 3]])):
        piece = Piece(start, start, tuple(batches), 7, 1, "", 0, start, part)
        piece.derived["arrow"] = tuple(arrow)
        conditions = RowConditions.of_settings({"shop.users": "id <> 1", "*.orders": "TRUE"})
        sifted = sieve_of(View("typed"), conditions=conditions).sift(piece, {})
        rows_shown = [
            sifted_rows.arrow.column("_metadata").field("row").to_pylist() for sifted_rows in sifted
        ]
        assert rows_shown == numbered, part


def test_piece_of_one_account_computes_nothing_for_others() -> None:
    changes: list[Change] = [(None, {"id": number, "region": "eu", "amount": number}) for number in range(20)]
    piece = piece_of(changes)
    conditions = RowConditions.of_settings({TABLE: "amount < 10"})
    for shard in range(4):
        shards = ShardSet(4, frozenset({shard}))
        limited = listed(sieve_of(View("typed"), shards=shards, conditions=conditions).sift(piece, {}))
        whole = listed(sieve_of(View("typed"), shards=shards).sift(piece, {}))
        again = listed(sieve_of(View("typed"), shards=shards, conditions=conditions).sift(piece, {}))
        assert limited == again == [row for row in whole if row["amount"] < 10]


def absent(*names: str) -> Image:
    return {"_metadata": {"absent": list(names), "unrepresentable": None, "row": 0}}


def permitted(where: str, rows: list[Image]) -> list[Image]:
    conditions = RowConditions.of_settings({TABLE: where})
    shown: list[Image] = conditions.permit_rows(TableName.parse(TABLE), batch_of(rows)).to_pylist()
    return shown


@pytest.mark.parametrize("where", ["region IS NULL", "NOT region <=> 'eu'", "region = 'eu'"])
def test_image_without_the_column_of_a_condition_is_refused(where: str) -> None:
    """A missing value is not NULL: a condition on it is unknown."""
    full = {"id": 1, "region": "eu"}
    for rows in each(
        [
            [{"id": 1, "_change_type": "insert", **absent("region")}],
            [{"id": 1, "_change_type": "delete", **absent("region")}],
            [
                {"id": 1, "_change_type": "update_preimage", **absent("region")},
                {**full, "_change_type": "update_postimage"},
            ],
            [
                {"id": 1, "_change_type": "update_preimage", **absent("region")},
                {"id": 1, "_change_type": "update_postimage", **absent("region")},
            ],
        ]
    ):
        with pytest.raises(AccessDenied, match="region, which a row image lacks"):
            permitted(where, rows)


def test_unchanged_column_of_a_condition_has_the_value_of_the_preimage() -> None:
    after = {"id": 1, "_change_type": "update_postimage", "amount": 2, **absent("region")}
    for region, kinds in (("eu", ["update_preimage", "update_postimage"]), ("us", [])):
        rows = [{"id": 1, "region": region, "_change_type": "update_preimage"}, after]
        assert [row["_change_type"] for row in permitted("region = 'eu'", rows)] == kinds


REFUSED = {
    "a missing column": ("country = 'de'", "depend on column country, which the table does not have"),
    "a comparison that its type does not support": (
        "region > 5",
        "cannot be evaluated with the types of region",
    ),
    "a missing field": ("_metadata.query = 'x'", "cannot be evaluated"),
}


def test_condition_that_cannot_be_evaluated_refuses_the_table_without_its_values() -> None:
    secret = {"id": 1, "region": "a secret", "_change_type": "insert"}
    for case, (where, message) in each(REFUSED.items()):
        with pytest.raises(AccessDenied, match=message) as refused:
            permitted(where, [secret])
        assert TABLE in refused.value.message, case
        assert "secret" not in f"{refused.value.message} {refused.value.hint}", case
        assert refused.value.__cause__ is None


def test_condition_of_another_table_hides_nothing() -> None:
    conditions = RowConditions.of_settings({"shop.users": "FALSE", "crm.*": "nothing = 1"})
    rows = batch_of([{"id": 1, "_change_type": "insert"}])
    assert conditions.permit_rows(TableName.parse(TABLE), rows) is rows
    assert conditions.permit_rows(TableName("SHOP", "Users"), rows).num_rows == 0
    assert (bool(conditions), bool(RowConditions())) == (True, False)
    assert TablePatterns(["shop.users"]).include == conditions.patterns[:1]
