# SPDX-License-Identifier: Apache-2.0
"""The public surface: one sorted list, and the version of the changelog."""

import re
import tomllib

import penstock
from tests.tidy.tree import ROOT


def test_public_names_are_sorted_and_exist() -> None:
    assert penstock.__all__ == sorted(penstock.__all__)
    assert [name for name in penstock.__all__ if not hasattr(penstock, name)] == []


def test_every_public_name_is_documented() -> None:
    silent = [
        name
        for name in penstock.__all__
        if callable(getattr(penstock, name)) and not getattr(penstock, name).__doc__
    ]
    assert silent == []


def test_latest_changelog_version_is_the_package_version() -> None:
    top = re.search(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    version = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    assert top is not None
    assert top[1] == version == penstock.__version__


def test_package_is_marked_as_typed() -> None:
    assert (ROOT / "src/penstock/py.typed").exists()
