# SPDX-License-Identifier: Apache-2.0
"""The output of the step verbs of a pipeline, and which of these verbs let rows pass."""

import datetime
import pickle
import sys
from decimal import Decimal
from pathlib import Path

import pyarrow
import pytest
from pydantic import ValidationError

from penstock.changes import Changes, Origin
from penstock.errors import OptionInvalid, ServerUnsupported, StepFailed
from penstock.pipeline.step import Rejected, make_step, run_steps, settings_of, target_through, verbs
from tests.support.pipeline.changes_made import Made, changes_of, delete, insert, target_of, update
from tests.support.pipeline.steps_run import ORDERS, rows, run, step


def test_step_verbs_equal_those_of_the_guide() -> None:
    assert verbs() == [
        "dedupe",
        "filter",
        "lookup",
        "map",
        "mask",
        "only",
        "python",
        "route",
        "shard",
        "soft_delete",
    ]


STEPS = {
    "dedupe": {},
    "filter": "total > 0",
    # The row has no status, so the server is not asked.
    "lookup": {
        "server": {"url": "mysql://127.0.0.1:1"},
        "table": "shop.states",
        "on": {"status": "name"},
        "add": {"state": {"column": "text", "type": "text"}},
    },
    "map": {"add": {"twice": "total * 2"}},
    "mask": {"columns": {"email": "hash"}},
    "only": ["insert"],
    "python": {"function": "tests.unit.test_steps:as_it_is"},
    "route": {"to": "lake.{table}"},
    "shard": {"of": 2, "keep": [0, 1]},
    "soft_delete": {},
}


