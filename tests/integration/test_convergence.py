# SPDX-License-Identifier: Apache-2.0
"""Random transactions, definitions and crashes: after each round every target equals its source."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.local.driver import LocalDriver
from tests.convergence.machine import KINDS, Machine, play_seed
from tests.convergence.targets import TARGETS
from tests.support.sinks.backends import ServerOf
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.sweep_seed import sweep_seed
from tools.servers import PartMissing

CASES = [
    (flavor, target, mode)
    for target, target_class in TARGETS.items()
    for mode in target_class.MODES
    for flavor in ("mysql", "mariadb")
]
# Seeds that once diverged, by flavor, target and mode.
DIVERGED: dict[tuple[str, str, str], tuple[int, ...]] = {
    ("mysql", "mysql", "mirror"): (102,),
    ("mariadb", "mysql", "cascades"): (201, 204),
    ("mysql", "mongodb", "mirror"): (202,),
    ("mariadb", "mongodb", "mirror"): (212, 213),
    ("mariadb", "mysql", "mirror"): (600,),
    ("mysql", "clickhouse", "mirror"): (201,),
}
ROUNDS = 12 if os.environ.get("PENSTOCK_LONG") else 3

ServerOfTarget = Callable[[str], Any]


@pytest.fixture(scope="module")
def server_of_target(missing_part: MissingPart) -> Iterator[ServerOfTarget]:
    """Return the running server of a target. It ends when the server of another target is requested."""
    with ExitStack() as stack:
        running: dict[str, Any] = {}

        def get(target: str) -> Any:
            if target not in running:
                stack.close()
                running.clear()
                try:
                    running[target] = stack.enter_context(TARGETS[target].new_server())
                except PartMissing as problem:
                    missing_part(target, str(problem))
            return running[target]

        yield get


@pytest.mark.timeout(3600)
@pytest.mark.deep(
    guard="tests/integration/test_pipeline_definitions.py::test_changed_definitions_are_followed"
)
@pytest.mark.parametrize(("flavor", "target", "mode"), CASES)
def test_target_equals_its_source_after_random_transactions_definitions_and_crashes(
    flavor: str,
    target: str,
    mode: str,
    server_of: ServerOf,
    server_of_target: ServerOfTarget,
    tmp_path: Path,
) -> None:
    followed = TARGETS[target](mode, tmp_path, server_of_target(target))
    for seed in (*DIVERGED.get((flavor, target, mode), ()), sweep_seed(1)):
        # Cases share the server of their target, so each has its own databases.
        machine = Machine(server_of(flavor), followed, LocalDriver(), f"{flavor}_{mode}_{seed}")
        name = f"{flavor} {target} {mode} {seed}"
        _, divergence = play_seed(machine, name, ROUNDS, KINDS)
        machine.close()
        assert divergence is None, f"python -m tests.convergence {name} {ROUNDS}:\n{divergence}"
