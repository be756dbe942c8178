# SPDX-License-Identifier: Apache-2.0
"""Runs `make miri`, which tests the kernel's unsafe code for undefined behavior."""

import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT, MissingPart


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_unit_tests_of_unsafe_code_have_no_undefined_behavior(missing_part: MissingPart) -> None:
    if shutil.which("rustup") is None:
        missing_part("rustup", "miri is a component of Rust's nightly toolchain: https://rustup.rs")
    done = subprocess.run(
        [sys.executable, "-m", "tools.miri"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert "test result: ok" in done.stdout, done.stdout[-2000:]
    assert "running 0 tests" not in done.stdout, done.stdout[-2000:]
