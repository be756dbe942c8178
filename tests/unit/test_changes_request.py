# SPDX-License-Identifier: Apache-2.0
"""What a request for changes may hold: whatever costs time for each piece of it is bounded in number."""

import json

import pytest

from penstock.errors import OptionInvalid
from penstock.limits import REQUEST_COLUMNS_MAX, REQUEST_PATTERNS_MAX
from penstock.serve.changes_request import ChangesRequest


@pytest.mark.parametrize(
    ("field", "bound"),
    [("tables", REQUEST_PATTERNS_MAX), ("exclude", REQUEST_PATTERNS_MAX), ("columns", REQUEST_COLUMNS_MAX)],
)
def test_lists_of_a_request_are_bounded(field: str, bound: int) -> None:
    names = [f"shop.t{number}" for number in range(bound + 1)]
    with pytest.raises(OptionInvalid, match=f"{field}.*at most {bound} items"):
        ChangesRequest.parse(json.dumps({field: names}).encode())
    assert getattr(ChangesRequest.parse(json.dumps({field: names[:bound]}).encode()), field) == names[:bound]


def test_columns_of_shards_are_bounded() -> None:
    columns = {f"shop.t{number}": ["id"] for number in range(REQUEST_PATTERNS_MAX + 1)}
    asked = {"shards": {"count": 2, "of": [0], "columns": columns}}
    with pytest.raises(OptionInvalid, match=r"shards\.columns"):
        ChangesRequest.parse(json.dumps(asked).encode())
