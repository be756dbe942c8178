# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

import pytest

from penstock import limits
from penstock._native import Decoder
from penstock.errors import LimitExceeded

KERNEL = Path(__file__).resolve().parents[2] / "native/kernel/src/limits.rs"


def test_bounds_shared_by_python_and_rust_are_equal() -> None:
    matches = dict(re.findall(r"pub const (\w+): \w+ = ([\d_<() *+]+);", KERNEL.read_text()))
    shared = {name: text for name, text in matches.items() if hasattr(limits, name)}
    assert "EVENT_BYTES_MAX" in shared
    for name, text in shared.items():
        assert eval(text) == getattr(limits, name), name


def test_file_number_beyond_commit_versions_is_refused() -> None:
    number = limits.FILE_NUMBER_MAX
    assert Decoder(instance="shop", file=f"mysql-bin.{number}").state == "input"
    with pytest.raises(LimitExceeded, match=str(number + 1)):
        Decoder(instance="shop", file=f"mysql-bin.{number + 1}")
