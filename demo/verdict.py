# SPDX-License-Identifier: Apache-2.0
"""The proof: every value of every row, as a plain client reads it from the server, against the Delta tables.

Nothing of Penstock takes part: PyMySQL on one side, `deltalake` on the other.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from deltalake import DeltaTable

from demo.mirror import Mirror

DIFFERENCES_TOLD_MAX = 5
# How the change feed names the kinds of change that the writer counts.
_KINDS = {"insert": "insert", "update": "update_postimage", "delete": "delete"}


@dataclass(frozen=True)
class Verdict:
    """What the comparison of one table found; `differences` are sentences, empty where all is equal."""

    table: str
    rows: int
    values: int
    changes: int
    differences: list[str]

    @property
    def equal(self) -> bool:
        """Whether mirror and change feed are what they should be."""
        return not self.differences

    @property
    def first_differences(self) -> list[str]:
        """As many differences as a screen should show."""
        return self.differences[:DIFFERENCES_TOLD_MAX]


def judge(connection: Any, database: str, mirror: Mirror, tally: Mapping[str, int]) -> Verdict:
    """Compare one table with its mirror, value for value, and its change feed with the writer's own tally."""
    source = _source_rows(connection, database, mirror)
    target = _target_rows(mirror)
    feed = Counter(
        DeltaTable(mirror.changes_path).to_pyarrow_table(columns=["_change_type"])["_change_type"].to_pylist()
    )
    differences = _row_differences(source, target)
    differences += [
        f"change feed: {feed[_KINDS[kind]]} changes of kind {kind}, the writer made {count}"
        for kind, count in tally.items()
        if feed[_KINDS[kind]] != count
    ]
    values = sum(map(len, source.values()))
    changes = sum(feed[kind] for kind in _KINDS.values())
    return Verdict(mirror.name, len(source), values, changes, differences)


_Rows = dict[tuple[Any, ...], dict[str, Any]]


def _source_rows(connection: Any, database: str, mirror: Mirror) -> _Rows:
    with connection.cursor() as cursor:
        # A TIMESTAMP is shown in the session's time zone.
        cursor.execute("SET time_zone = '+00:00'")
        cursor.execute(f"SELECT * FROM {database}.{mirror.name} ORDER BY {', '.join(mirror.key)}")
        names = [column[0] for column in cursor.description]
        rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    return {tuple(row[column] for column in mirror.key): row for row in rows}


def _target_rows(mirror: Mirror) -> _Rows:
    rows = DeltaTable(mirror.rows_path).to_pyarrow_table().to_pylist()
    keyed = {tuple(row[column] for column in mirror.key): row for row in rows}
    if len(keyed) != len(rows):
        raise AssertionError(f"{mirror.rows_path}: {len(rows) - len(keyed)} keys are there more than once")
    return keyed


def _row_differences(source: _Rows, target: _Rows) -> list[str]:
    differences = [f"row {key} is missing in the mirror" for key in source.keys() - target.keys()]
    differences += [f"row {key} is in the mirror alone" for key in target.keys() - source.keys()]
    for key in source.keys() & target.keys():
        here, there = source[key], target[key]
        differences += [
            f"row {key}, column {name}: the server has {here.get(name)!r}, the mirror {there.get(name)!r}"
            for name in here.keys() | there.keys()
            if name not in here or name not in there or exact(here[name]) != exact(there[name])
        ]
    return differences


def exact(value: Any) -> Any:
    """Return a form in which values are equal only if the server would print them alike."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC).replace(tzinfo=None)
    if isinstance(value, Decimal | int):
        # 1.50 and 1.5 are different decimals to a client; a BIGINT UNSIGNED is a decimal to Spark.
        return str(value)
    return value
