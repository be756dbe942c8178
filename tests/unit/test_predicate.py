# SPDX-License-Identifier: Apache-2.0
from datetime import date, datetime, timedelta
from decimal import Decimal

import pyarrow
import pytest

from penstock.errors import OptionInvalid
from penstock.predicate import Predicate

# Four rows; the third is null throughout.
ROWS = pyarrow.record_batch(
    {
        "id": pyarrow.array([1, 2, None, 4], pyarrow.int32()),
        "note": ["paid", "PAID", None, "a%b"],
        "price": pyarrow.array(
            [Decimal("19.99"), Decimal("20.00"), None, Decimal("-1.50")], pyarrow.decimal128(10, 2)
        ),
        "big": pyarrow.array([1, 2**64 - 1, None, 3], pyarrow.decimal128(20, 0)),
        "day": [date(2026, 1, 1), date(2026, 1, 2), None, date(2020, 1, 1)],
        "at": pyarrow.array(
            [datetime(2026, 1, 1, 10), datetime(2026, 1, 2), None, datetime(2020, 1, 1)],
            pyarrow.timestamp("us", tz="UTC"),
        ),
        "span": pyarrow.array(
            [timedelta(hours=10), -timedelta(hours=1), None, timedelta(0)], pyarrow.duration("us")
        ),
        "rate": pyarrow.array([1.5, 2, None, 4], pyarrow.float32()),
        "raw": [b"A", b"\x00", None, b"xx"],
        "_metadata": [{"gtid": "a:1"}, {"gtid": "a:2"}, {"gtid": None}, {"gtid": "a:1"}],
    }
)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("id = 1", [1]),
        ("1 = id", [1]),
        ("2 > id", [1]),
        ("ID = 1", [1]),
        ("`id` <> 1", [2, 4]),
        ("NOT id = 1", [2, 4]),
        ("id IN (1, 4)", [1, 4]),
        ("id IN (1, NULL)", [1]),
        ("id NOT IN (1, NULL)", []),
        ("id BETWEEN 2 AND 9", [2, 4]),
        ("id NOT BETWEEN 2 AND 9", [1]),
        ("id = 1.5", []),
        ("id > 1.5", [2, 4]),
        ("id = '2'", [2]),
        ("id > -1", [1, 2, 4]),
        ("id", [1, 2, 4]),
        ("id IS TRUE", [1, 2, 4]),
        ("(id = 1) IS FALSE", [2, 4]),
        ("id = 1 OR note IS NULL AND TRUE", [1, 3]),
        ("id = 1 XOR TRUE", [2, 4]),
        ("id <=> NULL", [3]),
        ("id <=> 1", [1]),
        ("id = big", [1]),
        ("rate = id", [2, 4]),
        ("TRUE", [1, 2, 3, 4]),
        ("FALSE", []),
        ("NULL", []),
        ("note = 'paid'", [1]),
        ("LOWER(note) = 'paid'", [1, 2]),
        ("UPPER(note) LIKE 'PA%'", [1, 2]),
        ("note LIKE 'pa__'", [1]),
        (r"note LIKE 'a\%b'", [4]),
        ("note NOT LIKE 'pa__'", [2, 4]),
        ("NOT note LIKE 'pa__'", [2, 4]),
        ("NOT note NOT LIKE 'pa__'", [1]),
        ("note NOT LIKE 'a|%b' ESCAPE '|'", [1, 2]),
        ("(note LIKE 'pa__') IS NULL", [3]),
        ("(id = 1 AND note = 'paid') IS NOT NULL", [1, 2, 4]),
        ("note LIKE 'a|%b' ESCAPE '|'", [4]),
        ("note LIKE 'p|%' ESCAPE '|'", []),
        ("note IS NULL", [3]),
        ("note IS NOT NULL", [1, 2, 4]),
        ("price >= 19.99", [1, 2]),
        ("price = 20", [2]),
        ("price = '20'", [2]),
        ("price > 19.995", [2]),
        ("price IN (20, -1.5, 3)", [2, 4]),
        ("big = 18446744073709551615", [2]),
        ("big > 1e1", [2]),
        ("day = '2026-01-01'", [1]),
        ("day = DATE '2026-01-01'", [1]),
        ("day >= '2026-01-01 00:00:01'", [2]),
        ("at > '2026-01-01T09:00:00'", [1, 2]),
        ("at = '2026-01-01T11:00:00+01:00'", [1]),
        ("at BETWEEN '2026-01-01' AND '2026-01-01 10:00:00'", [1]),
        ("span = '10:00:00'", [1]),
        ("span < '-00:30'", [2]),
        ("rate = 1.5", [1]),
        ("raw = X'41'", [1]),
        ("raw = 'xx'", [4]),
        ("_metadata.gtid = 'a:1'", [1, 4]),
    ],
)
def test_predicate_selects_the_matching_rows(text: str, rows: list[int]) -> None:
    passes = Predicate.compile(text).passes(ROWS)
    assert [row for row, selected in enumerate(passes, 1) if selected] == rows


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("id + 1 = 2", "id + 1"),
        ("id IN (SELECT 1)", "SELECT 1"),
        ("SELECT 1", "SELECT 1"),
        ("id = 1; DROP TABLE t", "not one condition"),
        ("id =", "no condition"),
        ("", "not one condition"),
        ("orders.id = 1", "orders.id"),
        ("SLEEP(5)", "SLEEP(5)"),
        ("id = 1 || TRUE", "may mean OR or a concatenation"),
        ("day = CAST('2026-01-01 10:00:00' AS DATE)", "CAST('2026-01-01 10:00:00' AS DATE)"),
        ("day BETWEEN SYMMETRIC '2026-01-02' AND '2026-01-01'", "symmetric"),
        ("CASE WHEN id THEN 1 END", "CASE"),
        ("note REGEXP 'a'", "REGEXP"),
        ("1 = 1", "1 = 1"),
        ("id = " + "1" * 5000, "over 400 digits"),
        ("(" * 3000 + "id" + ")" * 3000, "nested too deep"),
    ],
)
def test_unsupported_predicate_is_named(text: str, part: str) -> None:
    with pytest.raises(OptionInvalid, match="where: ") as refused:
        Predicate.compile(text)
    assert part in refused.value.message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("nothing = 1", "no column 'nothing'"),
        ("note = 1", "note is string"),
        ("id = 'x'", "id is int32"),
        ("id = '1e1000000'", "over 400 digits"),
        ("id IN (1, '1e-1000000')", "over 400 digits"),
        ("id BETWEEN '1e9999999999' AND 2", "over 400 digits"),
        ("id = 'Infinity'", "id is int32"),
        ("id <=> 'NaN'", "id is int32"),
        ("day = '0001-01-01T00:00:00+14:00'", "day is date32"),
        ("day = 5", "day is date32"),
        ("day = 'soon'", "'soon'"),
        ("span = 'soon'", "'soon'"),
        ("note = id", "do not compare"),
        ("id LIKE '1%'", "LIKE is for text"),
        ("LOWER(id) = '1'", "where: "),
    ],
)
def test_incomparable_types_are_reported_once_the_columns_are_known(text: str, part: str) -> None:
    predicate = Predicate.compile(text)
    with pytest.raises(OptionInvalid) as refused:
        predicate.passes(ROWS)
    assert part in refused.value.message


def test_large_integers_compare_with_floating_point_numbers() -> None:
    rows = pyarrow.record_batch({"id": pyarrow.array([2**62, 3, None]), "rate": [1e18, 3.5, 0.0]})
    assert Predicate.compile("id > 1e1").passes(rows).tolist() == [True, False, False]
    assert Predicate.compile("id > rate").passes(rows).tolist() == [True, False, False]


def test_minus_zero_is_zero() -> None:
    rows = pyarrow.record_batch({"rate": [0.0, -0.0, 1.5, None]})
    for text in ("rate = 0", "rate IN (0)", "rate IN (-0.0, 7)", "NOT rate IN (1.5, -3)"):
        assert Predicate.compile(text).passes(rows).tolist() == [True, True, False, False], text


def test_predicate_lists_the_columns_it_reads() -> None:
    assert Predicate.compile("id = 1 AND (note LIKE 'x' OR _metadata.gtid = 'a')").columns == {
        "id",
        "note",
        "_metadata",
    }
