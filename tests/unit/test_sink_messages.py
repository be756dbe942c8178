# SPDX-License-Identifier: Apache-2.0
"""Changes as queue messages: their kinds, their keys, and the partitions of the keys."""

import json
from dataclasses import replace
from typing import Any

import numpy
import pyarrow
import pytest

from penstock import _native
from penstock.changes import Changes, Origin
from penstock.errors import EventUnsupported
from penstock.model import Column, TableName
from penstock.sinks.kafka.writer import topic_of
from penstock.sinks.messages import Format, key_of, messages_of
from tests.support.pipeline.changes_made import Made, changes_of, delete, insert, target_of, update

ORDERS = target_of({"id": "int", "status": "varchar(20)"})


def order_changes() -> Changes:
    """An insert, an update, a move to another key, and a delete."""
    new: dict[str, Any] = {"id": 1, "status": "new"}
    paid = new | {"status": "paid"}
    return changes_of(
        ORDERS,
        insert(1, **new),
        update(2, new, paid),
        update(3, paid, paid | {"id": 2}),
        delete(4, id=2, status="paid"),
    )


@pytest.mark.parametrize(
    ("form", "field", "kinds"),
    [
        ("debezium", "op", ["c", "u", "d", "c", "d"]),
        ("json", "change", ["insert", "update", "delete", "insert", "delete"]),
        ("maxwell", "type", ["insert", "update", "update", "delete"]),
        ("canal_flat", "type", ["INSERT", "UPDATE", "UPDATE", "DELETE"]),
    ],
)
def test_rows_become_messages_of_their_kind(form: Format, field: str, kinds: list[str]) -> None:
    messages = messages_of(order_changes(), form, ("id",))
    assert [json.loads(value)[field] for value in messages.value.to_pylist()] == kinds


def test_moved_row_is_a_delete_of_its_old_key() -> None:
    messages = messages_of(order_changes(), "debezium", ("id",))
    old, new = b'{"id":1}', b'{"id":2}'
    assert messages.key.to_pylist() == [old, old, old, new, new]
    assert messages.kind.to_pylist() == [0, 1, 2, 0, 2]


PARTIAL = changes_of(
    target_of({"id": "int", "status": "varchar(20)", "n": "int"}),
    [
        Made("update_preimage", 1, {"id": 5}, absent=("status", "n")),
        Made("update_postimage", 1, {"n": 2}, absent=("id", "status")),
        Made("update_preimage", 2, {"id": 5}, absent=("status", "n")),
        Made("update_postimage", 2, {"id": 6}, absent=("status", "n")),
    ],
)


@pytest.mark.parametrize(
    ("form", "keys"),
    [
        ("debezium", [b'{"id":5}', b'{"id":5}', b'{"id":6}']),
        ("json", [b'{"id":5}', b'{"id":5}', b'{"id":6}']),
        ("canal_flat", [b'{"id":5}', b'{"id":6}']),
    ],
)
def test_key_of_an_update_is_complete_even_if_its_images_are_not(form: Format, keys: list[bytes]) -> None:
    assert messages_of(PARTIAL, form, ("id",)).key.to_pylist() == keys


def test_key_absent_from_every_image_is_refused() -> None:
    with pytest.raises(EventUnsupported, match="`status`"):
        messages_of(PARTIAL, "debezium", ("status",))


def test_debezium_uses_a_unique_key_without_nulls_if_there_is_no_primary_key() -> None:
    columns = {name: Column(name, "int", None, nullable) for name, nullable in (("a", True), ("b", False))}
    table = target_of(columns, key=(), unique=(("a",), ("b",)))
    moved = changes_of(table, update(1, {"a": 1, "b": 1}, {"a": 1, "b": 2}))
    messages = messages_of(moved, "debezium", key_of(table, "debezium"))
    assert messages.key.to_pylist() == [b'{"b":1}', b'{"b":2}']
    assert [json.loads(value)["op"] for value in messages.value.to_pylist()] == ["d", "c"]
    assert key_of(table, "maxwell") == ()


def test_loaded_row_is_marked_as_a_snapshot() -> None:
    loaded = changes_of(ORDERS, insert(1, id=1), origin=Origin.LOAD)
    (message,) = (json.loads(value) for value in messages_of(loaded, "debezium", ("id",)).value.to_pylist())
    assert (message["op"], message["source"]["snapshot"]) == ("r", "true")


def test_every_member_of_a_set_is_included() -> None:
    members = target_of({"id": "int", "s": "set('x','y z','')", "t": "set('','x')"})
    (message,) = messages_of(
        changes_of(members, insert(1, id=1, s="x,", t=",x")), "json", ("id",)
    ).value.to_pylist()
    assert json.loads(message)["after"] == {"id": 1, "s": "x,", "t": ",x"}


def test_debezium_schema_has_its_own_names_and_types() -> None:
    types = {"id": "int", "e": "enum('d,e','a\\\\b')", "f": "float(7,4)", "g": "float"}
    changes = changes_of(target_of(types), insert(1, id=1, e="d,e", f=999.0001, g=999.0001))
    (message,) = messages_of(changes, "debezium_schema", ("id",)).value.to_pylist()
    schema, payload = (json.loads(message)[part] for part in ("schema", "payload"))
    fields = {field["field"]: field for field in schema["fields"][0]["fields"]}
    assert fields["e"]["parameters"] == {"allowed": r"d\,e,a\\b"}
    assert (fields["f"]["type"], fields["g"]["type"]) == ("double", "float")
    assert (payload["after"]["f"], payload["after"]["g"]) == (999.0001220703125, 999.0001)


def test_invalid_letters_in_topic_names_become_underscores() -> None:
    changes = changes_of(replace(ORDERS, name=TableName("shop", "dot.t-b$é")), insert(1, id=1, status="new"))
    (message,) = messages_of(changes, "debezium_schema", ("id",)).value.to_pylist()
    assert json.loads(message)["schema"]["name"].endswith("shop.dot.t-b__.Envelope")
    assert topic_of("{database}.{table}", changes.target) == "shop.dot.t-b__"


def test_partition_of_a_key_equals_that_of_kafkas_producers() -> None:
    # Hashes from the tests of Kafka's Java client.
    hashes = {b"21": -973_932_308, b"foobar": -790_332_482, b"abc": 479_470_107}
    keys = pyarrow.record_batch([pyarrow.array(list(hashes), pyarrow.large_binary())], ["key"])
    partitions = pyarrow.array(_native.partitions(keys, 7)).to_pylist()
    positive = numpy.array(list(hashes.values())) & 0x7FFF_FFFF
    assert partitions == (positive % 7).tolist()
