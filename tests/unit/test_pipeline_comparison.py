# SPDX-License-Identifier: Apache-2.0
"""Unit tests of the parts of a comparison: hashed rows, rows touched by the log, and differences."""

import random
from collections import Counter
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import numpy
import pyarrow
import pytest

from penstock.changes import Changes, Target
from penstock.errors import ServerUnsupported, StepFailed
from penstock.model import Column, Position, TableName
from penstock.pipeline.settings import StepSettings, pipeline_of_values
from penstock.pipeline.step import Rejected
from penstock.pipeline.verify.differences import Kind, differences
from penstock.pipeline.verify.hashed import HashCollector, hashes, is_among
from penstock.pipeline.verify.kept_values import TEXTS, expected_values, values_not_held
from penstock.pipeline.verify.system_columns import as_changes, with_version
from penstock.pipeline.verify.touched import Touched
from penstock.pipeline.verify.unjudged import Unjudged
from penstock.sinks.sink import Sink, make_sink, settings_of

TARGET = Target(
    TableName("shop", "orders"),
    (
        Column("id", "int", None, False),
        Column("owner", "varchar(20)", "utf8mb4"),
        Column("total", "decimal(8,2)"),
        Column("plan", "json"),
    ),
    ("id",),
)


def batch(*rows: tuple[Any, ...]) -> pyarrow.RecordBatch:
    """Return rows of TARGET, filled with null at the end."""
    names = TARGET.column_names
    return pyarrow.RecordBatch.from_pylist(
        [dict(zip(names, (*row, *[None] * 3), strict=False)) for row in rows], schema=TARGET.arrow()
    )


def logged(*events: tuple[str, int, str]) -> Changes:
    """Return changes from the log: kind, id, owner."""
    rows = batch(*((number, owner) for _, number, owner in events))
    made = as_changes(TARGET, rows, "insert", Position(0, "bin.000001", 1600), instance="here")
    return with_version(made, 100, [kind for kind, _, _ in events])


def gathered(rows: list[tuple[Any, ...]], size: int = 7) -> HashCollector:
    made = HashCollector(TARGET.primary_key, TARGET.column_names)
    for first in range(0, len(rows), size):
        made.add(batch(*rows[first : first + size]))
    return made


def test_comparison_reports_exactly_the_keys_that_differ() -> None:
    chosen = random.Random(3)
    for _ in range(30):
        mine = [(chosen.randint(0, 30), chosen.choice("ab")) for _ in range(40)]
        theirs = [row for row in mine if chosen.random() > 0.1]
        theirs += [(chosen.randint(0, 40), "c") for _ in range(chosen.randint(0, 3))]
        chosen.shuffle(theirs)
        one, other = Counter(mine), Counter(theirs)
        keys = {row[0] for row in (one - other) | (other - one)}
        wanted = numpy.unique(hashes(batch(*((key,) for key in keys)), ["id"]))
        found = gathered(mine).done().differing(gathered(theirs, 11).done())
        assert found.tolist() == wanted.tolist()


def test_membership_in_sorted_hashes_is_exact() -> None:
    ascending = numpy.array([3, 5, 9], numpy.uint64)
    values = numpy.array([0, 3, 4, 9, 10], numpy.uint64)
    assert is_among(values, ascending).tolist() == [False, True, False, True, False]
    assert not is_among(values, numpy.zeros(0, numpy.uint64)).any()


def test_first_event_of_a_key_shows_its_earlier_row() -> None:
    touched = Touched(["id"])
    touched.add(
        logged(
            ("update_preimage", 1, "old"),
            ("update_postimage", 1, "new"),
            ("insert", 2, "born"),
            ("delete", 3, "gone"),
            ("insert", 3, "back"),
        )
    )
    # Later events of the same keys add no information; a change of a key touches both keys.
    touched.add(
        logged(
            ("delete", 1, "new"),
            ("update_preimage", 4, "moves"),
            ("update_postimage", 5, "moves"),
            ("delete", 2, "born"),
        )
    )
    rows = [row for one in touched.before() for row in one.rows.to_pylist()]
    assert sorted((row["id"], row["owner"]) for row in rows) == [(1, "old"), (3, "gone"), (4, "moves")]
    assert {row["_change_type"] for row in rows} == {"insert"}
    now = logged(*(("insert", number, "now") for number in range(8)))
    assert touched.untouched(now).rows.column("id").to_pylist() == [0, 6, 7]


