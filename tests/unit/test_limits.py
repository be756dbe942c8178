# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

import pytest

from penstock import limits
from penstock._native import Decoder
from penstock.errors import LimitExceeded

KERNEL = Path(__file__).resolve().parents[2] / "native/kernel/src/limits.rs"


def test_a_bound_that_both_sides_have_is_the_same() -> None:
    found = dict(re.findall(r"pub const (\w+): \w+ = ([\d_<() *+]+);", KERNEL.read_text()))
    shared = {name: text for name, text in found.items() if hasattr(limits, name)}
    assert "EVENT_BYTES_MAX" in shared
    for name, text in shared.items():
        assert eval(text) == getattr(limits, name), name


def test_a_file_number_that_no_commit_version_can_hold_is_refused() -> None:
    number = limits.FILE_NUMBER_MAX
    assert Decoder(instance="shop", file=f"mysql-bin.{number}").state == "input"
    with pytest.raises(LimitExceeded, match=str(number + 1)):
        Decoder(instance="shop", file=f"mysql-bin.{number + 1}")
