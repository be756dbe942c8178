# SPDX-License-Identifier: Apache-2.0
"""Rows as Elasticsearch documents: their ids, and values that cannot be read back."""

import json

import pytest

from penstock.changes import Target
from penstock.errors import OptionInvalid, ValueMalformed
from penstock.model import Column, TableName
from penstock.sinks.mongodb.documents import rows_of_documents
from penstock.sinks.search.documents import index_lines, rows_of_sources
from tests.support.pipeline.changes_made import changes_of, insert

NOTES = Target(
    TableName("shop", "notes"),
    (Column("name", "varchar(20)", "utf8mb4", False), Column("place", "point")),
    ("name",),
)


def ids(*names: str) -> list[str]:
    changes = changes_of(NOTES, *(insert(1, name=name, place=None) for name in names))
    lines = b"\n".join(index_lines(changes, ["name"])).decode().split("\n")
    return [json.loads(line)["index"]["_id"] for line in lines[::2]]


def test_empty_key_has_a_document_id_of_its_own() -> None:
    names = ["", "%", "%%", "a", "a%", "%a", "\n", ":", "%25"]
    document_ids = ids(*names)
    assert document_ids == ["%", "%%", "%%%", "a", "a%", "%a", "\n", ":", "%25"]


def test_unreadable_geometry_is_omitted_by_name() -> None:
    with pytest.raises(OptionInvalid) as refused:
        rows_of_sources(NOTES, [{"name": "a", "place": "POINT(1 1)"}])
    assert "--leave-out place" in str(refused.value.hint)
    (column, _) = NOTES.columns
    rows = rows_of_sources(Target(NOTES.name, (column,), ("name",)), [{"name": "a", "place": "POINT(1 1)"}])
    assert rows.to_pylist() == [{"name": "a"}]


def test_value_of_another_type_than_its_column_is_refused_by_name() -> None:
    counted = Target(NOTES.name, (NOTES.columns[0], Column("n", "int")), ("name",))
    for rows_of in (rows_of_sources, rows_of_documents):
        with pytest.raises(ValueMalformed, match=r"column n of shop\.notes that is no int") as raised:
            rows_of(counted, [{"name": "a", "n": "7 o'clock"}])
        assert raised.value.hint == "Run penstock resnapshot for shop.notes"
