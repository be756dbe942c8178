# SPDX-License-Identifier: Apache-2.0
"""The kernel rejects damaged logs of real servers with a named error: no panic, no hang, no excessive memory.

`make test-long` runs the test for a long time; `PENSTOCK_FUZZ_SECONDS` sets the duration,
`PENSTOCK_FUZZ_SEED` the first seed.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.fuzz.logs import write_logs
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tests.support.suite.sweep_seed import SEED as SWEEP
from tools.servers import FLAVORS, Server

SECONDS_SHORT, SECONDS_LONG = 2.0, 900.0
SECONDS = float(
    os.environ.get(
        "PENSTOCK_FUZZ_SECONDS", SECONDS_LONG if os.environ.get("PENSTOCK_LONG") else SECONDS_SHORT
    )
)
SEED = int(os.environ.get("PENSTOCK_FUZZ_SEED", "1"))
# Each case uses the next seed. The first seeds of two runs are this far apart, and no run has this many
# cases.
SEEDS_APART = 1_000_000_000


@pytest.mark.timeout(SECONDS + 3 * WAIT_SECONDS_MAX)
@pytest.mark.parametrize("flavor", FLAVORS)
def test_damaged_logs_are_refused_by_name_within_bounds(
    flavor: str, server_of: Callable[[str], Server], tmp_path: Path
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    write_logs(server_of(flavor), folder)
    seed = SEED + ((SWEEP or 0) * len(FLAVORS) + FLAVORS.index(flavor)) * SEEDS_APART
    command = [sys.executable, "-m", "tests.fuzz.attack", str(folder), str(seed), str(SECONDS)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS + 2 * WAIT_SECONDS_MAX, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    assert "EventMalformed" in done.stdout, done.stdout
