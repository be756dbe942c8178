# SPDX-License-Identifier: Apache-2.0
"""The first entry of a Delta table's log, beside the one that `deltalake` writes."""

import json
import random
from pathlib import Path
from typing import Any

import deltalake
import pyarrow
import pytest
from deltalake.transaction import create_table_with_add_actions

from penstock.sinks.delta.first_entry import write_first_entry
from penstock.sinks.delta.table import DEFAULT_PROPERTIES, add_actions, with_numbers
from penstock.sinks.delta.unwritten_table import as_stored
from penstock.sinks.lake.parquet_files import Bounds, DataFile

ZONELESS, ZONED = pyarrow.timestamp("us"), pyarrow.timestamp("us", tz="UTC")
TYPES = [
    *(pyarrow.bool_(), pyarrow.int8(), pyarrow.int16(), pyarrow.int32(), pyarrow.int64()),
    *(pyarrow.uint8(), pyarrow.uint32(), pyarrow.float32(), pyarrow.float64(), pyarrow.decimal128(20, 4)),
    *(pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.date32(), ZONELESS, ZONED),
    pyarrow.list_(pyarrow.field("element", pyarrow.string())),
    pyarrow.map_(pyarrow.string(), ZONED),
    pyarrow.struct([pyarrow.field("a", pyarrow.int32()), pyarrow.field("b", pyarrow.list_(ZONED))]),
]


def entry_of(folder: Path) -> dict[str, list[Any]]:
    """Return the actions of the first entry by kind, without the values that no two entries share."""
    actions: dict[str, list[Any]] = {}
    for line in (folder / f"_delta_log/{0:020}.json").read_text().splitlines():
        ((kind, action),) = json.loads(line).items()
        for name in ("id", "createdTime", "lastUpdated", "modificationTime"):
            action.pop(name, None)
        actions.setdefault(kind, []).append(
            {key: value for key, value in action.items() if value is not None}
        )
    operations = {action["operation"] for action in actions.pop("commitInfo")}
    assert operations == {"CREATE TABLE"}
    return actions


@pytest.mark.parametrize("seed", range(12))
def test_first_entry_has_the_actions_of_deltalake(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    kinds = [TYPES[seed], *chance.sample(TYPES, 4)] if seed else TYPES
    # A column's name may be that of a type.
    fields = [pyarrow.field(f"timestamp_ntz {number}", kind) for number, kind in enumerate(kinds)]
    schema = as_stored(pyarrow.schema([pyarrow.field("id", pyarrow.int64()), *fields]))
    files = [
        DataFile(f"part-{number}.snappy.parquet", number, 99, {"id": Bounds(-1, 9, number)})
        for number in range(seed % 3)
    ]
    numbers = {"penstock/shop/g": seed, "penstock/shop/": seed}
    own, other = tmp_path / "own", tmp_path / "other"
    other.mkdir()
    write_first_entry(str(own / "_delta_log"), schema, "shop.t", DEFAULT_PROPERTIES, files, numbers)
    create_table_with_add_actions(
        str(other),
        deltalake.Schema.from_arrow(schema),
        add_actions(files, 1),
        name="shop.t",
        configuration=DEFAULT_PROPERTIES,
        commit_properties=with_numbers(numbers, 1, is_exclusive=False),
    )
    assert entry_of(own) == entry_of(other)
    assert not [path for path in (own / "_delta_log").iterdir() if path.suffix != ".json"]
    table = deltalake.DeltaTable(own)
    assert table.version() == 0
    assert table.history()[0]["operation"] == "CREATE TABLE"
    table.create_write_transaction(
        [], "append", table.schema(), commit_properties=with_numbers({"later": 9}, 1, is_exclusive=False)
    )
    assert deltalake.DeltaTable(own).transaction_version("later") == 9


@pytest.mark.parametrize(
    "kind",
    [pyarrow.list_(ZONELESS), pyarrow.map_(pyarrow.string(), ZONELESS), pyarrow.struct([("a", ZONELESS)])],
    ids=str,
)
def test_nested_times_without_zone_need_the_feature_too(tmp_path: Path, kind: pyarrow.DataType) -> None:
    """`deltalake` creates no such table, because it does not list the feature."""
    schema = as_stored(pyarrow.schema([pyarrow.field("times", kind)]))
    write_first_entry(str(tmp_path / "_delta_log"), schema, "t", DEFAULT_PROPERTIES, [], {})
    assert deltalake.DeltaTable(tmp_path).protocol().reader_features == ["timestampNtz"]


def test_entry_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    schema = pyarrow.schema([pyarrow.field("id", pyarrow.int64())])
    log = tmp_path / "_delta_log"
    write_first_entry(str(log), schema, "first", DEFAULT_PROPERTIES, [], {})
    with pytest.raises(FileExistsError):
        write_first_entry(str(log), schema, "second", DEFAULT_PROPERTIES, [], {"penstock/shop/g": 1})
    assert deltalake.DeltaTable(tmp_path).metadata().name == "first"
    assert len(list(log.iterdir())) == 1
