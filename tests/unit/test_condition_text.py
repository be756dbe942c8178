# SPDX-License-Identifier: Apache-2.0
"""The conditions of requests to read rows again."""

import pytest

from penstock import _native
from penstock.pipeline.condition_text import condition_text
from tests.support.pipeline.changes_made import changes_of, insert, target_of

ROWS = target_of({"key": "varbinary(16)", "name": "varchar(40)"})
EVERY_BYTE = bytes(range(256))


@pytest.mark.parametrize("key", [b"", b"\0\xff'\\", *(EVERY_BYTE[at : at + 16] for at in range(0, 256, 16))])
def test_bytes_of_a_key_are_digits_and_texts_stay(key: bytes) -> None:
    changes = changes_of(ROWS, insert(1, key=key, name="é _binary'\\ \" \n"))
    ((_, condition),) = _native.sql_values(
        changes.rows.select(["key", "name", "_metadata"]), ["key", "name"], before=["(a=", " AND b="]
    )
    behind = condition[condition.index(b" AND b=") :].decode()
    assert condition_text(condition) == f"(a=x'{key.hex()}'{behind}"
