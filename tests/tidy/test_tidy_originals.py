# SPDX-License-Identifier: Apache-2.0
"""The list of differences from the original systems agrees with the page that documents them."""

import re

import pytest

from tests.originals.comparing import rules_of
from tests.tidy.tree import ROOT

SECTIONS = {"debezium": "## Debezium", "canal": "## Canal"}


@pytest.mark.parametrize("system", SECTIONS)
def test_page_and_list_name_the_same_differences(system: str) -> None:
    text = (ROOT / "docs/formats/messages.md").read_text()
    section = text[text.index(SECTIONS[system] + "\n") :]
    table = section[section.index("can see these differences") :]
    table = table[: table.index("\n## ")]
    matches = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \| [^|]+ \|$", table, re.MULTILINE)[1:]
    assert len(matches) > 10
    assert sorted(matches) == sorted({rule.what for rule in rules_of(system)})
