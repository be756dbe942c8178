# SPDX-License-Identifier: Apache-2.0
"""Steps that change columns, values and names: `map`, `python`, `mask`, `route`."""

import datetime
import hashlib
import hmac
import pickle
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute as compute
import pytest
from pydantic import ValidationError

from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid, StepFailed
from penstock.model import TableName
from penstock.pipeline.step import (
    Rejected,
    could_be_named,
    make_step,
    named_by_rows,
    run_steps,
    settings_of,
    target_through,
)
from tests.support.pipeline.changes_made import Made, changes_of, delete, insert, target_of, update
from tests.support.pipeline.steps_run import ORDERS, rows, run, step

# --- map ------------------------------------------------------------------------------------


def test_map_adds_casts_drops_and_renames_and_keys_follow() -> None:
    made = step(
        "map",
        {
            "add": {"total_text": "concat('EUR ', total)", "status": "upper(status)", "two": "1 + 1"},
            "cast": {"two": "tinyint"},
            "drop": ["email"],
            "rename": {"ID": "order_id"},
        },
    )
    changes = changes_of(
        ORDERS, update(1, {"id": 1, "status": "a", "total": Decimal("1.50")}, {"id": 2, "status": "b"})
    )
    found = run(made, changes)
    assert found.target.primary_key == ("order_id",)
    assert found.target.unique_keys == ()
    assert [(one.name, one.type_text) for one in found.target.columns] == [
        ("order_id", "bigint"),
        ("status", "longtext"),
        ("total", "decimal(10,2)"),
        ("total_text", "longtext"),
        ("two", "tinyint"),
    ]
    assert rows(found) == [
        ("update_preimage", 1, "A", Decimal("1.50"), "EUR 1.50", 2),
        ("update_postimage", 2, "B", None, None, 2),
    ]


def test_projection_returns_exactly_its_columns_in_order() -> None:
    made = step("map", {"columns": {"mail": "email", "id": None, "cents": "cast(total * 100 as bigint)"}})
    found = run(made, changes_of(ORDERS, insert(1, id=7, email="a@b", total=Decimal("0.50"))))
    assert rows(found) == [("insert", "a@b", 7, 50)]
    assert found.target.unique_keys == (("mail",),)
    assert found.target.column("mail").type_text == "varchar(100)"


def test_copies_of_a_column_are_all_named_as_absent_or_unrepresentable() -> None:
    made = step("map", {"add": {"copy": "email"}})
    changes = changes_of(
        ORDERS, [Made("insert", 1, {"id": 1}, unrepresentable={"email": "odd"}, absent=["email"])]
    )
    [metadata] = run(made, changes).rows.column("_metadata").to_pylist()
    assert metadata["absent"] == ["email", "copy"]
    assert metadata["unrepresentable"] == [("email", "odd"), ("copy", "odd")]


def test_computed_key_stays_a_key_of_bounded_text() -> None:
    made = step("map", {"add": {"id": "concat('o-', id)"}})
    found = run(made, changes_of(ORDERS, delete(1, id=7)))
    assert (found.target.primary_key, found.target.column("id").type_text) == (("id",), "varchar(255)")
    assert rows(found)[0][:2] == ("delete", "o-7")


def test_key_is_not_dropped_unless_requested() -> None:
    with pytest.raises(OptionInvalid, match="primary key"):
        step("map", {"drop": ["id"]}).target(ORDERS)
    without = step("map", {"drop": ["id"], "key": []}).target(ORDERS)
    assert without is not None
    assert without.primary_key == ()
    other = step("map", {"drop": ["id"], "rename": {"email": "mail"}, "key": ["mail"]}).target(ORDERS)
    assert other is not None
    assert other.primary_key == ("mail",)


def test_properties_of_single_values_follow_their_column() -> None:
    odd = [
        Made(
            "insert",
            1,
            {"id": 1},
            unrepresentable={"email": "0xff", "status": "0xfe"},
        )
    ]
    found = run(step("map", {"rename": {"email": "mail"}, "drop": ["status"]}), changes_of(ORDERS, odd))
    assert found.rows.column("_metadata")[0].as_py()["unrepresentable"] == [("mail", "0xff")]


