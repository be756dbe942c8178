# SPDX-License-Identifier: Apache-2.0
import struct
import uuid

import pytest

from penstock._native import encode_gtid_set
from penstock.errors import PositionInvalid

SOURCE = "80beb49b-e55d-11f1-9e5b-02fc00000001"


def test_intervals_end_after_their_last_number() -> None:
    encoded = encode_gtid_set(f"{SOURCE}:1-3:7")
    assert encoded == struct.pack("<Q", 1) + uuid.UUID(SOURCE).bytes + struct.pack("<QQQQQ", 2, 1, 4, 7, 8)


def test_empty_gtid_set_encodes_no_source() -> None:
    assert encode_gtid_set("") == struct.pack("<Q", 0)


def test_intervals_are_sorted_and_joined() -> None:
    assert encode_gtid_set(f"{SOURCE}:7-9:1-3,\n{SOURCE.upper()}:4:8-12") == encode_gtid_set(
        f"{SOURCE}:1-4:7-12"
    )


def test_tag_marks_the_whole_set_as_tagged() -> None:
    encoded = encode_gtid_set(f"{SOURCE}:1-2:Import:5")
    assert encoded[0] == encoded[7] == 1
    assert int.from_bytes(encoded[1:7], "little") == 2
    assert encoded[8:25] == uuid.UUID(SOURCE).bytes + b"\x00"
    assert b"\x0cimport" in encoded


@pytest.mark.parametrize(
    "text", ["nonsense", f"{SOURCE}:0", f"{SOURCE}:3-1", f"{SOURCE}:1-", "0-1-5", f"{SOURCE}:9x"]
)
def test_invalid_gtid_set_is_refused(text: str) -> None:
    with pytest.raises(PositionInvalid):
        encode_gtid_set(text)