def test_partial_images_are_refused() -> None:
    changes = logged(("delete", 1, "x"))
    metadata = changes.rows.column("_metadata")
    absent = pyarrow.array([["owner"]], metadata.type.field("absent").type)
    fields = [absent if one.name == "absent" else metadata.field(one.name) for one in metadata.type]
    made = pyarrow.StructArray.from_arrays(fields, fields=list(metadata.type))
    index = changes.rows.schema.get_field_index("_metadata")
    rows = changes.rows.set_column(index, changes.rows.schema.field(index), made)
    with pytest.raises(ServerUnsupported, match="partial row images"):
        Touched(["id"]).add(changes.with_rows(rows))


def test_differences_show_both_values() -> None:
    expected = as_changes(
        TARGET,
        batch(
            (1, "same", Decimal("1.50"), '{"a": 1, "b": [1, 2]}'),
            (2, "mine", Decimal("2.00"), '{"a": 1}'),
            (3, "missing"),
            (4, "twice"),
            (6, "null", None, None),
        ),
        "insert",
        Position(0, "bin.000001", 160),
        instance="here",
    )
    theirs = batch(
        (4, "twice"),
        (2, "theirs", Decimal("2.00"), '{"a": 2}'),
        (1, "same", Decimal("1.50"), '{"b":[1,2],"a":1.0}'),
        (4, "twice"),
        (5, "besides"),
        (6, "null", None, "null"),
    )
    mine = expected.rows.select(TARGET.column_names)
    found = list(differences(TARGET, TARGET.column_names, [mine], [theirs]))
    assert sorted((one.row["id"], str(one.kind), one.columns) for one in found) == [
        (2, "changed", ("owner", "plan")),
        (3, "missing", ()),
        (4, "extra", ()),
        (5, "extra", ()),
        (6, "changed", ("plan",)),
    ]
    assert not list(differences(TARGET, ("id", "total"), [mine.slice(0, 2)], [theirs.slice(1, 2)]))
    (missing,) = [one for one in found if one.kind is Kind.MISSING]
    assert missing.target is None


def steps_of(*steps: dict[str, Any]) -> tuple[StepSettings, ...]:
    return pipeline_of_values(
        {
            "name": "one",
            "source": {"url": "mysql://root@127.0.0.1", "name": "here", "tables": ["shop.*"]},
            "sink": "stdout",
            "steps": list(steps),
        }
    ).steps


def rejected(left: int, *rows: tuple[Any, ...]) -> Rejected:
    changes = as_changes(TARGET, batch(*rows), "insert", Position(0, "bin.000001", 160), instance="here")
    return Rejected(changes, "map", StepFailed("no"), steps_left=left)


def refuse(rows: pyarrow.RecordBatch) -> None:
    raise ValueError


def test_rows_sharing_a_key_with_a_rejected_row_are_undecided() -> None:
    steps = steps_of({"mask": {"columns": {"id": "hash"}}}, {"map": {"add": {"owner": "upper(owner)"}}})
    unjudged = Unjudged(TARGET, steps)
    there = batch((1, "one"), (2, "two"), (3, "three"))
    assert not unjudged
    assert unjudged.among(there).tolist() == [False, False, False]
    # The failed step and the steps after it leave the key unchanged.
    unjudged.add(rejected(1, (2, "x"), (7, "y")))
    assert unjudged
    assert unjudged.among(there).tolist() == [False, True, False]
    # The mask comes after the failed step, so the key in the target is unknown.
    unjudged.add(rejected(2, (9, "x")))
    assert unjudged.among(there).tolist() == [True, True, True]


def test_every_row_is_undecided_if_a_user_function_rejected_a_row() -> None:
    unjudged = Unjudged(TARGET, steps_of({"python": {"function": refuse, "on_error": "skip"}}))
    unjudged.add(rejected(1, (2, "x")))
    assert unjudged.among(batch((1, "one"), (2, "two"))).all()


def test_known_part_of_the_key_limits_the_undecided_rows() -> None:
    shard = Column("shard", "varchar(20)", "utf8mb4", False)
    merged = replace(TARGET, columns=(*TARGET.columns, shard), primary_key=("id", "shard"))
    unjudged = Unjudged(merged, steps_of({"route": {"to": "shop.orders", "shard_column": "shard"}}))
    unjudged.add(rejected(1, (2, "x")))
    rows = [{"id": number, "owner": "x", "total": None, "plan": None, "shard": "a"} for number in (1, 2)]
    there = pyarrow.RecordBatch.from_pylist(rows, schema=merged.arrow())
    assert unjudged.among(there).tolist() == [False, True]


DAYS = Target(
    TableName("shop", "days"),
    (
        Column("id", "int", None, False),
        Column("day", "date"),
        Column("at", "datetime(0)"),
        Column("note", "varchar(20)", "utf8mb4"),
    ),
    ("id",),
)


