# SPDX-License-Identifier: Apache-2.0
"""The parts of the Spark source that run before Spark: options, offsets, filters, types."""

import pickle
from datetime import UTC, datetime

import pytest
from pyspark.sql.datasource import EqualTo, GreaterThan, In, IsNotNull, LessThanOrEqual

from penstock.errors import OptionInvalid
from penstock.model import Column, Position, TableName
from penstock.source.bounds import Bound
from penstock.source.offsets import Offset
from penstock.source.source import ByteRange
from penstock.spark.filters import narrow
from penstock.spark.options import parse_settings
from penstock.spark.schema import TableShape, envelope_arrow, spark_schema

SERVER = {"source": "mysql://repl:secret@127.0.0.1:3306", "tables": "shop.orders"}

# One column of each SQL type with a distinct Arrow type.
TYPE_TEXTS = """tinyint|tinyint unsigned|smallint|smallint unsigned|mediumint|mediumint unsigned
int|int unsigned|bigint|bigint unsigned|float|double|decimal(10,2)|decimal(38,30)|decimal(65,30)
bit(1)|bit(64)|year|date|datetime|datetime(6)|timestamp|timestamp(6)|time|time(6)|binary(4)|varbinary(9)
blob|json|geometry|vector(3)|char(4)|varchar(9)|text|enum('a','b')|set('a','b')"""


_TEXT_WORDS = ("char", "varchar", "text", "enum", "set")


def test_option_names_are_case_insensitive() -> None:
    settings = parse_settings(
        {
            **SERVER,
            "STARTINGoffsets": "mysql-bin.000003:1542",
            "maxbytespertrigger": "64m",
            "minpartitions": "3",
        }
    )
    assert settings.start == Bound(position=Position(0, "mysql-bin.000003", 1542))
    assert settings.bytes_max == 64 << 20
    assert settings.ranges_min == 3


@pytest.mark.parametrize(("text", "count"), [("5", 5), ("1k", 1024), ("2MB", 2 << 20), ("1g", 1 << 30)])
def test_size_may_have_a_unit(text: str, count: int) -> None:
    assert parse_settings({**SERVER, "rangeBytes": text}).range_bytes == count


@pytest.mark.parametrize("text", ["0", "-1", "m", "1.5g", "1x", "12 apples", ""])
def test_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(OptionInvalid, match="rangeBytes"):
        parse_settings({**SERVER, "rangeBytes": text})


def test_settings_pickle_and_print_no_password() -> None:
    settings = pickle.loads(pickle.dumps(parse_settings(SERVER)))
    assert settings.source.address.password.reveal() == "secret"
    assert "secret" not in repr(settings)


def test_columns_may_have_any_name() -> None:
    settings = parse_settings({**SERVER, "columns": "id, `odd,name`,total"})
    assert settings.columns == ("id", "odd,name", "total")


def test_several_paths_are_passed_as_spark_encodes_them() -> None:
    settings = parse_settings({"paths": '["/a/bin.000001", "file:///a/bin.000002"]', "tables": "a.b"})
    assert settings.source.paths == ("/a/bin.000001", "/a/bin.000002")


def test_offset_round_trips_through_a_checkpoint() -> None:
    offset = Offset(Position(2, "mysql-bin.000003", 1542), "uuid:1-5", "mysql:uuid", by_set=True)
    assert Offset.from_json(offset.to_json()) == offset
    assert parse_settings({**SERVER, "startingOffsets": '{"file": "b.000001", "offset": 4}'}).start == Offset(
        Position(0, "b.000001", 4)
    )


@pytest.mark.parametrize(
    "text", ['{"file": 3}', '{"file": "b.1", "offset": 4, "more": 1}', "{", '{"offset": 4}']
)
def test_invalid_offset_is_refused(text: str) -> None:
    with pytest.raises(OptionInvalid):
        parse_settings({**SERVER, "startingOffsets": text})


def test_filters_on_system_columns_narrow_the_read() -> None:
    time = datetime(2026, 1, 1, tzinfo=UTC)
    filters = [
        IsNotNull(("id",)),
        In(("_change_type",), ("insert", "delete")),
        GreaterThan(("_commit_version",), 5),
        LessThanOrEqual(("_commit_timestamp",), time),
        EqualTo(("_metadata", "table"), "orders"),
        EqualTo(("id",), 7),
    ]
    narrowing, unsure = narrow(filters, envelope=False)
    assert narrowing.changes == ("insert", "delete")
    assert narrowing.version_min == 6
    assert narrowing.time_max_us == 1_767_225_600_000_000
    assert narrowing.tables == {"orders"}
    assert unsure == [filters[0], *filters[2:]], "only the change type is taken over whole"


def test_ranges_excluded_by_a_version_filter_are_not_planned() -> None:
    narrowing, _ = narrow([EqualTo(("_commit_version",), 3 << 32 | 1000 >> 4)], envelope=False)
    whole = ByteRange(0, "b.000003", 4, None, aligned=True)
    assert narrowing.keeps(whole)
    assert not narrowing.keeps(ByteRange(0, "b.000002", 4, None, aligned=True))
    assert not narrowing.keeps(ByteRange(0, "b.000003", 2000, None, aligned=False))
    assert not narrowing.keeps(ByteRange(0, "b.000003", 4, 500, aligned=True))


def test_update_in_an_envelope_is_one_row_with_both_images() -> None:
    narrowing, unsure = narrow([EqualTo(("_change_type",), "update")], envelope=True)
    assert narrowing.changes == ("update_preimage", "update_postimage")
    assert unsure == []


def test_spark_accepts_every_type_unchanged() -> None:
    texts = TYPE_TEXTS.replace("\n", "|").split("|")
    charsets = ["utf8mb4" if text.startswith(_TEXT_WORDS) else None for text in texts]
    columns = tuple(
        Column(f"c{number}", text, charset)
        for number, (text, charset) in enumerate(zip(texts, charsets, strict=True))
    )
    schema = spark_schema(TableShape(TableName("d", "t"), columns, mariadb=False).arrow())
    assert len(schema) == len(texts) + 4
    assert spark_schema(envelope_arrow()).fieldNames()[-3:] == ["definition", "before", "after"]
