# SPDX-License-Identifier: Apache-2.0
"""Limits on a request for changes: every list in the request has a maximum length if each of its elements
causes work.
"""

import json

import pytest

from penstock.errors import OptionInvalid
from penstock.limits import (
    REQUEST_COLUMNS_MAX,
    REQUEST_PATTERNS_BYTES_MAX,
    REQUEST_PATTERNS_MAX,
    SHARDS_MAX,
)
from penstock.serve.http.changes_request import ChangesRequest


@pytest.mark.parametrize(
    ("field", "bound"),
    [("tables", REQUEST_PATTERNS_MAX), ("exclude", REQUEST_PATTERNS_MAX), ("columns", REQUEST_COLUMNS_MAX)],
)
def test_lists_in_a_request_are_bounded(field: str, bound: int) -> None:
    names = [f"shop.t{number}" for number in range(bound + 1)]
    with pytest.raises(OptionInvalid, match=f"{field}.*at most {bound} items"):
        ChangesRequest.parse(json.dumps({field: names}).encode())
    assert getattr(ChangesRequest.parse(json.dumps({field: names[:bound]}).encode()), field) == names[:bound]


def test_shard_columns_in_a_request_are_bounded() -> None:
    columns = {f"shop.t{number}": ["id"] for number in range(REQUEST_PATTERNS_MAX + 1)}
    asked = {"shards": {"count": 2, "of": [0], "columns": columns}}
    with pytest.raises(OptionInvalid, match=r"shards\.columns"):
        ChangesRequest.parse(json.dumps(asked).encode())


@pytest.mark.parametrize("field", ["tables", "exclude", "shards"])
def test_patterns_in_a_request_are_bounded_in_size(field: str) -> None:
    def body(size: int) -> bytes:
        patterns = ["shop." + "t" * (size // 2 - 5)] * 2 if field != "shards" else ["t" * (size - 5)]
        if field == "shards":
            columns = {"shop." + patterns[0]: ["id"]}
            return json.dumps({"shards": {"count": 2, "of": [0], "columns": columns}}).encode()
        return json.dumps({field: patterns}).encode()

    ChangesRequest.parse(body(REQUEST_PATTERNS_BYTES_MAX))
    with pytest.raises(OptionInvalid, match="together"):
        ChangesRequest.parse(body(REQUEST_PATTERNS_BYTES_MAX + 2))


def test_number_of_shards_in_a_request_is_bounded() -> None:
    with pytest.raises(OptionInvalid, match=rf"shards\.of.*at most {SHARDS_MAX} items"):
        ChangesRequest.parse(json.dumps({"shards": {"count": 2, "of": [0] * (SHARDS_MAX + 1)}}).encode())


def test_request_for_no_kind_of_change_is_refused() -> None:
    with pytest.raises(OptionInvalid, match=r"changes.*at least 1 item"):
        ChangesRequest.parse(b'{"changes": []}')