def as_it_is(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    return batch


@pytest.mark.parametrize("verb", verbs())
def test_step_pickles_and_skips_tables_that_it_does_not_match(verb: str) -> None:
    told = STEPS[verb]
    made = step(verb, told)
    changes = changes_of(ORDERS, insert(1, id=1, total=Decimal("1.00"), email="a@b"))
    before = run(made, changes)
    assert rows(run(pickle.loads(pickle.dumps(made)), changes)) == rows(before)
    elsewhere = settings_of(verb).model_validate(told).model_copy(update={"tables": ("shop.customers",)})
    assert run(make_step(verb, elsewhere), changes) is changes


# --- filter ---------------------------------------------------------------------------------


def test_row_entering_a_filter_is_inserted_and_row_leaving_it_is_deleted() -> None:
    changes = changes_of(
        ORDERS,
        insert(1, id=1, status="draft"),
        insert(2, id=2, status="paid"),
        update(3, {"id": 1, "status": "draft"}, {"id": 1, "status": "paid"}),
        update(4, {"id": 2, "status": "paid"}, {"id": 2, "status": "draft"}),
        update(5, {"id": 1, "status": "paid"}, {"id": 1, "status": "sent"}),
        update(6, {"id": 2, "status": "draft"}, {"id": 2, "status": "draft"}),
        delete(7, id=1, status="sent"),
        delete(8, id=2, status="draft"),
    )
    found = run(step("filter", "status <> 'draft'"), changes)
    assert [(kind, key, status) for kind, key, status, *_ in rows(found)] == [
        ("insert", 2, "paid"),
        ("insert", 1, "paid"),
        ("delete", 2, "paid"),
        ("update_preimage", 1, "paid"),
        ("update_postimage", 1, "sent"),
        ("delete", 1, "sent"),
    ]
    assert found.rows.column("_commit_version").to_pylist() == [2, 3, 4, 5, 5, 7]


def test_several_rows_of_one_commit_are_distinguished() -> None:
    changes = changes_of(
        ORDERS,
        update(1, {"id": 1, "status": "a"}, {"id": 1, "status": "b"}, row=0),
        update(1, {"id": 2, "status": "b"}, {"id": 2, "status": "a"}, row=1),
    )
    found = run(step("filter", "status = 'b'"), changes)
    assert rows(found) == [("insert", 1, "b", None, None), ("delete", 2, "b", None, None)]


def test_null_does_not_pass_and_names_are_case_insensitive() -> None:
    changes = changes_of(ORDERS, insert(1, id=1), insert(2, id=2, total=Decimal("5.00")))
    assert [row[1] for row in rows(run(step("filter", "TOTAL > 1 and `Id` > 0"), changes))] == [2]


def test_filter_sees_the_time_and_source_of_a_change() -> None:
    changes = changes_of(ORDERS, insert(1, id=1), insert(2, id=2))
    where = "_commit_timestamp > '2026-03-01 00:00:01' and _metadata.`table` = 'orders'"
    assert [row[1] for row in rows(run(step("filter", where), changes))] == [2]


@pytest.mark.parametrize(
    ("where", "passes"),
    [
        ("placed between '2026-03-01' and timestamp '2026-03-31 23:59:59'", True),
        ("note is null or note = 'none'", True),
        ("note <=> null", True),
        ("flags in ('x', 'y')", False),
        ("flags like '%,b'", True),
        ("took > '01:00:00'", True),
        ("upper(name) in (' ANN')", True),
        ("big > 18446744073709551614", True),
        ("ratio = '1.50'", True),
        ("name = ' ANN'", False),
        ("doc is not null xor ratio > 1", False),
    ],
)
def test_filter_takes_conditions_over_every_type(where: str, passes: bool) -> None:
    target = target_of(
        {
            "id": "int",
            "name": "varchar(20)",
            "note": "text",
            "doc": "json",
            "placed": "datetime(3)",
            "took": "time(6)",
            "flags": "set('a','b')",
            "big": "bigint unsigned",
            "ratio": "double",
        }
    )
    changes = changes_of(
        target,
        insert(
            1,
            id=1,
            name=" ann",
            doc='{"a": {"b": 7}}',
            placed=datetime.datetime(2026, 3, 4),
            took=datetime.timedelta(hours=2),
            flags="a,b",
            big=Decimal(18446744073709551615),
            ratio=1.5,
        ),
    )
    found = list(run_steps([step("filter", where)], changes))
    assert len(found) == int(passes)


@pytest.mark.parametrize(
    "where",
    [
        "total >",
        "total > rand()",
        "created > now()",
        "current_date() > '2026-01-01'",
        "sum(total) > 1",
        "row_number() over (order by id) = 1",
        "id in (select 1)",
        "total > 1; drop table x",
        "total as t",
        "date_format(placed, 'yyyy-MM') = '2026-03'",
        "nvl(note, 'none') = 'none'",
        "note rlike 'x|y'",
        "took > interval 1 hour",
        "case when total is null then 'x' else 'y' end = 'y'",
        "total + 1 > 2",
        "status || note = 'paid'",
    ],
)
def test_filter_refuses_other_expressions_and_names_map(where: str) -> None:
    with pytest.raises(ValidationError, match="compute any other value as a column, in a map"):
        settings_of("filter").model_validate(where)


def test_filter_needs_no_sql_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    changes = changes_of(ORDERS, insert(1, id=1, status="paid"), insert(2, id=2, status="draft"))
    assert [row[1] for row in rows(run(step("filter", "status <> 'draft'"), changes))] == [1]


def test_condition_that_does_not_fit_a_column_is_refused_before_the_first_row() -> None:
    with pytest.raises(OptionInvalid, match="filter: where: status is string, and 1 does"):
        step("filter", "status = 1").target(ORDERS)


def test_missing_column_is_reported_with_the_nearest_name() -> None:
    with pytest.raises(OptionInvalid) as refused:
        step("filter", "statsu = 'paid'").target(ORDERS)
    assert refused.value.hint == "Did you mean status?"


def test_files_cannot_be_read_by_a_condition(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    with pytest.raises((OptionInvalid, StepFailed, ValidationError)):
        list(
            step("filter", f"read_text('{tmp_path}/secret') = 'x'").apply(changes_of(ORDERS, insert(1, id=1)))
        )


def test_image_without_the_column_is_refused_by_name() -> None:
    partial = [Made("update_preimage", 1, {"id": 1}, absent=["status"])]
    with pytest.raises(ServerUnsupported) as stopped:
        list(step("filter", "status = 'x'").apply(changes_of(ORDERS, partial)))
    assert "binlog_row_image = FULL" in (stopped.value.hint or "")
    assert stopped.value.position == "mysql-bin.000001:16"
    assert rows(run(step("filter", "id = 1"), changes_of(ORDERS, partial)))


# --- shard, only, soft_delete, dedupe -------------------------------------------------------


def test_shards_partition_the_rows_and_a_key_moves_between_them() -> None:
    steps = [step("shard", {"of": 3, "keep": number}) for number in range(3)]
    changes = changes_of(ORDERS, *(insert(number, id=number) for number in range(1, 200)))
    parts = [[row[1] for row in rows(run(one, changes))] for one in steps]
    assert sorted(number for part in parts for number in part) == list(range(1, 200))
    assert all(len(part) > 30 for part in parts)
    first, other = parts[0][0], parts[1][0]
    moved = changes_of(ORDERS, update(1, {"id": first}, {"id": other}))
    assert [row[0] for row in rows(run(steps[0], moved))] == ["delete"]
    assert [row[0] for row in rows(run(steps[1], moved))] == ["insert"]
    assert not list(run_steps([steps[2]], moved))


def test_shard_needs_a_key_and_a_number_in_range() -> None:
    with pytest.raises(OptionInvalid):
        step("shard", {"of": 2, "keep": 0}).target(target_of({"a": "int"}, ()))
    with pytest.raises(ValidationError):
        settings_of("shard").model_validate({"of": 2, "keep": [2]})


def test_only_selected_kinds_pass_and_loads_pass_by_default() -> None:
    changes = changes_of(ORDERS, insert(1, id=1), update(2, {"id": 1}, {"id": 2}), delete(3, id=2))
    assert [row[0] for row in rows(run(step("only", ["update"]), changes))] == [
        "update_preimage",
        "update_postimage",
    ]
    made = step("only", ["insert", "update"])
    assert [row[0] for row in rows(run(made, changes))][0::3] == ["insert"]
    assert not made.empties(ORDERS)
    loaded = changes_of(ORDERS, insert(1, id=1), origin=Origin.LOAD)
    assert len(run(step("only", "delete"), loaded)) == 1
    assert not list(run_steps([step("only", {"kinds": ["delete"], "load": False})], loaded))


def test_soft_deleted_row_stays_and_is_marked() -> None:
    changes = changes_of(
        ORDERS,
        insert(1, id=1, status="a"),
        delete(2, id=1, status="a"),
        update(3, {"id": 2, "status": "b"}, {"id": 3, "status": "b"}),
        update(4, {"id": 3, "status": "b"}, {"id": 3, "status": "c"}),
    )
    made = step("soft_delete", {"column": "gone", "at": "gone_at"})
    found = run(made, changes)
    assert [(kind, key, status, gone) for kind, key, status, _, _, gone, _ in rows(found)] == [
        ("insert", 1, "a", 0),
        ("update_preimage", 1, "a", 0),
        ("update_postimage", 1, "a", 1),
        ("update_preimage", 2, "b", 0),
        ("update_postimage", 2, "b", 1),
        ("insert", 3, "b", 0),
        ("update_preimage", 3, "b", 0),
        ("update_postimage", 3, "c", 0),
    ]
    times = found.rows.column("gone_at").to_pylist()
    assert times[2] == found.rows.column("_commit_timestamp")[2].as_py()
    assert [time is None for time in times] == [True, True, False, True, False, True, True, True]
    assert found.target.primary_key == ("id",)
    assert not made.empties(ORDERS)
    with pytest.raises(OptionInvalid):
        step("soft_delete", "status").target(ORDERS)


def test_updates_without_relevant_changes_are_dropped() -> None:
    changes = changes_of(
        ORDERS,
        update(1, {"id": 1, "status": "a"}, {"id": 1, "status": "a", "email": "x"}),
        update(2, {"id": 1, "status": "a"}, {"id": 1, "status": None}),
        update(3, {"id": 1, "total": Decimal("1.00")}, {"id": 1, "total": Decimal("1.00")}),
        update(4, {"id": 1}, {"id": 2}),
        insert(5, id=9),
        delete(6, id=9),
    )
    found = run(step("dedupe", {"ignore": ["email"]}), changes)
    assert found.rows.column("_commit_version").to_pylist() == [2, 2, 4, 4, 5, 6]
    chain = [step("map", {"drop": ["email", "total"]}), step("dedupe", {})]
    assert run(chain, changes).rows.column("_commit_version").to_pylist() == [2, 2, 4, 4, 5, 6]
    with pytest.raises(OptionInvalid, match="primary key"):
        step("dedupe", ["id"]).target(ORDERS)


def test_changed_value_that_no_type_can_hold_counts_as_an_update() -> None:
    odd = [
        Made("update_preimage", 1, {"id": 1}, unrepresentable={"email": "0xfe"}),
        Made("update_postimage", 1, {"id": 1}, unrepresentable={"email": "0xff"}),
    ]
    assert len(run(step("dedupe", {}), changes_of(ORDERS, odd))) == 2


def test_only_the_last_change_of_each_key_remains_if_requested() -> None:
    changes = changes_of(
        ORDERS,
        insert(1, id=1, status="a"),
        update(2, {"id": 1, "status": "a"}, {"id": 1, "status": "b"}),
        insert(3, id=2, status="a"),
        delete(4, id=2, status="a"),
        update(5, {"id": 3, "status": "a"}, {"id": 4, "status": "a"}),
    )
    found = run(step("dedupe", {"last": True}), changes)
    # The before image is the last row of key 3, and the after image is the last row of key 4, so both remain.
    assert [(row[0], row[1]) for row in rows(found)] == [
        ("insert", 1),
        ("delete", 2),
        ("update_preimage", 3),
        ("update_postimage", 4),
    ]
    with pytest.raises(OptionInvalid):
        step("dedupe", {"last": True}).target(target_of({"a": "int"}, ()))


@pytest.mark.parametrize(
    ("verb", "told", "unique"),
    [
        ("soft_delete", {}, ()),
        ("only", ["insert", "update"], ()),
        ("only", ["insert", "update", "delete"], (("email",),)),
        ("dedupe", ["email"], ()),
        ("dedupe", ["status"], (("email",),)),
        ("filter", "id > 0", (("email",),)),
        ("shard", {"of": 1, "keep": 0}, (("email",),)),
    ],
)
def test_masked_value_is_no_longer_unique(verb: str, told: object, unique: object) -> None:
    found = run(step(verb, told), changes_of(ORDERS, insert(1, id=1)))
    assert found.target.unique_keys == unique


# --- Chains ---------------------------------------------------------------------------------


def test_steps_run_in_written_order_and_an_error_reports_its_step() -> None:
    chain = [
        step("filter", {"tables": "shop.orders", "where": "id < 10"}),
        step("route", {"to": "lake.orders"}),
        step("map", {"tables": "lake.orders", "cast": {"status": "int"}, "on_error": "dead_letter"}),
        step("soft_delete", {}),
    ]
    changes = changes_of(ORDERS, insert(1, id=1, status="1"), insert(2, id=2, status="x"), insert(3, id=30))
    kept, rejected = list(run_steps(chain, changes))
    assert isinstance(kept, Changes)
    assert rows(kept) == [("insert", 1, 1, None, None, 0)]
    assert isinstance(rejected, Rejected)
    assert (rejected.steps_left, str(rejected.changes.target.name)) == (2, "lake.orders")
    again = [
        one for one in run_steps(chain[-rejected.steps_left :], rejected.changes) if isinstance(one, Rejected)
    ]
    assert len(again) == 1


def test_table_that_does_not_fit_a_step_is_named_with_how_to_exclude_it() -> None:
    items = target_of({"id": "int", "name": "varchar(40)"}, name="shop.items")
    with pytest.raises(OptionInvalid, match=r"shop\.items: filter: where: there is no column") as raised:
        target_through([step("only", ["insert"]), step("filter", "total > 0")], items)
    assert "`tables`" in str(raised.value.hint)
