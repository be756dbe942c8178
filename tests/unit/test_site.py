# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation site: all pages of the repository, and the pages generated from code and
results.
"""

import html
import re
from pathlib import Path

import pytest

from tools.site.__main__ import ERROR_MESSAGES, ROOT, configuration, pages, write_source
from tools.site.error_pages import ErrorMessage, error_page, messages_in
from tools.site.figures import MARK, figures

# A block of code, between fences or indented.
SNIPPET = re.compile(r"^```.*?^```$|(?:^    [^\n]*\n+)+", re.MULTILINE | re.DOTALL)
TRANSLATIONS = {
    "docs/zh/README.md": "README.md",
    "docs/zh/start.md": "docs/start.md",
    "docs/zh/canal.md": "docs/guides/canal.md",
    "docs/zh/ptubes.md": "docs/guides/ptubes.md",
}


def test_messages_are_read_with_their_hints() -> None:
    source = """
raise OptionInvalid(f"the table {name} is gone", hint="Run " + verb)
raise ValueError("no error of ours, however long")
def refuse(): return PositionPurged("the log before it is purged", position=p, hint=f"Start at {first}")
raise OptionInvalid(f"{what}: {why}")
"""
    assert list(messages_in(source)) == [
        ErrorMessage("OptionInvalid", "the table … is gone", "…"),
        ErrorMessage("PositionPurged", "the log before it is purged", "Start at …"),
    ]


@pytest.mark.deep(guard="tests/unit/test_site.py::test_messages_are_read_with_their_hints")
def test_page_of_errors_has_messages_of_the_code_as_plain_text() -> None:
    page = error_page()
    assert "\n## PositionPurged\n" in page
    assert "there is no sink …" in page
    shown = html.unescape(re.sub(r"\\(.)", r"\1", page))
    assert "Write penstock://host:7070/instance" in shown
    assert "<" not in re.sub(r"&lt;", "", page), "no message is read as HTML"


def test_figures_are_of_the_same_run_and_name_both_systems() -> None:
    table = figures()
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert {row[-1] for row in rows if "Canal's server" in row[2]} <= {
        row[-1] for row in rows if "Penstock" in row[2]
    }
    assert any("Debezium's engine" in row[2] for row in rows)
    linked = re.findall(r"\]\(\.\./(bench/results/[^)]+)\)", table)
    assert len(linked) == len(rows) >= 4
    assert all((ROOT / path).exists() for path in linked)


def test_site_has_every_page_and_what_the_pages_link_to(tmp_path: Path) -> None:
    write_source(tmp_path)
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.md")}
    documents = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert documents <= written == set(pages())
    assert (tmp_path / "examples/orders_copy.py").exists()
    comparison = (tmp_path / "docs/comparison.md").read_text()
    assert MARK not in comparison
    assert figures() in comparison
    sections = configuration(tmp_path, tmp_path / "html")["nav"]
    listed = [page for section in sections for entries in section.values() for page in entries]
    assert sorted(listed) == sorted({*written, ERROR_MESSAGES}), "each page is in the navigation once"


@pytest.mark.parametrize("translation", TRANSLATIONS)
def test_translation_has_the_snippets_of_its_original(translation: str) -> None:
    original = SNIPPET.findall((ROOT / TRANSLATIONS[translation]).read_text())
    assert original
    assert SNIPPET.findall((ROOT / translation).read_text()) == original