def days(*rows: tuple[Any, ...], texts: dict[int, dict[str, str]] | None = None) -> Changes:
    """Return rows of DAYS; `texts` are the texts of unrepresentable values, by id."""
    schema = DAYS.arrow()
    values = pyarrow.RecordBatch.from_pylist(
        [dict(zip(schema.names, (*row, *[None] * 3), strict=False)) for row in rows], schema=schema
    )
    made = as_changes(DAYS, values, "insert", Position(0, "bin.000001", 160), instance="here")
    metadata = made.rows.column("_metadata")
    maps = [list((texts or {}).get(row[0], {}).items()) or None for row in rows]
    fields = [
        pyarrow.array(maps, one.type) if one.name == "unrepresentable" else metadata.field(one.name)
        for one in metadata.type
    ]
    column = pyarrow.StructArray.from_arrays(fields, fields=list(metadata.type))
    place = made.rows.schema.get_field_index("_metadata")
    return made.with_rows(made.rows.set_column(place, made.rows.schema.field(place), column))


def sink_of(kind: str, **told: Any) -> Sink:
    return make_sink(kind, settings_of(kind).model_validate(told))


def test_value_that_a_target_cannot_hold_is_expected_to_be_null() -> None:
    rows = days((1, None, None, "a\0b"), (2, date(1700, 1, 1), datetime(2400, 1, 1)), (3, date(2026, 1, 1)))
    columns = DAYS.column_names
    postgres = sink_of("postgres", url="postgresql://root@127.0.0.1/x")
    kept = expected_values(postgres, DAYS, columns, rows.rows)
    assert kept.column("note").to_pylist() == [None, None, None]
    assert kept.column("day").to_pylist() == [None, date(1700, 1, 1), date(2026, 1, 1)]
    assert values_not_held(postgres, DAYS, columns, rows.rows) == {"note": 1}
    clickhouse = sink_of("clickhouse")
    kept = expected_values(clickhouse, DAYS, columns, rows.rows)
    assert kept.schema.types == DAYS.arrow().types
    assert kept.to_pylist()[1] == {"id": 2, "day": None, "at": None, "note": None}
    assert values_not_held(clickhouse, DAYS, columns, rows.rows) == {"day": 1, "at": 1}
    assert values_not_held(clickhouse, DAYS, ["id", "at"], rows.rows) == {"at": 1}


def test_zero_dates_are_counted_if_a_target_has_no_text_for_them() -> None:
    rows = days((1,), (2,), texts={1: {"day": "0000-00-00"}}).rows
    delta = sink_of("delta", path="/nowhere")
    assert values_not_held(delta, DAYS, DAYS.column_names, rows) == {"day": 1}
    assert values_not_held(sink_of("mysql", url="mysql://root@127.0.0.1"), DAYS, ["id", "day"], rows) == {}


def test_text_of_unrepresentable_values_is_compared_if_a_sink_writes_it() -> None:
    mysql = sink_of("mysql", url="mysql://root@127.0.0.1")
    columns = DAYS.column_names
    source = days(
        (1,),
        (2,),
        (3,),
        (4,),
        texts={1: {"day": "0000-00-00"}, 3: {"day": "2026-02-30"}, 4: {"note": "0xFF"}},
    )
    target = days((1,), (2,), (3,), (4,), texts={3: {"day": "2026-02-31"}})
    mine = expected_values(mysql, DAYS, columns, source.rows)
    theirs = expected_values(mysql, DAYS, columns, target.rows)
    assert (hashes(mine, [*columns, TEXTS]) == hashes(theirs, [*columns, TEXTS])).tolist() == [
        False,
        True,
        False,
        False,
    ]
    found = {one.row["id"]: one for one in differences(DAYS, columns, [mine], [theirs])}
    assert {key: (one.columns, one.not_held) for key, one in found.items()} == {
        1: (("day",), ()),
        3: (("day",), ()),
        # Bytes that are not valid text cannot be stored in a text column of another charset.
        4: ((), ("note",)),
    }
    assert not list(differences(DAYS, ["id", "at"], [mine], [theirs]))


def test_rows_become_changes_ordered_before_those_after_a_position() -> None:
    place = Position(0, "bin.000002", 3200)
    made = as_changes(TARGET, batch((1, "x"), (2, "y")), "delete", place, instance="here")
    (first, second) = made.rows.to_pylist()
    assert place.commit_version > first["_commit_version"] > Position(0, "bin.000002", 3168).commit_version
    assert [one["_metadata"]["row"] for one in (first, second)] == [0, 1]
    assert first["_change_type"] == "delete"
    assert first["_metadata"]["instance"] == "here"
