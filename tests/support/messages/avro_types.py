# SPDX-License-Identifier: Apache-2.0
"""A table with a column of every type that Debezium's messages distinguish, and rows for this table."""

from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from penstock.changes import Changes
from penstock.model import Column
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update

_COLUMNS = {
    "id": "int",
    "tiny": "tinyint",
    "small": "smallint unsigned",
    "big": "bigint unsigned",
    "total": "decimal(14,4)",
    "wide": "decimal(65,2)",
    "single": "float",
    "digits": "float(7,4)",
    "twice": "double",
    "flag": "bit(1)",
    "bits": "bit(10)",
    "grown": "year",
    "day": "date",
    "span": "time(6)",
    "at": "datetime(3)",
    "finer": "datetime(6)",
    "logged": "timestamp(3)",
    "name": "varchar(400)",
    "token": "varbinary(400)",
    "fixed": "binary(4)",
    "kind": "enum('a','b,c')",
    "kinds": "set('a','b')",
    "plan": "json",
    "place": "point",
    "area": "geometry",
    "vector": "vector(3)",
}
_POINT = bytes.fromhex("e61000000101000000000000000000f83f00000000000000c0")
FULL: dict[str, Any] = {
    "id": -1,
    "tiny": -128,
    "small": 65_535,
    "big": Decimal((1 << 64) - 1),
    "total": Decimal("-1234567890.1234"),
    "wide": "-" + "9" * 63 + ".99",
    "single": 0.1,
    "digits": 999.0001,
    "twice": 1e300,
    "flag": 1,
    "bits": 0x201,
    "grown": 2024,
    "day": date(1969, 12, 31),
    "span": -timedelta(hours=30, microseconds=1),
    "at": datetime(2024, 2, 29, 1, 2, 3, 456_000),
    "finer": datetime(1900, 1, 1, 0, 0, 0, 1),
    "logged": datetime(2001, 9, 9, 1, 46, 40, 120_000, UTC),
    "name": 'say "yes"\n' + "é" * 100,
    "token": bytes(range(256)),
    "fixed": b"\n\n\n\n",
    "kind": "b,c",
    "kinds": "a,b",
    "plan": '{"a": [1, 2.5]}',
    "place": _POINT,
    "area": _POINT,
    "vector": [1.0, -2.5, 0.0],
}


def every_type(*, name: str = "shop.every-type") -> Changes:
    """Return an insert, an update to null, a move to another key, and a delete of a row with every type."""
    types = dict[str, str | Column](_COLUMNS)
    # The Avro type of a NOT NULL column differs from that of a nullable column.
    types["required"] = Column("required", "datetime", None, False)
    full = FULL | {"required": datetime(2024, 1, 1)}
    empty = {"id": -1, "required": datetime(1970, 1, 1)}
    return changes_of(
        target_of(types, name=name),
        insert(1, **full),
        update(2, full, empty),
        update(3, empty, empty | {"id": 10}),
        delete(4, **full | {"id": 10}),
    )
