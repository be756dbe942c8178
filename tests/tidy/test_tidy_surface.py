# SPDX-License-Identifier: Apache-2.0
"""What users may rely on: one sorted list, and a version that is the changelog's."""

import re
import tomllib

import penstock
from tests.tidy.tree import ROOT


def test_the_public_surface_is_sorted_and_exists() -> None:
    assert penstock.__all__ == sorted(penstock.__all__)
    assert [name for name in penstock.__all__ if not hasattr(penstock, name)] == []


def test_everything_public_is_documented() -> None:
    silent = [
        name
        for name in penstock.__all__
        if callable(getattr(penstock, name)) and not getattr(penstock, name).__doc__
    ]
    assert silent == []


def test_the_top_of_the_changelog_is_the_version() -> None:
    top = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert top is not None
    assert top[1] == version == penstock.__version__


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "src/penstock/py.typed").exists()