@pytest.mark.parametrize(
    ("expression", "type_text"),
    [
        ("id > 1", "tinyint(1)"),
        ("id + 1", "bigint"),
        ("cast(id as decimal(30,4))", "decimal(30,4)"),
        ("cast(id as double)", "double"),
        ("date '2026-01-01'", "date"),
        ("timestamp_ntz '2026-01-01 10:00:00'", "datetime(6)"),
        ("_commit_timestamp", "timestamp(6)"),
        ("interval 1 hour", "time(6)"),
        ("array(id, 2)", "longtext"),
        ("cast(status as binary)", "longblob"),
        ("null", "longtext"),
        ("_metadata.`table`", "longtext"),
    ],
)
def test_type_of_an_expression_becomes_its_column_type(expression: str, type_text: str) -> None:
    made = step("map", {"add": {"result": expression}})
    found = run(made, changes_of(ORDERS, insert(1, id=1, status="a")))
    assert found.target.column("result").type_text == type_text


def test_failed_cast_stops_with_the_position_or_rejects_the_row() -> None:
    changes = changes_of(
        ORDERS,
        insert(1, id=1, status="7"),
        update(2, {"id": 2, "status": "8"}, {"id": 2, "status": "eight"}),
        insert(3, id=3, status="9"),
        insert(4, id=4, status="nine"),
    )
    told = {"cast": {"status": "int"}}
    with pytest.raises(StepFailed) as stopped:
        list(step("map", told).apply(changes))
    assert stopped.value.position is not None
    found = list(run_steps([step("map", told | {"on_error": "dead_letter"})], changes))
    whole = [row for one in found if isinstance(one, Changes) for row in rows(one)]
    assert [(row[1], row[2]) for row in whole] == [(1, 7), (3, 9)]
    rejected = [one for one in found if isinstance(one, Rejected)]
    assert [(len(one.changes), one.error.position, one.kept, one.steps_left) for one in rejected] == [
        (2, "mysql-bin.000001:32", True, 1),
        (1, "mysql-bin.000001:64", True, 1),
    ]
    skipped = [
        one
        for one in run_steps([step("map", told | {"on_error": "skip"})], changes)
        if isinstance(one, Rejected)
    ]
    assert [one.kept for one in skipped] == [False, False]


# --- python ---------------------------------------------------------------------------------


def doubled(batch: pyarrow.RecordBatch, target: Target) -> pyarrow.Table:
    assert target.name == ORDERS.name
    table = pyarrow.Table.from_batches([batch])
    return table.append_column("double", compute.multiply(table["id"], 2)).drop_columns(["email"])


def without_drafts(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    return batch.filter(compute.not_equal(batch["status"], "draft"))


def choking_on_poison(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    if "poison" in batch["status"].to_pylist():
        raise ValueError("poison")
    return batch


def test_function_receives_arrow_and_declares_its_columns() -> None:
    told = {"function": f"{__name__}:doubled", "columns": {"double": "bigint"}, "drop": ["email"]}
    found = run(step("python", told), changes_of(ORDERS, insert(1, id=4)))
    assert rows(found) == [("insert", 4, None, None, 8)]
    assert found.target.unique_keys == ()


def test_function_may_be_in_a_file_and_pickles_with_the_step(tmp_path: Path) -> None:
    file = tmp_path / "rules.py"
    file.write_text("def keep(batch):\n    return batch.slice(0, 1)\n")
    settings = settings_of("python").model_validate({"function": f"{file}:keep"})
    told = pickle.dumps(settings.model_copy(update={"on_error": "skip"}))
    file.unlink()
    made = make_step("python", pickle.loads(told))
    assert len(run(made, changes_of(ORDERS, insert(1, id=1), insert(2, id=2)))) == 1


def test_half_an_update_kept_by_a_function_is_a_delete_or_an_insert() -> None:
    changes = changes_of(
        ORDERS,
        update(1, {"id": 1, "status": "draft"}, {"id": 1, "status": "paid"}),
        update(2, {"id": 1, "status": "paid"}, {"id": 1, "status": "draft"}),
    )
    found = run(step("python", {"function": without_drafts}), changes)
    assert [row[0] for row in rows(found)] == ["insert", "delete"]


def test_poison_row_is_isolated_and_rejected_alone() -> None:
    changes = changes_of(
        ORDERS,
        *(insert(number, id=number, status="poison" if number == 37 else "fine") for number in range(1, 100)),
    )
    told = {"function": choking_on_poison, "on_error": "dead_letter"}
    found = list(run_steps([step("python", told)], changes))
    kept = [row[1] for one in found if isinstance(one, Changes) for row in rows(one)]
    assert kept == [number for number in range(1, 100) if number != 37]
    (rejected,) = [one for one in found if isinstance(one, Rejected)]
    assert rejected.changes.rows.column("id").to_pylist() == [37]
    assert isinstance(rejected.error, StepFailed)
    assert "poison" in rejected.error.message


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda batch: batch.select(["id"]), "did not return"),
        (lambda batch: batch.append_column("extra", batch["id"]), "types are not declared"),
        (lambda batch: 7, "other types"),
        (lambda batch: batch.take(pyarrow.array([1, 0])), "another order"),
    ],
)
def test_invalid_return_value_of_a_function_stops(function: Any, what: str) -> None:
    with pytest.raises(StepFailed, match=what):
        list(
            step("python", {"function": function}).apply(changes_of(ORDERS, insert(1, id=1), insert(2, id=2)))
        )


