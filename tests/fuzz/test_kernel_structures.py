# SPDX-License-Identifier: Apache-2.0
"""Tests the kernel with ten million damaged logs and payloads; `cargo test` runs a shorter version."""

import os
import subprocess

import pytest

from tests.conftest import ROOT
from tests.support.suite.sweep_seed import SEED

MUTATIONS = 10_000_000


@pytest.mark.long
@pytest.mark.timeout(24 * 3600)
@pytest.mark.parametrize("target", ["structures", "payloads"])
def test_ten_million_damaged_logs_end_or_are_refused_by_name(target: str) -> None:
    environment = {"PENSTOCK_KERNEL_MUTATIONS": str(MUTATIONS), "PENSTOCK_SEED": str(SEED or 0)}
    command = [
        "cargo",
        "test",
        "--release",
        "--locked",
        "--package",
        "penstock-kernel",
        "--test",
        target,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
