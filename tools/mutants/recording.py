# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for runs in the mutated copy of the repository: records the outcome of each test and
attributes coverage to tests.

Use it with `-p tools.mutants.recording`. The variable RECORD_VARIABLE names the file of JSON lines, one per
test: its id, tier, outcome, duration in seconds, and whether it uses a server.
"""

import json
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

import penstock
from tools.mutants.places import RECORD_VARIABLE, TREE_VARIABLE

# Fixtures that start a process of another product.
_SERVER_FIXTURES = ("server_of", "start_server", "spark")


def pytest_configure(config: pytest.Config) -> None:
    tree = Path(os.environ[TREE_VARIABLE])
    imported = Path(penstock.__file__)
    if not imported.is_relative_to(tree):
        raise pytest.UsageError(f"{imported} was imported, which is not in {tree}: no mutant would be tested")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    if "coverage" in sys.modules:
        _name_coverage(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report: Any = yield
    if report.when == "call" or report.failed:
        fixtures = getattr(item, "fixturenames", ())
        _write(
            test=item.nodeid,
            # The selection of tests has set this attribute (tests/conftest.py).
            tier=dict(item.user_properties).get("tier", "everyday"),
            outcome=report.outcome,
            seconds=round(report.duration, 3),
            server=any(name.startswith(_SERVER_FIXTURES) for name in fixtures),
        )
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(test=report.nodeid, tier="everyday", outcome="failed", seconds=0.0, server=False)


def _name_coverage(test: str) -> None:
    import coverage

    measurement = coverage.Coverage.current()
    if measurement is not None:
        measurement.switch_context(test)


def _write(**record: str | float | bool) -> None:
    with Path(os.environ[RECORD_VARIABLE]).open("a") as file:
        file.write(json.dumps(record) + "\n")