@pytest.mark.parametrize("function", ["no_such_module:f", "json:no_such_function", "no_such.py:f"])
def test_missing_function_is_reported_before_the_start(function: str) -> None:
    with pytest.raises((OptionInvalid, ValidationError)):
        step("python", {"function": function})


# --- mask -----------------------------------------------------------------------------------


def test_hash_masks_keep_equal_values_equal_and_keys_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASK_KEY", "pepper")
    made = step("mask", {"columns": {"id": "hash", "email": "hash"}, "key_env": "MASK_KEY"})
    monkeypatch.delenv("MASK_KEY")
    changes = changes_of(
        ORDERS, update(1, {"id": 1, "email": "a@b"}, {"id": 1, "email": "c@d"}), insert(2, id=2)
    )
    found = run(pickle.loads(pickle.dumps(made)), changes)
    first, second, third = rows(found)
    assert first[1] == second[1] == hmac.digest(b"pepper", b"1", "sha256").hex()
    assert first[3] == hmac.digest(b"pepper", b"a@b", "sha256").hex() != second[3]
    assert third[3] is None
    assert (found.target.primary_key, found.target.unique_keys) == (("id",), (("email",),))
    assert found.target.column("id").type_text == "char(64)"
    assert "pepper" not in repr(made.settings)  # type: ignore[attr-defined]


def test_other_masks_reveal_nothing() -> None:
    target = target_of(
        {"id": "int", "phone": "varchar(20)", "note": "text", "born": "date", "code": "char(2)", "n": "int"}
    )
    told = {
        "columns": {
            "phone": {"first": 1, "last": 2},
            "note": "redact",
            "born": "redact",
            "code": "redact",
            "n": "null",
        }
    }
    born = datetime.date(1990, 1, 1)
    changes = changes_of(
        target,
        insert(1, id=1, phone="0123456789", note="secret", born=born, code="ab", n=5),
        insert(2, id=2, phone="äöü", note=None, code=None),
    )
    found = run(step("mask", told), changes)
    assert rows(found) == [
        ("insert", 1, "0*******89", "***", None, "**", None),
        ("insert", 2, "***", None, None, None, None),
    ]


def test_masked_value_that_no_type_could_hold_is_hidden_everywhere() -> None:
    odd = [Made("insert", 1, {"id": 1}, unrepresentable={"email": "0xdeadbeef", "status": "0xfe"})]
    found = run(step("mask", {"columns": {"email": "hash"}}), changes_of(ORDERS, odd))
    assert found.rows.column("_metadata")[0].as_py()["unrepresentable"] == [("status", "0xfe")]
    assert rows(found)[0][3] == hashlib.sha256(b"0xdeadbeef").hexdigest()


def test_mask_must_fit_its_column() -> None:
    for told, what in (
        ({"id": "redact"}, "primary key"),
        ({"total": {"last": 2}}, "no text"),
        ({"emial": "hash"}, "no column"),
    ):
        with pytest.raises(OptionInvalid, match=what):
            step("mask", {"columns": told}).target(ORDERS)
    lenient = step("mask", {"columns": {"emial": "hash", "email": "null"}, "if_present": True}).target(ORDERS)
    assert lenient is not None
    assert lenient.unique_keys == ()


# --- route ----------------------------------------------------------------------------------


def test_sixty_four_shards_become_one_table_whose_keys_have_the_shard() -> None:
    made = step(
        "route",
        {
            "tables": "shop_*.orders_*",
            "to": "shop.orders",
            "shard_column": "_shard",
            "shard_value": "{1}/{2}",
        },
    )
    seen = set()
    for number in range(64):
        name = TableName(f"shop_{number // 8}", f"orders_{number:02}")
        shard = Target(name, ORDERS.columns, ORDERS.primary_key, ORDERS.unique_keys)
        changes = changes_of(shard, update(1, {"id": 7}, {"id": 7, "status": "paid"}))
        found = run(made, changes)
        assert str(found.target.name) == "shop.orders"
        assert found.source == name
        assert found.target.primary_key == ("id", "_shard")
        assert found.target.unique_keys == (("email", "_shard"),)
        assert not made.empties(shard)
        seen.add(found.target)
        (value,) = set(found.rows.column("_shard").to_pylist())
        assert value == f"{number // 8}/{number:02}"
    assert len(seen) == 1


