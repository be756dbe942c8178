# SPDX-License-Identifier: Apache-2.0
"""Names and keys rendered from rows."""

import json
from typing import Any

import pyarrow
import pytest

from penstock import _native
from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid
from penstock.model import Column, TableName
from penstock.sinks.template import Template, default_key

TARGET = Target(
    TableName("shop", "orders"),
    (
        Column("id", "bigint unsigned", None, False),
        Column("table", "varchar(9)", "utf8mb4"),
        Column("plan", "json"),
        Column("token", "binary(4)"),
        Column("day", "date"),
        Column("odd`{name}", "int"),
    ),
    ("id", "token"),
)
METADATA = {
    "instance": "i",
    "database": "log",
    "table": "orders_1",
    "gtid": "0-1-2",
    "file": "f.000001",
    "offset": 4,
    "row": 0,
    "server_id": 7,
    "schema_version": 1,
    "unrepresentable": [("day", "0000-00-00")],
}
ROWS: list[dict[str, Any]] = [
    {"id": 18446744073709551615, "table": "tä", "plan": '{"a": [{"b": "x"}]}', "token": b"\xff\x00\x00\x01"},
    {"id": 1, "table": None, "plan": None, "token": b"abcd", "odd`{name}": 5},
]


def texts(template: str) -> list[str | None]:
    schema = pyarrow.schema(_native.arrow_schema(TARGET.declared))
    system = {"_change_type": "insert", "_commit_version": 9, "_commit_timestamp": 0, "_metadata": METADATA}
    rows = pyarrow.RecordBatch.from_pylist([row | system for row in ROWS], schema=schema)
    actual_rows: list[str | None] = (
        Template(template, TARGET).texts(Changes(TARGET, rows, TableName("log", "orders_1"))).to_pylist()
    )
    return actual_rows


@pytest.mark.parametrize(
    ("template", "first", "second"),
    [
        ("plain {{}}", "plain {}", "plain {}"),
        ("{database}.{table}", "shop.orders", "shop.orders"),
        ("{source.database}.{source.table}", "log.orders_1", "log.orders_1"),
        ("{id}", "18446744073709551615", "1"),
        ("<{`table`}>", "<tä>", None),
        ("{plan.a[0].b}", "x", None),
        ("{plan.a[1]}{id}", None, None),
        ("{plan.a[0]}", '{"b": "x"}', None),
        ("{token}", "ff000001", "61626364"),
        ("{day}", "0000-00-00", "0000-00-00"),
        ("{_change_type}:{_commit_version}:{_metadata.gtid}", "insert:9:0-1-2", "insert:9:0-1-2"),
        (default_key(TARGET), "shop:orders:18446744073709551615:ff000001", "shop:orders:1:61626364"),
    ],
)
def test_template_renders_a_text_for_each_row(template: str, first: str | None, second: str | None) -> None:
    assert texts(template) == [first, second]


@pytest.mark.parametrize(
    "template",
    [
        "{",
        "a}",
        "{}",
        "{nothing}",
        "{ids}",
        "{_metadata.nothing}",
        "{_metadata}",
        "{source}",
        "{id..a}",
        "{id[x]}",
    ],
)
def test_template_with_an_unknown_name_is_refused(template: str) -> None:
    with pytest.raises(OptionInvalid) as refused:
        Template(template, TARGET)
    assert repr(template) in str(refused.value)


def test_pattern_covers_every_rendered_text() -> None:
    assert Template("a*[{database}]:{id}:{day}", TARGET).glob() == r"a\*\[shop\]:*:*"
    assert Template("{table}", TARGET).constant == "orders"
    assert Template("{id}", TARGET).constant is None


@pytest.mark.parametrize(
    ("left", "right", "meet"),
    [
        ("order:{id}", "order:{id}", True),
        ("order:{id}", "order:lines:{id}", True),
        ("order:{id}", "orders:{id}", False),
        ("{id}", "customer:{id}", True),
        ("a:{id}:x", "a:b:{id}", True),
        ("a:{id}:x", "a:{id}:y", False),
        ("a:{id}", "a:", True),
        ("a:{id}b", "a:{day}", True),
        ("a{id}c{day}e", "ab{id}d{day}f", False),
        ("a{id}c{day}e", "ab{id}d{day}e", True),
        ("fixed", "fixed", True),
        ("fixed", "fixe", False),
    ],
)
def test_templates_overlap_if_both_can_render_the_same_text(left: str, right: str, meet: bool) -> None:
    first, second = Template(left, TARGET), Template(right, TARGET)
    assert first.may_equal(second) is meet
    assert second.may_equal(first) is meet


def test_vector_is_a_list_of_numbers() -> None:
    column = ("v", "vector(3)", None, True)
    for mariadb in (False, True):
        schema = pyarrow.schema(_native.arrow_schema([column], mariadb=mariadb))
        values = pyarrow.array([[1.0, -0.5, 1e10], None], schema.field("v").type)
        array = pyarrow.array(
            _native.column_texts(pyarrow.record_batch({"v": values}), column, mariadb=mariadb, path=[])
        )
        first, second = array.to_pylist()
        assert json.loads(first) == [1.0, -0.5, 1e10]
        assert second is None


def test_text_of_an_exact_value_replaces_any_value_of_its_column() -> None:
    schema = pyarrow.schema(_native.arrow_schema(TARGET.declared))
    exact = METADATA | {"unrepresentable": [("id", "-7")]}
    system = {"_change_type": "insert", "_commit_version": 9, "_commit_timestamp": 0, "_metadata": exact}
    rows = pyarrow.RecordBatch.from_pylist([ROWS[1] | system], schema=schema)
    changes = Changes(TARGET, rows, TableName("log", "orders_1"))
    assert Template("{id}", TARGET).texts(changes).to_pylist() == ["-7"]


@pytest.mark.parametrize(
    "template", ["{_commit_version}/{id}", "{token}", "{_change_type} {table}", "{_metadata.server_id}:{day}"]
)
def test_few_rows_have_the_texts_that_arrow_renders(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few = texts(template)
    monkeypatch.setattr("penstock.sinks.template._FEW_ROWS_MAX", -1)
    assert few == texts(template)
