# SPDX-License-Identifier: Apache-2.0
"""Random statements on real servers: every tracked table definition and every decoded value equals the
server's own.
"""

import os

import pytest

from tests.ddl_machine.comparing import Outcome, compare
from tests.ddl_machine.recording import Run
from tests.support.suite.fixture_types import StartServer
from tests.support.suite.sweep_seed import sweep_seed
from tools.servers import FLAVORS, Server

STATEMENTS = 20_000 if os.environ.get("PENSTOCK_LONG") else 60
# Recordings are kept in memory and read in one range, so long runs are split.
STATEMENTS_OF_A_RUN_MAX = 1000
# The maximum share of statements whose effect is not derived from their text, so that the server is queried.
QUESTIONS_PART_MAX = 0.02
DEFAULT_METADATA = {"mysql": "MINIMAL", "mariadb": "NO_LOG", "mariadb11": "NO_LOG"}


@pytest.mark.timeout(6 * 3600)
@pytest.mark.deep(keep=("default",))
@pytest.mark.parametrize("metadata", ["default", "FULL"])
@pytest.mark.parametrize("flavor", FLAVORS)
def test_definitions_and_values_equal_the_servers_after_random_statements(
    flavor: str, metadata: str, start_server: StartServer
) -> None:
    logged = DEFAULT_METADATA[flavor] if metadata == "default" else metadata
    server = start_server(flavor, binlog_row_metadata=logged)
    outcomes = [run(server, f"{flavor} {seed}", number) for seed, number in runs()]
    statements, questions, values = (
        sum(outcome.counts[name] for outcome in outcomes)
        for name in ("statements", "questions", "values compared")
    )
    assert statements >= STATEMENTS
    assert values > statements
    if STATEMENTS > STATEMENTS_OF_A_RUN_MAX:
        assert questions <= QUESTIONS_PART_MAX * statements


def runs() -> list[tuple[int, int]]:
    """Return the seed and the number of statements of each run: the everyday one, then the long ones."""
    length = min(STATEMENTS, STATEMENTS_OF_A_RUN_MAX)
    new = range(-(-STATEMENTS // length) - 1)
    return [(1, length), *((sweep_seed(1000) + seed, length) for seed in new)]


def run(server: Server, seed: str, statements: int) -> Outcome:
    """Record one run in separate databases, and assert that nothing differs."""
    databases = ("machine", "other db")
    for database in databases:
        server.sql(
            f"DROP DATABASE IF EXISTS `{database}`; CREATE DATABASE `{database}` CHARACTER SET utf8mb4"
        )
    recording = Run(server, seed, databases).record(statements)
    files = [path for path in server.binlog_files() if path.name >= recording.start.file]
    outcome = compare(recording, [str(path) for path in files])
    assert not outcome.differences, f"seed {seed}: " + "\n".join(outcome.differences[:10])
    for database in databases:
        server.sql(f"DROP DATABASE `{database}`")
    return outcome