def test_merge_without_a_shard_column_keeps_no_unique_key() -> None:
    merged = step("route", {"tables": "shop.orders_*", "to": "lake.orders"})
    one = Target(TableName("shop", "orders_1"), ORDERS.columns, ORDERS.primary_key, ORDERS.unique_keys)
    made = merged.target(one)
    assert made is not None
    assert (made.primary_key, made.unique_keys) == (("id",), ())
    renamed = step("route", {"tables": "shop.orders_*", "to": "lake.orders_{1:upper}"})
    assert renamed.empties(one)
    kept = renamed.target(Target(TableName("shop", "orders_eu"), ORDERS.columns, ("id",), ORDERS.unique_keys))
    assert kept is not None
    assert (str(kept.name), kept.unique_keys) == ("lake.orders_EU", (("email",),))


def test_instance_column_distinguishes_servers() -> None:
    made = step(
        "route",
        {
            "to": "shop.orders",
            "shard_column": "server",
            "shard_value": "{instance}",
            "shard_type": "varchar(20)",
        },
    )
    found = run(made, changes_of(ORDERS, insert(1, id=1)))
    assert rows(found)[0][-1] == "test"


def test_shard_columns_accept_regular_expression_groups_and_numbers() -> None:
    made = step(
        "route",
        {
            "tables": r"/shop\.(ord)ers_(\d+)/",
            "to": "{database}.{1}s",
            "shard_column": "n",
            "shard_value": "{2}",
            "shard_type": "int",
        },
    )
    shard = Target(TableName("shop", "orders_07"), ORDERS.columns, ("id",))
    found = run(made, changes_of(shard, insert(1, id=1)))
    assert (str(found.target.name), rows(found)[0][-1]) == ("shop.ords", 7)


def test_row_that_changes_its_table_leaves_one_and_enters_the_other() -> None:
    made = step("route", {"to": "{database}.orders_{status:lower}"})
    changes = changes_of(
        ORDERS,
        insert(1, id=1, status="EU"),
        update(2, {"id": 1, "status": "EU"}, {"id": 1, "status": "US"}),
        update(3, {"id": 1, "status": "US"}, {"id": 1, "status": "US", "email": "x"}),
    )
    chain = [step("map", {"drop": ["total"]}), made]
    assert named_by_rows(chain, ORDERS)
    assert not named_by_rows(chain[:1], ORDERS)
    template = target_through(chain, ORDERS)
    assert template is not None
    assert could_be_named(template.name, TableName("shop", "orders_eu"))
    assert not could_be_named(template.name, TableName("shop", "invoices_eu"))
    found = {
        str(one.target.name): rows(one) for one in run_steps([made], changes) if isinstance(one, Changes)
    }
    assert {name: [row[0] for row in some] for name, some in found.items()} == {
        "shop.orders_eu": ["insert", "delete"],
        "shop.orders_us": ["insert", "update_preimage", "update_postimage"],
    }


def test_row_without_a_value_for_its_table_is_rejected() -> None:
    changes = changes_of(ORDERS, insert(1, id=1), insert(2, id=2, status="eu"))
    with pytest.raises(StepFailed, match="status is null"):
        list(step("route", {"to": "shop.orders_{status}"}).apply(changes))
    told = {"to": "shop.orders_{status}", "on_error": "dead_letter"}
    rejected, kept = list(step("route", told).apply(changes))
    assert isinstance(rejected, Rejected)
    assert rejected.error.position == "mysql-bin.000001:16"
    assert isinstance(kept, Changes)
    assert str(kept.target.name) == "shop.orders_eu"


@pytest.mark.parametrize("to", ["orders", "shop.{table!r}", "shop.{}", "shop.{table:title}", "a.b{"])
def test_invalid_template_is_refused(to: str) -> None:
    with pytest.raises(ValidationError):
        settings_of("route").model_validate({"to": to})


def test_missing_group_or_column_is_refused() -> None:
    for to in ("shop.orders_{1}", "shop.orders_{regoin}"):
        with pytest.raises(OptionInvalid):
            step("route", {"to": to}).target(ORDERS)
