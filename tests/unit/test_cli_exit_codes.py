# SPDX-License-Identifier: Apache-2.0
"""The exit codes of the command line show who has to act."""

import pytest

from penstock.cli.app import exit_code
from penstock.errors import ChecksumMismatch, ConnectionLost, OptionInvalid, PenstockError


@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (OptionInvalid("a setting"), 2),
        (ChecksumMismatch("a byte"), 3),
        (ConnectionLost("a server"), 4),
        (PenstockError("unexpected KeyError"), 1),
    ],
    ids=["operator", "stream", "transient", "defect"],
)
def test_exit_code_of_an_error_says_who_has_to_act(problem: PenstockError, code: int) -> None:
    assert exit_code(problem) == code
