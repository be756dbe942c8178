# SPDX-License-Identifier: Apache-2.0
"""The list of tests, collected by pytest itself: a plugin for a run that only collects."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
_LISTING_VARIABLE = "PENSTOCK_LISTING"


class ListingFailed(RuntimeError):
    """Pytest could not collect the tests. The message ends with pytest's output."""


@dataclass(frozen=True)
class ListedTest:
    """One test as pytest collects it. `function` is its id without parameters."""

    id: str
    function: str
    markers: tuple[str, ...]
    is_hypothesis: bool


def pytest_collection_finish(session: "pytest.Session") -> None:
    """Write the selected tests to the file named by the environment (a pytest hook)."""
    tests = [
        ListedTest(
            item.nodeid,
            item.nodeid.partition("[")[0],
            tuple(sorted({marker.name for marker in item.iter_markers()})),
            bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False)),
        )
        for item in session.items
    ]
    Path(os.environ[_LISTING_VARIABLE]).write_text(json.dumps([asdict(test) for test in tests]))


def list_tests(paths: Iterable[str], environment: dict[str, str]) -> list[ListedTest]:
    """Return the tests that pytest selects below some paths. Raises ListingFailed."""
    with tempfile.TemporaryDirectory(prefix="penstock-listing-") as folder:
        listing = Path(folder) / "tests.json"
        words = ["--collect-only", "--quiet", "-p", "tools.suite.listing", "-p", "no:cacheprovider", *paths]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words],
            cwd=ROOT,
            env=os.environ | environment | {_LISTING_VARIABLE: str(listing)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ListingFailed(f"pytest cannot collect {' '.join(paths)}:\n{done.stdout[-4000:]}")
        entries = json.loads(listing.read_text())
    return [ListedTest(**entry | {"markers": tuple(entry["markers"])}) for entry in entries]


def files_with(pattern: str) -> list[str]:
    """Return the test files whose text matches a regular expression, relative to the project."""
    return [
        str(path.relative_to(ROOT))
        for path in sorted(TESTS.rglob("test_*.py"))
        if re.search(pattern, path.read_text())
    ]
