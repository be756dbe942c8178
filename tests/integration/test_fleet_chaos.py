# SPDX-License-Identifier: Apache-2.0
"""A fleet under random faults: nothing is lost, repeated or changed. `python -m tests.chaos` runs one
seed.
"""

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.chaos.machine import Chaos
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.sweep_seed import sweep_seed
from tools.servers import PartMissing

SECONDS = 600.0 if os.environ.get("PENSTOCK_LONG") else 10.0


@pytest.mark.timeout(3600)
@pytest.mark.timing
@pytest.mark.deep(
    guard="tests/integration/test_fleet.py::"
    "test_instance_is_captured_by_another_member_when_its_capturer_dies"
)
def test_fleet_under_random_faults_loses_repeats_and_changes_nothing(
    missing_part: MissingPart, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        try:
            chaos = stack.enter_context(Chaos(tmp_path, sweep_seed(1)))
        except PartMissing as problem:
            missing_part("PostgreSQL or ZooKeeper", str(problem))
        chaos.play(SECONDS)
        chaos.prove()
        assert chaos.counts
